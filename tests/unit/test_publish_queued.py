"""Calls that a running task makes: again after an error, and in a call of itself."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, Task
from celery.app.trace import build_tracer
from celery.utils import uuid

from celery_singleton_lock import PER_TASK, StoreUnavailable, singleton_task
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.memory import MemoryStore


def test_a_call_that_is_repeated_after_a_join_without_a_reply_is_the_same_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With another name, both would have a place, and run."""
    app = Celery("caller", broker="memory://", set_as_current=False)
    store = MemoryStore(SystemClock())
    Runtime.install(app, Runtime(app, store=store))
    joined: list[str] = []
    join: Any = store.call_queue.join

    def join_without_a_reply(request: Any, **options: Any) -> Any:
        joined.append(request.token.call_id)
        place = join(request, **options)
        if len(joined) <= 2:  # it is repeated once by itself
            error = StoreUnavailable("no reply")
            error.was_sent = True
            raise error
        return place

    monkeypatch.setattr(store.call_queue, "join", join_without_a_reply)

    @singleton_task(app=app, name="work", shared=False, key=PER_TASK, on_conflict="queue")
    def work() -> None: ...

    @app.task(name="caller", shared=False)
    def caller() -> None:
        with pytest.raises(
            StoreUnavailable, match="it is unknown whether the call is in the queue"
        ):
            work.apply_async(task_id="fixed")
        work.apply_async(task_id="fixed")
        work.apply_async(task_id="fixed")

    trace = build_tracer("caller", app.tasks["caller"], app=app)
    task_id = uuid()  # as Celery makes it: another call has another one
    state = trace(task_id, [], {}, {"id": task_id, "task": "caller", "delivery_info": {}}).info
    app.close()
    assert state is None, state
    assert len(set(joined[:3])) == 1
    assert joined[3] != joined[2], "a call that was accepted is not repeated, but made again"


def test_a_retry_of_a_task_that_called_one_of_ours_has_no_header_of_this_library() -> None:
    """A nested call copies the request, and Celery makes headers of what it does not know."""
    app = Celery("plain", broker="memory://", set_as_current=False)
    Runtime.install(app, Runtime(app, store=MemoryStore(SystemClock())))

    @singleton_task(app=app, name="audit", shared=False)
    def audit() -> None: ...

    class Audited(Task):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            audit.delay()
            return super().__call__(*args, **kwargs)

    sent: list[Any] = []

    @app.task(base=Audited, bind=True, name="plain", shared=False)
    def plain(self: Any) -> None:
        sent.append(self.request.headers)
        if len(sent) == 1:
            self()  # a call within the task has a copy of its request

    trace = build_tracer("plain", app.tasks["plain"], app=app)
    trace("p", [], {}, {"id": "p", "task": "plain", "delivery_info": {}})
    app.close()
    assert sent == [{}, {}]
