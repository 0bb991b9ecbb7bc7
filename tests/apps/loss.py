"""Bodies that lose their lease or are ended from outside; all tasks share the keys of one scope.

Its environment: BROKER_URL, RESULT_URL, JOURNAL; LOCK_URL, the lock store (else the result
backend); TTL, seconds; SOFT_SHUTDOWN, seconds.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from threading import Event
from typing import Any

import redis
from celery import Celery, Task, signals
from celery.exceptions import SoftTimeLimitExceeded

from celery_singleton_lock import (
    LeaseLost,
    NoLease,
    OnConflict,
    current_lease,
    hold,
    singleton_task,
)
from tests.harness.journal import Journal, events

app = Celery("loss", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    singleton_lock_url=os.environ.get("LOCK_URL"),
    worker_prefetch_multiplier=1,
    worker_soft_shutdown_timeout=float(os.environ.get("SOFT_SHUTDOWN", "0")),
)

TTL = float(os.environ.get("TTL", "3"))
SHARED: dict[str, Any] = {"app": app, "bind": True, "key": "{key}", "scope": "loss", "ttl": TTL}


# What a body does. Each one that is not interrupted ends by itself after ``seconds``.


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def read(seconds: float) -> None:
    """Block in recv on a socket to which nothing is written."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(seconds)
        try:
            ours.recv(1)
        except TimeoutError:
            pass  # no data came


def loop(seconds: float) -> None:
    """Bytecode only, no call that blocks."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pass


def swallow(seconds: float) -> None:
    """Catch every Exception, as careless code does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            time.sleep(0.05)
        except Exception:
            pass


def wait_for_loss(seconds: float) -> None:
    """Work until the lease is seen to be lost."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not current_lease().lost:
        time.sleep(0.02)


async def compute(seconds: float) -> None:
    """Loops between two awaits, so that an interruption meets it there. Cleaning up awaits, too."""
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            loop(0.01)
            await asyncio.sleep(0)
    finally:
        await asyncio.sleep(0.01)
        Journal.from_env().note("cleaned up")


def event_loop(seconds: float) -> None:
    """Several asyncio tasks, under a lock of their own. The end of one does not end the others."""

    async def main() -> None:
        async with hold("event-loop", scope="held", ttl=60, app=app):
            await asyncio.wait([asyncio.create_task(compute(seconds)) for _ in range(3)])

    asyncio.run(main())


def until_notified(seconds: float) -> None:
    """Work until the test notes "go on"."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        notes = events(Journal.from_env().records(), "note")
        if any(note.data["text"] == "go on" for note in notes):
            return
        time.sleep(0.02)


def stubborn(seconds: float) -> None:
    """Go on against every attempt to end it, and write a note at each breath.

    Only SIGKILL ends it, and the process itself can't write that down: the last note can stand for
    the death, for the body surely ran until then.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            Journal.from_env().note("alive")
            time.sleep(0.01)
        except (SystemExit, SoftTimeLimitExceeded):
            pass


WAYS: dict[str, Callable[[float], None]] = {
    way.__name__: way
    for way in (sleep, read, loop, swallow, event_loop, wait_for_loss, until_notified, stubborn)
}


def work(task: Task, key: str, way: str, seconds: float) -> dict[str, Any]:
    """Run one of the ways, between two lines in the journal."""
    try:
        lease = current_lease()
    except NoLease:  # on_store_error="run"
        lease = None
    fence = lease.fence_number if lease else None  # not every store has one
    with Journal.from_env().run(key, task_id=task.request.id, fence=fence):
        WAYS[way](seconds)
    return {"fence": fence, "lost": bool(lease and lease.lost), "retries": task.request.retries}


def came_again(task: Task, key: str) -> bool:
    """Whether a body of this very task ran before."""
    return task.request.id in {run.task_id for run in Journal.from_env().runs(key)}


# Tasks by what becomes of them when their lease is lost.


@singleton_task(**SHARED)
def early(self: Task, key: str, way: str = "sleep", seconds: float = 30.0) -> Any:
    """Acknowledged before it runs: a lost lease is its FAILURE."""
    return work(self, key, way, seconds)


@singleton_task(**SHARED, acks_late=True)
def late(
    self: Task, key: str, way: str = "sleep", seconds: float = 30.0, again: float | None = None
) -> Any:
    """A lost lease requeues it; a second run takes ``again`` seconds if they are given."""
    if again is not None and came_again(self, key):
        seconds = again
    return work(self, key, way, seconds)


@singleton_task(**SHARED, on_lost="continue")
def deaf(self: Task, key: str, way: str = "sleep", seconds: float = 30.0) -> Any:
    """Nothing interrupts it: the variant of `early` that overlaps."""
    return work(self, key, way, seconds)


@singleton_task(**SHARED, autoretry_for=(LeaseLost,), retry_kwargs={"countdown": 0})
def forgiving(self: Task, key: str, way: str = "sleep", seconds: float = 30.0) -> Any:
    """Celery's own retry answers a lost lease; the second attempt is short."""
    return work(self, key, way, 0 if self.request.retries else seconds)


# Other holds.


@singleton_task(**SHARED, on_conflict=OnConflict.retry(delay=0.05, max_delay=0.2))
def competitor(self: Task, key: str, way: str = "sleep", seconds: float = 0.0) -> Any:
    """Wants the key as soon as it can be had."""
    return work(self, key, way, seconds)


@singleton_task(**SHARED, max_hold=1.5 * TTL)
def bounded(self: Task, key: str, way: str = "sleep", seconds: float = 30.0) -> Any:
    return work(self, key, way, seconds)


@singleton_task(**SHARED)
def holding(self: Task, key: str) -> None:
    """Leaves a block of ``hold()`` when it is notified, and goes on."""
    with Journal.from_env().run(key, task_id=self.request.id):
        with hold(key, scope="held", ttl=TTL, app=app):
            until_notified(60.0)
        Journal.from_env().note("left")
        sleep(60.0)


# A store that dies at a moment of the body's choice.


@signals.worker_init.connect
def _arm(**_: Any) -> None:
    # In workers alone: in the test's own process it would outlive this copy of the module, observe
    # other tests' tasks, and keep their apps alive in what it raises.
    signals.task_prerun.connect(_cut_before)


def _cut_before(task: Task | None = None, kwargs: Any = None, **_: Any) -> None:
    """Kill the server whose pid the call names, once the broker has let go of the message.

    Runs in the child, after the message was received and before the lock is asked for.
    """
    pid = (kwargs or {}).get("cut_before")
    if not pid:
        return
    done = [record.data["text"] for record in events(Journal.from_env().records(), "note")]
    if "cut" in done:
        return
    with redis.Redis.from_url(os.environ["BROKER_URL"]) as broker:
        while broker.hlen("unacked"):
            Event().wait(0.01)
    Journal.from_env().note("cut")
    os.kill(pid, signal.SIGKILL)


@singleton_task(**SHARED)
def cut(self: Task, key: str, cut_before: int = 0, cut_after: int = 0) -> Any:
    """Kills the server of that pid, before the lock is asked for or as its last act."""
    result = work(self, key, "sleep", 0.0)
    if cut_after:
        os.kill(cut_after, signal.SIGKILL)
    return result
