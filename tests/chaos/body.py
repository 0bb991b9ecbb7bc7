"""What the bodies of a campaign do: check, work, write with the fence; and write all that down.

A section begins when a check succeeded. How long it is exclusive is for the checker to say; the
body writes down what it knew: until when the lock could be trusted at the check, and whether a
second question at the end of the step was answered with yes.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import AbstractContextManager
from typing import Any, Protocol

from celery_singleton_lock import Lease, current_lease
from tests.chaos.history import History
from tests.chaos.resource import Resource


class Guard(Protocol):
    """What a body knows of its lock."""

    @property
    def fence(self) -> int | None:
        """The fence of the grant; None where the lock gives none."""
        ...

    def check(self) -> None:
        """Raise if the right to run is over."""
        ...

    def remaining(self) -> float:
        """Seconds that the lock may still be trusted; infinite where it doesn't say."""
        ...

    def holds(self) -> bool:
        """Whether it is still trusted."""
        ...

    def asked(self) -> float:
        """When the lock was asked for, on CLOCK_MONOTONIC."""
        ...


class LeaseGuard:
    """The running task's lease."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self.fence = lease.fence_number

    @classmethod
    def current(cls) -> LeaseGuard:
        return cls(current_lease())

    def check(self) -> None:
        self._lease.check()

    def remaining(self) -> float:
        return self._lease.remaining()

    def holds(self) -> bool:
        return not self._lease.lost

    def asked(self) -> float:
        # The lease's clock may be another one, but it runs as fast.
        now = time.monotonic()
        return now - (self._lease.clock.now() - self._lease.acquired_at)


def run_body(
    task: Any,
    guard: Guard,
    key: str,
    steps: int,
    seconds: float,
    *,
    retries: bool = False,
    **facts: Any,
) -> str:
    """All of one body: ``steps`` guarded steps of ``seconds`` each; returns the name of the run.

    Raises:
        Retry: At the end, if it ``retries``.
    """
    body = _Body(guard, key)
    with body.begun(task, steps * seconds, facts) as run:
        for _ in range(steps):
            body.check(run)
            time.sleep(seconds)
            body.write(run)
        if retries:
            raise task.retry(countdown=0.2)
    return run


async def run_async_body(
    task: Any, guard: Guard, key: str, steps: int, seconds: float, **facts: Any
) -> str:
    """The same in a coroutine, which can be cancelled while it sleeps."""
    body = _Body(guard, key)
    with body.begun(task, steps * seconds, facts) as run:
        for _ in range(steps):
            body.check(run)
            await asyncio.sleep(seconds)
            body.write(run)
    return run


class _Body:
    """What a body writes down, to its history and its resource."""

    def __init__(self, guard: Guard, key: str) -> None:
        history = History.from_env()
        compares = os.environ.get("CHAOS_RESOURCE_COMPARES", "1") == "1"
        self._guard, self._key = guard, key
        self._journal = history.mine()
        self._resource = Resource(history.directory, key, compares=compares)

    def begun(
        self, task: Any, planned: float, facts: dict[str, Any]
    ) -> AbstractContextManager[str]:
        """From its start to its end; gives the name of the run."""
        return self._journal.run(
            self._key,
            task_id=task.request.id,
            fence=self._guard.fence,
            asked=self._guard.asked(),
            worker=task.request.hostname,
            task=task.name,
            late=bool(task.acks_late),
            attempt=task.request.retries,
            planned=planned,
            **facts,
        )

    def check(self, run: str) -> None:
        """Begin a guarded step."""
        # Read before the lock is asked, so that a stop in between makes the section shorter, not
        # longer: what is reported is never more than what the lock had said.
        before = time.monotonic()
        self._guard.check()
        until = min(before + self._guard.remaining(), 1e12)
        self._journal.write("check", key=self._key, run=run, until=until)

    def write(self, run: str) -> None:
        """End a guarded step."""
        accepted = self._resource.write(run, self._guard.fence)
        before = time.monotonic()
        sure_until = before if self._guard.holds() else None
        self._journal.write(
            "step", key=self._key, run=run, sure_until=sure_until, accepted=accepted
        )
