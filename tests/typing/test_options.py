"""The options that type checkers know are those that are checked at runtime, and Celery's."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from celery.app.task import Task

from celery_singleton_lock import (
    CallOptions,
    LockOptions,
    OnConflict,
    Rate,
    TaskOptions,
    singleton_task,
)
from celery_singleton_lock.policy import OPTIONS, Policy, check_option
from celery_singleton_lock.task import keywords

LOCK = get_type_hints(LockOptions)
# Public attributes of Celery's Task that no decorator sets.
NOT_OPTIONS = {"abstract", "app", "from_config", "request", "request_stack"}
# Options that Celery 5.5 or 5.6 does not have.
NEWER = {"acks_on_failure", "acks_on_timeout", "retry_on_worker_lost"}
HOOKS = ("after_return", "before_start", "on_", "shadow_name")
SAMPLES: dict[Any, Any] = {
    bool: True,
    float: 2.5,
    int: 2,
    str: "billing",
    timedelta: timedelta(seconds=3),
    NoneType: None,
    OnConflict: OnConflict.retry(delay=2),
}


# Of options whose words are no names.
OWN_SAMPLES: dict[str, list[Any]] = {"rate": ["10/m", 2, 2.5, Rate("10/m", burst=3), None]}


def values(hint: Any) -> Iterator[Any]:
    """A value of each type in the union ``hint``, and each value of a Literal."""
    if hint in SAMPLES:
        yield SAMPLES[hint]
    elif get_origin(hint) is Literal:
        yield from get_args(hint)
    else:
        parts = get_args(hint)
        assert parts, f"no sample of {hint}"
        for part in parts:
            yield from values(part)


def celery_options() -> set[str]:
    """The names of Celery's own options, of the decorator and of the class."""
    methods = (classmethod, staticmethod)
    of_class = {
        name
        for name, value in vars(Task).items()
        if not name.startswith("_") and name not in NOT_OPTIONS
        if name.startswith(HOOKS) or not (callable(value) or isinstance(value, methods))
    }
    from_config = {name for name, _ in Task.from_config}
    return (of_class | from_config | keywords.DECORATOR_OPTIONS) - {"bind", "on_bound"}


def test_the_options_of_a_lock_are_those_of_the_policy() -> None:
    assert set(LOCK) == OPTIONS
    assert set(CallOptions.__annotations__) < OPTIONS


@pytest.mark.parametrize("name", sorted(OPTIONS - {"key"}))
def test_every_value_that_the_types_allow_is_accepted(name: str) -> None:
    for value in OWN_SAMPLES.get(name) or values(LOCK[name]):
        check_option(Policy, name, value)


@pytest.mark.parametrize("name", sorted(OPTIONS - {"key"}))
def test_every_value_that_the_types_leave_out_is_refused(name: str) -> None:
    allowed = OWN_SAMPLES.get(name) or list(values(LOCK[name]))
    for value in (None, "no such value", object()):
        is_text = isinstance(value, str) and "billing" in allowed
        if value not in allowed and not is_text:
            with pytest.raises((TypeError, ValueError), match=name):
                check_option(Policy, name, value)


def test_each_choice_at_runtime_is_one_for_type_checkers() -> None:
    for field in Policy.__dataclass_fields__.values():
        for kind in field.metadata.get("check", (None, ()))[1]:
            if isinstance(kind, type):
                assert {str(member) for member in kind} <= set(values(LOCK[field.name]))


def test_celery_s_options_are_known_too() -> None:
    known = set(TaskOptions.__annotations__) - OPTIONS
    assert celery_options() <= known
    assert known - celery_options() <= NEWER


def test_each_option_has_one_meaning_for_editors_and_for_help() -> None:
    fields: dict[str, str] = {}
    for kind in (CallOptions, LockOptions):
        [declared] = ast.parse(inspect.getsource(kind)).body
        assert isinstance(declared, ast.ClassDef)
        for field, text in pairwise(declared.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                fields[ast.unparse(field.target)] = ast.literal_eval(text.value)
    assert fields.keys() == OPTIONS
    section = (inspect.getdoc(singleton_task) or "").partition("Options of the lock::\n\n")[2]
    lines = [line.strip() for line in section.partition("\n\n")[0].splitlines()]
    assert {name: text for name, _, text in (line.partition(": ") for line in lines)} == fields
