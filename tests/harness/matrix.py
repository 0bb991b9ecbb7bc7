"""The versions with which `.ci/run` tests, as the tables of docs/reference/stability.md.

``python -m tests.harness.matrix`` writes them into the page, after a change of constraints/, of
`tests.ci` or of pyproject.toml. A test compares the two.
"""

from __future__ import annotations

import re
import tomllib
from typing import Final

from tests.ci.__main__ import VERSIONS
from tests.harness.processes import ROOT
from tests.harness.section import replace_section

PAGE: Final = ROOT / "docs/reference/stability.md"
COMMAND: Final = "python -m tests.harness.matrix"
_SECTION: Final = "tested versions"
#: Packages whose upper bounds are promises too; the extra that requires each.
_EXTRAS: Final = {
    "django": "django-celery-beat",
    "redbeat": "celery-redbeat",
    "serve": "uvicorn",
    "zookeeper": "kazoo",
}
#: The columns of a file of constraints/.
_PACKAGES: Final = {
    "celery": "Celery",
    "kombu": "kombu",
    "redis": "redis-py",
    "django": "Django",
    "django-celery-beat": "django-celery-beat",
    "celery-redbeat": "celery-redbeat",
}
#: The words for a server of `tests.ci`.
_SERVERS: Final = {
    "embedded": "Valkey 9.1",
    "redis-6.2": "Redis 6.2",
    "redis-8.2": "Redis 8.2",
    "redis-server": "Redis 7.0",
}


def rows() -> list[list[str]]:
    """The versions of each run of the quick tests, in the order of the columns."""
    runs = {"dev": "embedded", **VERSIONS}
    return [[*_pinned(versions), _SERVERS[server]] for versions, server in runs.items()]


def _pinned(versions: str) -> list[str]:
    text = (ROOT / "constraints" / f"{versions}.txt").read_text()
    # Of two lines for one package, the first is that for Python 3.11.
    found = dict(reversed(re.findall(r"^([\w-]+)==(\d+(?:\.\d+)*)", text, re.MULTILINE)))
    return [found[package] for package in _PACKAGES]


def tables() -> str:
    """The tables, in Markdown."""
    names = [*_PACKAGES.values(), "server"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows()]
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


def _requirement(text: str) -> tuple[str, str]:
    found = re.match(r"[\w-]+", text)
    assert found is not None, text
    return found[0], text[found.end() :]


def page_with_tables() -> str:
    """The page, with the tables as they are to be."""
    return replace_section(PAGE.read_text(), _SECTION, tables())


if __name__ == "__main__":
    PAGE.write_text(page_with_tables())
