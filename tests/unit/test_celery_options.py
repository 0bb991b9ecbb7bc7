"""Celery's own task options: what each does for a singleton task. The options page has the table.

Messages go through kombu's broker in memory, the worker's Request and Celery's own tracer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, Task, states
from celery.app.trace import build_tracer
from celery.backends.cache import CacheBackend

from celery_singleton_lock import (
    LockConflict,
    OnConflict,
    SingletonLockError,
    SingletonTask,
    StoreError,
    StoreUnavailable,
    singleton_task,
)
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.testing import ManualClock, hold_lock


def same(number: int) -> int:
    return number


class Bench:
    """An app with its own queue in memory, whose messages are run one by one."""

    def __init__(self) -> None:
        self.app = app = Celery("bench", broker="memory://", set_as_current=False)
        app.conf.update(
            result_backend="cache+memory://",
            task_default_queue=f"options-{uuid4()}",  # the queues belong to the process
            accept_content=["json", "yaml"],
        )
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        Runtime.install(app, Runtime(app, store=self.store, clock=self.clock))

    def task(self, body: Callable[..., Any] | None = None, **options: Any) -> Any:
        defaults: dict[str, Any] = {"name": f"t{uuid4().hex[:8]}", "key": "{number}"}
        options = {**defaults, "app": self.app, "shared": False, **options}
        return singleton_task(**options)(body or same)

    def message(self, queue: str = "") -> Any:
        with self.app.connection_for_read() as connection:
            message = connection.SimpleQueue(queue or self.app.conf.task_default_queue).get(False)
            message.ack()
            return message

    def request(self, message: Any) -> Any:
        """The message as the worker's parent has it."""
        from kombu.utils.imports import symbol_by_name

        task = self.app.tasks[message.headers["task"]]
        return symbol_by_name(task.Request)(message, app=self.app, task=task, hostname="here")

    def run(self, message: Any = None) -> Any:
        """Run the next message, or ``message``, as a pool child does; what the tracer returns."""
        request = self.request(message or self.message())
        args, kwargs, embedded = request._payload
        trace = build_tracer(request.task.name, request.task, app=self.app)
        return trace(request.id, args, kwargs, {**request.request_dict, **embedded})


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.app.close()


# An autoretry_for that would have no effect.

RAISES: Any = {"key": "{number}", "on_conflict": "raise"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"on_conflict": "raise"}, 'on_conflict="retry"'),
    ({"on_conflict": OnConflict.wait(3)}, 'on_conflict="retry"'),
    ({"on_conflict": "cancel_running"}, 'on_conflict="retry"'),
    ({"on_conflict": OnConflict.retry(max_wait=60)}, "longer max_wait"),
]


@pytest.mark.parametrize("named", [LockConflict, SingletonLockError])
@pytest.mark.parametrize(("options", "advice"), REFUSED, ids=repr)
def test_an_autoretry_that_names_the_conflict_is_refused_at_the_declaration(
    bench: Bench, options: Any, advice: str, named: type[Exception]
) -> None:
    with pytest.raises(ValueError, match=advice):
        bench.task(autoretry_for=(OSError, named), **options)
    assert bench.task(autoretry_for=(named,), dont_autoretry_for=(LockConflict,), **options)


@pytest.mark.parametrize("named", [StoreUnavailable, StoreError, SingletonLockError])
def test_an_autoretry_that_names_an_error_of_the_store_is_refused(
    bench: Bench, named: type[Exception]
) -> None:
    with pytest.raises(ValueError, match='on_store_error="retry"'):
        bench.task(autoretry_for=(named,), on_store_error="raise")


def test_a_class_is_refused_as_a_function_is(bench: Bench) -> None:
    class Base(Task):
        abstract = True
        autoretry_for = (LockConflict,)

    with pytest.raises(ValueError, match='"raise" with an autoretry_for'):
        bench.task(base=Base, on_conflict="raise")

    class Conflicting(SingletonTask[..., Any]):
        name = "conflicting"
        autoretry_for = (LockConflict,)
        singleton = RAISES

        def run(self, number: int) -> None: ...

    with pytest.raises(ValueError, match='"raise" with an autoretry_for'):
        bench.app.register_task(Conflicting())  # type: ignore[arg-type]

    options = {"autoretry_for": (LockConflict,), "singleton": RAISES, "shared": False}
    with pytest.raises(ValueError, match='"raise" with an autoretry_for'):
        bench.app.task(same, base=SingletonTask, lazy=False, **options)


def test_it_is_refused_too_where_the_app_or_a_call_says_raise(bench: Bench) -> None:
    task = bench.task(autoretry_for=(LockConflict,))
    with pytest.raises(ValueError, match='"raise" with an autoretry_for'):
        task.apply_async((1,), singleton={"on_conflict": "raise"})
    task.apply_async((1,), singleton={"on_conflict": "retry"})
    app = Celery("raising", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_on_conflict = "raise"
    by_app = singleton_task(app=app, shared=False, name="by_app", autoretry_for=(LockConflict,))(
        same
    )
    with pytest.raises(ValueError, match='"raise" with an autoretry_for'):
        by_app.delay(1)
    app.close()


@pytest.mark.parametrize("options", [{}, {"on_conflict": "retry"}, {"on_conflict": "revoke"}])
def test_an_autoretry_for_conflicts_within_the_body_is_taken(bench: Bench, options: Any) -> None:
    def body(number: int) -> None:
        raise LockConflict("of a hold() in the body", "other")

    task = bench.task(body, autoretry_for=(LockConflict,), **options)
    task.delay(1)
    assert bench.run().info.state == states.RETRY


def test_an_autoretry_for_every_exception_is_for_those_of_the_body(bench: Bench) -> None:
    task = bench.task(autoretry_for=(Exception,), on_conflict="raise")
    task.delay(1)
    with hold_lock(task, 1):
        assert bench.run().info.state == states.FAILURE


# Results.


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("errors_too", [False, True])
@pytest.mark.parametrize("rule", ["revoke", "raise"])
def test_an_error_of_a_conflict_is_stored_as_celery_stores_errors(
    bench: Bench, rule: str, errors_too: bool, ignored: bool
) -> None:
    task = bench.task(
        on_conflict=rule, ignore_result=ignored, store_errors_even_if_ignored=errors_too
    )
    result = task.delay(1)
    with hold_lock(task, 1):
        bench.run()
    state = {"revoke": states.REVOKED, "raise": states.FAILURE}[rule]
    assert result.state == (state if errors_too or not ignored else states.PENDING)


@pytest.mark.parametrize("stored", [False, True])
def test_an_eager_call_that_is_revoked_is_stored_only_if_eager_results_are(
    bench: Bench, stored: bool
) -> None:
    task = bench.task(on_conflict="revoke", store_eager_result=stored)
    task_id = str(uuid4())
    with hold_lock(task, 1):
        task.apply((1,), task_id=task_id)
    expected = states.REVOKED if stored else states.PENDING
    assert bench.app.AsyncResult(task_id).state == expected


class OwnBackend(CacheBackend):
    """Another backend than the app's, with other keys."""

    task_keyprefix = b"own-"


def test_a_duplicate_reads_the_result_in_the_backend_of_its_task(bench: Bench) -> None:
    own = OwnBackend(bench.app, url="memory://")
    task = bench.task(backend=own, unique="until_done")
    first = task.delay(1)
    duplicate = task.delay(1)
    assert (duplicate.id, duplicate.backend) == (first.id, own)
    bench.run()
    assert duplicate.get(timeout=1) == 1


def test_a_call_whose_end_is_in_the_backend_of_its_task_has_ended(bench: Bench) -> None:
    # Its worker was killed after it had stored the result, so its claim stays.
    own = OwnBackend(bench.app, url="memory://")
    task = bench.task(backend=own, unique="until_done")
    first = task.delay(1)
    own.store_result(first.id, 1, states.SUCCESS)
    assert task.delay(1).id != first.id


def test_a_conflict_that_is_expected_is_no_error_in_the_log(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for expected in (True, False):
        caplog.clear()
        task = bench.task(on_conflict="raise", throws=(LockConflict,) if expected else ())
        task.delay(1)
        with hold_lock(task, 1):
            bench.run()
        [record] = [each for each in caplog.records if each.name == "celery.app.trace"]
        assert record.levelno == (logging.INFO if expected else logging.ERROR)
