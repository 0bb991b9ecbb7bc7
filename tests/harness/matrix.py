"""The versions that continuous integration tests, as the tables of docs/reference/stability.md.

``python -m tests.harness.matrix`` writes them into the page, after a change of the workflow or of
pyproject.toml. A test compares the two.
"""

from __future__ import annotations

import json
import re
import tomllib
from typing import Final

from tests.benchmarks.section import replace_section
from tests.harness.processes import ROOT

WORKFLOW: Final = ROOT / ".github/workflows/ci.yml"
PAGE: Final = ROOT / "docs/reference/stability.md"
COMMAND: Final = "python -m tests.harness.matrix"
_SECTION: Final = "tested versions"
#: Packages whose upper bounds are promises too; the extra that requires each.
_EXTRAS: Final = {"django": "django-celery-beat", "redbeat": "celery-redbeat", "zookeeper": "kazoo"}


#: The packages of a line: the axis of the workflow, and the heading.
_COLUMNS: Final = {
    "celery": "Celery",
    "client": "redis-py",
    "django": "Django",
    "schedules": "django-celery-beat",
    "redbeat": "celery-redbeat",
}


def rows() -> list[dict[str, str]]:
    """Each combination of the workflow's matrix: Python, the packages and the server."""
    _, _, text = WORKFLOW.read_text().partition("\n  test:\n")
    matrix = text[text.index("      matrix:\n") : text.index("    steps:", text.index("matrix:"))]
    axes = {name: json.loads(f"[{values}]") for name, values in _axes(matrix).items()}
    products: list[dict[str, str]] = [{}]
    for name, values in axes.items():
        products = [{**row, name: value} for row in products for value in values]
    included = [
        dict(re.findall(r'(\w+): "([^"]+)"', line))
        for line in re.findall(r"^ +- \{(.*?)\}$", matrix, re.MULTILINE | re.DOTALL)
    ]
    return products + included


def _axes(matrix: str) -> dict[str, str]:
    return dict(re.findall(r"^        (\w+): \[(.*)\]$", matrix, re.MULTILINE))


def tables() -> str:
    """The tables, in Markdown."""
    names = ["Python", *_COLUMNS.values(), "server"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    merged: dict[tuple[str, ...], list[str]] = {}
    for row in rows():
        key = *(_version(row[axis]) for axis in _COLUMNS), _server(row["server"])
        merged.setdefault(key, []).append(row["python"])
    lines += [f"| {', '.join(pythons)} | {' | '.join(key)} |" for key, pythons in merged.items()]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = dict(map(_requirement, project["dependencies"]))
    extras = project["optional-dependencies"]
    lines += ["", "| package | versions that may be installed |", "|---|---|"]
    lines += [f"| Python | `{project['requires-python']}` |"]
    lines += [f"| {name} | `{required[name]}` |" for name in ("celery", "redis")]
    for extra, name in _EXTRAS.items():
        found = dict(map(_requirement, extras[extra]))
        lines += [f"| {name}, of the extra `{extra}` | `{found[name]}` |"]
    return "\n".join(lines) + "\n"


def _version(requirement: str) -> str:
    _, version = _requirement(requirement)
    return version.removeprefix("==").removesuffix(".*") if "==" in version else "the newest"


def _requirement(text: str) -> tuple[str, str]:
    found = re.match(r"[\w-]+", text)
    assert found is not None, text
    return found[0], text[found.end() :]


def _server(repository: str) -> str:
    name, _, version = repository.rpartition("/")[2].partition("@")
    return f"{name.capitalize()} {version}"


def page_with_tables() -> str:
    """The page, with the tables as they are to be."""
    return replace_section(PAGE.read_text(), _SECTION, tables())


if __name__ == "__main__":
    PAGE.write_text(page_with_tables())
