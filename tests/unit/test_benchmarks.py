"""What the benchmarks make of what they measure, and what the page for users makes of that."""

from __future__ import annotations

import random
import re
from collections import Counter
from statistics import median

import pytest

from tests.benchmarks.instructions import Path
from tests.benchmarks.instructions import as_table as instructions_table
from tests.benchmarks.publishing import CONTENDERS as PUBLISHERS
from tests.benchmarks.publishing import PLAIN
from tests.benchmarks.publishing import as_table as publishing_table
from tests.benchmarks.queue import Mark, drain_of
from tests.benchmarks.rate import starts_of
from tests.benchmarks.samples import Spread, estimate, ratios, spread
from tests.benchmarks.worker.contenders import CELERY, CONTENDERS
from tests.benchmarks.worker.report import Block, Course, as_table, pace
from tests.costs.instructions import Instructions
from tests.harness.processes import ROOT
from tests.harness.section import replace_section


def test_half_of_the_numbers_lie_within_the_spread() -> None:
    assert spread([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(2.0, 3.0, 4.0)


def test_a_ratio_is_taken_within_each_round_so_a_slow_spell_cancels_out() -> None:
    measured = {"ours": [[1.0, 1.0], [50.0, 50.0]], "theirs": [[2.0, 2.0], [100.0, 100.0]]}
    assert ratios(measured, "ours")["theirs"] == Spread(2.0, 2.0, 2.0)


def test_the_interval_has_the_truth_in_it_about_as_often_as_it_says() -> None:
    hits = 0
    for seed in range(60):
        noise = random.Random(seed)
        starts = [[noise.gauss(5.0, 1.0) for _ in range(10)] for _ in range(3)]
        found = estimate(starts, median)
        hits += found.low <= 5.0 <= found.high
    assert 51 <= hits < 60


def test_the_pace_of_a_run_lacks_what_overlaps_with_another_contender() -> None:
    # Processes take messages out of turn; the second run of a is as slow as a machine may be.
    order = ["a"] * 6 + ["b"] * 5 + ["a"] * 4
    moments = [0.0, 0.1, 10.0, 12.0, 16.0, 14.0, *(50.0, 51.0, 52.0, 53.0, 54.0)]
    assert pace(order, [*moments, 60.0, 61.0, 70.0, 74.0]) == {"a": 3.0, "b": 1.0}


def test_a_task_is_compared_with_celery_alone_in_the_same_block() -> None:
    def block(slow: int) -> Block:
        more = {CELERY.task: 0.0, "locked": 0.0008, "raw_pair": 0.0004}
        times = {one.name: (0.003 + more.get(one.task, 0.01)) * slow for one in CONTENDERS}
        return Block(tasks=times, processor=times)

    table = as_table(Course("solo", 0.0), [[block(slow) for slow in (1, 2, 1)]] * 2)
    assert table.startswith("**solo, no-op**: Celery alone takes 3000 [3000 .. 6000] µs a task")
    first, second = table.splitlines()[4:6]
    assert first.startswith("| SET NX PX + EVALSHA in the body (no lock) | 400 [400 .. 800] |")
    assert second.startswith(
        "| **celery-singleton-lock** | 800 [800 .. 1600] | 2.00 [2.00 .. 2.00]"
    )


def test_a_claim_is_compared_by_what_it_adds_to_a_plain_call_of_its_round() -> None:
    more = {PLAIN: 0.0, '**celery-singleton-lock, unique="until_done"**': 0.0003}
    rounds = [
        {name: (0.001 + more.get(name, 0.0005)) * slow for name in PUBLISHERS}
        for slow in (1, 2) * 10
    ]
    least = publishing_table([rounds] * 2).splitlines()[4]
    assert 'unique="until_done"** | 450 [300 .. 600] | 0.60 [0.60 .. 0.60] |' in least


def test_a_drain_begins_with_the_end_of_its_gate() -> None:
    times = {0: (0.0, 2.0), 2: (2.1, 2.2), 1: (2.4, 2.5), 3: (2.6, 2.7)}
    marks = [Mark("k", number, 0.0, *of) for number, of in sorted(times.items())]
    found = drain_of(marks, others=1.0, others_alone=1.0)
    assert [round(one, 3) for one in (found.took, found.p50, found.p99)] == [0.7, 0.1, 0.2]
    assert found.out_of_order == 1


def test_a_start_is_due_an_interval_after_the_one_before() -> None:
    found = starts_of({"k": [(0, 1.0), (2, 1.1), (1, 1.5)], "other": [(0, 2.0), (1, 2.25)]}, 5)
    assert (found.early, found.overtaken) == (1, 1)
    assert [round(one, 2) for one in found.late] == [-0.1, 0.05, 0.2]
    assert found.pace == 4.0


def test_a_path_may_take_a_tenth_more_instructions_than_are_published() -> None:
    found = Instructions(Counter({"run.py: TaskRun.run": 1100}))
    longer = Instructions(Counter({"inspect.py: signature": 1101}))
    table = instructions_table({"kept": Path(found, 1000), "long": Path(longer, 1000)})
    assert "| kept | 1100 | 1000 | +10.0 %, at most +10 %: kept |" in table
    assert "| long | 1101 | 1000 | +10.1 %, at most +10 %: **exceeded** |" in table


def test_a_section_of_a_page_is_replaced_and_the_rest_stays() -> None:
    page = "# Title\n<!-- stores: begin -->old<!-- stores: end -->\nrest\n"
    once = replace_section(page, "stores", "new")
    assert once == "# Title\n<!-- stores: begin -->\n\nnew\n\n<!-- stores: end -->\nrest\n"
    assert replace_section(once, "stores", "new") == once


# --- the page for users --------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
FULL_PAGE = (ROOT / "docs" / "dev" / "benchmarks.md").read_text()


def what_locks_add(kind: str) -> dict[str, str]:
    """The first figure of each lock in the full table for one kind of worker and task."""
    table = (
        FULL_PAGE.split(f"**{kind}**: Celery alone takes")[1]
        .split("<!-- worker: end")[0]
        .split("**: Celery")[0]
    )
    found = re.findall(r"^\| (?:\*\*)?(.+?)(?: in the body)?(?:\*\*)? \| (-?\d+) \[", table, re.M)
    return dict(found)


@pytest.mark.parametrize(
    ("column", "kind"),
    [(1, "solo, no-op"), (2, "solo, 10 ms"), (3, "prefork, no-op"), (4, "prefork, 10 ms")],
)
def test_the_page_for_users_has_the_figures_of_the_full_tables(column: int, kind: str) -> None:
    lines = [line for line in PAGE.splitlines() if re.search(r"\| \d+ \|$", line)]
    cells = [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in lines]
    assert len(cells) == 5
    full = what_locks_add(kind)
    assert {row[0]: row[column] for row in cells} == {row[0]: full[row[0]] for row in cells}


def test_each_figure_of_the_page_for_users_is_on_the_full_page() -> None:
    for figure in re.findall(r"\d[\d,.]*(?:%| µs| ms| bytes)", PAGE):
        number = re.escape(figure.rstrip("% µmsbyte"))
        assert re.search(rf"(?<![\d.,]){number}(?!,?\d|\.\d)", FULL_PAGE), figure
