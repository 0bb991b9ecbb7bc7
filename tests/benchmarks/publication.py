"""Where results go: a section of a page, its pictures, and the numbers that a next run needs."""

from __future__ import annotations

import json
from typing import Any, Final

from tests.benchmarks.plots import Chart, draw
from tests.harness.processes import ROOT
from tests.harness.section import replace_section

__all__ = ["publish", "published"]

#: For contributors. The page for users, docs/benchmarks.md, is written by hand.
_PAGE: Final = ROOT / "docs" / "dev" / "benchmarks.md"
_OTHER_PAGES: Final = {"instructions": ROOT / "docs" / "dev" / "architecture.md"}
_DIRECTORY: Final = ROOT / "docs" / "benchmarks"


def published(name: str) -> Any:
    """The data that the last run of the benchmark ``name`` has left; None if there are none."""
    path = _DIRECTORY / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def publish(name: str, text: str, chart: Chart | None = None, data: Any = None) -> None:
    """Replace what an earlier run of the benchmark ``name`` has left."""
    if chart:
        draw(chart, _DIRECTORY)
        text = f"![{chart.title}](../{_DIRECTORY.name}/{chart.name}.svg)\n\n{text}"
    if data is not None:
        (_DIRECTORY / f"{name}.json").write_text(json.dumps(data, indent=2) + "\n")
    page = _OTHER_PAGES.get(name, _PAGE)
    page.write_text(replace_section(page.read_text(), name, text))
    print(f"written into {page.relative_to(ROOT)}")
