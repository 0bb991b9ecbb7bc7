"""What users test their own tasks with: no server, no worker, no waiting."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextvars import copy_context
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from celery import Celery, chain, chord, group
from celery.exceptions import Retry

from celery_singleton_lock import (
    CallOptions,
    DuplicateTask,
    LeaseLost,
    LockConflict,
    NoLease,
    OnConflict,
    SingletonTask,
    current_lease,
    hold,
    is_skipped,
    singleton_task,
)
from celery_singleton_lock.core import native_threads
from celery_singleton_lock.testing import (
    ManualClock,
    SingletonStore,
    hold_claim,
    hold_lock,
    lose_lease,
)
from tests.harness.keys import EVERY_NAME
from tests.harness.processes import ROOT

UNREACHABLE = "redis://127.0.0.1:1/0"


@pytest.fixture
def celery_app(monkeypatch: pytest.MonkeyPatch) -> Iterator[Celery]:
    """An eager app; a connection to anywhere is a failure."""
    monkeypatch.setattr("socket.socket.connect", refuse)
    app = Celery(broker=UNREACHABLE, backend=UNREACHABLE, set_as_current=False)
    app.conf.task_always_eager = True
    yield app
    app.close()


def refuse(self: Any, address: Any) -> None:
    raise AssertionError(f"a test without a server connects to {address}")


def task_of(app: Celery, **options: Any) -> SingletonTask[[str], str]:
    """``work(name)``, which returns its lease's key."""

    @singleton_task(app=app, name="work", shared=False, **options)
    def work(name: str) -> str:
        return current_lease().key

    return cast("SingletonTask[[str], str]", work)


# Celery's own fixtures, without ours.


CELERYS_WORKER = """
import pytest
from celery_singleton_lock import is_skipped, singleton_task
from celery_singleton_lock.testing import hold_lock

@pytest.fixture(scope="session")
def celery_worker_parameters():
    return {"perform_ping_check": False}

def test_a_task_is_skipped(celery_app, celery_worker):
    @singleton_task(app=celery_app, name="work", key="{name}")
    def work(name):
        return name

    celery_worker.reload()
    assert work.delay("ann").get(timeout=20) == "ann"
    with hold_lock(work, "ann"):
        assert is_skipped(work.delay("ann").get(timeout=20))

def test_a_worker_starts_where_a_task_is_known_before(celery_session_app):
    @singleton_task(app=celery_session_app, name="known")
    def known():
        return 1

    with start_worker(celery_session_app, perform_ping_check=False):
        assert known.delay().get(timeout=20) == 1
"""


@pytest.mark.slow
def test_celerys_own_worker_fixture_needs_no_store(tmp_path: Path) -> None:
    # A process of its own: that fixture sets logging up, and redirects the output.
    file = tmp_path / "test_site.py"
    file.write_text("from celery.contrib.testing.worker import start_worker\n" + CELERYS_WORKER)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "celery.contrib.pytest", str(file)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        # pytest-celery has a fixture of the same name, for containers.
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        timeout=120,
        check=False,
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr


# Eager, without the fixture.


def test_an_eager_call_needs_no_server(celery_app: Celery) -> None:
    work = task_of(celery_app, key="{name}")
    assert work.delay("ann").get() == work.lock_key("ann")
    assert work.delay("ann").get() == work.lock_key("ann")  # released in between
    assert work.apply_async(("ann",), singleton={"ttl": 5}).get() == work.lock_key("ann")


def test_a_direct_call_takes_no_lock(celery_app: Celery) -> None:
    work = task_of(celery_app, key="{name}")
    with hold_lock(work, "ann"), pytest.raises(NoLease, match=r"called directly.*\.apply\(\("):
        work("ann")


def test_a_direct_retry_raises_what_celery_s_own_raises(celery_app: Celery) -> None:
    @singleton_task(app=celery_app, bind=True, key="{name}", shared=False)
    def again(self: Any, name: str) -> None:
        raise self.retry()

    with pytest.raises(Retry):
        again("ann")


def test_an_eager_call_is_skipped_while_its_key_is_held(celery_app: Celery) -> None:
    work = task_of(celery_app, key="{name}")
    with hold_lock(work, "ann") as lease:
        result: Any = work.delay("ann")
        assert is_skipped(result)
        assert is_skipped(result.get())
        assert result.get()["holder"]["task_id"] == lease.holder.task_id
        assert not is_skipped(work.delay("bob"))
    assert not is_skipped(work.delay("ann"))


@pytest.mark.parametrize(
    "on_conflict",
    [
        *("raise", "retry", "queue"),
        *(
            OnConflict.wait(0),
            OnConflict.retry(delay=1),
            OnConflict.cancel_running(within=0.1, timeout=0.2),
        ),
    ],
    ids=str,
)
def test_a_conflict_that_can_not_wait_raises(celery_app: Celery, on_conflict: Any) -> None:
    work = task_of(celery_app, key="{name}", on_conflict=on_conflict)
    with hold_lock(work, "ann") as lease:
        result = work.delay("ann")
        assert result.state == "FAILURE"
        with pytest.raises(LockConflict, match="is held by hold-") as caught:
            result.get()
    assert caught.value.key == lease.key
    assert caught.value.holder["task_id"] == lease.holder.task_id
    assert not is_skipped(work.delay("ann").get())


def test_hold_and_an_eager_call_exclude_each_other_but_not_on_one_thread(
    celery_app: Celery,
) -> None:
    work = task_of(celery_app, key="{name}")
    # The caller holds the key itself: its eager call runs inside that lease.
    with hold("ann", scope="work", app=celery_app) as lease:
        assert work.delay("ann").get() == lease.key
    with hold_lock(work, "ann"), pytest.raises(LockConflict):
        hold("ann", scope="work", app=celery_app).__enter__()


def test_an_eager_task_that_calls_itself_re_enters_its_lease(celery_app: Celery) -> None:
    @singleton_task(app=celery_app, name="nested", shared=False, key="{name}", bind=True)
    def nested(self: Any, name: str, depth: int = 0) -> list[int]:
        fence = current_lease().fence
        return [fence, *(self.delay(name, depth + 1).result if depth < 2 else [])]

    fences = nested.delay("ann").get()
    assert len(fences) == 3
    assert len(set(fences)) == 1
    with hold_lock(nested, "ann"):
        assert is_skipped(nested.delay("ann"))


def test_an_eager_retry_runs_all_attempts_under_the_key(celery_app: Celery) -> None:
    seen = []

    @singleton_task(app=celery_app, name="r", shared=False, key="{name}", bind=True, max_retries=3)
    def retried(self: Any, name: str) -> int:
        seen.append((self.request.retries, current_lease().key))
        if self.request.retries < 2:
            raise self.retry(countdown=60)
        return int(self.request.retries)

    assert retried.delay("ann").get() == 2
    assert seen == [(number, retried.lock_key("ann")) for number in range(3)]
    assert retried.delay("ann").get() == 2  # nothing is left of the reservations


def test_eager_errors_propagate_where_the_app_says_so(celery_app: Celery) -> None:
    celery_app.conf.task_eager_propagates = True
    work = task_of(celery_app, key="{name}", on_conflict="raise")
    with hold_lock(work, "ann"), pytest.raises(LockConflict):
        work.delay("ann")
    assert not is_skipped(work.delay("ann").get())

    @singleton_task(app=celery_app, name="r", shared=False, key="{name}", bind=True)
    def retried(self: Any, name: str) -> None:
        raise self.retry(countdown=1)

    with pytest.raises(Retry):
        retried.delay("ann")


# Claims.


MODES: list[dict[str, Any]] = [
    {"unique": "until_start"},
    {"unique": "until_done"},
    {"unique": "until_expired", "unique_for": 100},
]
each_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode["unique"])


def claims(store: SingletonStore) -> list[str]:
    return [record.key for record in store.store.operators.scan(f"{EVERY_NAME}}}:claim|*")]


@each_mode
def test_a_call_is_a_duplicate_while_its_claim_is_held(celery_app: Celery, mode: Any) -> None:
    work = task_of(celery_app, key="{name}", **mode)
    with hold_claim(work, "ann") as queued:
        assert work.delay("ann").id == queued.id
        assert work.delay(name="ann").id == queued.id
        assert is_skipped(work.apply_async(("ann",), singleton={"on_duplicate": "skip"}))
        with pytest.raises(DuplicateTask) as raised:
            work.apply_async(("ann",), singleton={"on_duplicate": "raise"})
        assert raised.value.task_id == queued.id
        assert work.delay("bob").get() == work.lock_key("bob")
        beside = work.apply_async(("ann",), singleton=False)
        assert beside.get() == work.lock_key("ann"), "a claim is no lock"
    assert work.delay("ann").get() == work.lock_key("ann")


def test_a_held_claim_concerns_unique_calls_alone(celery_app: Celery) -> None:
    work = task_of(celery_app, key="{name}")
    with hold_claim(work, "ann") as queued:
        assert work.delay("ann").get() == work.lock_key("ann")
        for mode in MODES:
            assert work.apply_async(("ann",), singleton=mode).id == queued.id


@each_mode
def test_a_held_claim_ends_as_that_of_a_lost_message(
    celery_app: Celery, singleton_store: SingletonStore, mode: Any
) -> None:
    work = task_of(celery_app, key="{name}", **mode | {"unique_for": 60})
    with hold_claim(work, "ann") as queued:
        singleton_store.clock.advance(59)
        assert work.delay("ann").id == queued.id
        singleton_store.clock.advance(2)
        assert work.delay("ann").get() == work.lock_key("ann")


def test_a_claim_is_held_once_and_only_where_there_is_a_key(celery_app: Celery) -> None:
    work = task_of(celery_app, key=lambda name: name or None, unique="until_done")
    with hold_claim(work, "ann"), pytest.raises(DuplicateTask, match="has the claim"):
        hold_claim(work, "ann").__enter__()
    with pytest.raises(ValueError, match="takes no lock"):
        hold_claim(work, "").__enter__()


@pytest.mark.parametrize("mode", MODES[:2], ids=lambda mode: mode["unique"])
def test_eager_calls_run_one_after_the_other_and_leave_no_claim(
    celery_app: Celery, singleton_store: SingletonStore, mode: Any
) -> None:
    work = task_of(celery_app, key="{name}", **mode)
    assert work.delay("ann").id != work.delay("ann").id
    assert claims(singleton_store) == []


def test_eager_calls_run_once_per_period(
    celery_app: Celery, singleton_store: SingletonStore
) -> None:
    runs = []

    @singleton_task(app=celery_app, name="once", shared=False, key="{name}", **MODES[2])
    def once(name: str, fails: bool) -> int:
        runs.append(name)
        if fails:
            raise ZeroDivisionError(name)
        return len(runs)

    for name, fails in (("ann", False), ("bob", True)):
        first = once.delay(name, fails)
        singleton_store.clock.advance(99)
        again = once.delay(name, not fails)
        assert (again.id, again.state) == (first.id, first.state)
        assert again.result == first.result, "it is there, without a result backend"
        singleton_store.clock.advance(2)
    assert once.delay("ann", False).get() == 3
    assert runs == ["ann", "bob", "ann"]


def test_an_eager_call_that_never_ran_begins_no_period(
    celery_app: Celery, singleton_store: SingletonStore
) -> None:
    work: Any = task_of(celery_app, **MODES[2])
    with pytest.raises(TypeError):
        work.delay()
    assert claims(singleton_store) == []


def test_an_eager_body_that_raises_through_its_call_has_had_its_period(celery_app: Celery) -> None:
    celery_app.conf.task_eager_propagates = True

    @singleton_task(app=celery_app, name="f", shared=False, on_duplicate="raise", **MODES[2])
    def failing() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing.delay()
    with pytest.raises(DuplicateTask):
        failing.delay()


@each_mode
def test_an_eager_body_calls_itself(
    celery_app: Celery, singleton_store: SingletonStore, mode: Any
) -> None:
    inner: list[Any] = []

    @singleton_task(app=celery_app, name="n", shared=False, key="{name}", bind=True, **mode)
    def nested(self: Any, name: str, depth: int = 0) -> int:
        if depth == 0:
            inner.append(self.delay(name, 1))
        return depth

    outer = nested.delay("ann")
    # In its own period a call is a duplicate; else it is the successor of the running one.
    assert (inner[0].id == outer.id) is (mode["unique"] == "until_expired")
    assert outer.get() == 0
    if mode["unique"] != "until_expired":
        assert inner[0].get() == 1
        assert claims(singleton_store) == []


@each_mode
def test_an_eager_retry_goes_on_under_its_claim(
    celery_app: Celery, singleton_store: SingletonStore, mode: Any
) -> None:
    @singleton_task(app=celery_app, name="r", shared=False, bind=True, max_retries=3, **mode)
    def retried(self: Any) -> int:
        if self.request.retries < 2:
            raise self.retry(countdown=60)
        return int(self.request.retries)

    assert retried.delay().get() == 2
    assert len(claims(singleton_store)) == (mode["unique"] == "until_expired")


@each_mode
def test_members_of_an_eager_canvas_give_way_to_a_held_claim(celery_app: Celery, mode: Any) -> None:
    celery_app.conf.update(result_backend="cache+memory://", task_store_eager_result=True)
    work: Any = task_of(celery_app, key="{name}", **mode)
    gives_way = mode["unique"] != "until_start"  # that one was published to cause a later run
    with hold_claim(work, "ann"):
        canvases = [
            group(work.si("ann"), work.si("bob")),
            chain(work.si("bob"), work.si("ann")),
            chord([work.si("bob")], work.si("ann")),
        ]
        for canvas in canvases:
            result = canvas.apply_async()
            last = result.results[0] if isinstance(canvas, group) else result
            assert is_skipped(last.get()) is gives_way
        linked = work.apply_async(("ann",), link=work.si("cat"))
        assert is_skipped(linked.get()) is gives_way
        assert not work.apply_async(
            ("ann",), link=work.si("cat"), singleton={"on_duplicate": "skip"}
        )


@each_mode
def test_an_explicit_apply_leaves_the_claims_of_messages_alone(
    celery_app: Celery, singleton_store: SingletonStore, mode: Any
) -> None:
    work = task_of(celery_app, key="{name}", **mode)
    celery_app.conf.update(task_always_eager=False)
    with hold_claim(work, "ann"):
        before = claims(singleton_store)
        assert work.apply(("ann",)).get() == work.lock_key("ann")
        assert claims(singleton_store) == before


def test_a_published_call_is_a_duplicate_while_its_claim_is_held(celery_app: Celery) -> None:
    celery_app.conf.update(
        task_always_eager=False, broker_url="memory://", result_backend="cache+memory://"
    )
    work = task_of(celery_app, key="{name}", unique="until_done")
    with hold_claim(work, "ann") as queued:
        assert work.delay("ann").id == queued.id
    assert work.delay("ann").id != queued.id


# The fixture.


def test_the_store_shows_what_is_held(celery_app: Celery, singleton_store: SingletonStore) -> None:
    work = task_of(celery_app, key="{name}")
    assert singleton_store.held() == []
    with hold_lock(work, "ann") as lease:
        [record] = singleton_store.held()
        assert (record.key, record.token) == (work.lock_key("ann"), str(lease.token))
    assert singleton_store.held() == []


def test_time_passes_only_as_the_test_says(
    celery_app: Celery, singleton_store: SingletonStore
) -> None:
    work = task_of(celery_app, key="{name}", min_hold=timedelta(minutes=5))
    assert not is_skipped(work.delay("ann"))
    singleton_store.clock.advance(299)
    assert is_skipped(work.delay("ann"))
    singleton_store.clock.advance(2)
    assert not is_skipped(work.delay("ann"))
    singleton_store.clock.advance(301)
    assert singleton_store.held() == []


def test_a_dead_holder_blocks_for_its_ttl_and_no_longer(
    celery_app: Celery, singleton_store: SingletonStore
) -> None:
    work = task_of(celery_app, key="{name}", ttl=60)
    with hold_lock(work, "ann") as lease:
        assert lease.remaining() > 59
        singleton_store.clock.advance(59)
        assert is_skipped(work.delay("ann"))
        singleton_store.clock.advance(2)
        assert lease.lost
        assert not is_skipped(work.delay("ann"))


def test_no_thread_renews_what_a_test_lets_expire(
    celery_app: Celery, singleton_store: SingletonStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr(
        native_threads, "start_new_thread", lambda function, name: started.append(name)
    )
    with hold_lock(task_of(celery_app, key="{name}", ttl=10), "ann"):
        singleton_store.clock.advance(9)
    assert started == []


def test_waiting_costs_no_time_of_the_test(
    celery_app: Celery, singleton_store: SingletonStore
) -> None:
    work = task_of(celery_app, key="{name}", ttl=60, on_conflict=OnConflict.wait(timeout=30))
    begin = singleton_store.clock.now()
    with hold_lock(work, "ann"):
        with pytest.raises(LockConflict, match="waiting for 30 s was not enough"):
            work.delay("ann").get()
        assert 30 <= singleton_store.clock.now() - begin < 32
        # The holder lives, and its lease is renewed while a call waits for longer than its ttl.
        patient: CallOptions = {"on_conflict": OnConflict.wait(timeout=300)}
        with pytest.raises(LockConflict, match="waiting for 300 s was not enough"):
            work.apply_async(("ann",), singleton=patient).get()
        singleton_store.clock.advance(61)  # the holder is dead
        assert work.apply_async(("ann",), singleton=patient).get() == work.lock_key("ann")


def test_losing_a_lease_interrupts_the_body(
    celery_app: Celery, singleton_store: SingletonStore
) -> None:
    steps = []

    @singleton_task(app=celery_app, name="l", shared=False, key="{name}")
    def losing(name: str) -> None:
        steps.append("before")
        try:
            lose_lease(app=celery_app)
            current_lease().check()
            steps.append("after")
        except Exception as error:
            steps.append(type(error).__name__)  # not even this one keeps it running
            raise

    with pytest.raises(LeaseLost, match="was lost") as caught:
        losing.delay("ann").get()
    assert caught.value.key == losing.lock_key("ann")
    assert "after" not in steps
    assert singleton_store.held() == []


def test_a_body_that_goes_on_sees_that_its_lease_is_lost(
    celery_app: Celery, singleton_store: SingletonStore
) -> None:
    @singleton_task(app=celery_app, name="c", shared=False, key="{name}", on_lost="continue")
    def going_on(name: str) -> tuple[bool, float]:
        lose_lease(app=celery_app)
        return current_lease().lost, current_lease().remaining()

    assert going_on.delay("ann").get() == (True, 0.0)


def test_a_lost_hold_is_never_interrupted(
    celery_app: Celery, singleton_store: SingletonStore
) -> None:
    with hold("ann", scope="work", app=celery_app) as lease:
        assert lose_lease(lease, app=celery_app) is lease
        assert lease.lost
        with pytest.raises(LeaseLost):
            lease.check()
        # Others may have the key now, and this block's end leaves them alone.
        other = hold_lock(task_of(celery_app, key="{name}"), "ann")
        elsewhere = copy_context()  # as another thread: the two blocks end in the wrong order
        theirs = elsewhere.run(other.__enter__)
        with pytest.raises(LockConflict), hold("ann", scope="work", app=celery_app):
            raise AssertionError("a lost lease was re-entered")
    assert [record.token for record in singleton_store.held()] == [str(theirs.token)]
    elsewhere.run(other.__exit__, None, None, None)
    assert singleton_store.held() == []


@pytest.mark.usefixtures("singleton_store")
def test_a_lost_lease_is_not_re_entered_by_an_eager_call(celery_app: Celery) -> None:
    inner = task_of(celery_app, key="{name}")

    @singleton_task(
        app=celery_app, name="o", shared=False, scope="work", key="{name}", on_lost="continue"
    )
    def outer(name: str) -> tuple[bool, bool]:
        before = is_skipped(inner.delay(name))
        lose_lease(app=celery_app)
        with hold_lock(inner, name):
            return before, is_skipped(inner.delay(name))

    assert outer.delay("ann").get() == (False, True)


def test_hold_lock_is_another_worker_also_where_the_test_holds_the_key(
    celery_app: Celery,
) -> None:
    work = task_of(celery_app, key="{name}")
    with hold("ann", scope="work", app=celery_app) as mine:
        with pytest.raises(LockConflict), hold_lock(work, "ann"):
            raise AssertionError("two holders")
        with hold_lock(work, "bob"):
            assert work.delay("ann").get() == mine.key  # its own lease is still its own


def test_the_app_has_its_own_store_again_after_the_test(celery_app: Celery) -> None:
    work = task_of(celery_app, key="{name}", min_hold=60)
    store = SingletonStore()
    store.install(celery_app)
    work.delay("ann")
    assert is_skipped(work.delay("ann"))
    store.uninstall()
    assert not is_skipped(work.delay("ann"))
    store.uninstall()  # once more is as good as once


def test_a_manual_clock_stands_still() -> None:
    clock = ManualClock(now=5, wall=100)
    assert (clock.now(), clock.wall(), clock.now()) == (5, 100, 5)
    clock.advance(1.5)
    clock.sleep(1)
    assert (clock.now(), clock.wall()) == (7.5, 102.5)


def test_is_skipped_knows_values_and_results(celery_app: Celery) -> None:
    work = task_of(celery_app, key="{name}")
    with hold_lock(work, "ann"):
        result = work.delay("ann")
    assert is_skipped(result)
    assert is_skipped(result.get())
    for other in (None, "skipped", {}, {"__singleton__": "other"}, [result.get()], 0):
        assert not is_skipped(other)


# A user's project, as pytest sees it.

APP = """
from celery import Celery
from celery_singleton_lock import OnConflict, current_lease, singleton_task

app = Celery("shop", broker="redis://127.0.0.1:1/0", backend="redis://127.0.0.1:1/1")

@singleton_task(app=app, key="account:{account_id}")
def sync(account_id):
    return f"synced {account_id}"

@singleton_task(key="{order_id}", ttl=30)
def charge(order_id):
    current_lease().check()
    return current_lease().fence
"""
TESTS = """
import pytest, socket
from celery_singleton_lock.testing import hold_lock, is_skipped, lose_lease
from celery_singleton_lock import LeaseLost
import shop

@pytest.fixture(autouse=True)
def no_server(monkeypatch):
    def connect(self, address):
        raise AssertionError(address)
    monkeypatch.setattr(socket.socket, "connect", connect)

@pytest.fixture
def celery_app():
    shop.app.conf.task_always_eager = True
    return shop.app

def test_a_second_sync_is_skipped(celery_app, singleton_store):
    with hold_lock(shop.sync, 42):
        assert is_skipped(shop.sync.delay(42))
        assert shop.sync.delay(account_id=7).get() == "synced 7"
        singleton_store.clock.advance(61)
        assert not is_skipped(shop.sync.delay(42))

def test_fences_rise(celery_app, singleton_store):
    assert shop.charge.delay(1).get() < shop.charge.delay(1).get()

class TestWithoutTheAppFixture:
    def test_the_current_app_is_meant(self, singleton_store):
        shop.app.conf.task_always_eager = True
        with hold_lock(shop.charge, 1):
            assert is_skipped(shop.charge.delay(1))
        assert singleton_store.held() == []

@pytest.mark.xfail(strict=True)
def test_an_overlap_would_be_seen(celery_app, singleton_store):
    with hold_lock(shop.sync, 42):
        assert not is_skipped(shop.sync.delay(42))
"""


def test_a_users_project_has_the_fixture_by_installing_us(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP)
    (tmp_path / "test_shop.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    env.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed, 1 xfailed" in done.stdout
