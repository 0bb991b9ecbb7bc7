"""A store with leases and claims alone: locks work, and what needs another part is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from celery.app.trace import build_tracer

from celery_singleton_lock import (
    OnConflict,
    SettingsError,
    StoreError,
    inspection,
    is_skipped,
    singleton_task,
)
from celery_singleton_lock.beat.election import Election
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.lease import Holder
from celery_singleton_lock.core.store import Capabilities, Store
from celery_singleton_lock.core.store_requests import Acquire
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.testing.contract import new_token
from celery_singleton_lock.worker.bootstep import check_tasks


class TwoParts(Store):
    capabilities = Capabilities(fence=True, name="two parts")

    def __init__(self) -> None:
        complete = MemoryStore(SystemClock())
        self.leases, self.claims = complete.leases, complete.claims


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("two-parts", broker="memory://", set_as_current=False)
    Runtime.install(app, Runtime(app, store=TwoParts()))
    yield app
    app.close()


def task(app: Celery, **options: Any) -> Any:
    def work(account: str) -> str:
        return account

    return singleton_task(app=app, name="work", key="{account}", shared=False, **options)(work)


@pytest.mark.parametrize(
    "options", [{}, {"unique": "until_done"}, {"on_conflict": OnConflict.wait(0.2)}], ids=str
)
def test_tasks_run_under_its_locks(app: Celery, options: dict[str, Any]) -> None:
    task(app, **options)
    store = Runtime.of(app).store
    check_tasks(app, store)
    trace = build_tracer("work", app.tasks["work"], app=app)

    def run(task_id: str) -> Any:
        return trace(
            task_id, ["a"], {}, {"id": task_id, "task": "work", "delivery_info": {}}
        ).retval

    assert (run("first"), run("second")) == ("a", "a")
    slots, holder = (app.tasks["work"].lock_key("a"),), Holder(task_id="another")
    request = Acquire(slots=slots, token=new_token(), holder=holder, ttl=60)
    store.leases.acquire(request, timeout=1)
    assert is_skipped(run("third")) == ("on_conflict" not in options)


@pytest.mark.parametrize(
    "options",
    [
        {"on_conflict": "queue"},
        {"on_conflict": "cancel_running"},
        {"unique": "until_start", "on_duplicate": "replace"},
    ],
    ids=str,
)
def test_a_worker_refuses_options_that_need_another_part(
    app: Celery, options: dict[str, Any]
) -> None:
    task(app, **options)
    with pytest.raises(SettingsError, match=r"the store \(two parts\)"):
        check_tasks(app, Runtime.of(app).store)


@pytest.mark.parametrize(
    "ask",
    [
        lambda app: list(inspection.held_keys(app)),
        lambda app: inspection.explain(app, "an id"),
        lambda app: inspection.release(app, "work:a", None, user="ann"),
    ],
    ids=["ls", "explain", "release"],
)
def test_what_operators_ask_says_that_the_store_cannot_answer(
    app: Celery, ask: Callable[[Celery], Any]
) -> None:
    with pytest.raises(StoreError, match="'two parts' can't list or free its keys"):
        ask(app)


def test_a_beat_is_not_elected_by_it(app: Celery) -> None:
    with pytest.raises(SettingsError, match=r"\(two parts\) can't keep the last runs"):
        Election(Runtime.of(app))
