"""What a message makes of arguments, and keys that are the same at each reading of it."""

from __future__ import annotations

import inspect
import itertools
import json
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu.utils.json import dumps, loads

from celery_singleton_lock import PER_TASK, LockKeyError
from celery_singleton_lock.core.key import KeyMaker, KeySpec
from celery_singleton_lock.message.arguments import as_sent, stable_key_suffix
from tests.apps.serializer import SETS

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(Decimal("1"))
)


class Opaque:
    """Has the default repr."""


class Color(StrEnum):
    RED = "red"


def body(account: Any, other: Any = 1) -> None:
    """A task's."""


def maker(spec: KeySpec) -> KeyMaker:
    return KeyMaker(spec, inspect.signature(body), dumps)


STABLE: list[Any] = [
    UUID(int=7),
    datetime(2024, 2, 29, tzinfo=UTC),
    Decimal("1.10"),
    (1, (2, 3)),
    {"b": 1, "a": [None]},
    Color.RED,
    0.1 + 0.2,
]


@pytest.mark.parametrize("spec", [None, "{account}", ("account",), PER_TASK], ids=repr)
@pytest.mark.parametrize("value", STABLE, ids=repr)
@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_plain_values_make_one_key_at_each_reading(
    spec: KeySpec, value: Any, serializer: str
) -> None:
    keys = {stable_key_suffix(maker(spec), [value], {}, serializer) for _ in range(3)}
    assert len(keys) == 1
    assert keys == {maker(spec).key_suffix(*as_sent([value], {}, serializer))}, (
        "as its worker sees it"
    )


@given(st.lists(SCALARS), st.dictionaries(st.text(max_size=3) | st.integers(), SCALARS, max_size=3))
def test_scalars_are_what_a_message_makes_of_them(args: Any, kwargs: Any) -> None:
    assert repr(as_sent(args, kwargs)) == repr(tuple(loads(dumps([args, kwargs]))))


def test_sets_come_back_as_sets_where_the_serializer_has_them() -> None:
    assert as_sent([{2, 1}], {"x": {3}}, SETS) == ([{1, 2}], {"x": {3}})
    assert stable_key_suffix(maker("{account}"), [{1}], {}, SETS) == "{1}"


@pytest.mark.parametrize("value", [object(), {1, 2}], ids=["object", "set"])
def test_what_the_serializer_cannot_write_is_left_for_the_publisher_to_say(value: Any) -> None:
    args, kwargs = [value], {"other": value}
    assert as_sent(args, kwargs, "json") == (args, kwargs)


def test_what_pickle_cannot_write_is_left_for_the_publisher_to_say() -> None:
    args = [lambda: None]
    assert as_sent(args, {}, "pickle") == (args, {})


def test_an_unknown_serializer_is_left_for_the_publisher_to_say() -> None:
    assert as_sent([1], {}, "none such") == ([1], {})


@pytest.mark.parametrize(
    ("args", "kwargs", "name"),
    [
        ([Opaque()], {}, "account"),
        ([1, Opaque()], {}, "other"),
        ([1], {"other": Opaque()}, "other"),
    ],
    ids=["first", "second", "by name"],
)
def test_an_argument_without_a_text_of_its_own_is_named(
    args: list[Any], kwargs: dict[str, Any], name: str
) -> None:
    with pytest.raises(LockKeyError, match=rf"Argument '{name}' \(Opaque\)"):
        stable_key_suffix(maker("{account}:{other}"), args, kwargs, "pickle")


def test_an_opaque_argument_that_the_key_leaves_out_is_no_matter() -> None:
    assert stable_key_suffix(maker("{account}"), [7, Opaque()], {}, "pickle") == "7"


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_a_function_that_answers_otherwise_each_time_is_named(serializer: str) -> None:
    numbers = itertools.count()

    def counting_key(account: Any, other: Any = 1) -> str:
        return f"{account}:{next(numbers)}"

    with pytest.raises(LockKeyError, match=r"'7:0' and '7:1'\. .*make counting_key depend on"):
        stable_key_suffix(maker(counting_key), [7], {}, serializer)


def test_a_function_that_says_now_and_then_that_there_is_no_lock_is_refused() -> None:
    answers = itertools.cycle(["key", None])
    with pytest.raises(LockKeyError, match="not stable"):
        stable_key_suffix(maker(lambda account, other=1: next(answers)), [7], {}, "json")


def test_a_function_that_always_says_no_lock_makes_no_key() -> None:
    assert stable_key_suffix(maker(lambda account, other=1: None), [7], {}, "json") is None


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@given(PLAIN, PLAIN)
def test_the_publishers_key_is_the_workers(account: Any, other: Any) -> None:
    message = json.loads(dumps([[account], {"other": other}]))
    key = stable_key_suffix(maker(None), [account], {"other": other}, "json")
    assert key == maker(None).key_suffix(*message)
