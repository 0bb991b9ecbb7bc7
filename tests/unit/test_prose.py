"""No phrase of the old private vocabulary in the package, its tests or its documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.prose.vocabulary import ALLOWED, EVERYWHERE

_ROOT: Final = Path(__file__).resolve().parents[2]
_FORBIDDEN: Final = re.compile(rf"\b({'|'.join(EVERYWHERE)})\b", re.IGNORECASE)
_CODE: Final = (".py", ".lua", ".pml")
# What lists the words, and what is kept as an earlier version had it.
_UNREAD: Final = ("tests/prose/", "tests/unit/test_prose.py", "tests/contract/older/")


def found_in(text: str) -> list[str]:
    """The forbidden phrases of a text, also across the lines of a comment, and in names."""
    flowing = re.sub(r"\s+(?:(?:#:?|--|>|\*)\s+)?|_+", " ", text)
    return [match[0].lower() for match in _FORBIDDEN.finditer(flowing)]


def files() -> list[str]:
    folders = ("celery_singleton_lock", "docs", "example_project", "examples", "tests")
    found = [_ROOT / "README.md"]
    for folder in folders:
        found += [path for path in (_ROOT / folder).rglob("*") if path.suffix in (*_CODE, ".md")]
    names = sorted(str(path.relative_to(_ROOT)) for path in found)
    return [name for name in names if not name.startswith(_UNREAD)]


@pytest.mark.parametrize("phrase", EVERYWHERE)
def test_a_forbidden_phrase_is_found(phrase: str) -> None:
    assert found_in(f"{phrase.upper()}, or not") == [phrase]
    assert found_in("    # It is\n    # {}\n    # here".format("\n    # ".join(phrase.split())))
    assert found_in(f"def test_{phrase.replace(' ', '_')}_once()") == [phrase]
    assert not found_in("a marshalled, shallow blesting of anewer kind; who  never waits")


def test_the_prose_has_no_forbidden_phrase() -> None:
    texts = {name: (_ROOT / name).read_text() for name in files()}
    for name, phrase in ALLOWED.items():
        assert phrase in texts[name]
        texts[name] = texts[name].replace(phrase, "")
    found = {name: found_in(text) for name, text in texts.items()}
    assert {name: phrases for name, phrases in found.items() if phrases} == {}


def test_the_linter_of_the_pages_finds_what_it_looks_for_and_not_in_code(tmp_path: Path) -> None:
    prose = pytest.importorskip("tests.prose.__main__")
    page = tmp_path / "page.md"
    page.write_text("Plain.\n\n`nobody`\n\n```\nnobody\n```\nA word is nobody.\n")
    assert list(prose.found_in(page)) == ["8: say 'no client' instead of 'nobody'."]
    page.write_text("It is worst possible and very unique.\n")
    assert list(prose.found_in(page)) != [], "proselint's own checks are on"


def test_long_sentences_and_pages_are_advice_and_fail_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prose = pytest.importorskip("tests.prose.__main__")
    monkeypatch.setattr(prose, "_ROOT", tmp_path)
    page, reference = tmp_path / "page.md", tmp_path / "docs" / "reference" / "lists.md"
    reference.parent.mkdir(parents=True)
    reference.write_text("Short.\n\n" * 200)
    page.write_text("Short.\n\n" * 200 + "A word " * 20 + "more.\n" + "`nobody nobody` " * 50)
    assert prose.main() == 0
    assert capsys.readouterr().out.splitlines() == [
        "advice: page.md:1: a page of 401 lines",
        "advice: page.md:401: a sentence of 41 words",
        "2 pages read well",
    ]
    page.write_text(("A word " * 21 + ".\n\n") * 12 + "It waits for nobody.\n")
    assert prose.main() == 1
    *advice, rest, failure = capsys.readouterr().out.splitlines()
    assert len(advice) == 10
    assert rest == "advice: 2 more"
    assert failure == "page.md:25: say 'no client' instead of 'nobody'."
