"""Messages that were sent by name: their calls have no name, and neither have their successors'."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from celery import Celery, signals
from celery.app.trace import build_tracer

from celery_singleton_lock import singleton_task
from celery_singleton_lock.delivery import NONCE_KEY
from celery_singleton_lock.testing import SingletonStore


@dataclass
class Site:
    """A worker's child without its worker: what it publishes is given to it by the test."""

    app: Celery
    store: SingletonStore
    published: list[dict[str, Any]] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    deliveries: int = 0

    def collect(self, headers: dict[str, Any], **_: Any) -> None:
        self.published.append(headers)

    def deliver(self, headers: dict[str, Any]) -> None:
        """A message for ``work``, as the worker parent hands it over."""
        self.deliveries += 1
        where = {"exchange": "", "routing_key": "celery"}
        message = {**headers, "delivery_info": where, NONCE_KEY: f"n{self.deliveries}"}
        build_tracer("work", self.app.tasks["work"], app=self.app)("t", ["k"], {}, message)

    def task(self, **options: Any) -> None:
        @singleton_task(app=self.app, name="work", shared=False, bind=True, key="{name}", **options)
        def work(task: Any, name: str) -> None:
            self.started.append(task.request.retries)
            if task.request.retries == 0 and "fails" in task.request.headers:
                raise task.retry(countdown=30)
            if "twin" in (task.request.headers or {}) and len(self.started) == 1:
                other = threading.Thread(target=self.deliver, args=(BY_NAME,))
                other.start()
                other.join()

    @property
    def kept(self) -> list[Any]:
        return [*self.store.store.scan("csl:*")]


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


def test_its_retry_takes_what_was_reserved_for_it(site: Site) -> None:
    """As another call, it would wait until the reservation is over: a ttl longer."""
    site.task()
    site.deliver({**BY_NAME, "fails": True})
    assert [record.kind for record in site.kept] == ["r"]
    site.store.clock.advance(30)
    site.deliver(site.published[0])
    assert site.started == [0, 1]
    assert site.kept == []


def test_its_retry_frees_the_claim_that_its_first_attempt_made(site: Site) -> None:
    site.task(unique="until_done", ignore_result=True)
    site.deliver({**BY_NAME, "fails": True})
    site.store.clock.advance(30)
    site.deliver(site.published[0])
    assert site.started == [0, 1]
    assert site.kept == []


def test_the_copy_of_its_twin_is_dropped_when_it_is_done(site: Site) -> None:
    """As another call, it would run once more."""
    site.task(acks_late=True)
    site.deliver({**BY_NAME, "twin": True})
    assert len(site.published) == 1  # put back
    site.deliver(site.published[0])
    assert site.started == [0]
