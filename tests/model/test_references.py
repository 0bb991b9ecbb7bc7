"""The models name what they model: these functions exist, and no step goes without a name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import celery_singleton_lock
from tests.model.checks import CHECKS
from tests.model.coverage import ENVIRONMENT, actions_of, unlabelled

PACKAGE = Path(celery_singleton_lock.__file__).parent
MODELS = sorted({check.model for check in CHECKS})


def names_in(source: str) -> set[str]:
    """Functions, classes, and methods as ``Class.method``."""
    names: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names.update(
                f"{node.name}.{inner.name}"
                for inner in node.body
                if isinstance(inner, ast.FunctionDef)
            )
    return names


def exists(reference: str) -> bool:
    """Whether ``path`` or ``path name`` is there."""
    path, _, name = reference.partition(" ")
    file = PACKAGE / path
    return file.is_file() and (not name or name in names_in(file.read_text()))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_function_that_a_model_names_exists(model: Path) -> None:
    references = set(re.findall(r"\[(\w[\w/]*\.(?:py|lua)[^\]]*)\]", model.read_text()))
    assert references
    assert [reference for reference in references if not exists(reference)] == []


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_step_of_a_model_has_a_name_or_is_the_environments(model: Path) -> None:
    actions = actions_of(model)
    assert len(actions) > 10
    assert unlabelled(model) == []
    for action in actions:
        assert action.steps, f"{action.name} does nothing"
        assert all(reference == ENVIRONMENT or exists(reference) for reference in action.references)


@pytest.mark.parametrize(
    "reference",
    [
        "core/heartbeat.py Heartbeat.rest",
        "core/heartbeat.py nothing",
        "core/nobody.py",
        "lua/nothing.lua",
    ],
)
def test_a_function_that_is_gone_is_noticed(reference: str) -> None:
    assert exists("core/heartbeat.py Heartbeat.sweep")
    assert not exists(reference)


def test_every_variant_that_a_model_offers_is_checked() -> None:
    for model in MODELS:
        offered = set(re.findall(r"#ifn?def (\w+)|defined\((\w+)\)", model.read_text()))
        names = {name for pair in offered for name in pair if name}
        checked = {
            definition.partition("=")[0]
            for check in CHECKS
            if check.model == model
            for definition in check.definitions
        }
        has_default = set(re.findall(r"#ifndef (\w+)\n#define \1", model.read_text()))
        assert names - has_default - checked == set()
