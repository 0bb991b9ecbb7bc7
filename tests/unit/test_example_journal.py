"""The example's own arithmetic: a verdict is worth what its overlaps and losses are worth."""

import json
from pathlib import Path

import pytest

from example_project.bank import Bank, StaleFence
from example_project.beats import doubled, runs_of_the_other, scheduled_runs
from example_project.burst import burst, unpublished, waits
from example_project.journal import Entry, Journal, What, overlaps, requeues, runs, unsettled
from example_project.snapshot import Outcome
from example_project.timeline import draw


def start(at: float, body: str, lane: str = "a", worker: str = "worker-1", job: str = "") -> Entry:
    return Entry(at=at, what=What.START, lane=lane, body=body, job=job or body, worker=worker)


def end(
    at: float,
    body: str,
    lane: str = "a",
    worker: str = "worker-1",
    job: str = "",
    detail: str = "done",
) -> Entry:
    return Entry(
        at=at, what=What.END, lane=lane, body=body, job=job or body, worker=worker, detail=detail
    )


def test_bodies_of_one_lane_that_share_time_overlap() -> None:
    assert len(overlaps(runs([start(1, "x"), start(2, "y"), end(3, "x"), end(4, "y")]))) == 1


def test_bodies_of_two_lanes_do_not_overlap() -> None:
    assert not overlaps(
        runs([start(1, "x"), start(2, "y", lane="b"), end(3, "x"), end(4, "y", lane="b")])
    )


def test_a_body_that_starts_when_the_other_ends_does_not_overlap() -> None:
    assert not overlaps(runs([start(1, "x"), end(2, "x"), start(2, "y"), end(3, "y")]))


def test_every_pair_of_three_concurrent_bodies_counts() -> None:
    assert len(overlaps(runs([start(1, "x"), start(2, "y"), start(3, "z")]))) == 3


def test_two_bodies_of_the_same_job_overlap_too() -> None:
    assert len(overlaps(runs([start(1, "x", job="j"), start(2, "y", job="j")]))) == 1


def test_a_killed_body_ends_with_its_worker() -> None:
    kill = Entry(at=2, what=What.KILL, worker="worker-1")
    found = runs(
        [start(1, "x"), kill, start(3, "y", worker="worker-2"), end(4, "y", worker="worker-2")]
    )
    assert [run.outcome for run in found] == ["killed", "done"]
    assert found[0].ended == 2
    assert not overlaps(found)


def test_a_kill_ends_no_body_of_another_worker_nor_one_that_started_later() -> None:
    kill = Entry(at=2, what=What.KILL, worker="worker-1")
    found = runs([start(1, "x", worker="worker-2"), kill, start(3, "y")])
    assert [run.outcome for run in found] == ["running", "running"]


def test_a_job_that_died_and_did_not_run_again_is_lost() -> None:
    entries = [
        Entry(at=0, what=What.SENT, job="x", lane="a"),
        start(1, "b1", job="x"),
        Entry(at=2, what=What.KILL, worker="worker-1"),
    ]
    assert unsettled(entries) == {"x"}
    assert unsettled([*entries, start(3, "b2", job="x"), end(4, "b2", job="x")]) == set()


def test_a_skip_settles_a_job_that_never_started_and_no_other() -> None:
    skip = Entry(at=3, what=What.SKIP, job="x", lane="a")
    assert unsettled([Entry(at=0, what=What.SENT, job="x", lane="a"), skip]) == set()
    assert unsettled(
        [start(1, "b1", job="x"), Entry(at=2, what=What.KILL, worker="worker-1"), skip]
    ) == {"x"}


def test_a_body_that_raised_has_not_settled_its_job() -> None:
    assert unsettled([start(1, "x"), end(2, "x", detail="LeaseLost")]) == {"x"}


def test_only_later_publications_of_a_job_are_requeues() -> None:
    sent = [
        Entry(at=at, what=What.SENT, job=job)
        for at, job in ((0, "x"), (1, "y"), (2, "x"), (3, "x"))
    ]
    assert [entry.at for entry in requeues(sent)] == [2, 3]


def scheduled(at: float, beat: str = "beat-1") -> Entry:
    return Entry(at=at, what=What.SENT, job=f"{beat} {at}", worker=beat)


def night_after_night(count: int, beat: str = "beat-1", begin: float = 0.0) -> list[Entry]:
    """On time, give or take what sending takes."""
    return [scheduled(begin + night + 0.03 * (night % 3), beat) for night in range(count)]


def test_one_run_a_night_is_not_doubled() -> None:
    assert not doubled(night_after_night(10))
    assert not doubled([])


@pytest.mark.parametrize("delay", [0.0, 0.04, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("night", [1, 4, 8])
def test_a_run_that_a_second_beat_sends_too_is_doubled(night: int, delay: float) -> None:
    again = scheduled(night + delay + 0.06, "beat-2")
    assert len(doubled(sorted([*night_after_night(10), again], key=lambda run: run.at))) == 1


@pytest.mark.parametrize("offset", [0.01, 0.25, 0.5, 0.75, 0.99])
def test_two_beats_that_know_nothing_of_each_other_double_every_night(offset: float) -> None:
    both = [*night_after_night(10), *night_after_night(10, "beat-2", offset)]
    assert len(doubled(sorted(both, key=lambda run: run.at))) >= 8


@pytest.mark.parametrize("late", [0.0, 0.2, 0.5, 0.9, 0.98, 1.01])
def test_the_late_first_run_of_a_new_leader_is_not_doubled(late: float) -> None:
    # No beat led at 3 and 4; the run of 5 comes late, by up to a whole night and the sending.
    sent = [
        *night_after_night(3),
        scheduled(5 + late, "beat-2"),
        *night_after_night(4, "beat-2", 6.02),
    ]
    assert not doubled(sorted(sent, key=lambda run: run.at))


def test_only_what_a_beat_publishes_is_a_scheduled_run() -> None:
    sender = Entry(at=1, what=What.SENT, job="x", worker="sender")
    kill = Entry(at=3, what=What.KILL, worker="beat-1")
    entries = [sender, scheduled(2), kill, scheduled(4, "beat-2"), scheduled(5, "beat-2")]
    assert [entry.at for entry in scheduled_runs(entries)] == [2, 4, 5]
    assert runs_of_the_other(entries) == 2
    assert runs_of_the_other([scheduled(2), scheduled(4, "beat-2")]) == 0, "none was killed"


def call(at: float) -> Entry:
    return Entry(at=at, what=What.CALL, lane="a")


def sent(at: float, job: str) -> Entry:
    return Entry(at=at, what=What.SENT, lane="a", job=job)


def taken(at: float, job: str) -> Entry:
    return Entry(at=at, what=What.TAKEN, lane="a", job=job)


ONE_WAITS = [
    *(call(0), sent(0.1, "x"), taken(0.2, "x"), start(0.3, "x")),
    # Published between the lock's grant to x and the first line of its body.
    *(call(0.2), sent(0.25, "y"), call(0.5), taken(0.6, "y"), sent(0.7, "y")),
    *(end(1, "x"), taken(1.1, "y"), start(1.2, "y"), end(2, "y")),
]


def test_a_message_waits_until_it_is_taken_up_for_its_run() -> None:
    entries = sorted(ONE_WAITS, key=lambda entry: entry.at)
    assert [(wait.job, wait.since, wait.until) for wait in waits(entries)] == [
        ("x", 0.1, 0.2),
        ("y", 0.25, 1.1),
    ]
    found = burst(entries)
    assert (found.calls, found.published, found.bodies, found.waiting) == (3, 2, 2, 1)
    assert found.ran_after
    assert unpublished(entries) == {"a": 1}


def test_a_second_waiting_message_is_seen() -> None:
    entries = sorted([*ONE_WAITS, sent(0.8, "z")], key=lambda entry: entry.at)
    assert burst(entries).waiting == 2


def test_a_message_in_the_hands_of_a_killed_worker_waits_no_more() -> None:
    later = [sent(1.5, "z"), taken(1.6, "z"), sent(3, "w"), taken(8, "z"), start(8.1, "z")]
    kill = Entry(at=2, what=What.KILL, worker="")
    entries = sorted([*ONE_WAITS, *later, kill], key=lambda entry: entry.at)
    assert burst(entries).waiting == 1
    assert waits(entries)[2].until == 1.6
    requeue = sorted([*entries, sent(1.7, "z")], key=lambda entry: entry.at)
    assert burst(requeue).waiting == 2, "it was back in the queue"


def test_a_burst_whose_last_call_came_after_the_last_start_is_seen() -> None:
    entries = sorted([*ONE_WAITS, call(1.5)], key=lambda entry: entry.at)
    assert not burst(entries).ran_after


def test_the_journal_gives_back_what_was_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.jsonl")
    journal.write(What.START, lane="a", job="x", body="b", worker="worker-1", fence=2**60)
    (entry,) = journal.read()
    assert (entry.what, entry.fence, entry.detail) == (What.START, 2**60, "")
    with (tmp_path / "j.jsonl").open("a") as file:
        file.write('{"at": 1, "wh')  # a line being written while it is read
    assert len(journal.read()) == 1
    assert json.loads((tmp_path / "j.jsonl").read_text().splitlines()[0])["what"] == "start"


def test_the_bank_refuses_a_fence_that_is_not_above_the_last(tmp_path: Path) -> None:
    bank = Bank(tmp_path / "bank.sqlite3")
    assert bank.settle("p1", 7, balance=100, cents=100, fence=2**60 + 5)
    for old in (2**60 + 4, 2**60 + 5):
        with pytest.raises(StaleFence):
            bank.settle("p2", 7, balance=1, cents=1, fence=old)
    assert (bank.balance(7), bank.settled(7)) == (
        100,
        100,
    )  # a refused payment leaves nothing behind
    assert bank.settle("p2", 7, balance=200, cents=100, fence=2**60 + 6)
    assert not bank.settle("p2", 7, balance=300, cents=100, fence=2**60 + 7)
    assert (bank.balance(7), bank.settled(7)) == (200, 200)


def test_the_picture_marks_an_overlap_and_only_that() -> None:
    def picture(entries: list[Entry]) -> str:
        return draw(
            [
                Outcome(
                    locked=True,
                    zero=0,
                    seconds=5,
                    entries=entries,
                    late_write="refused",
                    money_missing=0,
                )
            ]
        )

    apart = [
        start(1, "x"),
        end(2, "x"),
        start(2.5, "y", worker="worker-2"),
        end(3, "y", worker="worker-2"),
    ]
    together = [
        start(1, "x"),
        start(1.5, "y", worker="worker-2"),
        end(2, "x"),
        end(3, "y", worker="worker-2"),
    ]
    assert (
        picture(together).count('fill-opacity="0.22"')
        == picture(apart).count('fill-opacity="0.22"') + 1
    )
    assert "overlaps: 1" in picture(together)
    assert "overlaps: 0" in picture(apart)
    assert "svg" in picture([])
