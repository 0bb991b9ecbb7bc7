"""The benchmarks that need more than a process run through."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.plots import Bar, Chart, draw
from tests.benchmarks.publishing import CONTENDERS as PUBLISHERS
from tests.benchmarks.publishing import PLAIN
from tests.benchmarks.samples import Spread
from tests.benchmarks.worker.contenders import CELERY, CONTENDERS
from tests.conftest import missing
from tests.harness.processes import ROOT

PEERS = ("celery_once", "celery_singleton", "matplotlib")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(autouse=True)
def peers() -> None:
    absent = [name for name in PEERS if importlib.util.find_spec(name) is None]
    if absent:
        missing(f"{', '.join(absent)} not installed: pip install -e '.[bench]'")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        *[
            (
                f"worker --pool {pool} --starts 1 --blocks 2 --work 0",
                [one.name for one in CONTENDERS if one is not CELERY],
            )
            for pool in ("solo", "prefork")
        ],
        ("publishing --starts 1 --rounds 3", [name for name in PUBLISHERS if name != PLAIN]),
        ("queue --rounds 1 --calls 10", ['`on_conflict="queue"`, `-c 4`']),
        ("stores --only Redis --rounds 1 --block 0.01", ["SET NX PX + EVALSHA"]),
        ("instructions --only task,redis --functions 5", ["task, redis"]),
    ],
)
def test_a_benchmark_has_a_row_for_each_contender(arguments: str, names: list[str]) -> None:
    words = [word.replace(",", ", ") for word in arguments.split()]
    command = [sys.executable, "-m", "tests.benchmarks", *words]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    rows = [line for line in ran.stdout.splitlines() if line.startswith("|")]
    assert [name for name in names if not any(name in row for row in rows)] == []


def test_an_earlier_revision_runs_beside_the_present_one() -> None:
    if subprocess.run(["git", "cat-file", "-e", "HEAD"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("no git history here")
    sizes = ("--only", "Redis", "--rounds", "1", "--block", "0.01", "--before", "HEAD")
    command = [sys.executable, "-m", "tests.benchmarks", "stores", *sizes]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert "celery-singleton-lock, the earlier revision" in ran.stdout, ran.stderr


def test_a_chart_becomes_the_same_svg_each_time(tmp_path: Path) -> None:
    bars = [Bar("ours", Spread(0.5, 0.6, 0.7), True), Bar("theirs", Spread(1.0, 1.5, 2.0), False)]
    chart = Chart("chart", "Title", "times", bars)
    once = draw(chart, tmp_path).read_text()
    assert all(word in once for word in ("theirs", "1.50", "Title"))
    assert draw(chart, tmp_path).read_text() == once
