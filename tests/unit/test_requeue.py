"""What a copy of a message says: options that Celery's own retry loses, or keeps since 5.7 only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, signals
from celery.app.task import Context
from kombu import Exchange, Queue
from kombu.serialization import prepare_accept_content
from kombu.utils.imports import symbol_by_name

from celery_singleton_lock import singleton_task
from celery_singleton_lock.message.copy import publish_copy
from celery_singleton_lock.message.header import Delivery
from celery_singleton_lock.message.request_data import ATTRIBUTE, Arrival
from celery_singleton_lock.message.stored_message import Capture, StoredMessage
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
    delivery = Delivery.of(vars(request))
    publish_copy(work, request, delivery.header(), 1)
    signals.before_task_publish.disconnect(collect)
    app.close()
    assert [headers["ignore_result"] for headers in published] == [of_call, of_call]


def test_a_copy_has_no_notes_of_a_dead_letter(singleton_store: SingletonStore) -> None:
    """RabbitMQ 3 drops what it finds in them. Celery 5.5 keeps them."""
    app = Celery("noted", broker="memory://", set_as_current=False)
    singleton_store.install(app)

    @singleton_task(app=app, name="work", shared=False)
    def work() -> None: ...

    published: list[dict[str, Any]] = []

    def collect(headers: dict[str, Any], **_: Any) -> None:
        published.append(headers)

    request = Context(
        id="t-1",
        args=[],
        kwargs={},
        called_directly=False,
        delivery_info={"exchange": "", "routing_key": "celery"},
        headers={
            "tenant": "7",
            "x-death": [{"queue": "celery_delayed_0", "reason": "expired"}],
            "x-first-death-queue": "celery_delayed_0",
            "x-last-death-queue": "celery_delayed_0",
        },
    )
    signals.before_task_publish.connect(collect)
    publish_copy(work, request, Delivery.of(vars(request)).header(), 1)
    signals.before_task_publish.disconnect(collect)
    app.close()
    [headers] = published
    assert headers["tenant"] == "7"
    assert not [name for name in headers if "death" in name]


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
        {ATTRIBUTE: Arrival(queue=queue)},
        id="t-1",
        args=["k"],
        kwargs={},
        called_directly=False,
        delivery_info={"exchange": "work", "routing_key": "report.daily"},
    )
    signals.before_task_publish.connect(collect)
    delivery = Delivery.of(vars(request))
    publish_copy(work, request, delivery.header(), 1)
    signals.before_task_publish.disconnect(collect)
    app.close()
    assert published == [("", queue)]


#: What a caller may give the broker, by an option of `apply_async`. Each reaches a copy.
KEPT: dict[str, Any] = {
    "MessageGroupId": "tenant-7",  # SQS, see the table of the options page
    "app_id": "shop",
    "compression": "gzip",
    "correlation_id": "c-1",
    "delivery_mode": 1,
    "message_id": "m-1",
    "priority": 3,
    "reply_to": "replies",
    "serializer": "pickle",
    "timestamp": 1_790_000_000,
    "type": "sync",
    "x-own": {"a": 1},
}
#: What must not be sent a second time.
NOT_KEPT: dict[str, Any] = {
    "DelaySeconds": 60,
    "MessageDeduplicationId": "d-1",
    "delay_seconds": 60,
    "expiration": 60.0,
    "user_id": "guest",
}


class Broker:
    """An app whose queue is in memory."""

    def __init__(self, store: SingletonStore) -> None:
        self.app = Celery("properties", broker="memory://", set_as_current=False)
        self.app.conf.update(task_default_queue=f"q-{uuid4()}", accept_content=["json", "pickle"])
        store.install(self.app)
        self.task = singleton_task(app=self.app, name="work", shared=False, key="{name}")(work)

    def message(self) -> Any:
        with self.app.connection_for_read() as connection:
            message = connection.SimpleQueue(self.app.conf.task_default_queue).get(False)
            message.ack()
            message.accept = prepare_accept_content(self.app.conf.accept_content)
            return message

    def context(self, message: Any) -> Context:
        """The request of a message in a pool child."""
        request = symbol_by_name(self.task.Request)(message, app=self.app, task=self.task)
        args, kwargs, embedded = request._payload
        given = {"args": args, "kwargs": kwargs, "called_directly": False}
        return Context({**request.request_dict, **embedded}, **given)


def work(name: str) -> None:
    """Runs nowhere."""


@pytest.fixture
def broker(singleton_store: SingletonStore) -> Iterator[Broker]:
    broker = Broker(singleton_store)
    yield broker
    broker.app.close()


@pytest.mark.parametrize("name", [*KEPT, *NOT_KEPT])
def test_a_copy_keeps_what_its_caller_gave_the_broker_but_what_holds_once(
    broker: Broker, name: str
) -> None:
    broker.task.apply_async(("k",), **{name: (KEPT | NOT_KEPT)[name]})
    first = broker.message()
    context = broker.context(first)
    publish_copy(broker.task, context, Delivery.of(vars(context)).header(), 1)
    copy = broker.message()
    told = {"compression": (first.headers, copy.headers)}
    given, kept = told.get(name, (first.properties, copy.properties))
    if name == "serializer":
        assert (first.content_type, copy.content_type) == ("application/x-python-serialize",) * 2
    else:
        assert name in given
        assert kept.get(name) == (given[name] if name in KEPT else None)
    assert list(copy.decode()[0]) == ["k"]


def test_a_copy_survives_properties_with_the_names_of_options(broker: Broker) -> None:
    """Another publisher's: kombu takes any name."""
    broker.task.apply_async(("k",))
    message = broker.message()
    message.properties |= {"countdown": 3600, "name": "other", "self": 1, "task_id": "other"}
    context = broker.context(message)
    publish_copy(broker.task, context, Delivery.of(vars(context)).header(), 1)
    assert broker.message().headers["id"] == context.id


@pytest.mark.parametrize("name", [*KEPT, *NOT_KEPT])
def test_a_message_of_the_queue_of_a_key_keeps_the_same(broker: Broker, name: str) -> None:
    with broker.app.producer_or_acquire() as producer:
        capture = Capture(producer, "t-1", at=1e9)
        value = (KEPT | NOT_KEPT)[name]
        broker.task.apply_async(("k",), task_id="t-1", producer=capture, **{name: value})
        assert capture.message is not None
        StoredMessage.from_bytes(capture.message.to_bytes()).publish(producer)
    message = broker.message()
    if name not in ("compression", "serializer"):
        assert message.properties.get(name) == (value if name in KEPT else None)
    assert list(message.decode()[0]) == ["k"]
