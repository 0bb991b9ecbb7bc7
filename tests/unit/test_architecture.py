"""docs/dev/architecture.md names files and functions of the package: they exist."""

from __future__ import annotations

import re

import pytest

from tests.harness.processes import ROOT
from tests.harness.references import exists

PAGE = (ROOT / "docs" / "dev" / "architecture.md").read_text()
# `path` or `path name` in a code span, the path from the package's root.
REFERENCES = sorted(set(re.findall(r"`([a-z_]+(?:/\w+)*(?:\.py|\.lua)(?: [\w.]+)?)`", PAGE)))
FOLDERS = sorted(set(re.findall(r"(?<!\S)([a-z_]+(?:/|\.py))(?=\s)", PAGE)))


@pytest.mark.parametrize("reference", REFERENCES)
def test_a_file_or_function_that_the_page_names_exists(reference: str) -> None:
    assert exists(reference)


def test_the_diagram_shows_every_folder_and_file_of_the_package() -> None:
    package = ROOT / "celery_singleton_lock"
    names = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").is_file()}
    names |= {path.name for path in package.glob("*.py")} - {"__init__.py"}
    diagram = PAGE.split("```")[1]
    assert set(re.findall(r"[a-z_]+(?:/|\.py)", diagram)) == names


def test_the_page_names_the_way_of_a_message() -> None:
    assert len(REFERENCES) > 25
    assert {"task/run.py TaskRun.finish", "core/locker.py Locker.acquire"} <= set(REFERENCES)


def test_a_function_that_is_gone_is_noticed() -> None:
    assert not exists("task/run.py TaskRun.gone")
    assert not exists("task/gone.py")
