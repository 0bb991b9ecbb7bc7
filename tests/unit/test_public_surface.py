"""What users rely on changes only on purpose: tests/public_surface.txt lists it.

docs/reference/stability.md says what each kind of line promises.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests.harness.processes import ROOT
from tests.harness.surface import COMMAND, FILE, PUBLIC, difference, surface

PAGE = ROOT / "docs" / "reference" / "stability.md"
KEPT = FILE.read_text().splitlines()
KINDS = sorted({line.partition(": ")[0] for line in KEPT})


def test_the_public_surface_is_the_one_that_is_listed() -> None:
    assert not (changed := difference(KEPT, surface())), changed


def test_the_list_is_sorted_and_says_each_thing_once() -> None:
    assert sorted(set(KEPT)) == KEPT


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_each_kind_is_named_with_what_to_do(kind: str) -> None:
    line = next(line for line in KEPT if line.startswith(f"{kind}: "))
    without = [other for other in KEPT if other != line]
    for text in (f"removed: {line}", "stability.md", COMMAND):
        assert text in difference(KEPT, without)
    assert f"added:   {line}" in difference(without, KEPT)
    assert difference(KEPT, KEPT) == ""


def test_the_page_about_stability_names_each_kind_of_line() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    named = {kind for row in rows for kind in re.findall(r"`([^`]+)`", row)}
    assert set(KINDS) <= named


# Names that users read in the pages.


def imports_of(text: str) -> Iterator[tuple[str, str]]:
    """Module and name of each import from the package in the Python code of ``text``."""
    pattern = r"^(?:>>> )?(from celery_singleton_lock[\w.]* import (?:\([^)]*\)|[^(\n]*))"
    for statement in re.findall(pattern, text, re.MULTILINE):
        [node] = ast.parse(statement).body
        assert isinstance(node, ast.ImportFrom)
        module = (node.module or "").removeprefix("celery_singleton_lock").removeprefix(".")
        yield from ((module, alias.name) for alias in node.names)


def pages() -> list[Path]:
    found = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py"), ROOT / "README.md"]
    return sorted(found)


def is_public(module: str, name: str) -> bool:
    if module not in PUBLIC:
        return False
    exported = getattr(import_module(f"celery_singleton_lock.{module}".rstrip(".")), "__all__", [])
    path = ".".join(filter(None, (module, name)))
    listed = any(re.match(rf"name: {re.escape(path)}\b", line) for line in KEPT)
    return name == "__version__" or name in exported or listed


def test_the_pages_and_examples_import_public_names_only() -> None:
    found = {(page, *one) for page in pages() for one in imports_of(page.read_text())}
    assert len(found) > 20, "the pattern finds them"
    private = [
        f"{page.relative_to(ROOT)}: {module}.{name}"
        for page, module, name in sorted(found)
        if not is_public(module, name)
    ]
    assert not private, "\n".join(private)


def test_a_private_name_is_noticed() -> None:
    statements = "from celery_singleton_lock.task.run import TaskRun\n"
    [(module, name)] = imports_of(statements)
    assert not is_public(module, name)
    assert not is_public("core.lease", "drift")
    assert is_public("", "hold")
