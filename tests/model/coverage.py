"""The actions of a model: what implements each, and whether a search has come by it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.model.checks import Check
from tests.model.spin import Run

__all__ = ["ENVIRONMENT", "Action", "actions_of", "never_reached", "unlabelled"]

#: The reference of what happens to the protocol.
ENVIRONMENT = "environment"

# A process of a model is one `do`; its steps stand two blanks deep, each group below a comment that
# ends in references.
_COMMENT = re.compile(r"^  /\* (.*?) (\[[^\]]+\](?: \[[^\]]+\])*) \*/$")
_STEP = re.compile(r"^  (?::: |[A-Z_]+\(\d\)$)")
_END = "  od"


@dataclass(frozen=True, slots=True)
class Action:
    """One action.

    Attributes:
        name: Where it stands, and what it says.
        references: The functions that implement it, as "path name".
        steps: The lines on which its steps begin.
    """

    name: str
    references: tuple[str, ...]
    steps: frozenset[int]


def actions_of(model: Path) -> list[Action]:
    """What the processes of ``model`` do."""
    return [
        Action(name, references, steps) for name, references, steps in _groups(model) if references
    ]


def unlabelled(model: Path) -> list[int]:
    """Lines of steps that stand below no comment with references."""
    return sorted(
        line for _, references, steps in _groups(model) if not references for line in steps
    )


def never_reached(runs: Iterable[tuple[Check, Run]]) -> list[str]:
    """Names of actions that no search that holds has come by: nothing is claimed of those."""
    reached: dict[Path, set[int]] = {}
    for check, run in runs:
        if check.holds and not run.error:
            reached.setdefault(check.model, set()).update(run.reached)
    return [
        action.name
        for model, lines in reached.items()
        for action in actions_of(model)
        if not lines & action.steps
    ]


def _groups(model: Path) -> Iterable[tuple[str, tuple[str, ...], frozenset[int]]]:
    name, references, steps, inside = "", (), set[int](), False
    for number, line in enumerate(model.read_text().splitlines(), start=1):
        inside = (inside or line.startswith("proctype")) and line != _END
        comment = _COMMENT.match(line) if inside else None
        if steps and (comment or line == _END):
            yield name, references, frozenset(steps)
            name, references, steps = "", (), set()
        if comment:
            name = f"{model.name}:{number} {comment[1]}"
            references = tuple(re.findall(r"\[([^\]]+)\]", comment[2]))
        elif inside and _STEP.match(line):
            steps.add(number)
