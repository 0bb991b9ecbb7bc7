"""Where results go: a section of docs/benchmarks.md, the same as data, and pictures beside it."""

from __future__ import annotations

import json
from typing import Any, Final

from tests.benchmarks.plots import Chart, draw
from tests.benchmarks.section import replace_section
from tests.harness.processes import ROOT

__all__ = ["publish"]

_PAGE: Final = ROOT / "docs" / "benchmarks.md"
_DIRECTORY: Final = ROOT / "docs" / "benchmarks"


def publish(name: str, text: str, data: Any, charts: list[Chart]) -> None:
    """Replace what an earlier run of the benchmark ``name`` has left, and say what was written."""
    _DIRECTORY.mkdir(exist_ok=True)
    for chart in charts:
        text += f"\n![{chart.title}]({_DIRECTORY.name}/{chart.name}.svg)\n"
    written = [_PAGE, _DIRECTORY / f"{name}.json"]
    written[0].write_text(replace_section(_PAGE.read_text(), name, text))
    written[1].write_text(json.dumps(data, indent=2) + "\n")
    for chart in charts:
        written += draw(chart, _DIRECTORY)
    print("written:", ", ".join(str(path.relative_to(ROOT)) for path in written))
