"""The benchmarks that need more than a process run through, and count what needs no clock."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.micro.finding import Finding
from tests.benchmarks.plots import Bar, Chart, draw
from tests.benchmarks.publishing import parts as publishing_parts
from tests.benchmarks.publishing.contenders import CONTENDERS as PUBLISHERS
from tests.benchmarks.publishing.contenders import PLAIN
from tests.benchmarks.samples import Spread
from tests.benchmarks.worker.contenders import CELERY, CONTENDERS, OURS, SKIP
from tests.benchmarks.worker.parts import CELERYS, PARTS
from tests.conftest import missing
from tests.harness.processes import ROOT

PEERS = ("celery_heimdall", "celery_once", "celery_singleton", "matplotlib", "pottery", "redlock")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(autouse=True)
def peers() -> None:
    absent = [name for name in PEERS if importlib.util.find_spec(name) is None]
    if absent:
        missing(f"{', '.join(absent)} not installed: pip install -e '.[bench]'")


def output_of(*arguments: str) -> str:
    command = [sys.executable, "-m", "tests.benchmarks", *arguments]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def rows_of(output: str) -> dict[str, list[str]]:
    """The cells of each row of the first table, by the first of them, without its stars."""
    rows = {}
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0].strip("*") not in rows:
            rows[cells[0].strip("*")] = cells
    return rows


@pytest.mark.parametrize("pool", ["solo", "prefork"])
def test_every_contender_runs_at_a_worker_and_its_waits_are_counted(pool: str) -> None:
    sizes = ("--starts", "1", "--blocks", "2", "--profiled", "2", "--work", "0")
    output = output_of("worker", "--pool", pool, *sizes)
    rows = rows_of(output)
    waits = {name: cells[-1] for name, cells in rows.items()}
    for contender in CONTENDERS:
        if contender.name != CELERY:
            assert any(name.startswith(contender.name) for name in rows), contender.name
    # No task that is acknowledged early waits for the reply to its release.
    assert (waits[OURS], waits[SKIP]) == ("1", "1")
    assert waits["redis-py Lock in the body"] == "2"
    assert waits["a plain task beside singleton tasks (no lock)"] == "0"
    # Each part was seen: a stopwatch around what is never called measures nothing.
    spent = rows_of(output[output.index("| part of a no-op") :])
    for part in PARTS:
        rows_of_part = [cells for name, cells in spent.items() if name.endswith(part.name)]
        assert part.name == CELERYS or rows_of_part, part
        assert all(float(cells[1].split(" ")[0]) > 0 for cells in rows_of_part), rows_of_part


def test_events_are_measured_at_a_worker_and_their_counts_arrive_at_serve() -> None:
    sizes = ("--starts", "1", "--rounds", "1", "--tasks", "20", "--seconds", "1")
    output = output_of("events", *sizes)
    table = rows_of(output)
    assert float(table["Celery alone: a plain task"][1].split(" ")[0]) > 0
    assert "Celery's own events of a task, `-E`" in table
    assert any(name.startswith("the events of a singleton task") for name in table)
    # It fails if a counter of serve is not the number of the tasks.
    assert "`singleton serve` takes" in output


def test_an_earlier_revision_runs_beside_the_present_one() -> None:
    if subprocess.run(["git", "cat-file", "-e", "HEAD"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("no git history here")
    sizes = ("--only", "Redis", "--rounds", "1", "--block", "0.01")
    rows = output_of("stores", *sizes, "--before", "HEAD")
    assert "celery-singleton-lock, the earlier revision" in rows


def test_every_publisher_publishes_and_each_part_of_a_claim_takes_time() -> None:
    output = output_of("publishing", "--starts", "1", "--rounds", "3", "--profiled", "3")
    rows = rows_of(output)
    for name in PUBLISHERS:
        assert name == PLAIN or any(row.endswith(name) or name in row for row in rows), name
    spent = rows_of(output[output.index("| part of") :])
    for part in publishing_parts.PARTS:
        found = [cells for name, cells in spent.items() if name.endswith(part.name)]
        assert publishing_parts.is_celerys(part.name) or found, part
        assert all(float(cells[1].split(" ")[0]) > 0 for cells in found), found


def test_the_parts_are_measured_one_by_one() -> None:
    sizes = ("--rounds", "1", "--block", "0.01", "--body-seconds", "0.1")
    leases, keys = ("--leases", "1", "--leases", "300"), ("--keys", "1", "--keys", "2000")
    output = output_of("micro", *sizes, *leases, *keys)
    for what in (
        *(
            "acquire + release, as at a task's end",
            "a refused acquire, as of a skip",
            "key by template",
        ),
        *("a sweep over 300 leases", "bytes per lease in Redis (300)"),
        "`import celery_singleton_lock`, over `import celery`",
        "an app with one singleton task, over one with a task",
        "acquire + release with 2,000 keys held, over 1",
        *(
            "a task in an app with 200 tasks, over 1",
            "`celery singleton ls --json` with 2,000 keys",
        ),
    ):
        assert f"| {what} |" in output, what


def test_the_instructions_are_counted_beside_those_published() -> None:
    output = output_of("instructions", "--only", "task, redis", "--functions", "5")
    assert rows_of(output)["task, redis"][1:3] > ["0", "0"]
    assert "The functions with most of task, redis:" in output


def test_a_chart_becomes_a_png_and_an_svg(tmp_path: Path) -> None:
    finding = Finding("theirs", Spread(1.0, 1.5, 2.0), "times")
    bars = [Bar("ours", Spread(0.5, 0.6, 0.7), True), Bar(finding.what, finding.value, False)]
    png, svg = draw(Chart("chart", "Title", "times", bars), tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert all(word in svg.read_text() for word in ("theirs", "1.50", "Title"))
    again = draw(Chart("chart", "Title", "times", bars), tmp_path)
    assert again == [png, svg]
