"""The settings page grants each command that a script runs: without one of them it stops."""

from __future__ import annotations

import re
from typing import Final

import pytest

from celery_singleton_lock.stores.redis import scripts
from tests.harness.processes import ROOT

_PAGE: Final = (ROOT / "docs" / "reference" / "settings.md").read_text()
_SCRIPTS: Final = [
    pytest.param(script, id=name.lower())
    for name, script in vars(scripts).items()
    if isinstance(script, scripts.Script)
]
#: The commands of each ACL line, in the order of the page.
LOCKS, WAITING, QUEUES = (
    {right.upper() for right in re.findall(r"\+(\w+)", line)}
    for line in re.findall(r"^ACL SETUSER .*$", _PAGE, re.MULTILINE)
)
# MGET is optional, and the script asks whether it may run it. A key has no waiting clients unless
# their login could write them down.
_BESIDES: Final = {"MGET", "RPUSH"}


def test_the_command_for_all_rights_grants_those_of_each_line() -> None:
    [command] = re.findall(r"^redis-cli ACL SETUSER (?:.*\\\n)*.*$", _PAGE, re.MULTILINE)
    granted = {right.upper() for right in re.findall(r"\+(\w+)", command)}
    assert granted >= LOCKS | WAITING | QUEUES


@pytest.mark.parametrize("script", _SCRIPTS)
def test_the_page_grants_the_commands_of_a_script(script: scripts.Script) -> None:
    commands = set(re.findall(r"\b(?:call|pcall|get)\('([A-Z]+)'", script.source.decode()))
    assert commands
    assert commands <= LOCKS | QUEUES | _BESIDES
    assert {"RPUSH"} <= WAITING
