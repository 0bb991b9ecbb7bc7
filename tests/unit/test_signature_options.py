"""The options of a call in a signature: plain from where they are set, and refused there."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, chain, chord, group
from celery.canvas import Signature
from kombu.serialization import dumps, loads

from celery_singleton_lock import OnConflict, SingletonTask, singleton_task
from celery_singleton_lock.message.header import HEADER
from celery_singleton_lock.option_values import Unique

OPTIONS: dict[str, Any] = {
    "ttl": timedelta(seconds=20),
    "on_conflict": OnConflict.retry(timedelta(seconds=1), 2),
    "unique": Unique.UNTIL_DONE,
    "unique_for": timedelta(minutes=5),
}
RULE = {"action": "retry", "delay": 1.0, "max_delay": 2.0, "max_wait": None}
PLAIN = {"ttl": 20.0, "on_conflict": RULE, "unique": "until_done", "unique_for": 300.0}


class Bench:
    """An app with a singleton task and a plain one; its broker is in memory."""

    def __init__(self) -> None:
        self.app = app = Celery("bench", broker="memory://", set_as_current=False)
        app.conf.update(
            task_default_queue=f"signatures-{uuid4()}",  # the queues belong to the process
            result_backend="cache+memory://",
            singleton_lock_url="redis://127.0.0.1:1/0",  # no call of these tests asks it
            accept_content=["json", "pickle"],
        )

        @singleton_task(app=app, key="{number}", name="sync")
        def sync(number: int) -> None:
            """Runs nowhere."""

        @app.task(name="plain", shared=False)
        def plain(*_: object) -> None:
            """Runs nowhere."""

        self.sync: SingletonTask[..., Any] = sync
        self.plain: Any = plain

    def message(self) -> Any:
        with self.app.connection_for_read() as connection:
            queue = connection.SimpleQueue(self.app.conf.task_default_queue)
            message = queue.get(block=False)
            message.ack()
            return message


@pytest.fixture
def bench() -> Bench:
    return Bench()


#: Each way to give a signature its options.
WRITTEN: dict[str, Callable[[Any], Signature[Any]]] = {
    "set": lambda task: task.si(2).set(singleton=OPTIONS),
    "signature": lambda task: task.signature((2,), immutable=True, singleton=OPTIONS),
    "options": lambda task: task.signature((2,), {}, {"singleton": OPTIONS}, immutable=True),
    "subtask": lambda task: task.subtask((2,), options={"singleton": OPTIONS}, immutable=True),
    "clone": lambda task: task.si(2).clone(singleton=OPTIONS),
    "set on a clone": lambda task: task.si(2).clone().set(singleton=OPTIONS),
}
#: Each place in the message of another task.
PLACES: dict[str, Callable[[Any, Signature[Any]], Any]] = {
    "later link": lambda plain, later: chain(plain.si(), later),
    "third link": lambda plain, later: chain(plain.si(), plain.si(), later),
    "body of a chord": lambda plain, later: chord([plain.si()], later),
    "in a group after a link": lambda plain, later: chain(plain.si(), group(later, later)),
    "link": lambda plain, later: plain.si().set(link=[later]),
    "link_error": lambda plain, later: plain.si().set(link_error=[later]),
    "argument": lambda plain, later: plain.si(later),
}


@pytest.mark.parametrize("written", WRITTEN)
def test_options_are_plain_as_soon_as_they_are_written(bench: Bench, written: str) -> None:
    signature = WRITTEN[written](bench.sync)
    assert signature.options["singleton"] == PLAIN
    assert type(signature.options["singleton"]["unique"]) is str
    assert OPTIONS["ttl"] == timedelta(seconds=20)  # the user's dict is not changed


@pytest.mark.parametrize("serializer", ["json", "pickle"])
@pytest.mark.parametrize("place", PLACES)
def test_options_travel_in_the_message_of_another_task(
    bench: Bench, place: str, serializer: str
) -> None:
    bench.app.conf.task_serializer = serializer
    PLACES[place](bench.plain, WRITTEN["set"](bench.sync)).apply_async(serializer=serializer)
    message = bench.message()
    args, kwargs, embedded = loads(
        message.body, message.content_type, message.content_encoding, accept={message.content_type}
    )
    found = list(singleton_options([args, kwargs, embedded]))
    assert found
    assert all(options == PLAIN for options in found)


def singleton_options(value: Any) -> Any:
    """The option ``singleton`` of each signature in ``value``."""
    if isinstance(value, dict):
        if "singleton" in value.get("options", ()):
            yield value["options"]["singleton"]
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from singleton_options(item)


def test_a_link_that_was_in_a_message_is_published_with_its_options(bench: Bench) -> None:
    bench.plain.apply_async(link=bench.sync.si(2).set(singleton={"ttl": timedelta(seconds=20)}))
    [link] = bench.message().payload[2]["callbacks"]
    Signature.from_dict(link, app=bench.app).apply_async()
    assert bench.message().headers[HEADER]["options"] == {"ttl": 20.0}


def test_a_rule_that_was_in_a_message_is_taken_as_a_mapping(bench: Bench) -> None:
    rules = OnConflict.retry(1, 2, 3), OnConflict.wait(7), "raise"
    for rule in rules:
        later = bench.sync.si(2).set(singleton={"on_conflict": rule})
        bench.plain.apply_async(link=later)
        [link] = bench.message().payload[2]["callbacks"]
        Signature.from_dict(link, app=bench.app).apply_async()
        options = bench.message().headers[HEADER]["options"]
        assert OnConflict.of(options["on_conflict"]) == OnConflict.of(rule)
        assert bench.sync.singleton_policy(options).on_conflict == OnConflict.of(rule)


@pytest.mark.parametrize(
    ("singleton", "error", "message"),
    [
        ({"tll": 5}, TypeError, "did you mean 'ttl'"),
        ({"limit": 5}, TypeError, "belong to the task"),
        ({"ttl": "long"}, TypeError, "ttl='long'"),
        ({"ttl": timedelta(0)}, ValueError, r"at least 0\.3 seconds"),
        ({"unique": "until_strat"}, ValueError, "did you mean 'until_start'"),
        ({"on_conflict": "retyr"}, ValueError, "did you mean 'retry'"),
        ({"on_conflict": {"action": "wait", "timout": 1}}, ValueError, "there is no 'timout'"),
        (True, TypeError, "give a dict"),
    ],
    ids=repr,
)
def test_a_wrong_option_is_refused_where_it_is_written(
    bench: Bench, singleton: Any, error: type[Exception], message: str
) -> None:
    for write in (
        lambda: bench.sync.s().set(singleton=singleton),
        lambda: bench.sync.signature((), singleton=singleton),
        lambda: bench.sync.s().clone(singleton=singleton),
    ):
        with pytest.raises(error, match=message) as raised:
            write()
        assert "a signature of sync" in str(raised.value)


@pytest.mark.parametrize("singleton", [None, False])
def test_no_options_and_no_claim_stay_as_they_are(bench: Bench, singleton: Any) -> None:
    assert bench.sync.s(1).set(singleton=singleton).options["singleton"] is singleton


def test_a_message_has_celerys_own_signature(bench: Bench) -> None:
    signature = bench.sync.si(2).set(singleton=OPTIONS)
    assert type(pickle.loads(pickle.dumps(signature))) is Signature
    content_type, encoding, body = dumps([signature], serializer="json")
    assert loads(body, content_type, encoding) == [dict(signature, args=[2])]
