"""Celery's own task options: what each does for a singleton task. The options page has the table.

Messages go through kombu's broker in memory, the worker's Request and Celery's own tracer.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

import pydantic
import pytest
from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import Celery, Task, states
from celery.app.trace import build_tracer, get_log_policy
from celery.backends.cache import CacheBackend
from celery.worker.request import Request
from kombu.serialization import prepare_accept_content
from kombu.utils.imports import symbol_by_name

from celery_singleton_lock import (
    DuplicateTask,
    LockConflict,
    LockKeyError,
    NoLease,
    OnConflict,
    SingletonLockError,
    SingletonTask,
    StoreError,
    StoreUnavailable,
    current_lease,
    is_skipped,
    singleton_task,
)
from celery_singleton_lock.core.lease import Kind
from celery_singleton_lock.message.request_data import ATTRIBUTE
from celery_singleton_lock.policy import OPTIONS
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.task.ending import is_done
from celery_singleton_lock.task.option_types import TaskOptions
from celery_singleton_lock.testing import ManualClock, hold_lock
from celery_singleton_lock.worker.dead_child import is_requeued
from celery_singleton_lock.worker.request import SingletonRequestMixin
from tests.unit.test_documented_surface import first_codes, section


def same(number: int) -> int:
    return number


class Bench:
    """An app with its own queue in memory, whose messages are run one by one."""

    def __init__(self) -> None:
        self.app = app = Celery("bench", broker="memory://", set_as_current=False)
        app.conf.update(
            result_backend="cache+memory://",
            task_default_queue=f"options-{uuid4()}",  # the queues belong to the process
            accept_content=["json", "pickle"],
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
            message.accept = prepare_accept_content(self.app.conf.accept_content)
            return message

    def request(self, message: Any) -> Any:
        """The message as the worker's parent has it."""
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


# Sentry's Crons: sentry-sdk opens a check-in in beat, and puts it into the headers of the message.

CHECK_IN = {
    "sentry-monitor-slug": "every-hour",
    "sentry-monitor-config": {"timezone": "UTC"},
    "sentry-monitor-check-in-id": "c-1",
}
CLOSED = {
    "monitor_slug": "every-hour",
    "monitor_config": {"timezone": "UTC"},
    "check_in_id": "c-1",
    "status": "ok",
}


@pytest.fixture
def check_ins(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The check-ins that are sent; in place of sentry-sdk, which is not installed here."""
    sent: list[dict[str, Any]] = []
    module: Any = ModuleType("sentry_sdk.crons")
    module.capture_checkin = lambda **fields: sent.append(fields)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return sent


@pytest.mark.parametrize("on_duplicate", ["return_existing", "skip", "raise"])
def test_a_scheduled_call_that_another_answers_closes_its_check_in(
    bench: Bench, check_ins: list[dict[str, Any]], on_duplicate: str
) -> None:
    task = bench.task(unique="until_done", on_duplicate=on_duplicate)
    task.apply_async((1,), headers={**CHECK_IN, "sentry-monitor-check-in-id": "first"})
    assert check_ins == []
    with nullcontext() if on_duplicate != "raise" else pytest.raises(DuplicateTask):
        task.apply_async((1,), headers=CHECK_IN)
    assert check_ins == [CLOSED]


def test_a_scheduled_run_that_is_revoked_closes_its_check_in(
    bench: Bench, check_ins: list[dict[str, Any]]
) -> None:
    task = bench.task(on_conflict="revoke")
    result = task.apply_async((1,), headers=CHECK_IN)
    with hold_lock(task, 1):
        bench.run()
    assert result.state == states.REVOKED
    assert check_ins == [CLOSED]


def test_a_call_without_a_check_in_and_one_that_sentry_refuses_are_not_affected(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    task = bench.task(unique="until_done")
    first = task.delay(1)
    monkeypatch.setitem(sys.modules, "sentry_sdk.crons", ModuleType("sentry_sdk.crons"))
    assert task.delay(1).id == first.id
    assert "check-in" not in caplog.text
    assert task.apply_async((1,), headers=CHECK_IN).id == first.id
    assert "singleton: could not close a check-in of Sentry's Crons" in caplog.text


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


def test_a_call_that_asks_for_its_result_is_revoked_also_where_its_task_stores_none(
    bench: Bench,
) -> None:
    task = bench.task(on_conflict="revoke", ignore_result=True)
    result = task.apply_async((1,), ignore_result=False)
    with hold_lock(task, 1):
        bench.run()
    assert result.state == states.REVOKED


def test_a_retry_whose_time_is_text_has_the_key_reserved(bench: Bench) -> None:
    def body(self: Any, number: int) -> None:
        raise self.retry(eta=(self.app.now() + timedelta(seconds=30)).isoformat())

    task = bench.task(body, bind=True, ttl=10)
    task.delay(1)
    bench.run()
    record = bench.store.leases.inspect(task.lock_key(1))
    assert record is not None
    assert (record.kind, record.ttl) == (Kind.RESERVED, pytest.approx(40, abs=2))


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


# The table of the options page: a proof for each option in it.


class Recorded(Task):
    """Notes which hooks Celery called, and with what."""

    abstract = True
    calls: list[tuple[str, Any]]

    def note(self, hook: str, value: Any = None) -> None:
        type(self).calls.append((hook, is_skipped(value) or value))

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        with pytest.raises(NoLease):
            current_lease()
        self.note("before_start")

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        self.note("on_success", retval)

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        self.note("on_failure", type(exc))

    def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        self.note("on_retry", type(exc))

    def after_return(self, status: Any, retval: Any, *args: Any, **kwargs: Any) -> None:
        super().after_return(status, retval, *args, **kwargs)
        self.note("after_return", status)


def failing(number: int) -> None:
    raise OSError(number)


def hooks(bench: Bench, body: Any = None, *, held: bool = False, **options: Any) -> list[Any]:
    """The calls of hooks while one message is run."""
    base = type("Noting", (Recorded,), {"abstract": True, "calls": []})
    task = bench.task(body, base=base, **options)
    task.delay(1)
    with hold_lock(task, 1) if held else nullcontext():
        bench.run()
    return list(base.calls)


def copied(bench: Bench, **options: Any) -> tuple[Any, Any]:
    """A message, and the copy of it that a conflict requeues."""
    task = bench.task(on_conflict="retry", **options)
    task.delay(1)
    queue = options.get("queue", "")
    message = bench.message(queue)
    with hold_lock(task, 1):
        bench.run(message)
    return message, bench.message(queue)


def retried(bench: Bench, **options: Any) -> tuple[Any, float]:
    """The next attempt of a body that failed, and the seconds for which its key is reserved."""
    task = bench.task(failing, autoretry_for=(OSError,), retry_jitter=False, ttl=10, **options)
    task.delay(1)
    bench.run()
    record = bench.store.leases.inspect(task.lock_key(1))
    assert record is not None
    assert record.kind is Kind.RESERVED
    return bench.message(), record.ttl - 10


def name(bench: Bench) -> None:
    assert "billing:1" in bench.task(name="billing").lock_key(1)


class OwnRequest(Request):
    """A user's class."""


def request_class(bench: Bench) -> None:
    bench.task(Request=f"{__name__}:OwnRequest").delay(1)
    found = bench.request(bench.message())
    assert isinstance(found, (OwnRequest, SingletonRequestMixin))
    assert found.request_dict[ATTRIBUTE].nonce


def typing(bench: Bench) -> None:
    with pytest.raises(TypeError):
        bench.task().delay()
    bench.task(typing=False).delay()
    assert isinstance(bench.run().info.retval, TypeError)


def acks_late(bench: Bench) -> None:
    for late in (True, False):
        bench.task(acks_late=late).delay(1)
        message = bench.message()
        bench.run(message)
        found = bench.run(message)  # delivered again
        assert (found.info is not None and found.info.state == "IGNORED") is late


def is_requeued_after(bench: Bench, error: BaseException, **options: Any) -> bool:
    bench.task(acks_late=True, **options).delay(1)
    return is_requeued(bench.request(bench.message()), error)


def reject_on_worker_lost(bench: Bench) -> None:
    for rejects in (True, False):
        lost = WorkerLostError("killed")
        assert is_requeued_after(bench, lost, reject_on_worker_lost=rejects) is rejects


def retry_on_worker_lost(bench: Bench) -> None:
    if hasattr(Task, "retry_on_worker_lost"):  # since Celery 5.7
        assert is_requeued_after(bench, WorkerLostError("killed"), retry_on_worker_lost=True)


def acks_on_timeout(bench: Bench) -> None:
    if hasattr(Task, "acks_on_timeout"):  # since Celery 5.7
        assert is_requeued_after(bench, TimeLimitExceeded(1), acks_on_timeout=False)


def acks_on_failure(bench: Bench) -> None:
    names = {"acks_on_failure", "acks_on_failure_or_timeout"} & set(vars(Task))
    for option in names:
        for acks in (True, False):
            task = bench.task(acks_late=True, **{option: acks})
            assert is_done(task, states.FAILURE, OSError()) is acks


def max_retries(bench: Bench) -> None:
    bench.task(failing, autoretry_for=(OSError,), max_retries=0).delay(1)
    assert bench.run().info.state == states.FAILURE
    _, copy = copied(bench, max_retries=0)
    assert copy.headers["retries"] == 0


def default_retry_delay(bench: Bench) -> None:
    assert retried(bench, default_retry_delay=33)[1] == pytest.approx(33, abs=2)


def retry_kwargs(bench: Bench) -> None:
    assert retried(bench, retry_kwargs={"countdown": 44})[1] == pytest.approx(44, abs=2)


def retry_backoff(bench: Bench) -> None:
    assert retried(bench, retry_backoff=55)[1] == pytest.approx(55, abs=2)


def retry_backoff_max(bench: Bench) -> None:
    reserved = retried(bench, retry_backoff=55, retry_backoff_max=22)[1]
    assert reserved == pytest.approx(22, abs=2)


def time_limit(bench: Bench) -> None:
    renewed_for = []

    def body(number: int) -> None:
        lease = current_lease()
        renewed_for.append(lease.hold_until - lease.acquired_at)

    bench.task(body, time_limit=30, ttl=10).delay(1)
    bench.run()
    assert renewed_for == [40]


def soft_time_limit(bench: Bench) -> None:
    task = bench.task(on_conflict="retry")
    task.apply_async((1,), soft_time_limit=3, time_limit=5)
    with hold_lock(task, 1):
        bench.run()
    assert list(bench.message().headers["timelimit"]) == [5, 3]
    assert bench.task(soft_time_limit=3).soft_time_limit == 3  # the worker reads it there


def expires(bench: Bench) -> None:
    message, copy = copied(bench, expires=99)
    assert copy.headers["expires"] == message.headers["expires"] is not None


def priority(bench: Bench) -> None:
    message, copy = copied(bench, priority=7)
    assert copy.properties["priority"] == message.properties["priority"] == 7


def queue(bench: Bench) -> None:
    message, copy = copied(bench, queue=f"slow-{uuid4()}")
    assert copy.delivery_info["routing_key"] == message.delivery_info["routing_key"]


def serializer(bench: Bench) -> None:
    message, copy = copied(bench, serializer="pickle")
    assert copy.content_type == message.content_type == "application/x-python-serialize"


def backend(bench: Bench) -> None:
    own = OwnBackend(bench.app, url="memory://")
    task = bench.task(backend=own)
    result = task.delay(1)
    with hold_lock(task, 1):
        bench.run()
    assert is_skipped(own.get_result(result.id))
    assert bench.app.AsyncResult(result.id).state == states.PENDING


def ignore_result(bench: Bench) -> None:
    task = bench.task(ignore_result=True)
    result = task.delay(1)
    with hold_lock(task, 1):
        assert is_skipped(bench.run().retval)
    assert bench.app.AsyncResult(result.id).state == states.PENDING


def track_started(bench: Bench) -> None:
    seen: list[str] = []

    def body(self: Any, number: int) -> None:
        seen.append(self.AsyncResult(self.request.id).state)

    task = bench.task(body, bind=True, track_started=True, on_conflict="retry")
    result = task.delay(1)
    with hold_lock(task, 1):
        bench.run()
    assert result.state == states.PENDING
    bench.run()
    assert seen == [states.STARTED]


def throws(bench: Bench) -> None:
    task = bench.task(on_conflict="raise", throws=(LockConflict,))
    assert (
        get_log_policy(task, SimpleNamespace(internal=False), LockConflict("held")).severity
        == logging.INFO
    )


def trail(bench: Bench) -> None:
    once = bench.task(unique="until_done")
    first = once.delay(1)
    bench.message()

    def body(number: int) -> list[str]:
        return [once.delay(1).id, once.apply_async((2,), singleton=False).id]

    for trails in (True, False):
        parent = bench.task(body, trail=trails).delay(1)
        bench.run()
        bench.message()  # the call that was published
        assert parent.result[0] == first.id
        children = [child.id for child in parent.children or ()]
        assert first.id not in children
        assert bool(children) is trails


def resultrepr_maxsize(bench: Bench) -> None:
    task = bench.task(resultrepr_maxsize=20)
    task.delay(1)
    with hold_lock(task, 1):
        assert len(bench.run().retstr) < 40


def before_start(bench: Bench) -> None:
    assert hooks(bench)[0] == ("before_start", None)
    assert ("before_start", None) in hooks(bench, held=True)


def on_success(bench: Bench) -> None:
    assert ("on_success", 1) in hooks(bench)
    assert ("on_success", True) in hooks(bench, held=True)


def on_failure(bench: Bench) -> None:
    assert ("on_failure", LockConflict) in hooks(bench, held=True, on_conflict="raise")
    assert len(hooks(bench, held=True, on_conflict="revoke")) == 1  # before_start


def on_retry(bench: Bench) -> None:
    assert ("on_retry", OSError) in hooks(bench, failing, autoretry_for=(OSError,))
    bench.message()
    assert hooks(bench, held=True, on_conflict="retry") == [("before_start", None)]


def after_return(bench: Bench) -> None:
    for held in (True, False):
        assert hooks(bench, held=held)[-1] == ("after_return", states.SUCCESS)


def on_replace(bench: Bench) -> None:
    def body(self: Any, number: int) -> None:
        raise self.replace(bench.task(same, name=f"r{uuid4().hex[:8]}").s(2))

    seen: list[Any] = []

    class Replaces(Task):
        abstract = True

        def on_replace(self, sig: Any) -> Any:
            seen.append(sig.args)
            return super().on_replace(sig)

    bench.task(body, bind=True, base=Replaces).delay(1)
    bench.run()
    assert seen == [(2,)]


def shadow_name(bench: Bench) -> None:
    class Named(Task):
        abstract = True

        def shadow_name(self, args: Any, kwargs: Any, options: Any) -> str:
            return f"work on {args[0]}"

    message, copy = copied(bench, base=Named)
    assert copy.headers["shadow"] == message.headers["shadow"] == "work on 1"


class Order(pydantic.BaseModel):
    account: int


def pydantic_(bench: Bench) -> None:
    if not hasattr(Task, "_dump_pydantic_arguments"):
        return  # Celery publishes no models before 5.7

    def body(order: Order) -> int:
        return order.account

    def by_item(order: Any) -> str:
        return f"account:{order['account']}"

    def by_attribute(order: Any) -> str:
        return f"account:{order.account}"

    body.__annotations__ = {"order": Order, "return": int}
    more = {"pydantic_strict": False, "pydantic_context": {}, "pydantic_dump_kwargs": {}}
    for key in ("account:{order.account}", by_item):
        task = bench.task(body, key=key, pydantic=True, **more)
        assert task.lock_key(Order(account=3)).endswith(":account:3")
        task.delay(Order(account=3))
        assert bench.run().retval == 3
    task = bench.task(body, key=by_attribute, pydantic=True)
    with pytest.raises(LockKeyError, match=r"write \['account'\], or a template \"\{x.account\}\""):
        task.lock_key(Order(account=3))


PROOFS: dict[str, Callable[[Bench], None]] = {
    **{"name": name, "typing": typing, "Request": request_class},
    **{"acks_late": acks_late, "acks_on_timeout": acks_on_timeout},
    **dict.fromkeys(("acks_on_failure", "acks_on_failure_or_timeout"), acks_on_failure),
    "reject_on_worker_lost": reject_on_worker_lost,
    "retry_on_worker_lost": retry_on_worker_lost,
    **{"max_retries": max_retries, "default_retry_delay": default_retry_delay},
    **{"retry_kwargs": retry_kwargs, "retry_backoff": retry_backoff},
    **{"retry_backoff_max": retry_backoff_max, "retry_jitter": retry_backoff},
    **{"time_limit": time_limit, "soft_time_limit": soft_time_limit},
    **{"expires": expires, "priority": priority, "queue": queue, "serializer": serializer},
    **{"backend": backend, "ignore_result": ignore_result, "trail": trail, "throws": throws},
    **{"track_started": track_started, "resultrepr_maxsize": resultrepr_maxsize},
    **{"before_start": before_start, "on_success": on_success, "on_failure": on_failure},
    **{"on_retry": on_retry, "after_return": after_return, "on_replace": on_replace},
    "shadow_name": shadow_name,
    **dict.fromkeys(
        ("pydantic", "pydantic_context", "pydantic_dump_kwargs", "pydantic_strict"), pydantic_
    ),
}


#: Given to Celery as they are, and tested with the tests above and those of workers.
AS_IN_CELERY = (
    *("base", "bind", "shared", "lazy", "filter", "Strategy", "rate_limit"),
    *("exchange", "exchange_type", "routing_key", "delivery_mode", "send_events"),
    *("autoretry_for", "dont_autoretry_for"),
    *("store_errors_even_if_ignored", "store_eager_result"),
)


@pytest.mark.parametrize("option", PROOFS)
def test_an_option_does_what_the_table_says(bench: Bench, option: str) -> None:
    PROOFS[option](bench)


def test_every_option_of_celery_has_its_row_and_its_proof() -> None:
    table = first_codes(section("reference/options.md", "## Celery's own options"))
    assert sorted(table) == sorted({*TaskOptions.__annotations__, "bind"} - OPTIONS)
    assert sorted(table) == sorted({*PROOFS, *AS_IN_CELERY})
