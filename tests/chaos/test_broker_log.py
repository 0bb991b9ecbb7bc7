"""What the broker's file says of a message, with kombu and a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery

from example_project.private_server import PrivateServer
from tests.chaos.broker_log import Message, Place, newest_copies

QUEUE = "celery"


class Broker:
    """A broker, and what a worker does with its messages, step by step."""

    def __init__(self, server: PrivateServer, app: Celery) -> None:
        self._server, self._app = server, app
        self.connection: Any = app.connection_for_read()
        self.channel: Any = self.connection.default_channel

    def send(self, job: str, retries: int = 0) -> None:
        self._app.send_task("anything", task_id=job, retries=retries)

    def get(self) -> Any:
        """Pop a message and note it, as a worker does."""
        return self.channel.basic_get(QUEUE)

    def pop(self) -> None:
        """Pop a message, and die before it is noted."""
        with redis.Redis.from_url(self._server.url(0)) as client:
            assert client.rpop(QUEUE)

    def messages(self) -> dict[str, Message]:
        return newest_copies(self._server.directory)


@pytest.fixture
def broker(private_redis: PrivateServer) -> Iterator[Broker]:
    app = Celery("broker", broker=private_redis.url(0), set_as_current=False)
    broker = Broker(private_redis, app)
    yield broker
    broker.connection.close()
    app.close()


def steps(message: Message) -> list[str]:
    return [step.partition(" ")[0] for step in message.steps]


def test_a_message_is_followed_from_its_queue_to_its_end(broker: Broker) -> None:
    for job in ("waits", "is-lost", "is-done", "is-held"):
        broker.send(job)
    assert {message.place for message in broker.messages().values()} == {Place.QUEUE}
    waits = broker.get()
    broker.pop()
    is_done, _ = broker.get(), broker.get()
    is_done.ack()
    waits.requeue()
    found = broker.messages()
    assert {job: message.place for job, message in found.items()} == {
        "waits": Place.QUEUE,
        "is-lost": Place.POPPED,
        "is-done": Place.ACKNOWLEDGED,
        "is-held": Place.UNACKED,
    }
    assert steps(found["waits"]) == ["sent", "popped", "noted", "requeued"]
    assert steps(found["is-lost"]) == ["sent", "popped"]
    assert steps(found["is-done"]) == ["sent", "popped", "noted", "acknowledged"]


def test_the_newest_copy_of_a_message_counts(broker: Broker) -> None:
    broker.send("job")
    broker.get().ack()
    broker.send("job", retries=1)
    broker.pop()
    found = broker.messages()["job"]
    assert (found.place, steps(found)) == (Place.POPPED, ["sent", "popped"])
