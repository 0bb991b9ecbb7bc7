"""The queue that a message came from, by the exchange and the routing key that it names."""

from __future__ import annotations

import pytest
from celery import Celery
from kombu import Exchange, Queue, binding
from kombu.common import Broadcast

from celery_singleton_lock.message.header import call_in_queue
from celery_singleton_lock.message.origin import find_origin, reached_with_delay

WORK, NEWS = Exchange("work", "topic"), Exchange("news", "fanout")
DELAYED = "celery_delayed_27"
DELAY = "0." * 27 + "1."
QUEUES = [
    Queue("celery", Exchange("main", "direct"), "celery"),
    Queue("all", WORK, "#"),
    Queue("reports", WORK, "report.*"),
    Queue("deep", WORK, "a.#.z"),
    Queue("red", Exchange("tags", "headers"), binding_arguments={"colour": "red"}),
    Queue("bound", bindings=[binding(Exchange("one", "direct"), "x")]),
    Broadcast("news", queue="news-1", exchange=NEWS),
]


def app(*consumed: str) -> Celery:
    made = Celery("origins", broker="memory://", set_as_current=False)
    made.conf.update(task_queues=QUEUES, task_create_missing_queues=False)
    made.amqp.queues.select(consumed)
    return made


@pytest.mark.parametrize(
    ("exchange", "routing_key", "consumed", "found"),
    [
        ("main", "celery", ["celery", "all"], ("celery", False)),
        ("main", "other", ["celery", "all"], None),
        # One queue is consumed: it is that, whatever has bound it to the exchange.
        ("unknown", "x", ["celery"], ("celery", False)),
        ("unknown", "x", ["celery", "all"], None),
        ("one", "x", ["celery", "bound"], ("bound", False)),
        ("tags", "", ["celery", "red"], ("red", False)),
        # Another worker's queue has the message, too.
        ("work", "report.daily", ["reports", "celery"], ("reports", True)),
        ("work", "report", ["reports", "all"], ("all", False)),
        ("work", "a.z", ["deep", "celery"], ("deep", True)),
        ("work", "a.b.c.z", ["deep", "celery"], ("deep", True)),
        ("work", "a.b.c", ["deep", "celery"], None),
        # It is in both, and can't be distinguished from its copy.
        ("work", "report.daily", ["reports", "all"], ("reports", False)),
        ("news", "whatever", ["news-1", "celery"], ("news-1", True)),
        # As `-Q news` names a broadcast.
        ("news", "whatever", ["news"], ("news-1", True)),
        # Native delayed delivery has its own exchange, and leads by the key to all but direct ones.
        (DELAYED, f"{DELAY}report.daily", ["celery", "reports"], ("reports", True)),
        (DELAYED, f"{DELAY}celery", ["celery", "reports"], None),
    ],
)
def test_a_message_came_from_a_queue_that_this_worker_consumes(
    exchange: str, routing_key: str, consumed: list[str], found: tuple[str, bool] | None
) -> None:
    assert find_origin(app(*consumed), exchange, routing_key) == found


def test_a_delayed_copy_reaches_each_queue_whose_pattern_ends_like_its_key() -> None:
    assert reached_with_delay(app("all"), "report.daily") == ["all", "reports"]
    assert reached_with_delay(app("all"), f"{DELAY}x.report.daily") == ["all", "reports"]
    # Celery has given the queue of a broadcast the default routing key.
    assert reached_with_delay(app("all"), "celery") == ["all", "red", "news-1"]


def test_a_call_has_one_name_in_each_queue_and_keeps_it_in_its_retries() -> None:
    names = {call_in_queue("ab12", "left"), call_in_queue("ab12", "right"), "ab12"}
    assert len(names) == 3
    left = call_in_queue("ab12", "left")
    assert call_in_queue(left, "left") == left
    assert call_in_queue("cd34", "left") != left
