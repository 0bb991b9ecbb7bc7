"""The Grafana board with real data: each of its queries has an answer, and the docs show it."""

from __future__ import annotations

import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.board.load import Load, open_load
from tests.board.panels import Panel, Span, digest, panels, title
from tests.board.picture import draw
from tests.conftest import missing
from tests.harness.processes import ROOT, TIMEOUT
from tests.harness.prometheus import find_prometheus

PICTURE = ROOT / "docs/images/grafana-board.png"


def unanswered(load: Load, span: Span, board: list[Panel]) -> list[str]:
    """The expressions of the board for which Prometheus has no point."""
    return [
        target["expr"]
        for panel in board
        for target, series in zip(panel.targets, panel.answers(load.prometheus, span), strict=True)
        if not series
    ]


@pytest.mark.slow
def test_each_query_of_the_board_has_data(tmp_path: Path) -> None:
    if find_prometheus() is None:
        missing("prometheus is not installed. Debian: apt-get install prometheus")
    with open_load(tmp_path, interval=1) as load:
        begin = time.time()
        for fault in load.faults:
            load.call()
            fault()

        def span() -> Span:
            return Span(begin=begin, end=time.time(), step=1, scrape=1)

        while (left := unanswered(load, span(), panels())) and time.time() < begin + TIMEOUT:
            load.call()
        assert left == []
        [first, *_] = panels()
        other = replace(first, targets=[{**first.targets[0], "expr": "no_such_metric"}])
        assert unanswered(load, span(), [other]) == ["no_such_metric"]
        if find_spec("matplotlib"):  # of the extra `bench`
            board = [(panel, panel.answers(load.prometheus, span())) for panel in panels()]
            draw(title(), board, tmp_path / "board.png", step=1)
            assert digest().encode() in (tmp_path / "board.png").read_bytes()


def test_the_picture_in_the_documentation_is_of_this_board() -> None:
    assert digest().encode() in PICTURE.read_bytes(), "run: make board"
