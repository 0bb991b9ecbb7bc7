"""Where results go: a section of a page, the same as data, and pictures."""

from __future__ import annotations

import json
from typing import Any, Final

from tests.benchmarks.plots import Chart, draw
from tests.benchmarks.section import replace_section
from tests.harness.processes import ROOT

__all__ = ["publish", "published"]

#: For contributors. The page for users, docs/benchmarks.md, is written by hand.
_PAGE: Final = ROOT / "docs" / "dev" / "benchmarks.md"
_OTHER_PAGES: Final = {"instructions": ROOT / "docs" / "dev" / "architecture.md"}
_DIRECTORY: Final = ROOT / "docs" / "benchmarks"


def published(name: str) -> Any:
    """The data that the last run of the benchmark ``name`` has left; None if there are none."""
    path = _DIRECTORY / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def publish(name: str, text: str, data: Any, charts: list[Chart]) -> None:
    """Replace what an earlier run of the benchmark ``name`` has left, and say what was written."""
    _DIRECTORY.mkdir(exist_ok=True)
    pictures = [f"![{chart.title}](../{_DIRECTORY.name}/{chart.name}.svg)" for chart in charts]
    text = "\n\n".join([*pictures, text.strip()])
    written = [_OTHER_PAGES.get(name, _PAGE), _DIRECTORY / f"{name}.json"]
    written[0].write_text(replace_section(written[0].read_text(), name, text))
    written[1].write_text(json.dumps(data, indent=2) + "\n")
    for chart in charts:
        written += draw(chart, _DIRECTORY)
    print("written:", ", ".join(str(path.relative_to(ROOT)) for path in written))
