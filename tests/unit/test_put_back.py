"""What a copy of a message says, where the versions of Celery differ in what they keep."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, signals
from celery.app.task import Context
from kombu import Exchange, Queue

from celery_singleton_lock import singleton_task
from celery_singleton_lock.message.header import QUEUE_KEY, Delivery
from celery_singleton_lock.task.put_back import publish_copy
from celery_singleton_lock.testing import SingletonStore


@pytest.mark.parametrize("of_task", [True, False])
@pytest.mark.parametrize("of_call", [True, False])
def test_a_copy_says_what_the_call_said_of_its_result(
    of_task: bool, of_call: bool, singleton_store: SingletonStore
) -> None:
    """Were a False lost, a client that waits for the result of the copy would wait for ever."""
    app = Celery("copied", broker="memory://", set_as_current=False)
    singleton_store.install(app)

    @singleton_task(app=app, name="work", shared=False, key="{name}", ignore_result=of_task)
    def work(name: str) -> None: ...

    published: list[dict[str, Any]] = []

    def collect(headers: dict[str, Any], **_: Any) -> None:
        published.append(headers)

    signals.before_task_publish.connect(collect)
    work.apply_async(("k",), ignore_result=of_call)
    request = Context(
        published[0],
        args=["k"],
        kwargs={},
        called_directly=False,
        delivery_info={"exchange": "", "routing_key": "celery"},
    )
    delivery = Delivery.of(request)
    publish_copy(work, request, delivery.header(), 1)
    signals.before_task_publish.disconnect(collect)
    app.close()
    assert [headers["ignore_result"] for headers in published] == [of_call, of_call]


ELSEWHERE: dict[str, Any] = {"queue": "reports", "exchange": "work", "routing_key": "report.daily"}


@pytest.mark.parametrize("queue", ["reports", "direct", "unknown"])
@pytest.mark.parametrize("where", ["route", "typed route", "class"])
def test_a_copy_goes_to_its_queue_whatever_the_route_and_the_class_say(
    queue: str, where: str, singleton_store: SingletonStore
) -> None:
    app = Celery("routed", broker="memory://", set_as_current=False)
    app.conf.task_queues = [
        Queue("direct", Exchange("direct"), "direct"),
        Queue("reports", Exchange("work", "topic"), "report.#"),
        Queue("audit", Exchange("work", "topic"), "#"),
    ]
    if where != "class":
        exchange_type = {"exchange_type": "topic"} if where == "typed route" else {}
        app.conf.task_routes = {"work": {**ELSEWHERE, **exchange_type}}
    singleton_store.install(app)
    attributes = ELSEWHERE if where == "class" else {}

    @singleton_task(app=app, name="work", shared=False, key="{name}", **attributes)
    def work(name: str) -> None: ...

    published: list[tuple[str, str]] = []

    def collect(exchange: str, routing_key: str, **_: Any) -> None:
        published.append((exchange, routing_key))

    request = Context(
        {QUEUE_KEY: queue},
        id="t-1",
        args=["k"],
        kwargs={},
        called_directly=False,
        delivery_info={"exchange": "work", "routing_key": "report.daily"},
    )
    signals.before_task_publish.connect(collect)
    delivery = Delivery.of(request)
    publish_copy(work, request, delivery.header(), 1)
    signals.before_task_publish.disconnect(collect)
    app.close()
    assert published == [("", queue)]
