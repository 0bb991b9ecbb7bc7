"""A task's message in a store: published later, it is the one that Celery would have published."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from kombu import Exchange, Queue

from celery_singleton_lock.message.stored_message import Capture, StoredMessage

TOPIC = Exchange("stored-topic", "topic")


@pytest.fixture(scope="module")
def app() -> Iterator[Celery]:
    app = Celery("stored", broker="memory://", set_as_current=False)
    app.conf.task_queues = [
        Queue("stored"),
        Queue("by-topic", TOPIC, routing_key="sync.#", max_priority=5),
    ]
    app.conf.task_default_queue = "stored"
    yield app
    app.close()


@pytest.fixture(scope="module")
def task(app: Celery) -> Any:
    def sync(account_id: int) -> None: ...

    return app.task(name="stored.sync", shared=False)(sync)


def arrived(app: Celery, queue: str) -> tuple[Any, ...]:
    """The content of the one message in a queue."""
    with app.connection_or_acquire() as connection:
        found = app.amqp.queues[queue](connection.default_channel).get(no_ack=True)
        assert found is not None
        kept = {k: v for k, v in found.properties.items() if not k.startswith("delivery_")}
        content = (found.body, found.content_type, found.content_encoding, found.headers)
        return *content, kept, found.delivery_info["routing_key"]


CALLS = {
    "plain": {},
    "pickle": {"serializer": "pickle"},
    "compressed": {"compression": "gzip"},
    "priority": {"priority": 3},
    "headers": {"headers": {"trace": "1"}},
    "exchange": {"exchange": "stored-topic", "routing_key": "sync.one"},
    "properties": {"correlation_id": "c", "app_id": "a", "x-own": 1},
    "stamped": {"stamped_headers": ["a"], "a": "b"},
}


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_a_stored_message_is_published_as_celery_would(
    app: Celery, task: Any, options: dict[str, Any]
) -> None:
    queue = "by-topic" if "exchange" in options else "stored"
    options = {"task_id": str(uuid4()), **options}
    with app.connection_or_acquire() as connection:
        app.amqp.queues[queue](connection.default_channel).declare()
    task.apply_async((7,), **options)
    direct = arrived(app, queue)
    with app.producer_or_acquire() as producer:
        capture = Capture(producer, options["task_id"], at=1e9)
        task.apply_async((7,), **options, producer=capture)
        assert capture.message is not None
        StoredMessage.from_bytes(capture.message.to_bytes()).publish(producer)
    assert arrived(app, queue) == direct


def test_a_delayed_message_has_the_eta_of_a_call_with_a_countdown(app: Celery, task: Any) -> None:
    with app.connection_or_acquire() as connection:
        app.amqp.queues["stored"](connection.default_channel).declare()
    with app.producer_or_acquire() as producer:
        capture = Capture(producer, "delayed", at=1e9)
        task.apply_async((7,), task_id="delayed", producer=capture)
        assert capture.message is not None
        capture.message.publish(producer, eta=1e9)
    *_, delayed, _, _ = arrived(app, "stored")
    task.apply_async((7,), countdown=60.0)
    *_, direct, _, _ = arrived(app, "stored")
    etas = [datetime.fromisoformat(headers["eta"]) for headers in (delayed, direct)]
    assert etas[0].utcoffset() == etas[1].utcoffset()
    assert etas[0].timestamp() == 1e9
    assert capture.message.headers["eta"] is None


def test_an_expiry_is_kept_for_the_worker_and_not_for_the_broker(app: Celery, task: Any) -> None:
    with app.producer_or_acquire() as producer:
        capture = Capture(producer, "t-1", at=1e9)
        task.apply_async((7,), task_id="t-1", expires=30, producer=capture)
    assert capture.message is not None
    assert capture.message.headers["expires"]
    assert "expiration" not in capture.message.properties


def test_the_entities_that_have_to_be_declared_are_kept(app: Celery, task: Any) -> None:
    queue = Queue("own", TOPIC, routing_key="own.*", queue_arguments={"x-max-length": 9})
    with app.producer_or_acquire() as producer:
        capture = Capture(producer, "t-1", at=1e9)
        task.apply_async((7,), task_id="t-1", declare=[queue, TOPIC], producer=capture)
    assert capture.message is not None
    read = StoredMessage.from_bytes(capture.message.to_bytes())
    assert list(read.declare) == [queue, TOPIC]
    assert read.declare[0].queue_arguments == {"x-max-length": 9}  # type: ignore[union-attr]


def test_values_that_kombu_writes_as_json_are_kept(app: Celery, task: Any) -> None:
    headers = {"when": datetime(2026, 11, 24, tzinfo=UTC), "trace": b"\x00\xff", "of": uuid4()}
    with app.producer_or_acquire() as producer:
        capture = Capture(producer, "t-1", at=1e9)
        task.apply_async((7,), task_id="t-1", headers=headers, producer=capture)
    assert capture.message is not None
    read = StoredMessage.from_bytes(capture.message.to_bytes())
    assert {name: read.headers[name] for name in headers} == headers
    assert read.at == 1e9


def test_a_header_that_kombu_does_not_write_as_json_is_named(app: Celery, task: Any) -> None:
    with app.producer_or_acquire() as producer:
        capture = Capture(producer, "t-1", at=1e9)
        task.apply_async((7,), task_id="t-1", headers={"own": object()}, producer=capture)
    assert capture.message is not None
    with pytest.raises(TypeError, match=r"t-1.*header or property.*object"):
        capture.message.to_bytes()


def test_a_message_of_another_task_is_published(app: Celery, task: Any) -> None:
    with app.producer_or_acquire() as producer:
        capture = Capture(producer, "another", at=1e9)
        task.apply_async((7,), task_id="t-1", producer=capture)
    assert capture.message is None
    assert arrived(app, "stored")[3]["id"] == "t-1"


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"\xff", b'{"body": 1}'])
def test_what_is_no_stored_message_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"no stored message|codec"):
        StoredMessage.from_bytes(text)
