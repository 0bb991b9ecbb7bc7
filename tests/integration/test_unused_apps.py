"""What an app leaves in its process when it is closed, or when nothing refers to it any more."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import Context
from itertools import count
from typing import Any, ClassVar

import pytest
from celery import Celery, Task

from celery_singleton_lock import (
    PER_TASK,
    LockConflict,
    SingletonTask,
    current_lease,
    hold,
    singleton_task,
)
from celery_singleton_lock.celery_compat import limit_backend_timeouts
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.testing import hold_lock
from tests.harness.deliveries import wait_until, wait_until_collected
from tests.harness.leftovers import Open
from tests.harness.redlock_nodes import RedlockNodes
from tests.harness.zookeeper import ZooKeeperEnsemble

UNREACHABLE = "redis://127.0.0.1:1/0"
# Celery makes a shared task in all apps of a process, so each has a name of its own.
numbers = count()


def make_app(url: str = UNREACHABLE, lock_url: str | None = None, task_cls: Any = None) -> Celery:
    app = Celery(
        f"unused-{next(numbers)}",
        broker=url,
        backend=url,
        set_as_current=False,
        task_cls=task_cls,
    )
    app.conf.singleton_lock_url = lock_url or url
    return app


def declare(app: Celery, **options: Any) -> Any:
    """A task whose function refers to no app."""

    @singleton_task(app=app, name=f"task-{next(numbers)}", **options)
    def task(number: int = 0) -> int:
        return number

    return task


def plain(app: Celery) -> None:
    @app.task(name=f"task-{next(numbers)}")
    def task() -> None: ...


def given_as_base(app: Celery) -> None:
    @app.task(name=f"task-{next(numbers)}", base=SingletonTask, singleton={"ttl": 20})
    def task() -> None: ...


def of_all_apps(app: Celery) -> None:
    @singleton_task(name=f"task-{next(numbers)}", ttl=20)
    def task() -> None: ...


DECLARATIONS = [plain, declare, given_as_base, of_all_apps]


@pytest.mark.parametrize("finalized", [True, False])
@pytest.mark.parametrize("declaration", DECLARATIONS)
def test_an_app_that_has_only_declared_tasks_dies_as_a_plain_one(
    declaration: Callable[[Celery], Any], finalized: bool
) -> None:
    app = make_app()
    declaration(app)
    if finalized:
        app.finalize()
    found = weakref.ref(app)
    del app
    gc.collect()
    assert found() is None


@pytest.mark.parametrize("declaration", DECLARATIONS)
def test_an_app_that_got_the_task_of_another_dies(declaration: Callable[[Celery], Any]) -> None:
    first, second = make_app(), make_app()
    declaration(first)
    for app in (first, second):
        app.finalize()
    found = [weakref.ref(first), weakref.ref(second)]
    del app, second
    gc.collect()
    assert found[1]() is None
    del first
    gc.collect()
    assert found[0]() is None


class Counting(type):
    """As libraries have it that note the classes of tasks."""

    made: ClassVar[list[str]] = []

    def __init__(cls, name: str, bases: Any, attributes: Any) -> None:
        super().__init__(name, bases, attributes)
        Counting.made.append(name)


class FirstBase(Task, metaclass=Counting):
    abstract = True
    singleton: ClassVar[Any] = {"ttl": 20, "needs_fence": True}
    of = "first"


class SecondBase(Task):
    abstract = True
    of = "second"


def test_a_shared_task_has_the_own_task_of_each_app_as_its_base_and_that_ones_options() -> None:
    first, second = make_app(task_cls=FirstBase), make_app(task_cls=SecondBase)
    name = f"task-{next(numbers)}"

    @singleton_task(app=first, name=name, ttl=30)
    def counted() -> None: ...

    of_first, of_second = first.tasks[name], second.tasks[name]
    assert (of_first.of, of_first.singleton) == ("first", {"ttl": 30, "needs_fence": True})
    assert (of_second.of, of_second.singleton) == ("second", {"ttl": 30})
    assert Counting.made.count("counted") == 1
    assert type(type(of_first)) is Counting
    assert (of_first.app, of_second.app) == (first, second)


def test_the_base_is_the_task_that_the_app_has_when_it_is_finalized() -> None:
    # The Flask guide's idiom, in a module that is imported later than the tasks.
    app = make_app()
    task = declare(app)
    app.Task = FirstBase
    assert task.of == "first"


# What was used.


def published(app: Celery) -> None:
    declare(app, unique="until_done").delay(1)


def published_twice(app: Celery) -> None:
    task = declare(app, unique="until_done")
    assert task.delay(1).id == task.delay(1).id  # the second asks the result backend


def held(app: Celery) -> None:
    with hold("k", scope="s", app=app):
        pass


def held_by_coroutine(app: Celery) -> None:
    async def body() -> None:
        async with hold("k", scope="s", app=app):
            pass

    asyncio.run(body())


def run_eagerly(app: Celery) -> None:
    assert declare(app).apply((1,)).get() == 1


def always_eager(app: Celery) -> None:
    app.conf.task_always_eager = True
    assert declare(app).delay(1).get() == 1


USES = [published, published_twice, held, held_by_coroutine, run_eagerly, always_eager]


@pytest.fixture
def before(redis_url: str) -> Open:
    """What is open before the app is made."""
    return Open.now()


def assert_nothing_is_left(before: Open) -> None:
    assert before.wait_until_nothing_is_left() == []


@pytest.mark.parametrize("use", USES)
def test_a_collected_app_leaves_no_thread_and_no_descriptor(
    use: Callable[[Celery], None], redis_url: str, before: Open
) -> None:
    app = make_app(redis_url)
    use(app)
    assert Open.now().descriptors - before.descriptors
    found = weakref.ref(app)
    del app
    wait_until_collected(lambda: found() is None, "the app is collected")
    assert_nothing_is_left(before)


@pytest.mark.parametrize("use", [use for use in USES if use is not published_twice])
def test_a_closed_app_leaves_no_thread_and_no_descriptor(
    use: Callable[[Celery], None], redis_url: str, before: Open
) -> None:
    # Celery's own connections end when the app is collected.
    app = make_app("memory://", redis_url)
    app.conf.result_backend = None
    with app:
        use(app)
    assert_nothing_is_left(before)
    assert app.main


def test_a_closed_app_asks_the_result_backend_no_more(redis_url: str, before: Open) -> None:
    app = make_app("memory://", redis_url)
    app.conf.result_backend = redis_url
    runtime = Runtime.of(app)
    backend = runtime.quick_backend = limit_backend_timeouts(app, 1.0)
    assert backend.get("nothing") is None
    assert Open.now().descriptors - before.descriptors
    app.close()
    assert before.left() == []
    assert runtime.quick_backend is None
    assert backend.get("nothing") is None  # a thread that has it still


@pytest.mark.parametrize("use", USES)
def test_an_app_can_be_used_and_closed_again(
    use: Callable[[Celery], None], redis_url: str, before: Open
) -> None:
    app = make_app(redis_url)
    for _ in range(3):
        use(app)
        app.close()
    del app
    gc.collect()
    assert_nothing_is_left(before)


def test_closing_an_app_twice_or_before_its_first_use_does_nothing(redis_url: str) -> None:
    app = make_app(redis_url)
    app.close()
    held(app)
    app.close()
    app.close()


def test_a_subclass_of_celery_keeps_its_own_close(redis_url: str) -> None:
    closed = []

    class Own(Celery):
        def close(self) -> None:
            closed.append(self.main)
            super().close()

    with Own("own", broker=redis_url, backend=redis_url, set_as_current=False) as app:
        held(app)
        threads = Runtime.of(app).locker.heartbeat
        assert threads._running
    assert closed == ["own"]
    wait_until(lambda: not threads._running, "the heartbeat has ended")


def test_a_lease_that_is_held_when_its_app_is_closed_is_renewed_until_its_release(
    redis_url: str, before: Open
) -> None:
    app = make_app(redis_url)
    task = declare(app, key=PER_TASK)
    with hold("k", scope="s", app=app, ttl=0.6) as lease:
        app.close()
        until = lease.valid_until
        wait_until(lambda: lease.valid_until > until + 0.6, "it is renewed again and again")
        with hold_lock(task, 1):  # by the next locker
            lease.check()
    app.close()
    del app, task
    gc.collect()
    assert_nothing_is_left(before)


def test_the_release_of_a_lease_that_outlives_its_closed_app_reaches_the_store(
    redis_url: str, redis_client: Any
) -> None:
    app = make_app(redis_url)
    with hold("k", scope="s", app=app) as lease:
        app.close()
        assert redis_client.exists(lease.key)
    assert not redis_client.exists(lease.key)


def test_a_body_that_closes_its_app_keeps_its_lease_to_its_end(
    redis_url: str, redis_client: Any
) -> None:
    app = make_app(redis_url)

    @singleton_task(app=app, name=f"task-{next(numbers)}", key=PER_TASK, shared=False)
    def closing() -> str:
        app.close()
        return current_lease().key if redis_client.exists(current_lease().key) else ""

    key = closing.apply().get()
    assert key
    assert not redis_client.exists(key)


# Other stores, whose clients have threads of their own.


def lock_url(servers: Any) -> str:
    url = getattr(servers, "url", servers)
    return str(url() if callable(url) else url)


@pytest.fixture
def redlock() -> Iterator[RedlockNodes]:
    with RedlockNodes(3) as nodes:
        yield nodes


@pytest.mark.parametrize(
    "store",
    [
        "redis_url",
        "redlock",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("sentinels", "cluster")),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("etcd", "zookeeper")),
    ],
)
@pytest.mark.parametrize("ends", ["closed", "collected"])
@pytest.mark.parametrize("use", [published, held])
def test_no_store_leaves_a_thread_or_a_descriptor(
    store: str, ends: str, use: Callable[[Celery], None], request: pytest.FixtureRequest
) -> None:
    redis_url = request.getfixturevalue("redis_url")
    servers = request.getfixturevalue(store)
    before = Open.now()
    app = make_app(redis_url, lock_url(servers))
    use(app)
    if ends == "closed":
        app.close()
    found = weakref.ref(app)
    del app
    wait_until_collected(lambda: found() is None, "the app is collected")
    assert_nothing_is_left(before)


def is_taken(app: Celery) -> bool:
    with suppress(LockConflict), hold("k", scope="s", app=app, ttl=6):
        return False
    return True


@pytest.mark.slow
def test_the_sessions_of_zookeeper_end_after_the_last_lease_of_a_closed_app(
    zookeeper: ZooKeeperEnsemble, redis_url: str
) -> None:
    before = Open.now()
    app, other = (make_app(redis_url, zookeeper.url()) for _ in range(2))
    with hold("k", scope="s", app=app, ttl=6):
        app.close()
        assert Context().run(is_taken, other)  # in this context it would re-enter the lease
    assert not is_taken(other)
    del app, other
    assert_nothing_is_left(before)
