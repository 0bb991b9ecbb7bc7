"""From the arguments of a call to the name of its lock."""

from __future__ import annotations

import inspect
import json
import re
import sys
import unicodedata
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kombu.utils.json import dumps, loads

from celery_singleton_lock import PER_TASK, LockKeyError
from celery_singleton_lock.core.key import KeyMaker
from celery_singleton_lock.core.keyspace import CallQueueNames, Keyspace, digest, stored_names

KEYSPACE = Keyspace("p")


class Colour(StrEnum):
    RED = "red"


def sync(account_id: Any, options: Any = None, *, deep: bool = False) -> None: ...


def anything(*args: Any, **kwargs: Any) -> None: ...
def by_name(**kwargs: Any) -> None: ...


def maker(spec: Any = None, function: Callable[..., Any] = sync) -> KeyMaker:
    return KeyMaker(spec, inspect.signature(function), dumps)


def rest(spec: Any, *args: Any, **kwargs: Any) -> str | None:
    return maker(spec).key_suffix(args, kwargs)


@pytest.mark.parametrize("spec", [None, PER_TASK, lambda: "a"])
def test_the_key_of_a_task_without_parameters_leaves_no_argument_out(spec: Any) -> None:
    """Otherwise each duplicate would log that its arguments were dropped."""
    assert maker(spec, lambda: None).names_all
    assert maker(spec).names_all is (spec is None)


# --- all bound arguments -------------------------------------------------------------------------


def test_equal_calls_written_five_ways_are_one_key() -> None:
    make = maker()
    keys = {
        make.key_suffix((1, {"a": 1, "b": [2, 3]}), {}),
        make.key_suffix((1,), {"options": {"a": 1, "b": [2, 3]}}),
        make.key_suffix((), {"account_id": 1, "options": {"a": 1, "b": [2, 3]}, "deep": False}),
        make.key_suffix((1, {"b": [2, 3], "a": 1}), {}),
        make.key_suffix((1, {"a": 1, "b": (2, 3)}), {"deep": False}),
    }
    assert len(keys) == 1


@given(
    args=st.lists(st.integers(), max_size=4),
    kwargs=st.dictionaries(st.sampled_from(["account_id", "options", "deep", "other"]), st.none()),
)
def test_arguments_are_bound_as_python_does(args: list[int], kwargs: dict[str, None]) -> None:
    signature = inspect.signature(sync)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as exc:
        with pytest.raises(TypeError, match=re.escape(str(exc))):
            maker().bind(args, kwargs)
        return
    bound.apply_defaults()
    assert maker().bind(args, kwargs) == bound.arguments


@given(st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()))
def test_a_scalar_has_the_key_that_its_message_would_have(value: Any) -> None:
    sent = json.dumps(loads(dumps(value)), sort_keys=True)
    assert rest(None, value) == digest(f"account_id={sent}\ndeep=false\noptions=null")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, "1"),
        (1, True),
        (None, "null"),
        (None, ""),
        ([1, 2], [2, 1]),
        ([[1], 2], [1, [2]]),
        ({"a": None}, {}),
        (b"x", "x"),
        (uuid.UUID(int=1), str(uuid.UUID(int=1))),
        (Decimal("1"), 1),
        (0.1, 0.2),
        ("é", "e\u0301"),
    ],
    ids=repr,
)
def test_different_arguments_are_different_keys(one: Any, other: Any) -> None:
    assert rest(None, one) != rest(None, other)


def test_what_one_argument_holds_cannot_pass_for_another() -> None:
    assert rest(None, "x", "y") != rest(None, "y", "x")
    assert rest(None, 'x"\noptions="y') != rest(None, "x", "y")
    assert rest(None, 1, deep=True) != rest(None, 1)


@pytest.mark.parametrize(
    "value",
    [
        uuid.UUID("12345678-1234-5678-1234-567812345678"),
        datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
        datetime(2026, 1, 2),
        date(2026, 1, 2),
        Decimal("1.10"),
        b"\x00\xff",
        b"text",
        {1: "a", 2: {3: 4}},
        {"ключ": "値 \u2028 \ud83d\ude00"},
        (1, (2, [3])),
        Colour.RED,
        float("nan"),
        2**200,
        "x" * 2**20,
    ],
    ids=lambda value: repr(value)[:40],
)
def test_the_key_is_the_same_before_and_after_the_message(value: Any) -> None:
    make = maker()
    sent = make.key_suffix((value,), {})
    assert sent == make.key_suffix((loads(dumps(value)),), {})
    assert sent is not None
    assert len(sent) == 32


def test_an_argument_without_a_json_form_says_which_and_what_to_do() -> None:
    with pytest.raises(LockKeyError, match=r"'options' \(object\).*key=\(names of the others\)"):
        rest(None, 1, object())


def test_an_argument_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(LockKeyError, match="account_id"):
        rest(None, loop)


def test_arguments_that_do_not_fit_are_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"'account_id': the task takes \(account_id"):
        rest(None)


def test_collected_arguments_count() -> None:
    make = maker(None, anything)
    assert make.key_suffix((1,), {"x": 2}) == make.key_suffix((1,), {"x": 2})
    assert (
        len(
            {
                make.key_suffix((1,), {"x": 2}),
                make.key_suffix((1, 2), {}),
                make.key_suffix((1,), {"y": 2}),
                make.key_suffix((1,), {}),
            }
        )
        == 4
    )


def test_the_order_in_which_a_call_names_its_arguments_does_not_count() -> None:
    make = maker(None, by_name)
    assert make.key_suffix((), {"x": 1, "y": 2}) == make.key_suffix((), {"y": 2, "x": 1})


# --- templates -----------------------------------------------------------------------------------


def test_a_template_renders_its_arguments() -> None:
    assert rest("account:{account_id}", 42) == "account:42"
    assert rest("{account_id}/{deep}", 42, deep=True) == "42/True"
    assert rest("{account_id:05d}", 42) == "00042"


@pytest.mark.parametrize("template", ["{account_id}", "a{{b}}:{account_id}/{{", "{account_id}}}!"])
@pytest.mark.parametrize("value", [42, 1.5, None, True, "x", Colour.RED, [1, "a"], Decimal("1.0")])
def test_a_template_of_bare_names_renders_as_python_formats_it(template: str, value: Any) -> None:
    assert rest(template, value) == template.format(account_id=value)


def test_a_template_reads_attributes_items_and_positions() -> None:
    as_object = SimpleNamespace(id=7, owner={"name": "n"}, rows=[SimpleNamespace(k="a")])
    as_dict = {"id": 7, "owner": {"name": "n"}, "rows": [{"k": "a"}]}
    template = "{account_id.id}:{account_id.owner[name]}:{account_id.rows[0].k}"
    assert rest(template, as_object) == rest(template, as_dict) == "7:n:a"


def test_a_template_prefers_a_mappings_item_to_its_attribute() -> None:
    assert rest("x:{account_id.items}", {"items": 3}) == "x:3"


@pytest.mark.parametrize("template", ["account", "", "{{account_id}}"])
def test_a_template_without_placeholder_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match=r"no placeholder.*PER_TASK"):
        maker(template)


@pytest.mark.parametrize("template", ["account:{account_id", "account_id}"])
def test_a_template_with_one_brace_is_named(template: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"key={template!r}: ")):
        maker(template)


@pytest.mark.parametrize("template", ["{missing}", "{account}", "{account_id}:{missing[x]}"])
def test_a_template_with_an_unknown_argument_names_the_known(template: str) -> None:
    with pytest.raises(ValueError, match=r"no argument of the task \(it has: account_id, options"):
        maker(template)


@pytest.mark.parametrize("template", ["{}", "{0}", "{account_id}-{1}", "{[x]}"])
def test_a_placeholder_without_a_name_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match="name the argument"):
        maker(template)


@pytest.mark.parametrize("template", ["{account_id}{deep}", "a:{account_id}{options}:{deep}"])
def test_adjacent_placeholders_are_refused(template: str) -> None:
    with pytest.raises(ValueError, match="put a separator"):
        maker(template)


@pytest.mark.parametrize("template", ["{account_id", "account_id}", "{account_id!x}:{deep"])
def test_a_broken_template_is_refused_where_it_is_written(template: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        maker(template)


def test_an_argument_of_a_var_keyword_may_be_named() -> None:
    assert maker("x:{tenant}", by_name).key_suffix((), {"tenant": 3}) == "x:3"


@pytest.mark.parametrize("spec", ["x:{tenant}", ("tenant",)])
def test_a_name_that_a_positional_argument_would_not_have_is_refused(spec: Any) -> None:
    with pytest.raises(ValueError, match=r"names 'tenant', which .*functools\.wraps"):
        maker(spec, anything)


def test_a_template_that_cannot_be_rendered_says_why() -> None:
    with pytest.raises(LockKeyError, match="AttributeError"):
        rest("{account_id.nothing}", 1)
    with pytest.raises(LockKeyError, match="KeyError"):
        maker("x:{tenant}", by_name).key_suffix((), {})


@given(one=st.tuples(st.text(), st.text()), other=st.tuples(st.text(), st.text()))
def test_two_placeholders_never_run_into_each_other(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    make = maker("a:{account_id}:{options}%")
    if one != other:
        assert make.key_suffix(one, {}) != make.key_suffix(other, {})


def test_separators_in_values_are_escaped() -> None:
    template = "{account_id}:{options}"
    assert rest(template, "a:b", "c") != rest(template, "a", "b:c")
    assert rest(template, "a%3Ab", "c") != rest(template, "a:b", "c")


# --- names, PER_TASK, callables ------------------------------------------------------------------


def test_a_tuple_of_names_takes_these_arguments_alone() -> None:
    names = ("account_id", "deep")
    assert rest(names, 1, "x") == rest(names, 1, object(), deep=False)
    assert rest(names, 1) != rest(names, 1, deep=True)
    assert rest(names, 1) != rest(names, "1")


def test_no_names_and_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="key=PER_TASK"):
        maker(())
    with pytest.raises(ValueError, match="'acount_id', which is no argument"):
        maker(("acount_id",))


def test_per_task_is_one_key_whatever_the_arguments() -> None:
    assert rest(PER_TASK, 1) == rest(PER_TASK, object(), deep=True)
    assert repr(PER_TASK) == "PER_TASK"


def test_a_callable_gets_the_arguments_as_they_came() -> None:
    assert rest(lambda account_id, **_: f"a:{account_id}", 1, deep=True) == "a:1"
    assert rest(lambda *args, **kwargs: None, 1) is None


@pytest.mark.parametrize("returned", ["", 1, b"x", ["x"]])
def test_a_callable_that_returns_no_name_is_refused(returned: Any) -> None:
    with pytest.raises(LockKeyError, match="return a non-empty str"):
        rest(lambda *args: returned, 1)


def test_a_callable_that_raises_is_named() -> None:
    def broken(account_id: int) -> str:
        return {}[account_id]

    with pytest.raises(LockKeyError, match=r"broken raised KeyError\(1\)"):
        rest(broken, 1)


@pytest.mark.parametrize("spec", [["account_id"], 1, b"x", True, {"a"}])
def test_a_key_of_no_known_kind_is_a_type_error(spec: Any) -> None:
    with pytest.raises(TypeError, match="write a template such as"):
        maker(spec)


# --- names in the store --------------------------------------------------------------------------


def test_a_lock_its_fence_and_its_completion_record_share_a_hash_tag() -> None:
    keyspace = Keyspace("p", 16)
    for number in range(50):
        key = keyspace.lock("s", str(number))
        tag = key[: key.index("}") + 1]
        assert Keyspace.shard_hash(key).startswith(tag)
        assert Keyspace.completion(key, "t|0.0").startswith(tag)


def test_shards_are_all_used() -> None:
    keyspace = Keyspace("p", 8)
    keys = [keyspace.lock("s", str(number)) for number in range(200)]
    assert {key[: key.index("}")] for key in keys} == {f"csl:{{p:{shard}" for shard in range(8)}


@given(
    one=st.tuples(st.text(min_size=1), st.text(min_size=1)),
    other=st.tuples(st.text(min_size=1), st.text(min_size=1)),
)
def test_scope_and_rest_never_run_into_each_other(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    if one != other:
        assert lock(*one) != lock(*other)


def lock(scope: str, name: str) -> str:
    try:
        return KEYSPACE.lock(scope, name)
    except UnicodeEncodeError:  # a lone surrogate: no text, and no message carries it
        return repr((scope, name))


@pytest.mark.parametrize("name", ["a b", "a\tb", "a\nb", "a\x00b", "a\xa0b", "x" * 10_000])
def test_a_key_is_short_and_holds_no_blank(name: str) -> None:
    key = KEYSPACE.lock("scope with blank", name)
    assert len(key) < 250
    assert not any(character.isspace() or ord(character) < 32 for character in key)


def test_no_character_that_ends_a_line_or_is_not_seen_is_in_a_key() -> None:
    """Of control, format, separators and surrogates, as Python's table of Unicode has them."""
    quoted = {"Cc", "Cf", "Cs", "Zl", "Zp", "Zs"}
    found = [c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c) in quoted]
    keys = {KEYSPACE.lock("s", f"a{c}b") for c in found}
    assert len(keys) == len(found)
    assert [key for key in keys if not key.isascii()] == []
    assert KEYSPACE.lock("s", "a\u202eb") == KEYSPACE.lock("s", "ab").replace("ab", "a%E2%80%AEb")
    assert KEYSPACE.lock("s", "Łódź-東京").endswith(":Łódź-東京")


def test_two_names_never_have_the_same_quoted_form() -> None:
    assert KEYSPACE.lock("s", "\u2028") != KEYSPACE.lock("s", " 28")


def test_a_claim_with_such_a_character_is_none() -> None:
    claim = Keyspace.claim("task", KEYSPACE.lock("s", "a"))
    assert KEYSPACE.is_claim(claim)
    assert not KEYSPACE.is_claim(f"{claim}\u2028")


def test_a_scope_cannot_forge_another_name() -> None:
    for scope in ("fence", "done|t", "a:b", "a}b", "a#0", "{p:0}", "ü"):
        quoted = KEYSPACE.lock(scope, "x").removeprefix("csl:{p:0}:").removesuffix(":x")
        assert not set(quoted) & set(":{}|# ")
    key = KEYSPACE.lock("fence", "x")
    assert key not in (Keyspace.shard_hash(key), Keyspace.completion(key, "x"))


def test_slots_are_distinguished_from_names_that_end_alike() -> None:
    key = KEYSPACE.lock("s", "order#5")
    assert Keyspace.slots(key, 1) == (key,)
    assert Keyspace.slots(key, 2) == (key, f"{key}#1")
    # The holder of a slot is recognised by what comes before the '#'.
    assert {slot.partition("#")[0] for slot in Keyspace.slots(key, 2)} == {key}
    assert key.partition("#")[0] == key
    assert KEYSPACE.lock("s", "order#5") != KEYSPACE.lock("s", "order%235")


def test_the_pattern_for_all_keys_quotes_the_prefix() -> None:
    assert Keyspace("a*[b]?").match_all() == r"csl:{a\*\[b\]\?:*}:*"


@pytest.mark.parametrize("start", ["prod:", "prod", "a*[b]?", "eu/prod|1:"])
def test_a_global_prefix_is_literally_in_front_of_every_name(start: str) -> None:
    bare, keyspace = Keyspace("p", 256), Keyspace("p", 256, start)
    one = keyspace.lock("s", "42")
    assert one == start + bare.lock("s", "42")
    claim, queue = keyspace.claim("t", one), CallQueueNames.of(one)
    beside = [
        *(
            keyspace.shard_hash(one),
            keyspace.completion(one, "t|0.0"),
            keyspace.release_note(one),
            claim,
        ),
        *(keyspace.period("t", one), keyspace.arguments(claim, "t"), keyspace.wait_queue(one)),
        *(*queue, queue.last_number, queue.ended("t")),
        *(keyspace.newest_call(one), keyspace.shard_count(one), *keyspace.slots(one, 3)),
        *(keyspace.last_run(keyspace.leader("b"), "e"), *keyspace.all_shards()),
        *(*keyspace.beside_acquire(one, "t|0.0"), *keyspace.beside_release(one, "t|0.0")),
    ]
    assert all(name.startswith(f"{start}csl:{{p:") for name in beside)
    assert keyspace.is_claim(claim)
    assert keyspace.is_lock(one)
    assert keyspace.is_slot_of(one, keyspace.slots(one, 2)[1])
    assert not any(map(bare.is_claim, (claim, keyspace.period("t", one))))
    assert not bare.is_lock(one)
    assert not keyspace.is_claim(claim.removeprefix(start))
    assert not keyspace.is_lock(one.removeprefix(start))


def test_the_pattern_for_all_keys_has_the_global_prefix_quoted() -> None:
    assert Keyspace("p", 1, "a*:").match_all() == r"a\*:csl:{p:*}:*"


# --- claims --------------------------------------------------------------------------------------

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200)


@given(task=NAMES, scope=NAMES, rest=st.text(st.characters(exclude_categories=["Cs"])))
def test_every_claim_is_known_as_one_and_shares_its_leases_shard(
    task: str, scope: str, rest: str
) -> None:
    keyspace = Keyspace("p", 256)
    key = keyspace.lock(scope, rest)
    for claim in (Keyspace.claim(task, key), Keyspace.period(task, key)):
        assert keyspace.is_claim(claim)
        assert Keyspace.is_period(claim) == (claim != Keyspace.claim(task, key))
        assert Keyspace.same_shard(key, claim)
        assert Keyspace.shard_hash(claim) == Keyspace.shard_hash(key)


def test_the_longest_claim_is_known_as_one() -> None:
    longest = "\U0001f600" * 200
    for rest in ("x" * 10_000, " " * 160, "\U000e0001" * 160, "\U0001f600" * 160):
        assert KEYSPACE.is_claim(Keyspace.claim(longest, KEYSPACE.lock(longest, rest)))
        assert KEYSPACE.is_claim(Keyspace.period(longest, KEYSPACE.lock(longest, rest)))


@given(one=st.tuples(NAMES, NAMES, NAMES), other=st.tuples(NAMES, NAMES, NAMES))
def test_no_two_calls_share_a_claim(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    for name in (Keyspace.claim, Keyspace.period):
        mine, others = (
            name(task, KEYSPACE.lock(scope, rest)) for task, scope, rest in (one, other)
        )
        assert (mine == others) == (one == other)


PARTS = st.lists(
    st.sampled_from(
        [
            "claim",
            "%period|",
            "period",
            "done",
            "fence",
            "|",
            ":",
            "#",
            "%7C",
            "{p:0}",
            "}",
            "csl:",
            "a",
            "1",
        ]
    ),
    max_size=8,
).map("".join)


@given(task=PARTS, scope=PARTS, rest=PARTS, attempt=PARTS, limit=st.integers(1, 3))
def test_no_name_forges_that_of_another_sort(
    task: str, scope: str, rest: str, attempt: str, limit: int
) -> None:
    key = KEYSPACE.lock(scope, rest)
    claim, period = Keyspace.claim(task, key), Keyspace.period(task, key)
    assert Keyspace.is_period(period)
    for other_task, other_scope, other_rest in ((task, scope, rest), (rest, task, scope)):
        lock = KEYSPACE.lock(other_scope, other_rest)
        leases = set(Keyspace.slots(lock, limit))
        others = {Keyspace.shard_hash(lock), Keyspace.completion(lock, attempt)}
        assert not {claim, period} & (leases | others)
        assert not leases & others
        claim_of_other = Keyspace.claim(other_task, lock)
        assert not any(map(Keyspace.is_period, (claim_of_other, *leases)))
        assert not any(KEYSPACE.is_claim(name) for name in leases | others), (other_task, lock)


@pytest.mark.parametrize(
    "name",
    [
        None,
        b"csl:{p:0}:claim|t|s:x",
        7,
        ["csl:{p:0}:claim|t|s:x"],
        "",
        "claim|t|s:x",
        "csl:{p:0}:shard",
        "csl:{p:0}:done|t|0.0",
        "csl:{p:0}:s:x",
        "csl:{p:0}:s:claim|t|s:x",
        "csl:{p:0}:claim",
        "csl:{p:0}:claim|",
        "csl:{p:0}:claim|t",
        "csl:{p:0}:claim|t|s",
        "csl:{p:0}:claim||s:x",
        "csl:{p:0}:claim|t|:x",
        "csl:{p:0}:claim|a|b|s:x",
        "csl:{p:0}:claim|a:b|s:x",
        "csl:{p:0}:claim|a{q}|s:x",
        "csl:{p:0}:claim|t|s:x#1",
        "csl:{p:0}:claim|t|s:x y",
        "csl:{p:0}:claim|t|s:x\n",
        "csl:{p:0}:claim|t|s:\x1b[2J",
        "csl:{p:0}:claim|t|s:\ud800",
        "csl:{p:0}:claim|\u00fc|s:x",
        "csl:{p:0}:claim|t|s:" + "x" * 10_000,
        "csl:{p:1}:claim|t|s:x",
        "csl:{p:-0}:claim|t|s:x",
        "csl:{p:00}:claim|t|s:x",
        "csl:{p:}:claim|t|s:x",
        "csl:{p:\u0660}:claim|t|s:x",
        "csl:{p:\u00b2}:claim|t|s:x",
        "csl:{p:" + "9" * 5000 + "}:claim|t|s:x",
        "csl:{q:0}:claim|t|s:x",
        "csl:{pp:0}:claim|t|s:x",
        "csl:{p:0}}:claim|t|s:x",
        "csl:{p:0:claim|t|s:x",
        " csl:{p:0}:claim|t|s:x",
    ],
    ids=lambda name: ascii(name)[:50],
)
def test_a_name_from_a_message_that_is_no_claim_of_ours_is_reported(name: Any) -> None:
    assert KEYSPACE.is_claim("csl:{p:0}:claim|t|s:x")
    assert not KEYSPACE.is_claim(name)


@given(st.text() | st.binary() | st.none() | st.integers() | st.lists(st.text()))
def test_whatever_a_message_names_is_judged_without_an_error(name: Any) -> None:
    assert KEYSPACE.is_claim(name) is False
    if isinstance(name, str):
        assert not Keyspace.is_claim(KEYSPACE, f"csl:{{p:0}}:claim|{name}#")


def test_a_claim_in_any_shard_of_its_keyspace_is_known() -> None:
    keyspace = Keyspace("p", 256)
    assert all(keyspace.is_claim(f"csl:{{p:{shard}}}:claim|t|s:x") for shard in range(256))
    assert not keyspace.is_claim("csl:{p:256}:claim|t|s:x")


@pytest.mark.parametrize("slot", ["", "#1", "#12"])
def test_what_stands_beside_a_key_has_one_name_however_it_is_asked_for(slot: str) -> None:
    key = KEYSPACE.lock("s", "x:{y}:z")
    fence, marker = Keyspace.beside_acquire(key + slot, "a|0.0")
    assert (fence, marker) == (Keyspace.shard_hash(key), Keyspace.completion(key, "a|0.0"))
    queue = Keyspace.wait_queue(key)
    assert Keyspace.beside_release(key + slot, "a|0.0") == [marker, queue, f"{queue}!"]


@pytest.mark.parametrize(
    "other", ["", "}", "csl:{p:0", "csl:{p:1}:x", "csl:{p:00}:x", "csl:{q:0}:x", "x:csl:{p:0}:x"]
)
def test_one_script_touches_names_of_one_shard_alone(other: str) -> None:
    key = KEYSPACE.lock("s", "x")
    assert Keyspace.same_shard(key, Keyspace.claim("t", key))
    assert not Keyspace.same_shard(key, other)


@given(scope=NAMES, rest=st.text(st.characters(exclude_categories=["Cs"])), limit=st.integers(1, 3))
@settings(deadline=None)
def test_a_key_is_found_by_its_text_and_as_it_is_stored(scope: str, rest: str, limit: int) -> None:
    lock = KEYSPACE.lock(scope, rest)
    for number, slot in enumerate(Keyspace.slots(lock, limit)):
        stored = slot.partition("}:")[2]
        end = f"#{number}" if number else ""
        assert stored in stored_names(stored)
        assert stored in stored_names(f"{scope}:{rest}{end}")
        assert stored.partition(":")[2] in stored_names(rest + end)
    claim = Keyspace.claim("app.task", lock).partition("}:")[2]
    assert claim in stored_names(f"claim|app.task|{scope}:{rest}")


def test_a_name_that_is_no_text_is_looked_for_without_an_error() -> None:
    assert "\udcff:a b" in stored_names("\udcff:a b")
