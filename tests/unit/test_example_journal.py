"""The example's own arithmetic: a verdict is worth what its overlaps and losses are worth."""

from pathlib import Path

import pytest

from example_project.bank import Bank, StaleFence
from example_project.beats import doubled, runs_of_the_other, scheduled_runs
from example_project.burst import burst, unpublished, waits
from example_project.journal import Entry, Journal, What, overlaps, requeues, runs, unsettled


def entry(what: What, at: float, job: str, *, body: str = "", **fields: str) -> Entry:
    given = {"lane": "a", "worker": "worker-1", **fields}
    return Entry(at=at, what=what, job=job, body=body or job, **given)  # type: ignore[arg-type]


def start(at: float, job: str, **fields: str) -> Entry:
    return entry(What.START, at, job, **fields)


def end(at: float, job: str, detail: str = "done", **fields: str) -> Entry:
    return entry(What.END, at, job, detail=detail, **fields)


def sent(at: float, job: str) -> Entry:
    return entry(What.SENT, at, job, worker="")


def taken(at: float, job: str) -> Entry:
    return entry(What.TAKEN, at, job, worker="")


def kill(at: float, worker: str = "worker-1") -> Entry:
    return Entry(at=at, what=What.KILL, worker=worker)


@pytest.mark.parametrize(
    ("entries", "count"),
    [
        ([start(1, "x"), start(2, "y"), end(3, "x"), end(4, "y")], 1),
        ([start(1, "x"), start(2, "y", lane="b"), end(3, "x"), end(4, "y", lane="b")], 0),
        ([start(1, "x"), end(2, "x"), start(2, "y"), end(3, "y")], 0),
        ([start(1, "x"), start(2, "y"), start(3, "z")], 3),
        ([start(1, "j", body="x"), start(2, "j", body="y")], 1),
        ([start(1, "x"), kill(2), start(3, "y", worker="worker-2")], 0),
        ([start(1, "x", worker="worker-2"), kill(2), start(3, "y")], 1),
    ],
)
def test_bodies_of_one_lane_that_share_time_overlap(entries: list[Entry], count: int) -> None:
    assert len(overlaps(runs(entries))) == count


DIED = [sent(0, "x"), start(1, "x"), kill(2)]
SKIP = entry(What.SKIP, 3, "x")


@pytest.mark.parametrize(
    ("entries", "lost"),
    [
        (DIED, {"x"}),
        ([*DIED, start(3, "x", body="2"), end(4, "x", body="2")], set()),
        ([sent(0, "x"), SKIP], set()),
        ([*DIED, SKIP], {"x"}),
        ([start(1, "x"), end(2, "x", detail="LeaseLost")], {"x"}),
    ],
)
def test_a_job_that_neither_ended_nor_was_skipped_before_it_began_is_lost(
    entries: list[Entry], lost: set[str]
) -> None:
    assert unsettled(entries) == lost


def test_only_later_publications_of_a_job_are_requeues() -> None:
    entries = [sent(0, "x"), sent(1, "y"), sent(2, "x"), sent(3, "x")]
    assert [entry.at for entry in requeues(entries)] == [2, 3]


def scheduled(at: float, beat: str = "beat-1") -> Entry:
    return Entry(at=at, what=What.SENT, job=f"{beat} {at}", worker=beat)


def nights(count: int, beat: str = "beat-1", begin: float = 0.0) -> list[Entry]:
    """On time, give or take what sending takes."""
    return [scheduled(begin + night + 0.03 * (night % 3), beat) for night in range(count)]


@pytest.mark.parametrize(
    ("sent", "count"),
    [
        (nights(10), 0),
        *[([*nights(10), scheduled(4 + delay + 0.06, "beat-2")], 1) for delay in (0.0, 0.3, 0.9)],
        # No beat led at 3 and 4; the run of 5 comes late, by up to a night and the sending.
        *[
            ([*nights(3), scheduled(5 + late, "beat-2"), *nights(4, "beat-2", 6.02)], 0)
            for late in (0.0, 0.5, 1.01)
        ],
    ],
)
def test_a_run_that_a_second_beat_sends_too_is_doubled_and_a_late_one_is_not(
    sent: list[Entry], count: int
) -> None:
    assert len(doubled(sorted(sent, key=lambda run: run.at))) == count


def test_only_what_a_beat_publishes_is_a_scheduled_run() -> None:
    sender = Entry(at=1, what=What.SENT, job="x", worker="sender")
    entries = [
        sender,
        scheduled(2),
        kill(3, "beat-1"),
        scheduled(4, "beat-2"),
        scheduled(5, "beat-2"),
    ]
    assert [entry.at for entry in scheduled_runs(entries)] == [2, 4, 5]
    assert runs_of_the_other(entries) == 2
    assert runs_of_the_other([scheduled(2), scheduled(4, "beat-2")]) == 0, "none was killed"


def call(at: float) -> Entry:
    return Entry(at=at, what=What.CALL, lane="a")


ONE_WAITS = [
    *(call(0), sent(0.1, "x"), taken(0.2, "x"), start(0.3, "x")),
    # Published between the lock's grant to x and the first line of its body.
    *(call(0.2), sent(0.25, "y"), call(0.5), taken(0.6, "y"), sent(0.7, "y")),
    *(end(1, "x"), taken(1.1, "y"), start(1.2, "y"), end(2, "y")),
]


def by_time(*entries: Entry) -> list[Entry]:
    return sorted([*ONE_WAITS, *entries], key=lambda entry: entry.at)


def test_a_message_waits_until_it_is_taken_up_for_its_run() -> None:
    entries = by_time()
    assert [(wait.job, wait.since, wait.until) for wait in waits(entries)] == [
        ("x", 0.1, 0.2),
        ("y", 0.25, 1.1),
    ]
    found = burst(entries)
    assert (found.calls, found.published, found.bodies, found.waiting) == (3, 2, 2, 1)
    assert found.ran_after
    assert unpublished(entries) == {"a": 1}
    assert burst(by_time(sent(0.8, "z"))).waiting == 2
    assert not burst(by_time(call(1.5))).ran_after


def test_a_message_in_the_hands_of_a_killed_worker_waits_no_more() -> None:
    later = [sent(1.5, "z"), taken(1.6, "z"), sent(3, "w"), taken(8, "z"), start(8.1, "z")]
    assert burst(by_time(*later, kill(2, ""))).waiting == 1
    assert burst(by_time(*later, kill(2, ""), sent(1.7, "z"))).waiting == 2, "back in the queue"


def test_the_journal_gives_back_what_was_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.jsonl")
    journal.write(What.START, lane="a", job="x", body="b", worker="worker-1", fence=2**60)
    with (tmp_path / "j.jsonl").open("a") as file:
        file.write('{"at": 1, "wh')  # a line being written while it is read
    (entry,) = journal.read()
    assert (entry.what, entry.fence, entry.detail) == (What.START, 2**60, "")


def test_the_bank_refuses_a_fence_that_is_not_above_the_last(tmp_path: Path) -> None:
    bank = Bank(tmp_path / "bank.sqlite3")
    assert bank.settle("p1", 7, balance=100, cents=100, fence=2**60 + 5)
    for old in (2**60 + 4, 2**60 + 5):
        with pytest.raises(StaleFence):
            bank.settle("p2", 7, balance=1, cents=1, fence=old)
    # A refused payment leaves nothing behind.
    assert (bank.balance(7), bank.settled(7)) == (100, 100)
    assert bank.settle("p2", 7, balance=200, cents=100, fence=2**60 + 6)
    assert not bank.settle("p2", 7, balance=300, cents=100, fence=2**60 + 7)
    assert (bank.balance(7), bank.settled(7)) == (200, 200)
