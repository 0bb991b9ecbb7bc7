"""Subclasses of `SingletonTask`, what they inherit, and keys as both sides see them; all eager."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, Task, signals
from celery.exceptions import Reject

from celery_singleton_lock import (
    PER_TASK,
    NoLease,
    OnConflict,
    SingletonTask,
    StoreUnavailable,
    TaskOptions,
    current_lease,
    is_skipped,
    singleton_task,
)
from celery_singleton_lock.core.lease import Holder
from celery_singleton_lock.errors import SettingsError
from celery_singleton_lock.message.skipped import skipped_value
from celery_singleton_lock.testing import hold_lock
from celery_singleton_lock.worker.bootstep import check_app
from example_project.private_server import free_port
from tests.harness.deliveries import wait_until_collected

UNREACHABLE = "redis://127.0.0.1:1/0"


@pytest.fixture
def celery_app() -> Iterator[Celery]:
    app = Celery("unit-class", broker=UNREACHABLE, backend=UNREACHABLE, set_as_current=False)
    app.conf.task_always_eager = True
    yield app
    app.close()


# A subclass's own __call__.


def held_key() -> str | None:
    try:
        return current_lease().key
    except NoLease:
        return None


class Wrapped(SingletonTask):
    """As Flask's guide has it: the body runs in a context of the application."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return ["wrapped", held_key(), super().__call__(*args, **kwargs)]


class Running(SingletonTask):
    """As many write it."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return ["running", held_key(), self.run(*args, **kwargs)]


class WrappedTwice(Wrapped):
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return ["twice", held_key(), super().__call__(*args, **kwargs)]


class Mixin:
    """Not a task: put in front of one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return ["mixin", held_key(), self.run(*args, **kwargs)]  # type: ignore[attr-defined]


class Mixed(Mixin, SingletonTask):
    abstract = True


class Behind(Task):
    """A project's own base, behind ours."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return ["behind", held_key(), self.run(*args, **kwargs)]


class InFront(SingletonTask, Behind):
    abstract = True


class MixedTwice(Mixin, Wrapped):
    """The mixin knows nothing of the ``__call__`` behind it."""

    abstract = True


class Heir(Wrapped):
    """Inherits a ``__call__`` and brings none."""

    abstract = True


WRAPPERS = {
    Wrapped: ["wrapped"],
    Running: ["running"],
    WrappedTwice: ["twice", "wrapped"],
    Mixed: ["mixin"],
    MixedTwice: ["mixin"],
    InFront: ["behind"],
    Behind: ["behind"],
    Heir: ["wrapped"],
}


def keyed(app: Celery, base: Any, **options: Any) -> Any:
    @singleton_task(app=app, base=base, name="work", key="{name}", shared=False, **options)
    def work(name: str) -> str | None:
        return held_key()

    return work


def nested(names: list[str], key: str | None) -> Any:
    """What the wrappers return around a body that returns ``key``."""
    return [names[0], key, nested(names[1:], key)] if names else key


@pytest.mark.parametrize("base", WRAPPERS)
def test_a_subclass_s_call_and_the_body_in_it_run_under_the_lease(
    celery_app: Celery, base: Any
) -> None:
    work = keyed(celery_app, base)
    key = work.lock_key("ann")
    assert work.delay("ann").get() == nested(WRAPPERS[base], key)
    assert work.delay("ann").get() == nested(WRAPPERS[base], key), "released in between"


@pytest.mark.parametrize("base", WRAPPERS)
def test_a_subclass_s_call_does_not_run_while_another_holds_the_key(
    celery_app: Celery, base: Any
) -> None:
    work = keyed(celery_app, base)
    with hold_lock(work, "ann"):
        assert is_skipped(work.delay("ann").get())


def test_a_result_of_a_call_that_has_not_ended_is_refused_with_what_to_write() -> None:
    app = Celery("later", backend="cache+memory://", set_as_current=False)
    result = app.AsyncResult("a-call")
    with pytest.raises(TypeError, match=r"Write is_skipped\(result\.get\(timeout=10\)\)"):
        is_skipped(result)
    with pytest.raises(TypeError, match=r"Write \[is_skipped\(value\) for value in results\.get"):
        is_skipped(app.GroupResult("some", [result]))
    app.backend.store_result(
        result.id, skipped_value("t", "k", Holder(task="t", task_id="id")), "SUCCESS"
    )
    assert is_skipped(result)
    assert is_skipped(result.get())
    app.close()


@pytest.mark.parametrize("base", WRAPPERS)
def test_a_direct_call_of_a_task_goes_through_the_subclass_s_call_without_a_lock(
    celery_app: Celery, base: Any
) -> None:
    work = keyed(celery_app, base)
    with hold_lock(work, "ann"):
        assert work("ann") == nested(WRAPPERS[base], None)


def test_a_body_may_call_its_own_task_through_the_subclass_s_call(celery_app: Celery) -> None:
    @singleton_task(
        app=celery_app, base=Wrapped, name="deep", bind=True, key="{name}", shared=False
    )
    def deep(self: Any, name: str, depth: int) -> Any:
        return [depth, self(name, depth - 1)] if depth else held_key()

    key = deep.lock_key("ann", 2)
    inner = ["wrapped", key, key]
    expected = ["wrapped", key, [2, ["wrapped", key, [1, inner]]]]
    assert deep.delay("ann", 2).get() == expected


def test_the_task_class_takes_no_name_that_a_user_may_give_an_attribute() -> None:
    added = {name for name in vars(SingletonTask) if not hasattr(Task, name)}
    others = {name for name in added if not name.startswith(("singleton", "_"))}
    assert others == {"hold", "lock_key"}


def test_a_task_class_of_its_own_runs_under_the_lease(celery_app: Celery) -> None:
    class Own(SingletonTask):
        name = "own"
        singleton = {"key": "{name}"}  # noqa: RUF012

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return ["own", held_key(), self.run(*args, **kwargs)]

        def run(self, name: str) -> str | None:
            return held_key()

    own = celery_app.register_task(Own())
    key = own.lock_key("ann")
    assert own.delay("ann").get() == ["own", key, key]


@pytest.mark.parametrize("unique", [None, "until_done"])
def test_an_apply_without_a_server_says_how_a_test_does_without_one(unique: Any) -> None:
    with Celery("later", broker=UNREACHABLE, backend=UNREACHABLE, set_as_current=False) as app:
        result = keyed(app, None, unique=unique).apply(("ann",))
        with pytest.raises(StoreUnavailable, match=r"refused\. In tests without a server, use"):
            result.get()


# A base's own apply_async.

PASSED_ON: list[dict[str, Any]] = []


class Narrow(Task):
    """As many write it: Celery's own callers give all but two arguments by keyword."""

    abstract = True

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        PASSED_ON.append(options)
        return super().apply_async(args, kwargs, **options)


class Named(Task):
    """Calls the two otherwise."""

    abstract = True

    def apply_async(self, a: Any = None, kw: Any = None, **options: Any) -> Any:
        PASSED_ON.append(options)
        return super().apply_async(a, kw, **options)


class Wide(Task):
    """Takes any arguments."""

    abstract = True

    def apply_async(self, *args: Any, **kwargs: Any) -> Any:
        assert len(args) == 2
        PASSED_ON.append(kwargs)
        return super().apply_async(*args, **kwargs)


@pytest.mark.parametrize("base", [Narrow, Named, Wide])
def test_a_base_s_own_apply_async_gets_what_is_given_and_by_keyword(
    celery_app: Celery, base: Any
) -> None:
    work = keyed(celery_app, base)
    PASSED_ON.clear()
    for send in (
        lambda: work.delay("ann"),
        lambda: work.s("ann").delay(),
        lambda: work.apply_async(("ann",), countdown=3, link=work.si("bob"), shadow="other"),
        lambda: work.apply_async(("ann",), {}, "id", None, None, None, "other"),
        lambda: work.apply_async(kwargs={"name": "ann"}, expires=None),
    ):
        assert send().get() == work.lock_key("ann")
    ours = {"task_id", "headers"}
    by_caller = [{*options} - ours for options in PASSED_ON if options.get("task_id")]
    assert by_caller[:2] == [set(), set()]
    assert {"countdown", "link", "shadow"} in by_caller
    assert {"shadow"} in by_caller
    assert {"expires"} in by_caller
    assert all({*options} >= ours for options in PASSED_ON)
    assert "id" in [options["task_id"] for options in PASSED_ON]
    PASSED_ON.clear()  # a linked call refers to the app


# A base's policy.


class Patient(SingletonTask):
    abstract = True
    singleton = {  # noqa: RUF012
        "ttl": 600,
        "on_conflict": "retry",
        "scope": "patients",
    }


def test_the_decorator_inherits_the_policy_of_its_base(celery_app: Celery) -> None:
    policy = keyed(celery_app, Patient).singleton_policy()
    assert (policy.ttl, policy.scope) == (600, "patients")
    assert policy.on_conflict == OnConflict.retry()


def test_what_the_decorator_says_wins_over_its_base_and_leaves_that_alone(
    celery_app: Celery,
) -> None:
    policy = keyed(celery_app, Patient, ttl=5).singleton_policy()
    assert (policy.ttl, policy.scope) == (5, "patients")
    assert Patient.singleton is not None
    assert Patient.singleton["ttl"] == 600


def test_the_app_s_own_task_class_brings_its_policy() -> None:
    app = Celery("unit-own", task_cls=Patient, broker=UNREACHABLE, set_as_current=False)
    try:
        policy = keyed(app, None).singleton_policy()
        assert (policy.ttl, policy.scope) == (600, "patients")
    finally:
        app.close()


# The form without our decorator.


def test_a_function_with_our_class_as_its_base_has_the_app_s_own_task_too() -> None:
    with Celery("unit-own", task_cls=Behind, set_as_current=False) as app:
        app.conf.task_always_eager = True

        @app.task(base=SingletonTask, singleton={"key": "{name}"}, name="work", shared=False)
        def work(name: str) -> str | None:
            return held_key()

        assert isinstance(work, Behind)
        assert work.delay("ann").get() == ["behind", work.lock_key("ann"), work.lock_key("ann")]
        with hold_lock(work, "ann"):
            assert is_skipped(work.delay("ann").get())


@pytest.mark.parametrize("base", [SingletonTask, Wrapped])
def test_a_function_with_a_base_of_ours_has_the_policy_of_no_other(base: Any) -> None:
    with Celery("unit-own", task_cls=Patient, set_as_current=False) as app:

        @app.task(base=base, name="work", shared=False)
        def work(name: str) -> None: ...

        assert not isinstance(work, Patient)
        assert work.singleton_policy().ttl == 60
        assert work.singleton_scope == "work"


# Keys.


class Colour(str, Enum):  # noqa: UP042 - StrEnum would hide it: its str() is its value
    RED = "red"


@pytest.mark.parametrize(
    ("given", "sent"),
    [(Colour.RED, "red"), ((1, 2), [1, 2]), (((1, 2), Colour.RED), [[1, 2], "red"])],
    ids=["str-Enum", "tuple", "nested"],
)
@pytest.mark.parametrize("key", ["value:{value}", ("value",), lambda value: str(value), None])
def test_a_key_is_that_of_the_arguments_as_a_worker_sees_them(
    celery_app: Celery, key: Any, given: Any, sent: Any
) -> None:
    @singleton_task(app=celery_app, name="keyed", key=key, shared=False)
    def keyed(value: Any) -> str:
        return current_lease().key

    assert keyed.lock_key(given) == keyed.lock_key(sent)
    assert keyed.lock_key(value=given) == keyed.lock_key(sent)
    assert keyed.delay(given).get() == keyed.lock_key(sent)


def sync(account_id: int, force: bool = False) -> None: ...


def nightly() -> None: ...


BY_DECORATOR: list[Callable[..., Any]] = [
    lambda app, body, **options: singleton_task(app=app, shared=False, **options)(body),
    lambda app, body, **options: app.task(
        base=SingletonTask, shared=False, lazy=False, singleton=options
    )(body),
]
TWO_WAYS = (
    r"sync: {}=[35] without a key .*key=PER_TASK .*the whole task.*"
    r'key="account_id:{{account_id}}" .*each account_id'
)


@pytest.mark.parametrize("declare", BY_DECORATOR)
@pytest.mark.parametrize(
    "options", [{"limit": 3}, {"debounce": 5}, {"debounce": 5, "debounce_max": 60}]
)
def test_a_number_of_calls_without_a_key_is_refused_with_both_ways_to_write_it(
    celery_app: Celery, declare: Callable[..., Any], options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=TWO_WAYS.format(next(iter(options)))):
        declare(celery_app, sync, **options)
    for key in (PER_TASK, "account:{account_id}", ("account_id", "force"), lambda *_, **__: "x"):
        declare(celery_app, sync, key=key, **options)
    # Without arguments there is one key, that of the task.
    declare(celery_app, nightly, **options)
    declare(celery_app, sync, limit=1)


def test_a_call_can_t_debounce_a_task_without_a_key(celery_app: Celery) -> None:
    task: Any = singleton_task(app=celery_app, shared=False)(sync)
    with pytest.raises(ValueError, match=r"apply_async\(singleton=...\) of .*debounce=5 without"):
        task.apply_async((1,), singleton={"debounce": 5})
    task.apply_async((1,), singleton={"debounce": None})


# The end.


def test_an_app_with_singleton_tasks_is_collected_once_it_is_referenced_no_more() -> None:
    app: Any = Celery("unit-gone", broker=UNREACHABLE, set_as_current=False)
    app.conf.task_always_eager = True
    assert keyed(app, None).delay("ann").get() is not None
    assert keyed(app, Wrapped) is not None
    gone = weakref.ref(app)
    del app
    wait_until_collected(lambda: gone() is None, "it is collected")


def test_what_an_attempt_publishes_twice_is_one_call_and_a_new_attempt_makes_another() -> None:
    app = Celery("unit-calls", set_as_current=False)
    app.conf.task_always_eager = True

    @singleton_task(app=app, name="unit.link", bind=True, shared=False)
    def link(self: Any, number: int) -> str:
        return str(self.request.headers["singleton_lock"]["call"])

    @singleton_task(app=app, name="unit.publisher", bind=True, shared=False)
    def publisher(self: Any) -> list[str]:
        self.request.called_directly = False
        return [link.delay(number).get(disable_sync_subtasks=False) for number in range(2)]

    task_id = str(uuid4())  # random, as Celery's own: a fixed id names no attempt
    first, again = (publisher.apply(task_id=task_id, retries=0).get() for _ in range(2))
    later = publisher.apply(task_id=task_id, retries=1).get()
    assert len({*first, *again}) == 1
    assert set(later).isdisjoint(first)
    outside = {link.delay(number).get() for number in range(3)}
    assert len(outside) == 3


# Where Celery calls the task, and sends no message: docs/explanation/how-it-works.md says so.


@pytest.mark.parametrize("shape", ["map", "starmap", "chunks"])
def test_the_items_of_one_message_are_function_calls(celery_app: Celery, shape: str) -> None:
    @singleton_task(app=celery_app, name="item", shared=False, key="{name}")
    def item(name: str) -> str | None:
        return held_key()

    parts = {
        "map": lambda: item.map(["k"]),
        "starmap": lambda: item.starmap([("k",)]),
        "chunks": lambda: item.chunks([("k",)], 1),
    }[shape]()
    with hold_lock(item, "k"):
        found = parts.apply_async().get()
    assert found in ([None], [[None]])


def test_a_postrun_signal_that_other_software_sends_outside_a_task_is_ignored(
    celery_app: Celery,
) -> None:
    @singleton_task(app=celery_app, name="unit.batched", shared=False)
    def batched() -> None: ...

    task = celery_app.tasks["unit.batched"]
    sent = signals.task_postrun.send(sender=task, task_id="t", state="SUCCESS", retval=None)
    assert sent
    assert all(reply is None for _, reply in sent)


# Functions a call of which runs none of their code.


async def coroutine(account_id: int) -> int:
    return account_id


def generator(account_id: int) -> Iterator[int]:
    yield account_id


class Awaiting(SingletonTask):
    """Runs what the function returns, under the lease."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return [held_key(), asyncio.run(super().__call__(*args, **kwargs))]


@pytest.mark.parametrize("body", [coroutine, generator])
def test_a_body_that_would_run_after_its_release_is_refused(
    celery_app: Celery, body: Callable[..., Any]
) -> None:
    task: Any = singleton_task(app=celery_app, name="later", shared=False)(body)
    for _ in range(2):  # Celery creates the task again at each use
        with pytest.raises(TypeError, match=r"task later is a coroutine or generator function"):
            task.delay(1)


def test_a_callable_key_reads_the_tenant_that_the_worker_has_set_before_the_call(
    celery_app: Celery,
) -> None:
    """As tenant-schemas-celery does: in a receiver of task_prerun; or a class in before_start."""
    tenant = ["unset"]

    def set_by_header(task: Task, **_: Any) -> None:
        tenant[:] = [task.request.headers["tenant"]]

    class Switching(Task):
        abstract = True

        def before_start(self, *args: Any, **kwargs: Any) -> None:
            tenant.append("started")

    def by_tenant(report: int) -> str:
        return f"{'-'.join(tenant)}:{report}"

    def build(report: int) -> str | None:
        return held_key()

    options: dict[str, Any] = {"key": by_tenant, "base": Switching, "shared": False}
    task: Any = singleton_task(app=celery_app, **options)(build)
    signals.task_prerun.connect(set_by_header)
    try:
        result = task.apply_async((7,), headers={"tenant": "a"})
    finally:
        signals.task_prerun.disconnect(set_by_header)
    assert result.get().endswith(":a-started:7")


def save_all(requests: list[Any]) -> None:
    """Runs nowhere."""


class Batches(Task):
    """As celery-batches: the pool calls the function outside of the messages' requests."""

    abstract = True

    def Strategy(self, *args: Any, **kwargs: Any) -> None:
        """Never reached."""


class UsersBatches(Batches):
    abstract = True


class SingletonBatches(SingletonTask, Batches):
    abstract = True


@pytest.mark.parametrize("base", [Batches, UsersBatches, SingletonBatches])
def test_a_task_of_celery_batches_is_refused_at_every_use(
    celery_app: Celery, base: type[Task]
) -> None:
    options: dict[str, Any] = {"name": "batch", "key": PER_TASK, "base": base, "shared": False}
    task: Any = singleton_task(app=celery_app, **options)(save_all)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"the task batch is of celery-batches"):
            task.delay(1)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"key": "{account_id}", "unique": "until_done"}, "given key, unique as attributes"),
        ({"singleton": {"ttl": -1}}, "ttl"),
        ({"singleton": {"key": "{nothing}"}}, "nothing"),
    ],
)
def test_a_task_with_wrong_options_is_refused_at_every_use(
    options: dict[str, Any], error: str
) -> None:
    def sync(account_id: int) -> None: ...

    app = Celery("unit", broker="memory://", set_as_current=False)
    task = app.task(base=SingletonTask, name="wrong", shared=False, **options)(sync)
    for _ in range(2):  # Celery creates the task again at each use
        with pytest.raises((TypeError, ValueError), match=error):
            task.delay(1)


def test_a_class_that_awaits_the_body_holds_the_key_meanwhile(celery_app: Celery) -> None:
    options: TaskOptions = {"name": "awaited", "base": Awaiting, "key": "{account_id}"}
    task: Any = singleton_task(app=celery_app, **options)(coroutine)
    key, value = task.delay(7).get()
    assert (key, value) == (task.lock_key(7), 7)


@pytest.mark.parametrize("late", [True, False])
def test_a_retry_that_the_broker_does_not_take_comes_back_if_it_is_acknowledged_late(
    late: bool,
) -> None:
    """Celery drops the message. One that is acknowledged early is gone already."""
    app = Celery("away", broker=f"redis://127.0.0.1:{free_port()}", set_as_current=False)
    app.conf.task_publish_retry = False

    @singleton_task(app=app, bind=True, acks_late=late)
    def work(self: Any, number: int) -> None: ...

    work.push_request(id="job", args=(1,), kwargs={}, called_directly=False, retries=0)
    with pytest.raises(Reject) as caught:
        work.retry()
    assert caught.value.requeue is late
    app.conf.broker_url = "memory://"
    with pytest.raises(Reject) as caught:
        work.retry(args=(object(),))
    assert not caught.value.requeue, "it would never be published"
    work.pop_request()
    app.close()


def test_a_queue_of_a_key_refuses_the_protocol_without_headers() -> None:
    app = Celery("old", broker="memory://", set_as_current=False)
    app.conf.update(task_protocol=1, singleton_lock_url="redis://127.0.0.1:1/0")

    @singleton_task(app=app, key="{number}", on_conflict="queue")
    def work(number: int) -> None: ...

    with pytest.raises(ValueError, match="needs task_protocol = 2"):
        work.delay(1)
    with pytest.raises(SettingsError, match="needs task_protocol = 2"):
        check_app(app)
    app.close()
