"""What goes on with a call, its retries and copies, is that call: one without a name, too."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from celery import Celery, signals
from celery.app.trace import build_tracer

from celery_singleton_lock import singleton_task
from celery_singleton_lock.message.request_data import ATTRIBUTE, Arrival
from celery_singleton_lock.testing import SingletonStore
from tests.harness.keys import EVERY_NAME


@dataclass
class Site:
    """A worker's child without its worker: what it publishes is given to it by the test."""

    app: Celery
    store: SingletonStore
    published: list[dict[str, Any]] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    deliveries: int = 0
    of_retry: dict[str, Any] = field(default_factory=dict)

    def collect(self, headers: dict[str, Any], **_: Any) -> None:
        self.published.append(headers)

    def deliver(self, headers: dict[str, Any], again: bool = False) -> None:
        """A message for ``work``, as the worker parent hands it over."""
        self.deliveries += 1
        where = {"exchange": "", "routing_key": "celery", "redelivered": again}
        message = {
            **headers,
            "delivery_info": where,
            ATTRIBUTE: Arrival(nonce=f"n{self.deliveries}"),
        }
        build_tracer("work", self.app.tasks["work"], app=self.app)("t", ["k"], {}, message)

    def task(self, **options: Any) -> None:
        @singleton_task(app=self.app, name="work", shared=False, bind=True, key="{name}", **options)
        def work(task: Any, name: str) -> None:
            self.started.append(task.request.retries)
            if task.request.retries == 0 and "fails" in task.request.headers:
                raise task.retry(countdown=30, **self.of_retry)
            if "duplicate" in (task.request.headers or {}) and len(self.started) == 1:
                other = threading.Thread(target=self.deliver, args=(BY_NAME, True))
                other.start()
                other.join()

    @property
    def kept(self) -> list[Any]:
        return [*self.store.store.operators.scan(EVERY_NAME)]


BY_NAME: dict[str, Any] = {"id": "t", "task": "work"}


@pytest.fixture
def site(singleton_store: SingletonStore) -> Iterator[Site]:
    app = Celery("nameless", broker="memory://", backend="cache+memory://", set_as_current=False)
    singleton_store.install(app)
    site = Site(app, singleton_store)
    signals.before_task_publish.connect(site.collect)
    yield site
    signals.before_task_publish.disconnect(site.collect)
    app.close()


def test_a_retry_of_a_nameless_call_takes_what_was_reserved_for_it(site: Site) -> None:
    """As another call, it would wait until the reservation is over: a ttl longer."""
    site.task()
    site.deliver({**BY_NAME, "fails": True})
    assert [record.kind for record in site.kept] == ["r"]
    site.store.clock.advance(30)
    site.deliver(site.published[0])
    assert site.started == [0, 1]
    assert site.kept == []


def test_a_retry_of_a_nameless_call_frees_the_claim_of_its_first_attempt(site: Site) -> None:
    site.task(unique="until_done", ignore_result=True)
    site.deliver({**BY_NAME, "fails": True})
    site.store.clock.advance(30)
    site.deliver(site.published[0])
    assert site.started == [0, 1]
    assert site.kept == []


def test_the_copy_of_a_nameless_duplicate_is_dropped_when_the_work_is_done(site: Site) -> None:
    """As another call, it would run once more."""
    site.task(acks_late=True)
    site.deliver({**BY_NAME, "duplicate": True})
    assert len(site.published) == 1  # requeued
    site.deliver(site.published[0])
    assert site.started == [0]


def test_a_retry_that_names_its_headers_keeps_what_its_call_has_set(site: Site) -> None:
    site.task(ignore_result=True)
    site.of_retry = {"headers": {"reason": "busy"}}
    options: Any = {"unique": "until_done", "ttl": 600}
    site.app.tasks["work"].apply_async(
        ("k",), task_id="t", headers={"fails": True}, singleton=options
    )
    site.deliver(site.published[0])
    site.store.clock.advance(30)
    site.deliver(site.published[1])
    assert site.started == [0, 1]
    assert site.published[1]["reason"] == "busy"
    assert site.published[1]["singleton_lock"]["options"] == options
    assert site.kept == []  # no claim either
