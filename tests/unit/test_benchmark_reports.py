"""What the worker's and the micro benchmark make of what they measure."""

from __future__ import annotations

from tests.benchmarks.micro.finding import Finding, as_table
from tests.benchmarks.samples import Spread
from tests.benchmarks.wire import Count
from tests.benchmarks.worker import report
from tests.benchmarks.worker.contenders import CELERY, CLAIMED, CONTENDERS, OURS, SKIP
from tests.benchmarks.worker.race import Laps
from tests.benchmarks.worker.waves import Course, Wave

SOLO = Course("solo", 0.0)
NOTHING = Count(0, 0)


def laps(**tasks: float) -> Laps:
    """Two rounds, the second on a machine twice as slow; seconds by the name of the task."""
    found = Laps(pair=[0.001, 0.002])
    for contender in CONTENDERS:
        own = 0.001 if contender.alike else tasks.get(contender.task, 0.01)
        published = 0.004 if contender.claims else 0.001
        for slow in (1, 2):
            wave = Wave(
                task=(0.003 + own) * slow,
                processor=(0.002 + own) * slow,
                publishing=[published * slow] * 3,
                tasks=10,
                sent=NOTHING,
            )
            found.waves.setdefault(contender.name, []).append(wave)
    return found


def test_an_overhead_is_what_a_task_takes_more_than_celery_alone_in_the_same_round() -> None:
    found = laps(plain=0.0, locked=0.004)
    assert [round(one, 6) for one in found.overheads(OURS)] == [0.004, 0.008]
    assert round(found.in_pairs(OURS).middle, 6) == 4  # in both rounds
    assert round(found.over_plain(OURS).middle, 6) == 1.333333
    assert [round(one, 6) for one in found.processor(OURS)] == [0.004, 0.008]


def test_the_publishing_of_a_claim_is_compared_by_what_it_costs_more() -> None:
    found = laps(plain=0.0)
    assert round(found.publishing_over(CLAIMED, "celery-once").middle, 6) == 1
    running, both = found.overheads(CLAIMED), found.together(CLAIMED)
    assert [round(a - b, 6) for a, b in zip(both, running, strict=True)] == [0.003, 0.006]


def test_the_table_begins_with_the_least_and_names_what_is_no_lock() -> None:
    found = laps(plain=0.0, beside=0.0, locked=0.0005)
    table = report.as_table(SOLO, found, {OURS: Count(2, 2)})
    assert table.startswith("**solo, no-op**: Celery alone takes 4500 [3750 .. 5250] µs a task")
    first, second = table.splitlines()[4:6]
    assert first.startswith("| a plain task beside singleton tasks (no lock) | 0 [0 .. 0] |")
    assert second == f"| **{OURS}** | 750 [625 .. 875] | 0.50 [0.50 .. 0.50] | 750 | 750 | 2 |"
    assert f"**{SKIP}**" in table


def test_a_goal_that_is_missed_is_said() -> None:
    good = report.verdicts(SOLO, laps(plain=0.0, locked=0.0009))
    assert good[0] == "solo, no-op: reached: a task adds 0.90 raw pairs; wanted: 1"
    assert not [line for line in good if "MISSED" in line and "claim" not in line]
    bad = report.verdicts(SOLO, laps(plain=0.0, locked=0.02))
    assert bad[0] == "solo, no-op: MISSED: a task adds 20.00 raw pairs; wanted: 1"
    assert "solo, no-op: MISSED: celery-once adds 0.50 times what ours adds" in bad
    assert "solo, no-op: MISSED: our claim adds 1.00 of celery-once's; wanted: 0.8" in bad


def test_the_data_have_every_contender_of_every_course() -> None:
    data = report.as_data({SOLO: laps(plain=0.0)}, {OURS: Count(2, 2)})["solo, no-op"]
    assert set(data["contenders"]) == {contender.name for contender in CONTENDERS}
    assert data["contenders"][OURS]["replies_waited_for"] == 2
    assert data["contenders"][CELERY]["replies_waited_for"] is None
    charts = report.as_charts({SOLO: laps(plain=0.0)})
    assert [chart.name for chart in charts] == ["worker-solo-0ms", "publishing"]


def test_a_finding_says_what_was_wanted_and_whether_it_is_so() -> None:
    one = Finding("sweep", Spread(1.0, 2.0, 3.0), "ms", most=2.0, digits=1)
    missed = Finding("import", Spread(40.0, 40.0, 40.0), "ms", most=30, digits=0)
    free = Finding("ls", Spread(1.0, 1.0, 1.0), "s")
    assert as_table([one, missed, free]).splitlines()[2:] == [
        "| sweep | 2.0 [1.0 .. 3.0] ms | at most 2: reached |",
        "| import | 40 ms | at most 30: **missed** |",
        "| ls | 1.00 s |  |",
    ]
