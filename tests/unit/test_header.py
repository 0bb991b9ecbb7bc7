"""The header is ours but travels: what others wrote is ignored, never trusted, never fatal."""

from __future__ import annotations

import json
import math
import pickle
import re
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from celery.app.task import Context
from hypothesis import given
from hypothesis import strategies as st

from celery_singleton_lock import OnConflict
from celery_singleton_lock.core.lease import Token
from celery_singleton_lock.message.header import (
    HEADER,
    Delivery,
    add_header,
    is_unnamed,
    mint_nonce,
)
from celery_singleton_lock.message.request_data import ATTRIBUTE, Arrival, RequestData
from celery_singleton_lock.policy import CALL_OPTIONS
from celery_singleton_lock.publish.apply_async import counting

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
PLAIN = Delivery(token=Token("t-1", 0, 0, "n", "c"))


def field_of(**changed: Any) -> str:
    """The field of a header in which this attribute of a delivery travels."""
    header = PLAIN.header()
    [name] = [n for n, v in replace(PLAIN, **changed).header().items() if v != header.get(n)]
    return name


ATTEMPT = field_of(token=Token("t-1", 0, 1, "n", "c"))
CALL = field_of(token=Token("t-1", 0, 0, "n", "d"))
STARTED, OPTIONS = field_of(started=True), field_of(options={"ttl": 5})
SINCE, LAST = field_of(since=1.0), field_of(last=1.0)
ASKED = field_of(asked=("0123456789abcdef",))
COUNTS = (field_of(sequence=1), field_of(tries=1), field_of(losses=1))
# Close to what is ours, so that single fields are wrong and not the whole.
HEADERS = JSON | st.fixed_dictionaries(
    {ATTEMPT: st.just("0.0") | JSON},
    optional={
        **dict.fromkeys((STARTED, SINCE, LAST, ASKED, *COUNTS), JSON),
        OPTIONS: JSON
        | st.dictionaries(
            st.sampled_from(sorted(CALL_OPTIONS)),
            JSON | st.dictionaries(st.sampled_from(["action", "delay", "max_wait"]), JSON),
        ),
    },
)


def request(header: Any = None, **fields: Any) -> Context:
    values = {"id": "t-1", "retries": 0, "replaced_task_nesting": 0, "delivery_info": {}, **fields}
    if header is not None:
        values.setdefault("headers", {HEADER: header})
    return Context(values)


def received(header: Any = None, **fields: Any) -> Delivery:
    return Delivery.of(vars(request(header, **fields)))


def test_the_token_names_task_attempt_and_delivery() -> None:
    delivery = received(retries=2, replaced_task_nesting=1, **{ATTRIBUTE: Arrival(nonce="abc1")})
    assert delivery.token == Token("t-1", 1, 2, "abc1")


def test_deliveries_without_a_minted_nonce_get_one_each() -> None:
    one, other = received(), received()
    assert one.token.attempt == other.token.attempt
    assert one.token.nonce != other.token.nonce
    assert len({mint_nonce() for _ in range(1000)}) == 1000


@pytest.mark.parametrize("foreign", ["", "ab", 1, None, ["x"], {"nonce": "ab"}], ids=repr)
def test_a_foreign_header_does_not_pass_for_what_the_worker_has_added(foreign: Any) -> None:
    found = request(**{ATTRIBUTE: foreign})
    token = Delivery.of(vars(found)).token
    assert Token.parse(str(token)) == token
    assert token.nonce != "ab"
    assert RequestData.of(found) == RequestData(Arrival())
    assert RequestData.of(found) is RequestData.of(found)


def test_requests_of_one_message_share_what_has_arrived_and_nothing_else() -> None:
    """Without prefork, the worker's request and that of the running task are in one process."""
    message = {"id": "t-1", ATTRIBUTE: Arrival(nonce="ab", queue="work")}
    one, other = RequestData.of(Context(message)), RequestData.of(Context(message))
    one.arrival = one.arrival._replace(is_unnamed=True)
    one.published["t-2"] = 1
    one.joined = "k"
    assert other == RequestData(Arrival(nonce="ab", queue="work"))
    assert Arrival.of(message) == other.arrival


def test_a_pool_process_gets_what_the_worker_has_added() -> None:
    arrival = Arrival(nonce="ab", serializer="json", queue="work", is_unnamed=True)
    assert pickle.loads(pickle.dumps(arrival)) == arrival


@pytest.mark.parametrize(
    ("fields", "started"),
    [
        ({}, False),
        ({"delivery_info": {"redelivered": True}}, True),
        ({"delivery_info": {"redelivered": False}}, False),
        ({"delivery_info": None}, False),
        ({"retries": 1}, True),
        ({"replaced_task_nesting": 1}, True),
    ],
    ids=str,
)
def test_work_that_may_have_begun_counts_as_started(fields: Any, started: bool) -> None:
    assert received(**fields).started is started


def test_what_a_copy_carries_is_read_by_its_next_delivery() -> None:
    sent = Delivery(
        token=Token("t-1", 0, 1, "n"),
        started=True,
        sequence=4,
        tries=3,
        since=1.7e9,
        last=1.8e9,
        losses=2,
        asked=("0123456789abcdef", "fedcba9876543210"),
        options={"ttl": 30, "on_conflict": OnConflict.retry(2, 3, None)},
    )
    header = json.loads(json.dumps(sent.header()))
    read = received(header, retries=1, **{ATTRIBUTE: Arrival(nonce="n")})
    assert read == sent


def test_a_copy_names_the_last_twenty_nonces() -> None:
    """It may be requeued for hours by a worker that gets no reply."""
    asked = [f"{number:016x}" for number in range(30)]
    sent = Delivery(token=Token("t-1", 0, 0, "n"), asked=tuple(asked))
    assert received(sent.header()).asked == tuple(asked[10:])


@pytest.mark.parametrize("asked", ["0123456789abcdef", 1, ["a b"], [None], {"a": 1}], ids=repr)
def test_what_is_no_nonce_is_forgotten(asked: Any) -> None:
    header = {**Delivery(token=Token("t-1", 0, 0, "n")).header(), ASKED: asked}
    assert received(header).asked == ()


def test_the_next_attempt_keeps_the_calls_options_and_nothing_else() -> None:
    sent = Delivery(token=Token("t-1", 0, 0, "n"), sequence=4, tries=3, options={"ttl": 30})
    read = received(sent.header(), retries=1, **{ATTRIBUTE: Arrival(nonce="m")})
    assert read == Delivery(token=Token("t-1", 0, 1, "m"), started=True, options={"ttl": 30})


def test_a_calls_options_travel_as_plain_values() -> None:
    from datetime import timedelta

    options = {"ttl": timedelta(minutes=1), "on_conflict": OnConflict.wait(2)}
    header = add_header({}, task_id="t-1", options=options)
    read = received(json.loads(json.dumps(header)))
    assert read.options == {"ttl": 60.0, "on_conflict": OnConflict.wait(2)}
    assert not read.started


def test_a_header_is_added_to_whatever_celery_takes_as_headers() -> None:
    for headers in ({"x": 1}, [("x", 1)], iter([("x", 1)])):
        message: dict[str, Any] = {"headers": headers}
        header = add_header(message, task_id="t-1", options=None)
        assert message["headers"] == {"x": 1, HEADER: header}
    given = {"x": 1}
    add_header({"headers": given}, task_id="t-1", options=None)
    assert given == {"x": 1}, "they belong to the caller"


def test_a_new_call_gets_a_name_and_its_retries_and_copies_keep_it() -> None:
    one, other = (
        add_header({"headers": headers}, task_id="t-1", options=None)
        for headers in (None, {HEADER: "foreign"})
    )
    assert one["call"] != other["call"]
    passed_on: dict[str, Any] = {"headers": {HEADER: one}}
    assert add_header({**passed_on}, task_id="t-1", options=None)["call"] != one["call"]
    retry = add_header({**passed_on, "retries": 1}, task_id="t-1", options={"ttl": 5})
    assert retry["call"] == one["call"]
    read = received(one)
    assert read.token.call == one["call"]
    assert read.header()["call"] == one["call"]


def test_a_header_that_was_passed_on_to_another_message_is_not_read() -> None:
    """As tracing does with all headers of a running task: the other is no copy of it."""
    header = Delivery(token=Token("t-1", 0, 0, "n", "c"), started=True, sequence=3).header()
    assert received(header).started
    passed_on = received({**header, "id": "of another"})
    assert (passed_on.token.call, passed_on.started, passed_on.sequence) == ("", False, 0)
    new = add_header({"headers": {HEADER: header}}, task_id="new", options=None)
    assert new["call"] != "c"
    assert set(new) == {"version", "id", "call"}


@pytest.mark.parametrize("version", [True, "2", 1.5, None, -1, 0], ids=repr)
def test_a_version_that_is_none_is_not_a_newer_one(version: Any) -> None:
    read = received({"version": version, "id": "t-1", "call": "c", "period": "p"})
    assert (read.newer, read.token.call, read.period) == (None, "c", "p")


@pytest.mark.parametrize(
    "where",
    [
        lambda header: {HEADER: header},
        lambda header: {HEADER: header, "headers": {"trace": "x"}},
        lambda header: {"headers": {HEADER: header}},
        lambda header: {HEADER: {**header, "id": "of another"}, "headers": {HEADER: header}},
        lambda header: {HEADER: header, "headers": {HEADER: {**header, "call": "older"}}},
        lambda header: {HEADER: header, "headers": "none"},
    ],
    ids=["top", "beside nested", "nested", "another's at the top", "both", "no headers"],
)
def test_our_header_is_read_wherever_it_is(where: Any) -> None:
    header = Delivery(token=Token("t-1", 0, 0, "n", "c"), sequence=3, options={"ttl": 5}).header()
    read = received(**where(header))
    assert (read.token.call, read.sequence, read.options) == ("c", 3, {"ttl": 5})


@pytest.mark.parametrize(
    ("fields", "unnamed"),
    [
        ({}, True),
        ({"headers": {"trace": "x"}}, True),
        ({"delivery_info": {"redelivered": True}}, False),
        ({"is_eager": True}, False),
        ({HEADER: {"id": "t-1", "call": "c"}}, False),
        ({HEADER: {"id": "of another"}}, True),
        ({HEADER: {"id": "t-1", "call": "c"}, ATTRIBUTE: Arrival(is_unnamed=True)}, True),
    ],
    ids=str,
)
def test_only_a_first_delivery_without_our_header_is_unnamed(fields: Any, unnamed: bool) -> None:
    assert is_unnamed(request(**fields), "amqp") is unnamed


@pytest.mark.parametrize(
    ("driver", "unnamed"),
    [("amqp", True), ("redis", True), ("memory", False), ("sqs", False), ("gcpubsub", False)],
)
def test_no_message_is_unnamed_where_redeliveries_are_not_marked(
    driver: str, unnamed: bool
) -> None:
    assert is_unnamed(request(), driver) is unnamed


class Running:
    """A task that publishes."""

    def __init__(self, delivery: Delivery, **fields: Any) -> None:
        token = delivery.token
        counted = {"retries": token.retries, "replaced_task_nesting": token.nesting}
        self.request = request(**{**counted, HEADER: delivery.header(), **fields})

    def publishes(self, **message: Any) -> Delivery:
        """How the message under the task's own id arrives."""
        header = add_header(message, task_id="t-1", options=None, running=self)
        counting(self, lambda task_id, options: None)("t-1", {})  # type: ignore[arg-type, return-value]
        return received(**message, **{HEADER: json.loads(json.dumps(header))})


def ordinal(delivery: Delivery) -> tuple[str, int, int]:
    return delivery.token.call, delivery.token.nesting, delivery.token.retries


def test_what_a_task_publishes_under_its_own_id_is_its_next_attempt() -> None:
    first = Delivery(token=Token("t-1", 2, 3, "n", "c"), sequence=4, options={"ttl": 5})
    retried = Running(first).publishes(replaced_task_nesting=2, retries=4)
    assert (ordinal(retried), retried.options) == (("c", 2, 4), {"ttl": 5})
    assert ordinal(Running(first).publishes(replaced_task_nesting=3)) == ("c", 3, 0)
    again = Running(first).publishes(replaced_task_nesting=2, retries=3)
    assert ordinal(again) == ("c", 3, 3)
    assert (again.started, again.sequence, again.options) == (True, 0, {})
    third = Running(again, replaced_task_nesting=2).publishes()
    assert ordinal(third) == ("c", 4, 0)
    retried = Running(third, replaced_task_nesting=0).publishes(retries=1)
    assert ordinal(retried) == ("c", 4, 1)


def test_what_a_task_publishes_several_times_under_one_id_are_as_many_calls() -> None:
    running = Running(Delivery(token=Token("t-1", 0, 0, "n", "c")))
    names = [running.publishes().token.call for _ in range(3)]
    assert names[0] == "c"
    assert len({*names}) == 3


class Plain:
    """A task without a lock, which publishes."""

    def __init__(self, task_id: str, **fields: Any) -> None:
        self.request = request(id=task_id, **fields)

    def publishes(self, task_id: str) -> str:
        """The name of the call."""
        header = add_header({}, task_id=task_id, options=None, running=self)
        return received(id=task_id, **{HEADER: header}).token.call


@pytest.mark.parametrize("child", ["plain", "child"])
def test_what_a_plain_task_publishes_is_the_same_call_in_a_redelivery_only(child: str) -> None:
    """RabbitMQ keeps no tag of a message: there a fixed id doesn't distinguish its deliveries."""
    tagged = [
        Plain("plain", properties={"delivery_tag": tag}).publishes(child) for tag in ("a", "a", "b")
    ]
    assert tagged[0] == tagged[1] != tagged[2]
    assert Plain("plain").publishes(child) != Plain("plain").publishes(child)
    random, other = str(uuid4()), str(uuid4())
    assert Plain(random).publishes(child) == Plain(random).publishes(child)
    assert Plain(random).publishes(child) != Plain(other).publishes(child)


def test_what_a_task_named_after_its_queue_publishes_differs_by_message() -> None:
    fields = {HEADER: {"id": "t-1", "call": "c"}, ATTRIBUTE: Arrival(is_unnamed=True)}
    one, other = (Plain("t-1", **fields, properties={"delivery_tag": tag}) for tag in "ab")
    assert one.publishes("child") != other.publishes("child")


def test_what_was_not_sent_is_not_counted() -> None:
    running = Running(Delivery(token=Token("t-1", 0, 0, "n", "c")))
    lost = add_header({}, task_id="t-1", options=None, running=running)
    assert ordinal(running.publishes()) == (lost["call"], 1, 0)
    assert running.publishes().token.call != "c"


@pytest.mark.parametrize("call", ["", "a b", "a|b", "a+b", "x" * 33, 1, None, ["x"]], ids=repr)
def test_a_calls_name_that_is_none_is_forgotten(call: Any) -> None:
    assert received({CALL: call}).token.call == ""


@given(HEADERS)
def test_an_arbitrary_header_never_raises_and_never_forges(header: Any) -> None:
    read = received(header)
    assert read.token.attempt in ("t-1|0.0", f"t-1+{read.token.call}|0.0")
    assert read.token.call == "" or read.token.call == header[CALL]
    assert isinstance(read.started, bool)
    ours = isinstance(header, dict) and header.get(ATTEMPT) == "0.0"
    assert read.started is (ours and header.get(STARTED) is True)
    for count in (read.sequence, read.tries, read.losses):
        assert type(count) is int
        assert 0 <= count < 10**9
    assert all(re.fullmatch("[0-9a-f]{16}", nonce) for nonce in read.asked)
    if read.since is not None:
        assert ours
        assert type(read.since) is float
        assert math.isfinite(read.since)
        assert read.since >= 0
    assert set(read.options) <= CALL_OPTIONS
    if "on_conflict" in read.options:
        assert isinstance(read.options["on_conflict"], OnConflict)
    json.dumps(read.header())
    assert Token.parse(str(read.token)) == read.token


@given(JSON)
def test_arbitrary_headers_beside_ours_never_raise(headers: Any) -> None:
    # A foreign publisher's header that is itself named "headers" ends up there.
    assert received(headers=headers).sequence == 0


@given(retries=JSON, nesting=JSON)
def test_an_arbitrary_attempt_never_raises(retries: Any, nesting: Any) -> None:
    token = received(retries=retries, replaced_task_nesting=nesting).token
    assert Token.parse(str(token)) == token


@pytest.mark.parametrize(
    "since",
    [True, 10**400, -1, float("nan"), float("inf"), 1e300, "1", None],
    ids=lambda since: repr(since)[:10],
)
def test_a_moment_that_is_none_is_forgotten(since: Any) -> None:
    read = received({ATTEMPT: "0.0", SINCE: since, LAST: since})
    assert (read.since, read.last) == (None, None)
