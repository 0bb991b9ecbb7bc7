"""What the worker's and the micro benchmark make of what they measure."""

from __future__ import annotations

import random
from collections import Counter
from statistics import median

import pytest

from tests.benchmarks.events import report as events_report
from tests.benchmarks.events.report import LOCKED as OBSERVED
from tests.benchmarks.events.report import PLAIN as BARE
from tests.benchmarks.events.report import Lap, Round
from tests.benchmarks.micro.finding import Finding, as_table
from tests.benchmarks.publishing import parts as publishing_parts
from tests.benchmarks.publishing import report as publishing_report
from tests.benchmarks.publishing.contenders import CONTENDERS as PUBLISHERS
from tests.benchmarks.publishing.contenders import OURS as PUBLISHING
from tests.benchmarks.publishing.contenders import PLAIN
from tests.benchmarks.samples import Spread, each_over
from tests.benchmarks.wire import Count
from tests.benchmarks.worker import parts, profile, report
from tests.benchmarks.worker.contenders import (
    CELERY,
    CONTENDERS,
    OURS,
    RAW_PAIR,
    SKIP,
    contenders_of,
)
from tests.benchmarks.worker.estimate import after_own_kind, estimate, first_of_runs, pace
from tests.benchmarks.worker.laps import Block, Laps, as_block, over, pair, together, whole
from tests.benchmarks.worker.race import runs
from tests.benchmarks.worker.stage import Course, Seen

SOLO = Course("solo", 0.0)
NOTHING = Count(0, 0)
STARTS, BLOCKS = 3, 40

ONCE = "celery-once"


def laps(**tasks: float) -> Laps:
    """Every second block on a machine twice as slow; seconds by the name of the task."""
    own = {
        contender.name: 0.001 if contender.alike else tasks.get(contender.task, 0.01)
        for contender in CONTENDERS
    }
    published = {one.name: 0.004 if one.name == ONCE else 0.001 for one in CONTENDERS}

    def block(slow: int) -> Block:
        times = {name: (0.003 + seconds) * slow for name, seconds in own.items()}
        calls = {name: seconds * slow for name, seconds in published.items()}
        return Block(tasks=times, first=times, processor=times, publishing=calls, pair=0.001 * slow)

    return Laps([[block(slow) for slow in (1, 2, 1)] for _ in range(2)])


# --- the estimator -------------------------------------------------------------------------------


def test_a_task_that_follows_anothers_is_counted_apart() -> None:
    order = ["a", "a", "a", "b", "b", "b", "a", "a"]
    numbers = [9.0, 1.0, 2.0, 8.0, 4.0, 6.0, 7.0, 3.0]
    assert after_own_kind(order, numbers) == {"a": 2.0, "b": 5.0}
    assert first_of_runs(order, numbers) == {"a": 8.0, "b": 8.0}


def test_the_pace_of_several_processes_lacks_what_overlaps_with_another_contender() -> None:
    order = ["a"] * 6 + ["b"] * 6
    # The first two are taken as the processes get rid of the contender before; then each 2 s. What
    # is taken out of its turn counts where it was taken.
    a = [0.0, 0.1, 10.0, 12.0, 16.0, 14.0]
    b = [50.0, 51.0, 52.0, 53.0, 54.0, 55.0]
    assert pace(order, a + b) == {"a": 2.0, "b": 1.0}


def test_what_slows_a_whole_block_hardly_widens_the_interval_of_a_difference() -> None:
    noise = random.Random(1)
    starts = []
    for _ in range(STARTS):
        slow = [noise.choice((1.0, 8.0)) for _ in range(BLOCKS)]
        starts.append([(0.001 * one + noise.gauss(0.0, 1e-5), 0.001 * one) for one in slow])
    paired = estimate(starts, lambda blocks: median(ours - plain for ours, plain in blocks))
    apart = estimate(
        starts, lambda blocks: median(one for one, _ in blocks) - median(one for _, one in blocks)
    )
    assert paired.low <= 0 <= paired.high
    assert paired.high - paired.low < 1e-5
    assert apart.high - apart.low > paired.high - paired.low


def test_the_interval_has_the_truth_in_it_about_as_often_as_it_says() -> None:
    hits = 0
    for seed in range(60):
        noise = random.Random(seed)
        starts = [[noise.gauss(5.0, 1.0) for _ in range(10)] for _ in range(STARTS)]
        found = estimate(starts, median)
        hits += found.low <= 5.0 <= found.high
    assert 51 <= hits < 60


def test_starts_that_differ_make_the_interval_as_wide_as_they_lie_apart() -> None:
    starts = [[1.0 + start] * BLOCKS for start in range(STARTS)]
    assert estimate(starts, median) == Spread(1.0, 2.0, 3.0)


def test_the_same_data_give_the_same_interval() -> None:
    starts = [[float(number) for number in range(BLOCKS)]] * STARTS
    assert estimate(starts, median) == estimate(starts, median)


# --- a block -------------------------------------------------------------------------------------


def test_a_block_has_every_name_in_runs_and_celery_alone_thrice() -> None:
    order = runs([CELERY, OURS, SKIP], 5, random.Random(1))
    assert Counter(order) == {CELERY: 15, OURS: 5, SKIP: 5}
    assert all(len(set(order[first : first + 5])) == 1 for first in range(0, len(order), 5))
    assert order != runs([CELERY, OURS, SKIP], 5, random.Random(2))


def test_a_skip_is_not_compared_where_bodies_take_time() -> None:
    assert SKIP in {one.name for one in contenders_of(0.0)}
    assert SKIP not in {one.name for one in contenders_of(0.01)}


@pytest.mark.parametrize("pool", ["solo", "prefork"])
def test_a_block_of_either_pool_becomes_seconds_per_task(pool: str) -> None:
    order = [CELERY] * 4 + [OURS] * 4
    solo = pool == "solo"
    seen = Seen(
        publishing=[9.0, 1.0, 1.0, 1.0, 9.0, 3.0, 3.0, 3.0],
        seconds=[9.0, 1.0, 1.0, 1.0, 9.0, 2.0, 2.0, 2.0] if solo else [],
        processor=[5.0] * 8 if solo else [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
        parts=[],
        taken=[] if solo else [0.0, 0.5, 1.0, 2.0, 3.0, 3.5, 4.0, 6.0],
        pairs=[0.1, 0.3, 0.2],
        sent=NOTHING,
    )
    block = as_block(order, seen)
    assert block.tasks == {CELERY: 1.0, OURS: 2.0}
    assert block.publishing == {CELERY: 1.0, OURS: 3.0}
    assert block.processor == ({CELERY: 5.0, OURS: 5.0} if solo else {CELERY: 0.5, OURS: 2.0})
    assert block.first == ({CELERY: 9.0, OURS: 9.0} if solo else {})
    assert block.pair == 0.2


# --- what it comes to ----------------------------------------------------------------------------


def test_an_overhead_is_what_a_task_takes_more_than_celery_alone_in_the_same_block() -> None:
    found = laps(plain=0.0, locked=0.004)
    assert found.of(over("tasks", OURS)).middle == pytest.approx(0.004)
    assert found.of(over("processor", OURS)).middle == pytest.approx(0.004)
    assert found.ratio(over("tasks", OURS), pair).middle == pytest.approx(4)
    assert found.ratio(over("tasks", OURS), over("tasks", RAW_PAIR)).middle == pytest.approx(0.4)
    assert found.ratio(over("tasks", OURS), whole(CELERY)).middle == pytest.approx(4 / 3)


def test_a_difference_is_taken_within_each_block() -> None:
    found = laps(plain=0.0, locked=0.0)
    (block, *others), _ = found.starts
    # Where all blocks are mixed, ours has its middle in one block and Celery's in another.
    for other, plain, ours in zip((block, *others), (1.0, 5.0, 9.0), (2.0, 5.5, 10.0), strict=True):
        other.tasks.update({CELERY: plain, OURS: ours})
    assert over("tasks", OURS)(found.starts[0]) == 1.0


def test_what_publishing_costs_more_is_added_to_what_the_task_does() -> None:
    found = laps(plain=0.0, once=0.002)
    assert found.of(over("publishing", ONCE)).middle == pytest.approx(0.003)
    assert found.of(together(ONCE)).middle == pytest.approx(0.005)


def test_the_table_begins_with_the_least_and_names_what_is_no_lock() -> None:
    found = laps(plain=0.0, beside=0.0, locked=0.0005)
    table = report.as_table(SOLO, found, {OURS: Count(2, 2)})
    assert table.startswith("**solo, no-op**: Celery alone takes 3000 [3000 .. 6000] µs a task")
    first, second = table.splitlines()[4:6]
    assert first.startswith("| a plain task beside singleton tasks (no lock) | 0 [0 .. 0] |")
    assert second.startswith(f"| **{OURS}** | 500 [500 .. 1000] | 0.05 [0.05 .. 0.05] | 0.50 ")
    assert second.endswith(" | 2 |")
    assert f"**{SKIP}**" in table


def test_a_goal_that_is_missed_is_said() -> None:
    good = report.verdicts(SOLO, laps(plain=0.0, locked=0.0009))
    of_a_loop = "a task adds, in raw pairs of a loop, 0.90 [0.90 .. 0.90]; wanted: at most 1"
    assert good[1] == f"solo, no-op: reached: {of_a_loop}"
    assert not [line for line in good if "reached" not in line]
    bad = report.verdicts(SOLO, laps(plain=0.0, locked=0.02))
    assert bad[0].startswith("solo, no-op: MISSED: a task adds, in raw pairs of a body, 2.00 ")
    assert [line for line in bad if "MISSED: a task adds, times celery-once, 2.00 " in line]


def test_a_goal_is_open_where_the_interval_has_both_answers_in_it() -> None:
    found = laps(plain=0.0, locked=0.0009)
    for number, block in enumerate(block for blocks in found.starts for block in blocks):
        block.tasks[OURS] += 0.0005 * (number % 3 == 1)
    assert "solo, no-op: open: a task adds, in raw pairs of a loop," in "\n".join(
        report.verdicts(SOLO, found)
    )


def test_a_peer_that_adds_nothing_is_ahead_of_ours() -> None:
    found = laps(plain=0.0, locked=0.001, once=-0.001)
    line = next(line for line in report.verdicts(SOLO, found) if "celery-once" in line)
    assert line.startswith("solo, no-op: MISSED: ")


def test_the_data_have_every_contender_of_every_course() -> None:
    data = report.as_data({SOLO: laps(plain=0.0)}, {OURS: Count(2, 2)})["solo, no-op"]
    assert set(data["contenders"]) == {contender.name for contender in CONTENDERS}
    assert data["contenders"][OURS]["replies_waited_for"] == 2
    assert data["contenders"][CELERY]["replies_waited_for"] is None
    assert data["blocks"] == [3, 3]
    charts = report.as_charts({SOLO: laps(plain=0.0)})
    assert [chart.name for chart in charts] == ["worker-solo-0ms"]


# --- the parts of ours ---------------------------------------------------------------------------


@pytest.mark.parametrize("part", parts.PARTS, ids=lambda part: part.path)
def test_what_is_timed_as_a_part_is_there(part: parts.Part) -> None:
    assert callable(parts.find(part.module, part.path)[2])


def test_a_part_is_what_its_function_spends_itself() -> None:
    clock = [0.0]
    watch = parts.Stopwatch(lambda: clock[0])

    def spend(seconds: float) -> None:
        clock[0] += seconds

    inner = watch.around(lambda: spend(2.0), "inner")

    def outer_body() -> None:
        spend(1.0)
        inner()
        inner()

    watch.around(outer_body, "outer")()
    assert watch.spent == {"outer": 1.0, "inner": 4.0}


def test_what_several_steps_do_is_separated_and_the_rest_is_celerys() -> None:
    clock = [0.0]
    watch = parts.Stopwatch(lambda: clock[0])

    def spend() -> None:
        clock[0] += 1.0

    send = watch.around(spend, "sending", of_steps=True)
    for step in ("acquire", "release"):
        watch.around(send, f"{step}: the store", step=step)()
    send()
    assert {part: seconds for part, seconds in watch.spent.items() if seconds} == {
        "acquire: sending": 1.0,
        "release: sending": 1.0,
        parts.CELERYS: 1.0,
    }


def test_the_profile_begins_with_the_most_and_says_what_is_not_waiting() -> None:
    found = profile.Profile(
        parts={"the key": [0.00001] * 3, f"acquire: {parts.WAITING}": [0.00003] * 3},
        overhead=[0.00005] * 3,
        server=0.00002,
    )
    rows = profile.as_table(found, Spread(0.00004, 0.000045, 0.00005)).splitlines()[2:]
    assert rows[:4] == [
        f"| acquire: {parts.WAITING} | 30.0 [30.0 .. 30.0] | 75% |",
        "| the key | 10.0 [10.0 .. 10.0] | 25% |",
        "| **all parts** | 40.0 | 100% |",
        "| all but sending and waiting | 10.0 | 25% |",
    ]


# --- the micro benchmark -------------------------------------------------------------------------


def test_a_finding_says_what_was_wanted_and_whether_it_is_so_or_open() -> None:
    reached = Finding("sweep", Spread(1.0, 2.0, 3.0), "ms", most=3.0, digits=1)
    unsure = Finding("sweep", Spread(1.0, 2.0, 3.0), "ms", most=2.0, digits=1)
    missed = Finding("import", Spread(40.0, 40.0, 40.0), "ms", most=30, digits=0)
    free = Finding("ls", Spread(1.0, 1.0, 1.0), "s")
    assert as_table([reached, unsure, missed, free]).splitlines()[2:] == [
        "| sweep | 2.0 [1.0 .. 3.0] ms | at most 3: reached |",
        "| sweep | 2.0 [1.0 .. 3.0] ms | at most 2: open, within 1.0 .. 3.0 |",
        "| import | 40 ms | at most 30: **missed** |",
        "| ls | 1.00 s |  |",
    ]


@pytest.mark.parametrize(("middle", "word"), [(1.0, "reached"), (1.05, "open"), (1.1, "missed")])
def test_more_rounds_make_a_verdict_of_what_a_few_leave_open(middle: float, word: str) -> None:
    numbers = [middle + 0.0003 * number for number in range(-1000, 1001)]
    assert "open" in Finding.of("a task", numbers[::100], "times", most=1.05).verdict
    found = Finding.of("a task", numbers, "times", most=1.05)
    assert word in found.verdict
    assert found.value.low < 1.05 < found.value.high, "half of the rounds lie apart all the same"


def test_ratios_are_taken_round_by_round() -> None:
    measured = {"few": [[1.0, 1.0], [4.0]], "many": [[2.0], [4.0, 4.0, 9.0]]}
    assert each_over(measured, "few") == {"few": [1.0, 1.0], "many": [2.0, 1.0]}


# --- publishing ----------------------------------------------------------------------------------


def publishing_start(claim: float) -> publishing_report.Start:
    """Every second round on a machine twice as slow; seconds that ours takes more than plain."""
    more = {PLAIN: 0.0, PUBLISHING: claim}
    rounds = [
        {name: (0.001 + more.get(name, 0.0005)) * slow for name in PUBLISHERS}
        for slow in (1, 2) * 10
    ]
    parts = {"the key": 2e-05, publishing_parts.SENDING: 1e-05, publishing_parts.WAITING: 1e-05}
    server = {"evalsha": 40.0, "set": 10.0}
    celerys = {"Celery's": 1.0, "Celery's: sending": 1.0}
    return publishing_report.Start(
        rounds=rounds,
        parts=[{**parts, **celerys}] * 3,
        server=server,
        instructions=dict.fromkeys(PUBLISHERS, 2029),
    )


def test_a_claim_is_compared_by_what_it_adds_to_a_plain_call_of_its_round() -> None:
    starts = [publishing_start(0.0003)] * 2
    table = publishing_report.as_table(starts)
    row = next(line for line in table.splitlines() if line.startswith(f"| **{PUBLISHING}**"))
    assert "| 450 [300 .. 600] | 300 | 2,029 | 0.60 [0.60 .. 0.60] | 0.60 [0.60 .. 0.60] |" in row
    assert all(line.startswith("reached: ") for line in publishing_report.verdicts(starts))
    dear = publishing_report.verdicts([publishing_start(0.00045)] * 2)
    assert dear[0] == (
        "MISSED: a claim adds, times celery-once's, 0.90 [0.90 .. 0.90]; wanted: at most 0.8"
    )
    data = publishing_report.as_data(starts)
    assert set(data["contenders"]) == {*PUBLISHERS} - {PLAIN}
    least = publishing_report.as_chart([publishing_start(0.00045)] * 2).bars[0]
    assert (least.name, least.ours) == (PUBLISHING, True)


def test_the_parts_of_a_claim_leave_out_what_celery_does_anyway() -> None:
    table = publishing_report.as_table([publishing_start(0.0003)])
    rows = table[table.index("| part of") :].splitlines()[2:]
    assert rows[0] == "| the key | 20.0 [20.0 .. 20.0] | 50% |"
    assert rows[3:] == [
        "| **all parts** | 40.0 | 100% |",
        "| all but sending and waiting | 20.0 | 50% |",
        "| a claim by EVALSHA at the server, by its own count | 40.0 | |",
        "| a claim by SET at the server, by its own count | 10.0 | |",
    ]


@pytest.mark.parametrize("part", publishing_parts.PARTS, ids=lambda part: part.path)
def test_what_is_timed_as_a_part_of_a_claim_is_there(part: parts.Part) -> None:
    assert callable(parts.find(part.module, part.path)[2])


# --- the events ----------------------------------------------------------------------------------


def round_of(own_events: float, slow: float = 1.0) -> Round:
    """Celery's own events take 200 us of the parent, the lock 100 us of the pool's process."""

    def lap(parent: float, child: float) -> Lap:
        processor = {"parent": parent * slow * 1e-6, "child": child * slow * 1e-6}
        return Lap(time=sum(processor.values()), threads=10e-6 * slow, **processor)

    return {
        (BARE, False): lap(800, 150),
        (BARE, True): lap(1000, 150),
        (OBSERVED, False): lap(800, 250),
        (OBSERVED, True): lap(1000 + own_events, 250),
    }


def test_the_events_of_a_singleton_task_stand_beside_those_of_celery() -> None:
    table = events_report.as_table([round_of(50), round_of(50, slow=2), round_of(50)])
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    cells = {name: numbers for name, *numbers in rows}
    assert [[number.split(" ")[0] for number in numbers] for numbers in cells.values()] == [
        ["950", "800", "10", "150", "950", "4.75"],
        ["200", "200", "0", "0", "200", "1.00"],
        ["100", "0", "0", "100", "100", "0.50"],
        ["150", "50", "0", "100", "150", "0.75"],
        ["50", "50", "0", "0", "50", "0.25"],
    ]
    # A machine that is slow for a round makes each number of that round larger, and no ratio.
    assert cells["**the events of a singleton task**, `-E`"][-2:] == [
        "50 [50 .. 75]",
        "0.25 [0.25 .. 0.25]",
    ]


@pytest.mark.parametrize(
    ("own_events", "share", "words"),
    [
        ([50, 50], 0.02, ["reached", "reached", "reached"]),
        ([70, 70], 0.06, ["MISSED", "MISSED", "MISSED"]),
        ([40, 80], 0.02, ["open", "open", "reached"]),
    ],
)
def test_a_goal_of_the_events_is_reached_or_missed_only_if_the_interval_says_so(
    own_events: list[float], share: float, words: list[str]
) -> None:
    starts = [[round_of(own)] * 3 for own in own_events]
    found = events_report.verdicts(starts, share)
    assert [line.partition(":")[0] for line in found] == words


def test_the_data_of_the_events_are_in_seconds() -> None:
    data = events_report.as_data([round_of(50)])
    own = data["the events of a singleton task, `-E`"]
    assert own["processor"]["middle"] == pytest.approx(50e-6)
    assert own["times_celerys_own_events"]["middle"] == pytest.approx(0.25)
