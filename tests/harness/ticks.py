"""What many beats sent: read from the queue, from which no worker takes it."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import redis
from celery import Celery
from kombu import Connection, Queue

from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.core.lease import Record
from celery_singleton_lock.runtime import Runtime
from tests.harness.deliveries import wait_until
from tests.harness.processes import TIMEOUT
from tests.harness.worker import CeleryBeat

#: Seconds: moments are stored in microseconds.
_SAME_POINT = 5e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """One message of `tests.apps.ticks`.

    Attributes:
        sent_at: Seconds since the epoch, by the process that sent it.
        due: When it was due, likewise; None from a plain scheduler.
        beat: Process id of the sender.
    """

    task: str
    sent_at: float
    due: float | None
    beat: int


class Ticks:
    """The ticks in the queue.

    Args:
        client: A client of the broker's database, decoding responses.
    """

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def of(self, task: str = "interval") -> list[Tick]:
        """All ticks of ``task``, in the order in which they were sent."""
        messages: list[Any] = [json.loads(m)["headers"] for m in self._messages()]
        ticks = [_tick(headers) for headers in messages if headers["task"] == task]
        return sorted(ticks, key=lambda tick: tick.sent_at)

    def wait_for(self, count: int, task: str = "interval", *, timeout: float = TIMEOUT) -> None:
        """Wait until ``count`` more of ``task`` have been sent."""
        enough = len(self.of(task)) + count
        wait_until(
            lambda: len(self.of(task)) >= enough, f"{count} more ticks of {task}", timeout=timeout
        )

    def _messages(self) -> list[Any]:
        found: Any = self._client.lrange("celery", 0, -1)
        return list(found)


class RabbitTicks(Ticks):
    """The ticks in the queue of a RabbitMQ node, from which this takes them; a context manager.

    Args:
        url: The URL of the broker.
    """

    def __init__(self, url: str) -> None:
        self._connection = Connection(url)
        self._taken: list[Any] = []

    def __enter__(self) -> Self:
        self._connection.connect()
        Queue("celery")(self._connection.default_channel).declare()
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.release()

    def _messages(self) -> list[Any]:
        channel: Any = self._connection.default_channel
        while (message := channel.basic_get("celery", no_ack=True)) is not None:
            self._taken.append(json.dumps({"headers": message.headers}))
        return list(self._taken)


def _tick(headers: dict[str, Any]) -> Tick:
    due = headers.get("singleton_scheduled_at")
    return Tick(
        task=headers["task"],
        sent_at=headers["sent_at"],
        due=datetime.fromisoformat(due).timestamp() if due else None,
        beat=headers["beat"],
    )


class Beats:
    """Several beats of one schedule, and which of them leads.

    Args:
        start: The fixture `beat`, with the app and the scheduler.
        app: The test's own copy of the app.
        ambush: The file that makes a mishap happen in the app.

    Attributes:
        store: The lock store.
        running: Those that were started and not killed.
    """

    def __init__(self, start: Callable[..., CeleryBeat], app: Celery, ambush: Path) -> None:
        self._start = start
        self._ambush = ambush
        self._runtime = Runtime.of(app)
        self.store = self._runtime.store
        self._count = 0
        self.running: list[CeleryBeat] = []

    @property
    def key(self) -> str:
        """The key of the leader's lease."""
        return self._runtime.keyspace.leader(self._runtime.settings.beat_name)

    @property
    def record(self) -> Record | None:
        """The leader, as the store has it."""
        return self.store.leases.inspect(self.key)

    def add(
        self,
        count: int = 1,
        *,
        decided: bool = True,
        **options: Any,
    ) -> list[CeleryBeat]:
        """Start more, and wait until they log that they tick or stand by.

        Args:
            count: How many.
            decided: False: wait for none of the two.
            **options: Of `CeleryBeat`.
        """
        new = [self._start(name=f"beat{self._count + n}", **options) for n in range(count)]
        self._count += count
        self.running += new
        for process in new if decided else ():
            process.wait_for_event(EventName.LEADING, EventName.STANDING_BY)
        return new

    def leader(self, *, but: CeleryBeat | None = None, timeout: float = TIMEOUT) -> CeleryBeat:
        """Wait until one of them leads, other than ``but``; that one."""
        found: list[CeleryBeat] = []

        def one_leads() -> bool:
            record = self.record
            pid = record.holder.pid if record else 0
            found[:] = [beat for beat in self.running if beat.pid == pid and beat is not but]
            return bool(found)

        wait_until(one_leads, "a beat leads", timeout=timeout)
        return found[0]

    def kill(self, process: CeleryBeat) -> None:
        """SIGKILL one."""
        process.kill()
        self.running.remove(process)

    def resign(self, process: CeleryBeat) -> None:
        """SIGTERM the leader, and wait for its clean end."""
        self.running.remove(process)
        process.terminate()
        assert process.wait() == 0
        assert process.events(EventName.RESIGNED)

    def wake(self, process: CeleryBeat) -> float:
        """SIGCONT one that stood still, and wait until it stands by; when that was."""
        woken, seen = time.time(), len(process.lines)
        process.cont()
        process.wait_for_event(EventName.STANDING_BY, since=seen)
        return woken

    def prepare(self, process: CeleryBeat, signal_name: str, place: str) -> None:
        """Have ``process`` send itself a signal, once, at its next send (see the app)."""
        draft = self._ambush.with_suffix(".draft")
        draft.write_text(f"{process.pid} {signal_name} {place}")
        draft.rename(self._ambush)


def faults(ticks: Sequence[Tick], every: float) -> list[str]:
    """What is wrong with the ticks of an interval of ``every`` seconds; of one leader at a time.

    Distinct points of one grid, none of which was sent before it was due: so no tick came twice.
    Of plain schedulers, which name no moments, only the count shows it.
    """
    span = ticks[-1].sent_at - ticks[0].sent_at
    # The first may have been late, and the last on time.
    most = math.floor(span / every) + 2
    found = [f"{len(ticks)} ticks in {span:.3f} s"] if len(ticks) > most else []
    named = [(tick, tick.due) for tick in ticks if tick.due is not None]
    found += [
        f"the tick {due} came {count} times"
        for due, count in Counter(due for _, due in named).items()
        if count > 1
    ]
    for tick, due in named:
        place = (due - named[0][1]) / every
        if abs(place - round(place)) * every > _SAME_POINT:
            found.append(f"the tick {due} is off the grid: {place:.6f} after the first")
        if tick.sent_at < due:
            found.append(f"the tick {due} was sent {due - tick.sent_at:.6f} s too early")
    return found


def longest_gap(ticks: Sequence[Tick]) -> float:
    """Seconds between two ticks, at most."""
    times = [tick.sent_at for tick in ticks]
    return max(later - earlier for earlier, later in pairwise(times))
