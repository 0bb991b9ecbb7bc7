"""The linter of the pages finds what it looks for."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_the_linter_of_the_pages_reads_prose_and_no_code(tmp_path: Path) -> None:
    prose = pytest.importorskip("tests.prose.__main__")
    page = tmp_path / "page.md"
    page.write_text("Plain.\n\n`more unique`\n\n```\nmore unique\n```\nIt is more unique.\n")
    assert [line.partition(":")[0] for line in prose.found_in(page)] == ["8"]
