"""The linter of the pages finds what it looks for."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_the_linter_of_the_pages_reads_prose_and_no_code(tmp_path: Path) -> None:
    prose = pytest.importorskip("tests.prose.__main__")
    page = tmp_path / "page.md"
    page.write_text("Plain.\n\n`more unique`\n\n```\nmore unique\n```\nIt is more unique.\n")
    assert [line.partition(":")[0] for line in prose.found_in(page)] == ["8"]


def test_long_sentences_and_pages_are_advice_and_fail_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prose = pytest.importorskip("tests.prose.__main__")
    monkeypatch.setattr(prose, "_ROOT", tmp_path)
    page, reference = tmp_path / "page.md", tmp_path / "docs" / "reference" / "lists.md"
    reference.parent.mkdir(parents=True)
    reference.write_text("Short.\n\n" * 200)
    page.write_text("Short.\n\n" * 200 + "A word " * 20 + "more.\n" + "`more unique` " * 50)
    assert prose.main() == 0
    assert capsys.readouterr().out.splitlines() == [
        "advice: page.md:1: a page of 401 lines",
        "advice: page.md:401: a sentence of 41 words",
        "2 pages read well",
    ]
    page.write_text(("A word " * 21 + ".\n\n") * 12 + "It is more unique.\n")
    assert prose.main() == 1
    *advice, rest, failure = capsys.readouterr().out.splitlines()
    assert len(advice) == 10
    assert rest == "advice: 2 more"
    assert failure.startswith("page.md:25: ")
