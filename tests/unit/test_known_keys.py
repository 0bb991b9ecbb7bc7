"""A key that a block or a claim names by hand is one that a task uses, or is refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import (
    PER_TASK,
    LockKeyError,
    claim_and_send,
    current_lease,
    hold,
    is_skipped,
    singleton_task,
)

UNREACHABLE = "redis://127.0.0.1:1/0"


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("unit-keys", broker=UNREACHABLE, backend=UNREACHABLE, set_as_current=False)
    app.conf.task_always_eager = True
    yield app
    app.close()


def make(
    app: Celery, name: str = "shop.sync", key: Any = "account:{account_id}", **options: Any
) -> Any:
    @singleton_task(app=app, name=name, key=key, shared=False, **options)
    def sync(account_id: int, force: bool = False) -> str:
        return current_lease().key

    return sync


@pytest.mark.parametrize("scope", [None, "accounts"])
@pytest.mark.parametrize(
    "key",
    ["account:{account_id}", ("account_id",), PER_TASK, lambda account_id, force=False: "x y"],
)
def test_a_task_holds_the_key_of_a_call_with_these_arguments(
    app: Celery, key: Any, scope: str | None
) -> None:
    task = make(app, key=key, scope=scope)
    with task.hold(7, force=True) as lease:
        assert lease.key == task.lock_key(7, True)
        assert lease.ttl == 60
    with make(app, name="other", ttl=9).hold(account_id=7) as lease:
        assert lease.ttl == 9


def test_a_call_is_skipped_while_its_key_is_held_and_another_runs(app: Celery) -> None:
    task = make(app)

    async def in_a_coroutine() -> list[bool]:
        async with task.hold(7):
            loop = asyncio.get_running_loop()  # its threads don't inherit the lease
            calls = [partial(lambda one: task.delay(one).get(), one) for one in (7, 8)]
            return [is_skipped(await loop.run_in_executor(None, call)) for call in calls]

    assert asyncio.run(in_a_coroutine()) == [True, False]


def test_the_options_of_a_hold_are_set_as_those_of_a_signature(app: Celery) -> None:
    task = make(app)
    holding = task.hold(7).set(wait=0.01, ttl=12)
    with holding as lease:
        assert lease.ttl == 12
    with pytest.raises(ValueError, match=r"at least 0\.3"):
        task.hold(7).set(ttl=0.1)

    @task.hold(7).set(ttl=12)
    def work() -> str:
        return f"{current_lease().key} {current_lease().ttl}"

    assert [work(), work()] == [f"{task.lock_key(7)} 12.0"] * 2


def test_arguments_that_no_call_can_have_are_refused(app: Celery) -> None:
    with pytest.raises(TypeError, match="account_id"):
        make(app).hold()
    unlocked = make(app, name="sometimes", key=lambda account_id, force=False: None)
    with pytest.raises(LockKeyError, match=r"sometimes: .*takes no lock"):
        unlocked.hold(7)


REMEDY = r"Write sync\.hold\(\.\.\.\) with the arguments"


@pytest.mark.parametrize(
    ("key", "scope", "said"),
    [
        ("acount:7", "shop.sync", rf"no call of shop.sync has this key: .*'account:\{{.*{REMEDY}"),
        ("shop.sync:account:7", "shop.sync", REMEDY),
        ("7", "digests", "a digest of all its arguments"),
        ("7", "some", "a digest of account_id"),
        ("all", "one", r'PER_TASK, written "\*"'),
        ("account:7", "scoped", "its scope is 'accounts'"),
        ("other:7", "accounts", "no call of scoped"),
        ("csl:{celery:0}:shop.sync:account:7", "shop.sync", "the whole name of a key"),
        ("csl:{celery:0}:shop.sync:account:7", "unknown", "the whole name of a key"),
        ("prod:csl:{celery:0}:shop.sync:account:7", "shop.sync", "the whole name of a key"),
    ],
)
def test_a_key_that_no_call_has_is_refused_with_what_to_write(
    app: Celery, key: str, scope: str, said: str
) -> None:
    app.conf.singleton_lock_global_keyprefix = "prod:"
    make(app)
    make(app, "digests", None)
    make(app, "some", ("account_id",))
    make(app, "one", PER_TASK)
    make(app, "scoped", scope="accounts")

    async def in_a_coroutine() -> None:
        async with hold(key, scope=scope, app=app):
            pass

    with pytest.raises(LockKeyError, match=said), hold(key, scope=scope, app=app):
        pass
    with pytest.raises(LockKeyError, match=said):
        asyncio.run(in_a_coroutine())
    with pytest.raises(LockKeyError, match=said):
        hold(key, scope=scope, app=app)(print)()


@pytest.mark.parametrize(
    ("key", "scope"),
    [
        ("account:7", "shop.sync"),
        ("account:7", "shared"),
        ("order:7", "shared"),
        ("anything", "called"),
        ("nightly", "blocks of ours"),
        ("account:" + "x" * 200, "shop.sync"),
        ("{7}\n", "braces"),
    ],
)
def test_a_key_that_a_call_may_have_is_held(app: Celery, key: str, scope: str, caplog: Any) -> None:
    make(app)
    make(app, "one.of.two", scope="shared")
    make(app, "two.of.two", "order:{account_id}", scope="shared")
    make(app, "called", lambda account_id, force: str(account_id))
    make(app, "braces", "{{{account_id:>1}}}\n")
    with hold(key, scope=scope, app=app):
        pass
    assert not [r for r in caplog.records if r.name == "celery_singleton_lock"]


@pytest.mark.parametrize(("scope", "meant"), [("shop.snyc", "shop.sync"), ("sync", "shop.sync")])
def test_a_scope_that_resembles_a_known_one_is_reported_once(
    app: Celery, scope: str, meant: str, caplog: Any
) -> None:
    make(app)
    with caplog.at_level(logging.WARNING, "celery_singleton_lock"):
        for _ in range(2):
            with hold("account:7", scope=scope, app=app):
                pass
    [record] = [r for r in caplog.records if r.name == "celery_singleton_lock"]
    assert f"did you mean '{meant}'" in record.getMessage()


@pytest.mark.parametrize("key", ["acount:7", "csl:{celery:0}:shop.sync:account:7"])
def test_a_claim_under_a_key_that_no_call_has_is_refused(app: Celery, key: str) -> None:
    make(app)
    once: Any = {"unique": "until_done"}
    with pytest.raises(LockKeyError, match=r"claim_and_send\('shop.sync'\): key="):
        claim_and_send(app, "shop.sync", [7], singleton=once, key=key)
