"""What any program may write, read by pure functions: keys, ids, counts, records."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from celery.app.task import Context
from hypothesis import given, settings
from hypothesis import strategies as st
from kombu.utils.json import dumps

from celery_singleton_lock import OnConflict
from celery_singleton_lock.cli.commands import describe, table
from celery_singleton_lock.core.key import PER_TASK, KeyMaker
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Holder, Kind, Record, Token
from celery_singleton_lock.core.store_requests import Relation
from celery_singleton_lock.errors import LockKeyError
from celery_singleton_lock.inspection import HeldKey
from celery_singleton_lock.message.header import HEADER, SCHEDULED_AT_HEADER, Delivery
from celery_singleton_lock.message.request_data import Arrival
from celery_singleton_lock.on_conflict.rule import Conflict, Outcome
from celery_singleton_lock.task.conflict import decide, is_overtaken
from celery_singleton_lock.worker.request import SingletonRequestMixin
from tests.harness.keys import name_in_store

#: With control characters, lone surrogates and what our own names are made of.
TEXT = st.text(st.characters(), max_size=300) | st.text("{}:|#%+~ ./\x00\n\ud800*", max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.binary(max_size=5) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
SPECS = [
    None,
    PER_TASK,
    ("name",),
    "{name}",
    "a:{name}:{other}",
    "{other[name]}",
    lambda name, other: name,
]
KEYSPACE = Keyspace("fuzz", shards=256)


def body(name: Any, other: Any = None) -> None: ...


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: getattr(spec, "__name__", repr(spec)))
@settings(max_examples=40, deadline=None)
@given(name=VALUES, other=VALUES)
def test_any_argument_makes_a_key_that_is_a_name_in_the_store_or_no_key(
    spec: Any, name: Any, other: Any
) -> None:
    maker = KeyMaker(spec, inspect.signature(body), dumps)
    try:
        rest = maker.key_suffix((name,), {"other": other})
    except LockKeyError:
        return  # the task fails with it, and its body doesn't run
    key = KEYSPACE.lock("scope", rest or "")
    assert key.encode().decode() == key, "what the client sends"
    assert not re.search(r"[\x00-\x20#\x7f-\xa0\u2028-\u202e\u2066-\u2069]", key)
    assert len(key) < 2500
    # Whatever the argument is, the key stays in its scope, and claims and completion records are no
    # lock keys.
    shard, _, rest_of_key = key.partition("}:")
    assert re.fullmatch(
        re.escape(name_in_store("", prefix="fuzz", shard="")[:-2]) + r"\d{1,3}", shard
    )
    assert rest_of_key.startswith("scope:")
    assert KEYSPACE.is_claim(KEYSPACE.claim("task", key))
    assert not KEYSPACE.is_claim(key)


@given(TEXT, TEXT)
def test_two_texts_are_never_one_key(one: str, other: str) -> None:
    same = KEYSPACE.lock("s", one) == KEYSPACE.lock("s", other)
    assert same == (one == other)


@given(task_id=TEXT, nesting=st.integers(0, 9), retries=st.integers(0, 9))
def test_any_task_id_makes_a_token_that_is_read_back(
    task_id: str, nesting: int, retries: int
) -> None:
    token = Token(task_id, nesting, retries, "abc1", "c1")
    assert str(token).isascii()
    assert Token.parse(str(token)) == token
    assert Token.task_id_of(token.call_id) == task_id


@pytest.mark.parametrize("sequence", [0, 7, 10**9 - 2, 10**9 - 1])
def test_a_copy_is_never_read_as_older_than_what_it_is_a_copy_of(sequence: int) -> None:
    header = Delivery(token=Token("t", 0, 0, "n"), sequence=sequence).header()
    read = Delivery.of({"id": "t", "headers": {HEADER: header}})
    assert read.sequence == sequence
    copy = json.loads(json.dumps(read.copied().header()))
    assert Delivery.of({"id": "t", "headers": {HEADER: copy}}).sequence >= sequence


def test_a_first_conflict_that_is_yet_to_come_counts_from_now() -> None:
    delivery = Delivery(token=Token("t", 0, 0, "n"), since=9e10)
    rule = OnConflict.retry(max_wait=10)
    decision = decide(Relation.OTHER, rule, Conflict(delivery, None, wall=1e9, waited=0.0))
    copy = decision.copy
    assert copy is not None
    assert (decision.outcome, copy.since) == (Outcome.REQUEUED, 1e9)
    later = decide(Relation.OTHER, rule, Conflict(copy, None, wall=1e9 + 11, waited=0.0))
    assert later.outcome is Outcome.RAISE


CAME, LAST_TRY, NOW = 100.0, 200.0, 300.0


@pytest.mark.parametrize(
    ("holder", "overtaken"),
    [
        (Holder(since=250), True),
        (Holder(since=250, first_try=150), True),
        (Holder(since=250, first_try=50), False),
        (Holder(since=150), False),
        (Holder(since=400), False),
        (Holder(), False),
    ],
    ids=["newer", "newer, waited", "older, waited", "met before", "wrong clock", "unknown"],
)
def test_a_call_is_overtaken_once_by_each_holder_that_came_later(
    holder: Holder, overtaken: bool
) -> None:
    delivery = Delivery(token=Token("t", 0, 0, "n"), tries=3, since=CAME, last=LAST_TRY)
    record = Record(key="k", kind=Kind.LEASE, token="u|0.0|m", fence=1, holder=holder, ttl=1)
    assert is_overtaken(delivery, record, NOW) is overtaken
    assert not is_overtaken(delivery, None, NOW)
    assert not is_overtaken(delivery, replace(record, kind=Kind.COOLING), NOW)
    for one in (delivery, replace(delivery, started=True)):
        conflict = Conflict(one, None, wall=NOW, waited=0.0)
        again = decide(Relation.OTHER, OnConflict.retry(), conflict).copy
        assert again is not None
        assert not is_overtaken(again, record, NOW + 1), "the same holder, at the next try"
    for copied_by_another_version in (replace(delivery, last=None), replace(delivery, since=None)):
        assert not is_overtaken(copied_by_another_version, record, NOW)


@pytest.mark.parametrize("name", ["singleton_data", "singleton_claim", "is_eager", "get", "update"])
def test_the_worker_takes_such_a_header_from_the_message(name: str) -> None:
    class Base:
        def __init__(self) -> None:
            self.id = "t"
            self.request_dict = {name: None, "id": "t", HEADER: ours, "mine": 1, "headers": None}
            self.content_type = "application/json"

    ours = {"id": "t", "call": "c"}
    request = type("R", (SingletonRequestMixin, Base), {})()
    rest = {"id": "t", HEADER: ours, "mine": 1, "headers": {"mine": 1}}
    assert {key: request.request_dict.get(key) for key in rest} == rest
    if name == "singleton_data":  # the worker's own takes its place
        assert isinstance(request.request_dict[name], Arrival)
    else:
        assert name not in request.request_dict


def test_the_worker_leaves_its_task_the_moment_that_a_beat_of_ours_wrote() -> None:
    class Base:
        def __init__(self) -> None:
            self.id = "t"
            self.request_dict = {"id": "t", SCHEDULED_AT_HEADER: "2026-01-01T00:00:00+00:00"}
            self.content_type = "application/json"

    request = type("R", (SingletonRequestMixin, Base), {})()
    context: Any = Context(request.request_dict)
    assert context.singleton_scheduled_at == "2026-01-01T00:00:00+00:00"
    assert context.headers[SCHEDULED_AT_HEADER] == context.singleton_scheduled_at, (
        "what is requeued has it, too"
    )


@pytest.mark.parametrize("since", [float("nan"), float("inf"), -1e300, 1e300, 0.0], ids=repr)
@settings(max_examples=20, deadline=None)
@given(text=TEXT)
def test_operators_are_shown_any_record_on_one_line_without_control_characters(
    since: float, text: str
) -> None:
    """A task's id is its publisher's choice, and `ls` prints it to a terminal."""
    holder = Holder(task=text, task_id=text, worker=text, since=since)
    record = Record(key="csl:{a:0}:s:k", kind=Kind.LEASE, token="t", fence=1, holder=holder, ttl=1)
    held = HeldKey.of(record)
    for shown, lines in ((table([held]), 2), (describe(held), 10)):
        shown.encode()
        assert [c for c in shown if not c.isprintable() and c != "\n"] == []
        assert len(shown.split("\n")) == lines
