"""``make board``: the picture of the Grafana board in docs/images, from a load of some minutes.

It is drawn by tests/board/picture.py from the board's own expressions, not by Grafana.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.board.load import Load, open_load
from tests.board.panels import Span, panels, title
from tests.board.picture import draw
from tests.harness.processes import ROOT

PICTURE: Final = ROOT / "docs/images/grafana-board.png"
#: Seconds between two scrapes, and between two points of a line.
_SCRAPE: Final = 5


def main() -> int:
    """Run the load and write the picture; exit status 1 if a query has no data."""
    parser = argparse.ArgumentParser(prog="make board", description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="how long the load runs")
    parser.add_argument("--to", type=Path, default=PICTURE, help="the file to write")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="csl-board-") as folder,
        open_load(Path(folder), _SCRAPE) as load,
    ):
        begin = time.time()
        _run(load, given.minutes * 60)
        span = Span(begin=begin, end=time.time(), step=_SCRAPE, scrape=_SCRAPE)
        board = [(panel, panel.answers(load.prometheus, span)) for panel in panels()]
    draw(title(), board, given.to, step=_SCRAPE)
    print(given.to)
    missing = [panel.title for panel, answers in board if not all(answers)]
    print("\n".join(f"no data: {title}" for title in missing), file=sys.stderr)
    return 1 if missing else 0


def _run(load: Load, seconds: float) -> None:
    """Publish calls for so long, with the faults at equal distances."""
    begin, faults = time.monotonic(), load.faults
    for number, fault in enumerate(faults, start=1):
        while time.monotonic() - begin < seconds * number / (len(faults) + 1):
            load.call()
        fault()
    while time.monotonic() - begin < seconds:
        load.call()


if __name__ == "__main__":
    sys.exit(main())
