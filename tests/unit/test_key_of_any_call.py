"""Keys of generated calls: of any signature, of hostile names and values, of any template."""

from __future__ import annotations

import inspect
import json
import string
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import combinations
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kombu.utils.json import dumps, loads

from celery_singleton_lock.core.key import KeyMaker
from celery_singleton_lock.core.keyspace import digest

Parameter = inspect.Parameter
Call = tuple[tuple[Any, ...], dict[str, Any]]

#: Those of parameters, and of what ``**`` may collect.
NAMES = ["a", "b", "c", "d", "e", "f"]
EXTRAS = [*NAMES, "args", "options", "", "=", "\n", "a=1\nb", '"a"', "**", "**\na", "é", "\ud800"]
SCALARS = st.sampled_from([None, True, 0, 1, 1.0, "", "1", "a=1\nb=2", '"', "null", b"1"])
VALUES = st.recursive(
    SCALARS | st.text(max_size=3) | st.just(Decimal(1)),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(EXTRAS), inner),
    max_leaves=3,
)


@st.composite
def signatures(draw: st.DrawFn) -> inspect.Signature:
    """Positional-only, ordinary and keyword-only parameters, some with defaults, ``*``, ``**``."""
    names = iter(NAMES)

    def parameters(kind: Any, can_have_defaults_from: int) -> list[Parameter]:
        return [
            Parameter(
                next(names),
                kind,
                default=draw(SCALARS) if number >= can_have_defaults_from else Parameter.empty,
            )
            for number in range(draw(st.integers(0, 2)))
        ]

    first_default = draw(st.integers(0, 4))
    found = parameters(Parameter.POSITIONAL_ONLY, first_default)
    found += parameters(Parameter.POSITIONAL_OR_KEYWORD, first_default - len(found))
    if draw(st.booleans()):
        found.append(Parameter("args", Parameter.VAR_POSITIONAL))
    found += parameters(Parameter.KEYWORD_ONLY, draw(st.integers(0, 2)))
    if draw(st.booleans()):
        found.append(Parameter("options", Parameter.VAR_KEYWORD))
    return inspect.Signature(found)


@st.composite
def calls(draw: st.DrawFn, signature: inspect.Signature) -> Call:
    """One that fits; required arguments are there, others may be."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        if parameter.kind is Parameter.VAR_POSITIONAL:
            if len(args) == positional(signature):
                args += draw(st.lists(VALUES, max_size=2))
        elif parameter.kind is Parameter.VAR_KEYWORD:
            taken = {p.name for p in signature.parameters.values() if by_name(p)}
            free = st.sampled_from([name for name in EXTRAS if name not in taken])
            kwargs |= draw(st.dictionaries(free, VALUES, max_size=2))
        elif parameter.default is Parameter.empty or draw(st.booleans()):
            at_its_place = parameter.kind is not Parameter.KEYWORD_ONLY and not kwargs
            if at_its_place and (not by_name(parameter) or draw(st.booleans())):
                if len(args) == list(signature.parameters).index(parameter.name):
                    args.append(draw(VALUES))
            elif by_name(parameter):
                kwargs[parameter.name] = draw(VALUES)
    return tuple(args), kwargs


def positional(signature: inspect.Signature) -> int:
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in kinds for parameter in signature.parameters.values())


def by_name(parameter: Parameter) -> bool:
    return parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@st.composite
def alike(draw: st.DrawFn, call: Call) -> Call:
    """A call that is nearly that one: a value is another, or two names are forged into one."""
    args, kwargs = list(call[0]), dict(call[1])
    places: list[Any] = [*range(len(args)), *kwargs]
    if len(kwargs) > 1 and draw(st.booleans()):
        one, other = sorted(kwargs)[:2]
        kwargs[f"{one}={text_of(kwargs.pop(one))}\n{other}"] = kwargs.pop(other)
    elif places:
        place = draw(st.sampled_from(places))
        if isinstance(place, int):
            args[place] = draw(VALUES)
        else:
            kwargs[place] = draw(VALUES)
    return tuple(args), kwargs


def fits(signature: inspect.Signature, call: Call) -> bool:
    try:
        signature.bind(*call[0], **call[1])
    except TypeError:
        return False
    return True


def meaning(signature: inspect.Signature, call: Call) -> str:
    """What distinguishes one call from another: its bound arguments, as in the message."""
    bound = signature.bind(*call[0], **call[1])
    bound.apply_defaults()
    return text_of(bound.arguments)


def text_of(value: Any) -> str:
    return json.dumps(json.loads(dumps(value)), sort_keys=True)


def maker(spec: Any, signature: inspect.Signature) -> KeyMaker:
    return KeyMaker(spec, signature, dumps)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_calls_share_a_key_if_and_only_if_their_bound_arguments_are_equal(data: Any) -> None:
    signature = data.draw(signatures())
    some = data.draw(st.lists(calls(signature), min_size=1, max_size=3))
    some += [data.draw(alike(call)) for call in some]
    some = [call for call in some if fits(signature, call)]
    make = maker(None, signature)
    keys = [make.key_suffix(*call) for call in some]
    meanings = [meaning(signature, call) for call in some]
    for one, other in combinations(range(len(some)), 2):
        assert (keys[one] == keys[other]) == (meanings[one] == meanings[other]), (
            signature,
            some[one],
            some[other],
        )
    # And as the worker sees them.
    assert keys == [make.key_suffix(*loads(dumps(call))) for call in some]


def signature_of(source: str) -> inspect.Signature:
    namespace: dict[str, Any] = {}
    exec(f"def f{source}: ...", namespace)
    return inspect.signature(namespace["f"])


@pytest.mark.parametrize(
    ("source", "one", "other"),
    [
        ("(a, /, **options)", ((1,), {"a": 2}), ((5,), {"a": 2})),
        ("(a=1, /, **options)", ((), {"a": 2}), ((2,), {})),
        ("(*args, **options)", ((1,), {"args": 2}), ((5,), {"args": 2})),
        ("(*args, **options)", ((1,), {}), ((), {"args": [1]})),
        ("(**options)", ((), {"a=1\nb": 2}), ((), {"a": 1, "b": 2})),
        ("(a, **options)", ((1,), {"b": 2}), ((1,), {"b=2\nb": 2})),
        ("(**options)", ((), {"**\na": 1, "\n": 1}), ((), {"a": 1, "\n": 1})),
        ("(**options)", ((), {'"a"': 1, "\n": 1}), ((), {"a": 1, "\n": 1})),
    ],
)
def test_what_stars_collect_is_distinguished_from_what_is_declared(
    source: str, one: Call, other: Call
) -> None:
    make = maker(None, signature_of(source))
    assert make.key_suffix(*one) != make.key_suffix(*other)
    for spec in (("a", "options"), ("args", "options")):
        if {*spec} <= {*signature_of(source).parameters}:
            make = maker(spec, signature_of(source))
            assert make.key_suffix(*one) != make.key_suffix(*other)


@pytest.mark.parametrize("spec", [("a",), "x:{a}"])
def test_a_named_parameter_is_not_what_stars_collect_under_its_name(spec: Any) -> None:
    make = maker(spec, signature_of("(a, /, **options)"))
    assert (
        make.key_suffix((1,), {"a": 2})
        == make.key_suffix((1,), {"a": 3})
        == make.key_suffix((1,), {})
    )
    assert make.key_suffix((1,), {"a": 2}) != make.key_suffix((5,), {"a": 2})


@pytest.mark.parametrize("spec", [("options",), "x:{options}"])
def test_a_parameter_with_stars_may_be_named_itself(spec: Any) -> None:
    make = maker(spec, signature_of("(a, **options)"))
    assert make.key_suffix((1,), {"x": 1, "y": 2}) == make.key_suffix((2,), {"y": 2, "x": 1})
    keys = [
        make.key_suffix((1,), options)
        for options in ({}, {"x": 1}, {"x": 2}, {"options": {"x": 1}})
    ]
    assert len(set(keys)) == 4


def test_the_keys_of_ordinary_calls_are_those_of_earlier_versions() -> None:
    # Workers of two versions run beside each other while they are replaced.
    calls_and_texts: list[tuple[str, Call, str]] = [
        ("(a, b=2)", ((1,), {}), "a=1\nb=2"),
        ("(a, /, b=2)", (("x",), {"b": None}), 'a="x"\nb=null'),
        ("(*args, **options)", ((1, "y"), {"z": [1]}), 'args=[1, "y"]\nz=[1]'),
        ("(*args, **options)", ((), {}), "args=[]"),
        ("(a, /, **options)", ((1,), {"b": {"d": 1, "c": 2}}), 'a=1\nb={"c": 2, "d": 1}'),
        ("(**options)", ((), {"options": 1, "": 2, "x=y": 3}), "=2\noptions=1\nx=y=3"),
        ("()", ((), {}), ""),
    ]
    for source, call, text in calls_and_texts:
        assert maker(None, signature_of(source)).key_suffix(*call) == digest(text), (source, call)


# --- templates -----------------------------------------------------------------------------------

BINARY = signature_of("(x, y=None)")
TEXTS = st.text(st.sampled_from("ab%&2519!:→{}'") | st.characters(), max_size=4)


@given(
    separator=st.text(st.sampled_from("a%&25!→:{}"), min_size=1, max_size=3),
    end=st.text(st.sampled_from("%&a!"), max_size=2),
    one=st.tuples(TEXTS, TEXTS),
    other=st.tuples(TEXTS, TEXTS),
)
@example(separator="%", end="", one=("x", "25%"), other=("x%", "25"))
@example(separator="!→", end="", one=("!92", "x"), other=("→", "x"))
@settings(max_examples=200, deadline=None)
def test_values_never_run_into_each_other_whatever_is_between_them(
    separator: str, end: str, one: tuple[str, str], other: tuple[str, str]
) -> None:
    literal = separator.replace("{", "{{").replace("}", "}}")
    make = maker(f"{{x}}{literal}{{y}}{end}", BINARY)
    assert (make.key_suffix(one, {}) == make.key_suffix(other, {})) == (one == other)


@pytest.mark.parametrize("template", ["a:{x}:{y}", "{x}/{y}%", "é{x}-{y}", "{x}:{y}%"])
@pytest.mark.parametrize("value", ["b", "a:b", "50%", "/-é", "%25"])
def test_separators_are_escaped_as_in_earlier_versions(template: str, value: str) -> None:
    literals = {*"".join(literal for literal, *_ in string.Formatter().parse(template)), "%"}
    escaped = "".join(f"%{ord(c):02X}" if c in literals else c for c in value)
    assert maker(template, BINARY).key_suffix((value, "z"), {}) == template.format(x=escaped, y="z")


def backwards(value: Any) -> Any:
    """An equal value, with all its dicts and sets made in the other order."""
    if isinstance(value, Mapping):
        return {backwards(key): backwards(value[key]) for key in reversed(list(value))}
    if isinstance(value, (list, tuple)):
        return type(value)(map(backwards, value))
    if isinstance(value, (set, frozenset)):
        return type(value)(reversed(list(map(backwards, value))))
    return value


KEYS = st.integers() | st.text(max_size=3) | st.none()
PLAIN = st.recursive(
    KEYS | st.frozensets(KEYS | st.frozensets(st.integers())),
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner) | st.tuples(inner, inner),
    max_leaves=10,
)


@given(PLAIN)
@example({"b": 1, "a": {"d": [{"y": 1, "x": 2}], "c": 3}})
@example({8, 0, 16})
@settings(deadline=None)
def test_the_order_of_a_dict_or_a_set_makes_no_key(value: Any) -> None:
    for template in ("{x}", "{x!s}", "{x!r:>5}:{y}", "{y}:{x}"):
        make = maker(template, BINARY)
        assert make.key_suffix((value,), {}) == make.key_suffix((backwards(value),), {}), template


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, "b": {"c": [None, "x"]}},
        [{"a": 1}, (1, {"b": 2})],
        {1: "a", 2: "b", 10: "c"},
        {1, 2},
        [frozenset({1, 2}), {"a"}],
        set(),
        {"a": frozenset()},
        (1,),
        [],
        {},
    ],
    ids=repr,
)
def test_what_is_in_order_looks_as_python_shows_it(value: Sequence[Any]) -> None:
    assert maker("x:{x}", BINARY).key_suffix((value,), {}) == f"x:{value}"
