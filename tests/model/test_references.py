"""The models name what they model: these functions exist, and no step goes without a name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.references import exists
from tests.model.checks import CHECKS
from tests.model.coverage import ENVIRONMENT, actions_of, unlabelled

MODELS = sorted({check.model for check in CHECKS})


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
        "core/missing.py",
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
