"""Executions of a task in Celery's own tracer, as a worker's child has it; the store in memory."""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.app.trace import build_tracer

from celery_singleton_lock import current_lease, singleton_task
from celery_singleton_lock.core.store import Acquire, Granted, Refused, Release, Released
from celery_singleton_lock.delivery import NONCE_KEY
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.testing import ManualClock

UNREACHABLE = "redis://127.0.0.1:1/0"


class LateStore(MemoryStore):
    """The memory store; while it is silent, releases are on their way, and arrive when told to."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.silent = True
        self.on_their_way: list[Release] = []

    def acquire(self, call: Acquire, *, timeout: float = 0) -> Granted | Refused:
        if self.silent:
            raise StoreUnavailable("timed out")
        return super().acquire(call, timeout=timeout)

    def release(self, call: Release, *, timeout: float = 0) -> Released:
        if self.silent:
            self.on_their_way.append(call)
            raise StoreUnavailable("timed out")
        return super().release(call, timeout=timeout)

    def arrive(self) -> None:
        """What was given up by its sender reaches the server all the same."""
        while self.on_their_way:
            super().release(self.on_their_way.pop())


class OutageEndsClock(ManualClock):
    """Whoever sleeps wakes when the store answers again."""

    store: LateStore

    def sleep(self, seconds: float) -> None:
        self.store.silent = False
        super().sleep(seconds)


def test_a_release_of_an_unanswered_acquire_that_comes_late_frees_no_later_grant() -> None:
    clock = OutageEndsClock()
    clock.store = store = LateStore(clock)
    # Neither the store nor the broker answers, so the message is held and the store is asked again.
    app = Celery("late", broker=UNREACHABLE, set_as_current=False)
    app.conf.task_publish_retry = False
    app.conf.broker_transport_options = {"max_retries": 1, "interval_start": 0, "interval_step": 0}
    Runtime.install(app, Runtime(app, store=store, clock=clock))
    held: list[Any] = []

    @singleton_task(app=app, name="work", shared=False, key="{name}")
    def work(name: str) -> None:
        assert store.on_their_way
        store.arrive()
        held.append(store.inspect(current_lease().key))

    trace = build_tracer("work", app.tasks["work"], app=app)
    message = {"id": "t", "task": "work", "delivery_info": {}, NONCE_KEY: "a1"}
    trace("t", ["k"], {}, message)
    app.close()
    assert len(held) == 1, "it has not run"
    assert held[0] is not None, "its key was free while it ran"
    assert [*store.scan("csl:*")] == []
