"""What the bodies of a campaign do: check, work, write with the fence; and write all that down.

A section begins when a check succeeded. How long it is exclusive is for the checker to say; the
body writes down what it knew: until when the lock could be trusted at the check, and whether a
second question at the end of the step was answered with yes.
"""

from __future__ import annotations

import os
import time
from typing import Any, Protocol

from celery_singleton_lock import Lease, current_lease
from tests.chaos.history import History
from tests.chaos.resource import Resource
from tests.harness.journal import Journal


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
    call: int = 0,
) -> str:
    """All of one body: ``steps`` guarded steps of ``seconds`` each; returns the name of the run.

    Raises:
        Retry: At the end, if it ``retries``.
    """
    history = History.from_env()
    journal = history.mine()
    compares = os.environ.get("CHAOS_RESOURCE_COMPARES", "1") == "1"
    resource = Resource(history.directory, key, compares=compares)
    facts = {
        "asked": guard.asked(),
        "worker": task.request.hostname,
        "task": task.name,
        "late": bool(task.acks_late),
        "attempt": task.request.retries,
        "planned": steps * seconds,
    }
    if call:
        facts["call"] = call
    with journal.run(key, task_id=task.request.id, fence=guard.fence, **facts) as run:
        for _ in range(steps):
            _guarded_step(journal, guard, resource, key, run, seconds)
        if retries:
            raise task.retry(countdown=0.2)
    return run


def _guarded_step(
    journal: Journal, guard: Guard, resource: Resource, key: str, run: str, seconds: float
) -> None:
    # Read before the lock is asked, so that a stop in between makes the section shorter, not
    # longer: what is reported is never more than what the lock had said.
    before = time.monotonic()
    guard.check()
    journal.write("check", key=key, run=run, until=min(before + guard.remaining(), 1e12))
    time.sleep(seconds)
    accepted = resource.write(run, guard.fence)
    before = time.monotonic()
    sure_until = before if guard.holds() else None
    journal.write("step", key=key, run=run, sure_until=sure_until, accepted=accepted)
