"""``python -m tests.prose``: the documentation, read by proselint.

What proselint finds is a failure. The length of a sentence or of a page is advice, which is printed
and fails nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from proselint.checks import __register__ as proselints
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

_ROOT: Final = Path(__file__).parents[2]
_LISTS: Final = ("CHANGELOG.md", "docs/changelog.md", "docs/dev/benchmarks.md")
# Sentences longer than that are read twice.
_MOST_WORDS: Final = 40
# Pages longer than that are searched, not read through; reference pages are searched anyway.
_MOST_LINES: Final = 300
# Pieces of advice that are printed. A long list is not read.
_MOST_ADVICE: Final = 10
# Matters of typography and of taste: the pages are written in ASCII, "for ever" is British.
# "Exactly-once" is a term.
_UNUSED: Final = ("misc.phrasal_adjectives", "typography", "archaism", "lexical_illusions")
# What is no prose: code, HTML comments, link targets, directives.
_NO_PROSE: Final = re.compile(
    r"^( *)```.*?^\1```$|^:::.*?$|`[^`]*`|<!--.*?-->|\]\([^)]*\)|<https:[^>]*>",
    re.DOTALL | re.MULTILINE,
)
# The first name that fits decides.
_CHECKS: Final = dict.fromkeys(_UNUSED, False) | DEFAULT["checks"]
_CHECKS.update(dict.fromkeys(_UNUSED, False))
# Up to a full stop, colon or semicolon, the end of a cell, or the next paragraph or list item.
_SENTENCE: Final = re.compile(
    r"[^.:;!?|\s](?:[^.:;!?|\n]|[.:](?=\S)|\n(?![*#|-]| *\n| *\d\.|> -))*"
)
CheckRegistry().register_many(proselints)


def pages() -> list[Path]:
    """The pages that are written; the changelog lists names, and benchmarks are printed."""
    found = [*_ROOT.glob("*.md"), *(_ROOT / "docs").rglob("*.md"), *_ROOT.glob("examples/**/*.md")]
    return sorted(page for page in found if str(page.relative_to(_ROOT)) not in _LISTS)


def masked(text: str) -> str:
    """The text with blanks for everything that is no prose: positions stay."""
    return _NO_PROSE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def found_in(page: Path) -> Iterator[str]:
    """What has to be changed."""
    text = masked(page.read_text())
    for result in LintFile(page, text).lint({**DEFAULT, "checks": _CHECKS}):
        # proselint puts a line break in front.
        yield f"{line_of(text, result.check_result.span[0] - 1)}: {result.check_result.message}"


def advice_on(page: Path) -> Iterator[str]:
    """What a reader may find long."""
    text = masked(page.read_text())
    if page.parent.name != "reference" and (lines := text.count("\n")) > _MOST_LINES:
        yield f"1: a page of {lines} lines"
    for match in _SENTENCE.finditer(text):
        if (words := len(match[0].split())) > _MOST_WORDS:
            yield f"{line_of(text, match.start())}: a sentence of {words} words"


def main() -> int:
    names = {page: page.relative_to(_ROOT) for page in pages()}
    advice = [f"advice: {names[page]}:{each}" for page in names for each in advice_on(page)]
    if len(advice) > _MOST_ADVICE:
        advice[_MOST_ADVICE:] = [f"advice: {len(advice) - _MOST_ADVICE} more"]
    found = [f"{names[page]}:{each}" for page in names for each in found_in(page)]
    print("\n".join(advice + (found or [f"{len(names)} pages read well"])))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
