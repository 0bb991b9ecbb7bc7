"""No phrase of the old private vocabulary in the package, its scripts or its documentation.

``prose_not_done.txt`` lists the folders and files that still may have one. ``python -m
tests.unit.test_prose`` removes the finished ones from the list and prints what is left; once it is
empty, delete it and what reads it here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

_ROOT: Final = Path(__file__).resolve().parents[2]
_NOT_DONE: Final = Path(__file__).with_name("prose_not_done.txt")

FORBIDDEN: Final = (
    "who waits",
    "whoever",
    "nobody",
    "somebody",
    "anew",
    "in vain",
    "shall",
    "lest",
    "tells of",
    "hears of",
)
_FORBIDDEN: Final = re.compile(rf"\b({'|'.join(FORBIDDEN)})\b", re.IGNORECASE)


def found_in(text: str) -> list[str]:
    """The forbidden phrases of a text, also across the lines of a comment."""
    flowing = re.sub(r"\s+(?:(?:#:?|--|>)\s+)?", " ", text)
    return [match[0].lower() for match in _FORBIDDEN.finditer(flowing)]


def files() -> list[str]:
    package = _ROOT / "celery_singleton_lock"
    paths = [*package.rglob("*.py"), *package.rglob("*.lua"), *(_ROOT / "docs").glob("*.md")]
    return sorted(str(path.relative_to(_ROOT)) for path in [*paths, _ROOT / "README.md"])


def not_done() -> tuple[str, ...]:
    """Beginnings of paths: files, or folders with a slash at the end."""
    return tuple(_NOT_DONE.read_text().split())


@pytest.mark.parametrize("phrase", FORBIDDEN)
def test_a_forbidden_phrase_is_found(phrase: str) -> None:
    assert found_in(f"{phrase.upper()}, or not") == [phrase]
    assert found_in("    # It is\n    # {}\n    # here".format("\n    # ".join(phrase.split())))
    assert not found_in("a marshalled, shallow blesting of anewer kind; who  never waits")


def test_the_prose_has_no_forbidden_phrase() -> None:
    assert {
        name: found for name, found in unclean().items() if not name.startswith(not_done())
    } == {}


def unclean() -> dict[str, list[str]]:
    found = {name: found_in((_ROOT / name).read_text()) for name in files()}
    return {name: phrases for name, phrases in found.items() if phrases}


def shorten() -> None:
    """Keep the lines of the list that an unclean file needs; print these files."""
    left = unclean()
    needed = [line for line in not_done() if any(name.startswith(line) for name in left)]
    _NOT_DONE.write_text("".join(f"{line}\n" for line in needed))
    for name, phrases in left.items():
        print(f"{name}: {', '.join(phrases)}")


if __name__ == "__main__":
    shorten()
