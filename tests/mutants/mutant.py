"""The rows of ``mutants.toml``, and how one is applied to a copy of the repository."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_LIST = Path(__file__).with_name("mutants.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One wrong change.

    Attributes:
        name: What is wrong with the package after the change.
        file: The changed file, relative to the root of the repository.
        old: The text to replace, which occurs exactly once in the file.
        new: Its replacement.
        tests: The node ids of the tests of which one must fail.
        slow: Whether no quick test catches it.
    """

    name: str
    file: str
    old: str
    new: str
    tests: Sequence[str]
    slow: bool = False

    def changed(self, root: Path = ROOT) -> str:
        """The whole text of the changed file.

        Raises:
            ValueError: The list does not fit the file any more.
        """
        text = (root / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name!r}: its old text occurs {count} times in {self.file}")
        return text.replace(self.old, self.new)


def load() -> list[Mutant]:
    """All mutants, in the order of the list."""
    return [Mutant(**row) for row in tomllib.loads(_LIST.read_text())["mutant"]]
