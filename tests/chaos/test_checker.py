"""The checker finds each violation in a history made by hand, and nothing where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import celery_singleton_lock
from tests.chaos.bodies import Section, bodies
from tests.chaos.broker_log import Place
from tests.chaos.celerys_own import BROKER_AWAY, OFF_BROKER
from tests.chaos.checker import judge
from tests.chaos.jobs import _VANISHED
from tests.chaos.promises import PROMISES, Promise
from tests.chaos.resource import Write
from tests.chaos.schedule import SORTS
from tests.chaos.stacks import HEAD
from tests.chaos.verdict import Kind, Verdict, Violation
from tests.harness.journal import Record

TTL = 2.0
APP = "tests.chaos.app"


class Story:
    """A history made by hand; each call adds records. Times are seconds."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def add(self, event: str, at: float, *, pid: int = 1, **fields: Any) -> Story:
        named = {
            name: fields.pop(name) for name in ("run", "task_id", "key", "fence") & fields.keys()
        }
        self.records.append(Record(event=event, at=at, pid=pid, data=fields, **named))
        return self

    def published(
        self, job: str, task: str = "late", at: float = 0.0, copy: Sequence[int] = (0, 0)
    ) -> Story:
        self.add("publishing", at, task_id=job, copy=list(copy))
        return self.add("published", at, task_id=job, task=f"{APP}.{task}")

    def received(self, job: str, at: float, copy: Sequence[int] = (0, 0)) -> Story:
        return self.add("received", at, task_id=job, worker="w", copy=list(copy))

    def taken(self, job: str, at: float, copy: Sequence[int] = (0, 0), pid: int = 1) -> Story:
        return self.add("taken", at, task_id=job, worker="w", copy=list(copy), pid=pid)

    def body(
        self,
        run: str,
        begin: float,
        end: float | None,
        *,
        fence: int | None = None,
        job: str = "",
        pid: int = 1,
        until: float = 1e9,
        sure: bool = True,
        error: str | None = None,
        late: bool = True,
        asked: float | None = None,
        attempt: int = 0,
        task: str = "late",
        call: int = 0,
        lease: str = "",
    ) -> Story:
        """A body of one step, which takes all of it; ``end`` None: it doesn't end."""
        job = job or f"job-{run}"
        facts = {
            "asked": begin if asked is None else asked,
            "worker": "w-1@localhost",
            "task": f"{APP}.{task}",
            "late": late,
            "attempt": attempt,
            "call": call,
        }
        if lease:
            facts["lease"] = lease
        self.add("taken", begin, task_id=job, worker="w", copy=[attempt, 0], pid=pid)
        self.add("start", begin, run=run, task_id=job, key="k", fence=fence, pid=pid, **facts)
        self.add("check", begin, run=run, key="k", until=until, pid=pid)
        if end is not None:
            sure_until = end if sure else None
            self.add("step", end, run=run, key="k", sure_until=sure_until, accepted=True, pid=pid)
            self.add("end", end, run=run, task_id=job, key="k", error=error, pid=pid)
        return self

    def judge(
        self,
        writes: Sequence[Write] = (),
        *,
        drained: bool = True,
        promise: Promise = replace(PROMISES["redis"], fences=False),  # noqa: B008
    ) -> Verdict:
        records = sorted(self.records, key=lambda record: record.at)
        return judge(records, {"k": writes}, TTL, drained=drained, promise=promise)

    def kinds(self, **options: Any) -> list[Kind]:
        return [violation.kind for violation in self.judge(**options).violations]

    def of_kind(self, kind: Kind) -> list[Violation]:
        return self.judge().of(kind)

    def sections(self) -> dict[str, tuple[Section, ...]]:
        return {body.run: body.sections for body in bodies(self.records)}


def write(fence: int | None, *, accepted: bool = True, run: str = "a") -> Write:
    return Write(run=run, fence=fence, accepted=accepted, highest=0)


# What is exclusive.


def test_a_step_whose_second_question_was_answered_with_yes_is_exclusive_to_its_end() -> None:
    sections = Story().body("a", 1, 9, until=3).sections()
    assert sections == {"a": (Section(begin=1, end=9),)}


def test_a_step_whose_second_question_was_answered_with_no_is_exclusive_to_its_deadline() -> None:
    sections = Story().body("a", 1, 9, until=3, sure=False).sections()
    assert sections == {"a": (Section(begin=1, end=3),)}


def test_a_killed_body_is_exclusive_until_its_death_or_its_deadline() -> None:
    story = Story().body("a", 1, None, until=3).body("b", 1, None, until=3, pid=2)
    story.add("death", 2, pid=1)
    assert story.sections() == {"a": (Section(begin=1, end=2),), "b": (Section(begin=1, end=3),)}


def test_a_death_before_a_body_began_is_not_its_own() -> None:
    story = Story().add("death", 0.5, pid=1).body("a", 1, None)
    assert bodies(story.records)[0].end == float("inf")


def test_a_body_that_began_after_the_signal_died_by_it() -> None:
    story = Story().add("death", 0.5, pid=1, until=4.0).body("a", 1, None)
    assert bodies(story.records)[0].end == 1


def test_a_check_after_the_deadline_covers_nothing() -> None:
    assert Story().body("a", 5, 6, until=4, sure=False).sections() == {"a": ()}


# Overlaps.


def test_two_bodies_of_one_key_at_once_are_an_overlap() -> None:
    story = Story().body("a", 1, 3).body("b", 2, 4)
    (violation,) = story.judge().of(Kind.OVERLAP)
    assert violation.runs == ("a", "b")
    assert violation.key == "k"


def test_an_overlap_of_bodies_is_reported_once_however_many_sections_meet() -> None:
    story = Story().body("a", 1, 9)
    story.body("b", 2, 9)
    story.add("check", 4, run="b", key="k", until=1e9)
    assert story.kinds() == [Kind.OVERLAP]


def test_a_long_section_overlaps_what_begins_after_a_shorter_one_in_between() -> None:
    story = Story().body("a", 1, 9).body("b", 2, 3).body("c", 5, 6)
    pairs = {violation.runs for violation in story.judge().of(Kind.OVERLAP)}
    assert pairs == {("a", "b"), ("a", "c")}


def test_bodies_one_after_the_other_and_of_other_keys_are_no_overlap() -> None:
    story = Story().body("a", 1, 3).body("b", 3, 4)
    story.records += [
        Record(
            event=record.event,
            at=record.at,
            pid=9,
            run=f"other-{record.run}",
            task_id=record.task_id,
            key="other",
            fence=record.fence,
            data=record.data,
        )
        for record in Story().body("a", 1, 3).records
    ]
    assert story.kinds() == []


def test_a_body_that_was_stopped_beyond_its_deadline_does_not_overlap_its_successor() -> None:
    assert Story().body("a", 1, 9, until=3, sure=False).body("b", 3.1, 4).kinds() == []


def test_duplicates_of_one_job_at_once_are_an_overlap() -> None:
    story = Story().body("a", 1, 3, job="j").body("b", 2, 4, job="j")
    assert Kind.OVERLAP in story.kinds()


def loss(story: Story, fence: int) -> Story:
    return story.add("loss", 2, fence_from=fence, fence_to=fence)


def test_leases_on_different_sides_of_a_loss_may_overlap() -> None:
    story = loss(Story().body("a", 1, 3, fence=10).body("b", 2.5, 4, fence=30), 20)
    story.add("lost", 3, task_id="job-a", fence=10)
    assert story.kinds() == []
    assert story.judge().excused == {"overlaps across a loss of the store": 1}


def test_leases_on_one_side_of_a_loss_may_not_overlap() -> None:
    story = loss(Story().body("a", 1, 3, fence=10).body("b", 2.5, 4, fence=30), 40)
    assert story.kinds() == [Kind.OVERLAP]


# More bodies at once than a limit permits.


def limited(*times: tuple[float, float], fence: int | None = None) -> Story:
    """Bodies of a task with a limit of two, each from when to when."""
    story = Story()
    for pid, (begin, end) in enumerate(times):
        story.body("abcd"[pid], begin, end, pid=pid, task="limited", fence=fence)
    return story


def test_as_many_bodies_at_once_as_the_limit_permits_are_no_overlap() -> None:
    story = limited((1, 9), (2, 5), (5, 8), (8.5, 9))
    assert story.judge().violations == ()
    assert story.judge().counts["bodies at once, of which a limit permits two"] == 3


def test_one_body_more_than_the_limit_permits_is_an_overlap() -> None:
    (violation,) = limited((1, 9), (2, 5), (4.9, 8)).judge().violations
    assert (violation.kind, violation.runs) == (Kind.OVERLAP, ("a", "b", "c"))
    assert "for 0.100 s" in violation.text


def test_each_group_of_more_bodies_than_the_limit_permits_is_found_once() -> None:
    story = limited((1, 9), (2, 9), (3, 9), (4, 9))
    story.add("check", 5, run="a", key="k", until=1e9)
    groups = {violation.runs for violation in story.judge().of(Kind.OVERLAP)}
    assert groups == {("a", "b", "c"), ("a", "b", "d"), ("a", "c", "d"), ("b", "c", "d")}
    assert len(story.judge().violations) == 4


def test_a_loss_excuses_a_third_body_only_if_it_lies_between_the_grants_of_the_three() -> None:
    for at, excuses in ((0.5, 0), (3.5, 1), (4.5, 0)):
        story = limited((1, 9), (2, 9), (4, 5)).add("loss", at, fence_from=20, fence_to=20)
        assert len(story.judge().violations) == 1 - excuses, at
        assert sum(story.judge().excused.values()) == excuses


def test_three_bodies_on_one_side_of_a_loss_are_an_overlap_whatever_is_on_the_other() -> None:
    story = limited((1, 9), (3, 9), (4, 9), (5, 9)).add("loss", 2, fence_from=20, fence_to=20)
    (violation,) = story.judge().violations
    assert violation.runs == ("b", "c", "d")


def test_a_body_of_a_limit_needs_no_fence() -> None:
    assert limited((1, 2)).kinds(promise=PROMISES["etcd"]) == []


# Losses that have to be reported.


def lost_between(*reports: str, killed: float | None = None) -> Story:
    """Body b begins while a, with the lower fence, is not over; a never asks for its lease."""
    story = Story().body("a", 1, None if killed else 6, fence=10, until=1.5, sure=False)
    story.body("b", 2, 3, fence=20, pid=2)
    for report in reports:
        story.add(report, 6.1, task_id="job-a", fence=10)
    if killed:
        story.add("death", killed, pid=1)
    return story.add("published", 60, task_id="other").add("skip", 60, task_id="other", pid=9)


def test_a_lease_that_was_lost_has_to_be_reported_as_lost() -> None:
    assert lost_between("lost").judge().violations == ()


def test_a_loss_that_is_not_reported_is_found_though_the_body_never_asked_for_its_lease() -> None:
    (violation,) = lost_between().judge().of(Kind.UNREPORTED)
    assert violation.runs == ("a", "b")
    assert violation.key == "k"


def test_a_loss_that_is_reported_twice_is_found() -> None:
    assert lost_between("lost", "lost").kinds() == [Kind.UNREPORTED]


@pytest.mark.parametrize("reports", [("released",), ("lost", "released")])
def test_a_lost_lease_that_is_reported_as_released_is_found(reports: tuple[str, ...]) -> None:
    assert lost_between(*reports).kinds() == [Kind.RELEASED]


def test_a_report_of_another_grant_of_the_job_does_not_count() -> None:
    story = lost_between().add("lost", 6.1, task_id="job-a", fence=9)
    assert story.kinds() == [Kind.UNREPORTED]


def test_a_loss_of_the_store_is_no_excuse_for_a_loss_that_is_not_reported() -> None:
    assert Kind.UNREPORTED in loss(lost_between(), 15).kinds()


@pytest.mark.parametrize("reports", [("release-failed",), ("release-failed", "release-failed")])
def test_a_release_that_the_store_did_not_answer_is_no_unreported_loss(
    reports: tuple[str, ...],
) -> None:
    # Twice where the completion record of a done attempt could not be written either.
    verdict = lost_between(*reports).judge()
    assert verdict.violations == ()
    assert sum(verdict.excused.values()) == 1


def test_a_lease_whose_release_is_reported_as_failed_three_times_is_found() -> None:
    assert lost_between(*["release-failed"] * 3).kinds() == [Kind.UNREPORTED]


def test_a_release_after_the_loss_was_reported_may_fail() -> None:
    assert lost_between("lost", "release-failed").kinds() == []


def test_a_process_that_died_within_a_ttl_of_its_loss_need_not_have_reported_it() -> None:
    verdict = lost_between(killed=2 + TTL).judge()
    assert verdict.violations == ()
    assert sum(verdict.excused.values()) == 1


def test_a_process_that_lived_on_for_longer_has_to_have_reported_its_loss() -> None:
    assert lost_between(killed=3.5 + TTL).kinds() == [Kind.UNREPORTED]


def test_a_process_that_stood_still_until_shortly_before_its_death_need_not() -> None:
    story = lost_between(killed=9).add("stopped", 1.8).add("continued", 8)
    assert story.kinds() == []


def test_a_process_that_stands_still_need_not_have_reported_its_loss() -> None:
    story = Story().body("a", 1, None, fence=10, until=1.5).body("b", 2, 9, fence=20, pid=2)
    assert story.add("stopped", 1.8).kinds() == []


def test_a_body_that_died_before_the_other_began_had_not_lost_its_lease() -> None:
    verdict = lost_between(killed=1.9).judge()
    assert verdict.violations == ()
    assert verdict.excused == {}


def test_a_loss_is_not_missed_before_it_had_time_to_be_reported() -> None:
    story = Story().body("a", 1, None, fence=10, until=1.5).body("b", 2, None, fence=20, pid=2)
    assert story.kinds() == []


def test_a_lease_whose_successor_began_after_its_body_had_ended_was_not_lost() -> None:
    story = Story().body("a", 1, 2, fence=10).add("released", 2.2, task_id="job-a", fence=10)
    assert story.body("b", 2.1, 3, fence=20, pid=2).kinds() == []


# A hold() in a plain task.


def held(*, error: str | None = None) -> Story:
    """A hold() whose successor began while it was not over."""
    story = Story().body(
        "a", 1, 6, fence=10, until=1.5, sure=False, task="held", lease="hold-1", error=error
    )
    return story.body("b", 2, 3, fence=20, pid=2).add("skip", 60, task_id="other", pid=9)


def test_a_hold_and_a_task_of_one_key_at_once_are_an_overlap() -> None:
    story = Story().body("a", 1, 3, task="held", lease="hold-1").body("b", 2, 4, pid=2)
    assert story.kinds() == [Kind.OVERLAP]


def test_the_loss_of_a_hold_is_reported_by_the_id_of_its_lease() -> None:
    assert held().add("lost", 6.1, task_id="hold-1", fence=10).kinds() == []
    assert held().add("released", 6.1, task_id="hold-1", fence=10).kinds() == [Kind.RELEASED]
    assert held().add("lost", 6.1, task_id="job-a", fence=10).kinds() == [Kind.UNREPORTED]


def test_a_hold_needs_a_fence_where_the_store_has_fences() -> None:
    story = Story().body("a", 1, 2, task="held", lease="hold-1")
    assert story.kinds(promise=PROMISES["etcd"]) == [Kind.FENCE]


def test_a_plain_task_whose_hold_was_lost_has_to_succeed_later() -> None:
    story = held(error="LeaseLost").add("lost", 6.1, task_id="hold-1", fence=10)
    story.published("job-a", "held")
    left(story, "job-a", 6.2, "RETRY")
    assert story.kinds() == [Kind.JOB_LOST]
    assert story.body("c", 8, 9, fence=30, job="job-a", task="held", attempt=1).kinds() == []


def test_a_plain_task_may_run_again_after_its_success() -> None:
    story = Story().published("j", "held").body("a", 1, 2, job="j", task="held", lease="hold-1")
    left(story.add("released", 2.1, task_id="hold-1"), "j", 2.2, "SUCCESS")
    assert story.body("b", 5, 6, job="j", task="held", lease="hold-2").kinds() == []


# Holders that have to be notified of a restart without data.


def restarted(
    end: float,
    *,
    notified: bool = True,
    begin: float = 1,
    task: str = "lasting",
    by: str = "LeaseInterrupt",
) -> Story:
    """The store is killed at 3, answers at 5; the body ends at ``end``, by its loss if notified."""
    error = by if notified else None
    story = Story().body("a", begin, end, fence=10, task=task, sure=not notified, error=error)
    return story.add("emptied", 5, killed=3.0).add("skip", 60, task_id="other", pid=9)


def notified_holders(story: Story) -> int:
    """To how many the rule was applied."""
    return story.judge().counts["leases taken by a restart of the store"]


def test_a_holder_that_is_notified_within_a_second_of_the_restart_is_counted() -> None:
    for story in (restarted(5.9), restarted(5.9, by="LeaseLost"), restarted(4.9)):
        assert (story.kinds(), notified_holders(story)) == ([], 1)


@pytest.mark.parametrize(
    "story", [restarted(6.1), restarted(6.1, notified=False), restarted(6.1, by="Retry")]
)
def test_a_holder_that_is_notified_of_the_restart_later_or_never_is_found(story: Story) -> None:
    (violation,) = story.judge().violations
    assert (violation.kind, violation.runs, violation.key) == (Kind.REPORTED_LATE, ("a",), "k")


def test_the_signal_of_a_loss_notifies_its_process_too() -> None:
    story = restarted(9, notified=False).add("lost", 5.5, task_id="job-a", fence=10)
    assert (story.kinds(), notified_holders(story)) == ([], 1)
    other = restarted(9, notified=False).add("lost", 5.5, task_id="job-a", fence=9)
    assert other.kinds() == [Kind.REPORTED_LATE]


@pytest.mark.parametrize(
    "story",
    [
        restarted(5.5, notified=False),  # over before it had to be notified
        restarted(4.5, notified=False),  # over before the store answered
        restarted(9, notified=False, begin=3.5),  # granted after the kill, if not by this store
        restarted(9, notified=False, task="late"),  # renewed by the clock soon
        restarted(9).add("lost", 2.9, task_id="job-a", fence=10),  # lost before
    ],
)
def test_a_body_that_lost_nothing_by_the_restart_need_not_be_notified(story: Story) -> None:
    assert (story.kinds(), notified_holders(story)) == ([], 0)


def test_a_holder_is_not_late_before_its_second_is_over() -> None:
    story = Story().body("a", 1, None, fence=10, task="lasting").add("emptied", 5, killed=3.0)
    assert story.add("skip", 5.9, task_id="other", pid=9).kinds() == []
    assert story.add("skip", 6.1, task_id="other", pid=9).kinds() == [Kind.REPORTED_LATE]


@pytest.mark.parametrize(
    ("at", "until", "seconds", "kinds"),
    [
        (5.5, 5.6, 0.1, []),
        (5.5, 5.6, 0.09, [Kind.REPORTED_LATE]),
        (4.0, 4.9, 0.5, [Kind.REPORTED_LATE]),  # before the store answered
        (6.05, 6.2, 0.5, [Kind.REPORTED_LATE]),  # after the second
    ],
)
def test_the_time_for_which_the_machine_was_late_is_added_to_the_second(
    at: float, until: float, seconds: float, kinds: list[Kind]
) -> None:
    story = restarted(6.095).add("late", at, until=until, seconds=seconds, pid=9)
    assert (story.kinds(), notified_holders(story)) == (kinds, 1)


@pytest.mark.parametrize(
    ("name", "target", "at", "end", "counts"),
    [
        ("stall", "w", 2, 3.5, False),
        ("stall", "all", 5.5, 7, False),
        ("stall", "v", 2, 9, True),  # another worker's way
        ("stall", "w", 1, 2.9, True),  # over before the kill
        ("stall", "w", 6.1, 7, True),  # after the second
        ("restart-empty", "store", 3, 5, True),  # the restart itself
        ("freeze-server", "store", 5.5, 7, False),
        ("restart-broker", "broker", 2, 9, True),
        ("kill-child", "w", 2, 9, True),
    ],
)
def test_a_holder_is_left_out_only_if_a_fault_lay_between_it_and_the_store(
    name: str, target: str, at: float, end: float, counts: bool
) -> None:
    story = restarted(9, notified=False).add("fault", at, name=name, target=target, end=end, pid=9)
    assert (story.kinds(), notified_holders(story)) == ([Kind.REPORTED_LATE] * counts, int(counts))


@pytest.mark.parametrize(
    ("since", "until", "pid", "counts"),
    [(2, 3.5, 1, False), (5.5, None, 1, False), (2, 9, 2, True), (1, 2.5, 1, True)],
)
def test_a_holder_is_left_out_if_its_process_was_stopped_meanwhile(
    since: float, until: float | None, pid: int, counts: bool
) -> None:
    story = restarted(9, notified=False).add("stopped", since, pid=pid)
    if until is not None:
        story.add("continued", until, pid=pid)
    assert (story.kinds(), notified_holders(story)) == ([Kind.REPORTED_LATE] * counts, int(counts))


# Fences.


@pytest.mark.parametrize("fence", [10, 9])
def test_a_fence_that_does_not_rise_is_found(fence: int) -> None:
    assert Story().body("a", 1, 2, fence=10).body("b", 3, 4, fence=fence).kinds() == [Kind.FENCE]


def test_a_fence_is_compared_with_the_highest_before_it() -> None:
    story = Story().body("a", 1, 2, fence=10).body("b", 3, 4, fence=5).body("c", 5, 6, fence=7)
    assert story.kinds() == [Kind.FENCE, Kind.FENCE]


def test_bodies_whose_grants_are_not_ordered_may_have_their_fences_in_any_order() -> None:
    # The first was asked for before the second had begun: it was stopped before it could say so.
    story = Story().body("a", 1, 2, fence=10).body("b", 3, 4, fence=9, asked=0.5)
    assert story.add("lost", 3, task_id="job-b", fence=9).kinds() == []


def test_a_loss_is_no_excuse_for_a_fence() -> None:
    assert Kind.FENCE in loss(Story().body("a", 1, 2, fence=10).body("b", 3, 4, fence=9), 9).kinds()


# Writes.


def test_a_stale_write_that_is_accepted_is_found() -> None:
    assert Story().kinds(writes=[write(5), write(7), write(6)]) == [Kind.STALE_WRITE]


def test_a_stale_write_that_is_refused_is_no_violation() -> None:
    verdict = Story().judge(writes=[write(5), write(7), write(6, accepted=False), write(7)])
    assert verdict.violations == ()
    assert verdict.counts["stale writes refused"] == 1


# Jobs.


def left(
    story: Story, job: str, at: float, state: str | None, error: str | None = None, pid: int = 1
) -> Story:
    return story.add("left", at, task_id=job, state=state, error=error, pid=pid)


def test_a_job_that_never_ran_is_lost() -> None:
    assert Story().published("j").kinds() == [Kind.JOB_LOST]


def test_a_job_is_lost_before_the_drain_only_if_it_has_failed() -> None:
    story = Story().published("j")
    assert story.kinds(drained=False) == []
    assert left(story, "j", 5, "FAILURE", "ValueError").kinds(drained=False) == [Kind.JOB_LOST]


def test_a_job_that_succeeded_in_the_end_is_not_lost() -> None:
    story = Story().published("j").body("a", 1, None, job="j").add("death", 2, pid=1)
    assert story.body("b", 3, 4, job="j", pid=2).kinds() == []


def skip(story: Story, at: float, copy: Sequence[int] = (0, 0)) -> Story:
    return story.taken("j", at, copy, pid=9).add("skip", at, task_id="j", pid=9)


def test_a_job_that_was_skipped_before_it_began_is_not_lost() -> None:
    assert skip(Story().published("j", "late_skip"), 1).kinds() == []


def test_a_job_that_was_skipped_after_it_had_begun_is_lost() -> None:
    story = Story().published("j", "late_skip").body("a", 1, None, job="j")
    assert skip(story.add("death", 2, pid=1), 3).kinds() == [Kind.JOB_LOST]


def test_a_job_whose_skip_was_its_result_is_not_lost_when_a_second_delivery_of_it_dies() -> None:
    story = skip(Story().published("j", "late_skip"), 1)
    assert story.body("a", 2, None, job="j").add("death", 3, pid=1).kinds() == []


def requeued_and_delivered_again(copied: float) -> Story:
    """The message is taken up, requeued, delivered once more and killed; its copy is skipped."""
    story = Story().published("j", "late_skip").taken("j", 1, pid=2)
    story.published("j", "late_skip", at=copied, copy=(0, 1))
    story.body("a", 3, None, job="j").add("death", 4, pid=1)
    return skip(story, 5, copy=(0, 1))


def test_a_body_of_a_message_that_was_requeued_before_does_not_keep_its_copy_from_a_skip() -> None:
    assert requeued_and_delivered_again(copied=2).kinds() == []


def test_a_job_whose_copy_was_made_after_it_had_begun_may_not_be_skipped() -> None:
    assert requeued_and_delivered_again(copied=3.5).kinds() == [Kind.JOB_LOST]


def lose_lease(story: Story, times: int) -> Story:
    for number in range(times):
        story.body(f"a{number}", 1 + number, 1.5 + number, job="j", error="LeaseInterrupt")
    return left(story, "j", 9, "FAILURE", "LeaseLost")


def test_a_job_may_be_given_up_when_four_of_its_leases_were_lost_to_faults() -> None:
    story = lose_lease(Story().published("j").add("fault", 0, end=9, name="cut"), 4)
    assert story.kinds() == []


@pytest.mark.parametrize("task", ["plain", "heedless"])
def test_a_job_whose_policy_is_not_to_retry_may_be_given_up_at_the_first_loss(task: str) -> None:
    story = lose_lease(Story().published("j", task).add("fault", 0, end=9, name="cut"), 1)
    assert story.kinds() == []


def test_a_job_may_not_be_given_up_when_three_leases_were_lost() -> None:
    story = lose_lease(Story().published("j").add("fault", 0, end=9, name="cut"), 3)
    assert story.kinds() == [Kind.JOB_LOST]


def test_a_job_may_not_be_given_up_when_nothing_was_broken() -> None:
    story = lose_lease(Story().published("j").add("fault", 50, end=51, name="cut"), 4)
    assert story.kinds() == [Kind.JOB_LOST]


def conflict(begun: bool) -> Story:
    story = Story().published("j", "waiting")
    if begun:
        story.body("a", 1, None, job="j").add("death", 2, pid=1)
    return left(story.add("refused", 4, task_id="j"), "j", 5, "FAILURE", "LockConflict")


def test_a_job_that_never_began_may_fail_of_a_conflict() -> None:
    assert conflict(begun=False).kinds() == []


def test_a_job_that_had_begun_may_not_fail_of_a_conflict() -> None:
    assert conflict(begun=True).kinds() == [Kind.JOB_LOST]


def test_a_job_that_was_refused_is_not_lost_when_a_second_delivery_of_it_dies() -> None:
    story = Story().published("j", "waiting").taken("j", 1, pid=9)
    left(story.add("refused", 4, task_id="j", pid=9), "j", 4.1, "FAILURE", "LockConflict", pid=9)
    assert story.body("a", 5, None, job="j").add("death", 6, pid=1).kinds() == []


def traced(story: Story, job: str, at: float, place: Place = Place.POPPED) -> Story:
    """The broker's file is read when the job does not end."""
    return story.add("traced", at, task_id=job, place=str(place), steps="sent, popped")


def killed_in_the_midst(task: str) -> Story:
    story = Story().published("j", task).received("j", 0.5)
    return story.body("a", 1, None, job="j").add("death", 2, pid=1, worker="w")


def test_a_job_acknowledged_early_may_die_with_its_process() -> None:
    story = killed_in_the_midst("early")
    assert story.kinds() == [Kind.JOB_LOST], "the broker's file was not read"
    assert traced(story, "j", 9, Place.ACKNOWLEDGED).kinds() == []


@pytest.mark.parametrize("place", [Place.NOWHERE, Place.QUEUE, Place.UNACKED])
def test_an_early_job_whose_message_was_not_acknowledged_is_lost(place: Place) -> None:
    story = traced(killed_in_the_midst("early"), "j", 9, place)
    assert story.kinds() == [Kind.JOB_LOST]


def test_an_early_job_died_with_its_process_though_another_delivery_was_dropped_later() -> None:
    story = killed_in_the_midst("queued_early").taken("j", 3, pid=2)
    left(story, "j", 3.1, "IGNORED", pid=2)
    assert traced(story, "j", 9, Place.ACKNOWLEDGED).kinds() == []


def test_a_job_acknowledged_late_may_not_die_with_its_process() -> None:
    story = traced(killed_in_the_midst("late"), "j", 9, Place.ACKNOWLEDGED)
    assert story.kinds() == [Kind.JOB_LOST]


def test_a_job_acknowledged_early_is_lost_if_its_worker_had_died_before() -> None:
    story = Story().published("j", "early").received("j", 0.5)
    traced(story.add("death", 0.4, pid=1, worker="w"), "j", 9, Place.ACKNOWLEDGED)
    assert story.kinds() == [Kind.JOB_LOST]


def test_a_dropped_older_copy_is_not_the_end_of_an_early_job_that_died_with_its_process() -> None:
    story = Story().published("j", "early").published("j", "early", at=0.5, copy=(0, 1))
    story.received("j", 0.6, (0, 1)).taken("j", 1, (0, 1))
    story.add("start", 1.0, run="a", task_id="j", key="k", worker="w", task=f"{APP}.early")
    left(story.taken("j", 1.5, pid=2), "j", 1.6, "IGNORED", pid=2)
    traced(story.add("death", 2, pid=1, worker="w"), "j", 9, Place.ACKNOWLEDGED)
    assert story.kinds() == []


def popped(job: str = "j", task: str = "late") -> Story:
    """A message that no worker received, and the end of a worker after it was sent."""
    story = Story().published(job, task, at=2).add("death", 2.1, pid=7, worker="w")
    return traced(story, job, 9)


def test_a_message_that_was_popped_and_never_noted_has_vanished() -> None:
    assert popped().kinds() == []
    assert popped().judge().excused == {_VANISHED: 1}


@pytest.mark.parametrize("place", [place for place in Place if place is not Place.POPPED])
def test_a_message_that_is_elsewhere_has_not_vanished(place: Place) -> None:
    story = Story().published("j", at=2).add("death", 2.1, pid=7, worker="w")
    assert story.kinds() == [Kind.JOB_LOST], "the broker's file was not read"
    assert traced(story, "j", 9, place).kinds() == [Kind.JOB_LOST]


def test_a_message_that_a_worker_got_after_all_has_not_vanished() -> None:
    assert popped().received("j", 10).kinds() == [Kind.JOB_LOST]


@pytest.mark.parametrize("end", ["down", "cut-off"])
def test_a_message_vanishes_with_the_broker_or_on_the_way_to_it(end: str) -> None:
    story = traced(Story().published("j", at=2), "j", 9)
    assert story.kinds() == [Kind.JOB_LOST], "nothing has ended"
    assert story.add(end, 2.8, worker="broker").kinds() == []


def test_a_message_does_not_vanish_with_what_had_ended_before_it_was_sent() -> None:
    story = Story().published("j", at=5).add("death", 2.1, pid=7, worker="other")
    assert traced(story, "j", 9).kinds() == [Kind.JOB_LOST]


def test_a_message_does_not_vanish_with_a_pool_process() -> None:
    story = Story().published("j", at=2).published("i", at=2.5).received("i", 2.6)
    story.body("b", 2.6, 3, job="i").add("death", 2.55, pid=5, worker="w")
    assert traced(story, "j", 9).kinds() == [Kind.JOB_LOST]


@pytest.mark.parametrize(("placed", "kinds"), [(True, [Kind.JOB_LOST]), (False, [])])
def test_a_call_of_a_queue_vanishes_only_before_it_has_a_place(
    placed: bool, kinds: list[Kind]
) -> None:
    def story() -> Story:
        call = Story().published("j", "queued", at=2)
        call.add("returned", 2.2, task_id="j", entered=1.9, placed=placed)
        return call.add("death", 2.1, pid=7, worker="w")

    assert traced(story(), "j", 9).kinds() == kinds
    taken = story().received("j", 2.05).taken("j", 2.06)
    assert traced(taken, "j", 9).kinds() == [Kind.JOB_LOST]


@pytest.mark.parametrize(
    ("window", "kinds"),
    [
        ({}, []),  # all that it had
        ({"since": 2.4}, []),
        ({"lost_from": 2.4}, []),
        ({"since": 3.0}, [Kind.JOB_LOST]),
        ({"lost_from": 3.0}, [Kind.JOB_LOST]),
    ],
)
def test_a_waiting_call_is_lost_with_the_store_only_if_the_store_has_lost_it(
    window: dict[str, Any], kinds: list[Kind]
) -> None:
    story = Story().published("j", "queued", at=2)
    story.add("returned", 2.2, task_id="j", entered=1.9, placed=True)
    assert story.kinds() == [Kind.JOB_LOST], "the store has lost nothing"
    assert story.add("loss", 4, fence_from=5, fence_to=6, **window).kinds() == kinds


CLAIM = "csl:{x}:claim|newest|k: held: q j+b4 queued {}"


def test_the_claim_of_a_message_that_vanished_stays() -> None:
    story = popped().add("key-left", 9, text=CLAIM)
    assert story.kinds() == []
    assert story.judge().excused["claims of messages that vanished"] == 1


@pytest.mark.parametrize(
    ("task", "seconds", "kinds"),
    [
        ("newest", "3594.5", []),
        ("newest", "3700.0", [Kind.KEY_LEFT]),
        ("newest", "ever", [Kind.KEY_LEFT]),
        ("claimed", "7000.0", []),
        ("claimed", "7300.0", [Kind.KEY_LEFT]),
    ],
)
def test_the_claim_of_a_message_that_vanished_stays_for_unique_for(
    task: str, seconds: str, kinds: list[Kind]
) -> None:
    assert popped(task=task).add("key-left", 9, text=f"{CLAIM}, for {seconds}").kinds() == kinds


def discarded(story: Story, at: float) -> Story:
    """A worker's parent discards the message, and works on."""
    story.published("j", "claimed").add("damaged", 0, task_id="j")
    story.add("discarded", at, task_id="j", pid=7)
    return story.add("received", 40, task_id="i", pid=7, worker="w", copy=[0, 0])


def test_the_claim_of_a_discarded_message_is_freed() -> None:
    assert discarded(Story(), 1).kinds() == []
    story = discarded(Story(), 1).add("key-left", 50, text=CLAIM)
    assert story.kinds() == [Kind.KEY_LEFT]
    story = (
        discarded(Story(), 1).add("fault", 0.5, end=30, name="cut").add("key-left", 50, text=CLAIM)
    )
    assert story.kinds() == [Kind.KEY_LEFT], "it is repeated when the store is back"


def test_the_claim_of_a_discarded_message_may_stay_if_its_worker_died_then() -> None:
    story = discarded(Story(), 1).add("death", 2, pid=7, worker="w")
    assert story.add("key-left", 50, text=CLAIM).kinds() == []


def test_a_call_may_be_answered_with_a_discarded_message_until_its_claim_must_be_free() -> None:
    assert discarded(Story(), 1).add("answered", 3, task_id="j", entered=2.9).kinds() == []
    story = discarded(Story(), 1).add("answered", 9, task_id="j", entered=8.9)
    assert story.kinds() == [Kind.DISCARDED]


def test_a_call_may_be_answered_with_a_discarded_message_while_a_fault_delays_its_end() -> None:
    story = discarded(Story(), 1).add("fault", 0.5, end=30, name="cut")
    assert story.add("answered", 9, task_id="j", entered=8.9).kinds() == []
    assert story.add("answered", 36, task_id="j", entered=35).kinds() == [Kind.DISCARDED]


def test_a_call_may_be_answered_with_a_discarded_message_whose_end_the_store_lost() -> None:
    story = discarded(Story(), 1).add("answered", 9, task_id="j", entered=8.9)
    assert loss(story, 5).kinds() == []


def test_a_damaged_message_that_no_worker_discards_is_a_job_that_was_lost() -> None:
    story = Story().published("j", "claimed").add("damaged", 0, task_id="j")
    assert story.kinds() == [Kind.JOB_LOST]


@pytest.mark.parametrize(
    "text", [CLAIM.replace("q j+", "q i+"), CLAIM.replace("queued", "running")]
)
def test_no_other_claim_stays(text: str) -> None:
    story = popped().add("key-left", 9, text=text)
    assert story.kinds() == [Kind.KEY_LEFT]


def test_the_claim_of_a_message_that_was_taken_up_does_not_stay() -> None:
    story = popped().taken("j", 12).add("key-left", 13, text=CLAIM)
    assert Kind.KEY_LEFT in story.kinds()


# Runs after the success.


def done(story: Story, run: str, job: str, begin: float, fence: int | None = None) -> Story:
    """A body that succeeds within a second, with all that follows."""
    story.taken(job, begin)
    story.body(run, begin, begin + 1, job=job, fence=fence)
    story.add("released", begin + 1.1, task_id=job)
    return left(story, job, begin + 1.2, "SUCCESS")


def test_a_job_that_is_asked_for_after_its_success_was_recorded_ran_again() -> None:
    story = done(Story().published("j"), "a", "j", 1).body("b", 5, 6, job="j")
    (violation,) = story.judge().of(Kind.RUN_AGAIN)
    assert violation.runs == ("a", "b")


def test_a_duplicate_that_had_been_granted_the_key_before_did_not_run_again() -> None:
    story = done(Story().published("j"), "a", "j", 1).body("b", 5, 6, job="j", asked=2.05)
    assert story.judge().of(Kind.RUN_AGAIN) == []


def test_an_earlier_attempt_may_run_again() -> None:
    story = Story().published("j").taken("j", 1).body("a", 1, 2, job="j", attempt=1)
    left(story.add("released", 2.1, task_id="j"), "j", 2.2, "SUCCESS")
    assert story.body("b", 5, 6, job="j", attempt=0).kinds() == []
    assert story.body("c", 7, 8, job="j", attempt=1).kinds() == [Kind.RUN_AGAIN]


def test_a_job_whose_release_was_not_acknowledged_may_run_again() -> None:
    story = Story().published("j").taken("j", 1).body("a", 1, 2, job="j")
    story = left(story, "j", 2.2, "SUCCESS").body("b", 5, 6, job="j")
    assert story.kinds() == []


def unacknowledged(story: Story, *, lived_until: float) -> Story:
    """A job that is done while a fault lies between its process and the store, until 4."""
    story.taken("j", 1).body("a", 1, 2, job="j").add("fault", 1.5, name="freeze-server", end=4)
    left(story, "j", 2.2, "SUCCESS")
    return story.body("other", lived_until - 0.1, lived_until)


def test_a_job_whose_process_lived_on_and_reached_the_store_may_not_run_again() -> None:
    story = unacknowledged(Story().published("j"), lived_until=20)
    assert story.body("b", 30, 31, job="j", asked=8.1).of_kind(Kind.RUN_AGAIN)


def test_a_job_may_run_again_before_its_process_can_have_reached_the_store() -> None:
    story = unacknowledged(Story().published("j"), lived_until=20)
    assert not story.body("b", 30, 31, job="j", asked=7.9).of_kind(Kind.RUN_AGAIN)


def test_a_job_may_run_again_whose_process_died_before_it_reached_the_store() -> None:
    story = unacknowledged(Story().published("j"), lived_until=3)
    assert not story.body("b", 30, 31, job="j", pid=8).of_kind(Kind.RUN_AGAIN)
    story = unacknowledged(Story().published("j"), lived_until=20).add("death", 6, worker="w")
    assert not story.body("b", 30, 31, job="j", pid=8).of_kind(Kind.RUN_AGAIN)


@pytest.mark.parametrize(
    ("error", "may"), [("the store refuses: OOM", True), ("the store doesn't answer", False)]
)
def test_a_job_may_run_again_if_the_store_refused_its_end(error: str, may: bool) -> None:
    story = unacknowledged(Story().published("j"), lived_until=20)
    story.add("release-failed", 2.1, task_id="j", error=error).body("b", 30, 31, job="j")
    assert bool(story.of_kind(Kind.RUN_AGAIN)) is not may


def test_a_job_that_a_shutdown_struck_before_its_success_was_recorded_may_run_again() -> None:
    story = Story().published("j").taken("j", 1).body("a", 1, 2, job="j")
    story = left(story.add("released", 2.1, task_id="j"), "j", 2.2, None)
    assert story.body("b", 5, 6, job="j").kinds() == []


def test_a_job_whose_end_the_store_has_not_taken_may_run_again() -> None:
    story = done(Story().published("j"), "a", "j", 1).add("not-marked", 2.3, task_id="j", pid=7)
    story.body("b", 5, 6, job="j")
    assert story.kinds() == [Kind.RUN_AGAIN], "another process has said so"
    assert story.add("not-marked", 2.3, task_id="j").kinds() == []


def test_an_early_job_may_run_again() -> None:
    story = Story().published("j", "early").taken("j", 1)
    story.body("a", 1, 2, job="j", late=False).add("released", 2.1, task_id="j")
    left(story, "j", 2.2, "SUCCESS").body("b", 5, 6, job="j", late=False)
    assert story.kinds() == []


def test_a_job_may_run_again_after_a_loss_of_the_store() -> None:
    story = done(Story().published("j"), "a", "j", 1, fence=10)
    story = loss(story.body("b", 5, 6, job="j", fence=30), 20)
    assert story.kinds() == []


# What the campaign itself saw.


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        ("key-left", Kind.KEY_LEFT),
        ("never-ends", Kind.NEVER_ENDS),
        ("broken", Kind.BROKEN),
    ],
)
def test_what_the_campaign_wrote_down_is_a_violation(event: str, kind: Kind) -> None:
    assert Story().add(event, 1, text="it was so").kinds() == [kind]


# What the stores promise differs.


def failed_over(*, since: float, at: float) -> Story:
    """Two bodies at once, whose leases two servers granted in a failover."""
    story = Story().body("a", 1, 5, fence=100).body("b", 2, 3, fence=200, pid=2)
    return story.add("loss", at, name="leader-moved", since=since, fence_from=90, fence_to=150)


@pytest.mark.parametrize("store", sorted(PROMISES))
def test_an_overlap_across_a_loss_is_promised_never_to_happen_by_some_stores(store: str) -> None:
    promise = PROMISES[store]
    found = failed_over(since=0.5, at=1.5).judge(promise=promise).of(Kind.OVERLAP)
    assert bool(found) is (store in ("redlock", "etcd", "zookeeper"))


def test_a_body_without_a_promised_fence_is_found() -> None:
    kinds = Story().published("job-a").body("a", 1, 2).kinds(promise=PROMISES["etcd"])
    assert kinds == [Kind.FENCE]


def released_late(*, since: float, at: float) -> Story:
    story = failed_over(since=since, at=at)
    story.add("released", 5.1, task_id="job-a", fence=100)
    return story.add("lost", 2.5, task_id="job-b", fence=200)


def test_a_release_that_an_old_master_has_executed_is_counted_and_no_violation() -> None:
    verdict = released_late(since=0.5, at=6).judge()
    assert not verdict.of(Kind.RELEASED)
    assert verdict.excused["losses unknown to a process whose release an old master executed"] == 1


@pytest.mark.parametrize(("observed", "kinds"), [(False, []), (True, [Kind.UNREPORTED])])
def test_nothing_is_reported_of_a_release_that_nothing_observes(
    observed: bool, kinds: list[Kind]
) -> None:
    story = failed_over(since=0.5, at=6).add("lost", 2.5, task_id="job-b", fence=200)
    story.add("taken", 0.9, task_id="job-a", worker="w", copy=[0, 0], observed=observed)
    assert [each.kind for each in story.judge().of(Kind.UNREPORTED)] == kinds


def test_a_release_after_the_old_master_was_demoted_is_no_excuse() -> None:
    assert released_late(since=-2, at=0.5).judge().of(Kind.RELEASED)


@pytest.mark.parametrize(("store", "kinds"), [("redlock", []), ("etcd", [Kind.RUN_AGAIN])])
def test_a_store_that_loses_completion_records_may_run_a_job_again(
    store: str, kinds: list[Kind]
) -> None:
    story = Story().published("j").body("a", 1, 2, job="j", fence=1)
    story.add("released", 2.1, task_id="j", fence=1)
    story.add("left", 2.2, task_id="j", state="SUCCESS")
    story.add("loss", 3.5, name="minority-emptied", since=3, fence_from=50, fence_to=60)
    story.body("b", 4, 5, job="j", pid=2, fence=2)
    assert story.kinds(promise=PROMISES[store]) == kinds


CLAIM = "csl:{celery:0}:claim|newest|k: held: q j+1 queued {}"


@pytest.mark.parametrize("begin", ["since", "lost_from"])
@pytest.mark.parametrize(("since", "kinds"), [(0.5, []), (2.5, [Kind.KEY_LEFT])])
def test_a_claim_is_left_only_if_its_end_was_in_a_failover(
    begin: str, since: float, kinds: list[Kind]
) -> None:
    story = Story().published("j").body("a", 1, 2, job="j", task="newest", fence=1)
    window: dict[str, Any] = {begin: since}
    story.add("loss", 3, name="failover", fence_from=5, fence_to=6, **window)
    assert story.add("key-left", 9, text=CLAIM).kinds() == kinds


CRASH = "Unrecoverable error: ...\nAttributeError: 'NoneType' object has no attribute 'hostname'"
QUEUES_GONE = """Unrecoverable error: StopIteration()
  File "/x/celery/concurrency/asynpool.py", line 1216, in get_process_queues
    return next(q for q, owner in self._queues.items()
StopIteration"""
PACKAGE = Path(celery_singleton_lock.__file__).parent
OURS = str(PACKAGE / "worker/request.py")
HEARTBEAT = str(PACKAGE / "worker/parent_heartbeat.py")
THREAD = f"singleton-parent-heartbeat\n  File {HEARTBEAT}, in _run\n\n"
HANG = f"{THREAD}MainThread\n  File celery/concurrency/asynpool.py, in _flush_outqueue"


def uncounted(
    *,
    interrupted: str = "celery/concurrency/asynpool.py, in _recv_message",
    waits: str = "billiard/process.py, in join\n  File billiard/popen_fork.py, in wait",
    child: str = "billiard/pool.py in _ensure_messages_consumed",
    other: str = f"{HEARTBEAT} in _run",
) -> str:
    """The stacks of a shutdown that waits for a child, which waits for its result to be counted."""
    return "\n".join(
        [
            f"{THREAD}MainThread",
            f"  File {interrupted}",
            "  File celery/apps/worker.py, in _handle_request",
            "  File celery/apps/worker.py, in on_cold_shutdown",
            f"  File {waits}",
            "  File celery/utils/debug.py, in cry",
            f"{HEAD}1:",
            f"{HEAD}2:",
            f"Thread 2:\n  File {other}\n",
            f"Thread 1:\n  File {child}\n  File billiard/pool.py in workloop\n",
        ]
    )


def unread(
    *,
    waits: str = "billiard/process.py, in join\n  File billiard/popen_fork.py, in wait",
    child: str = "billiard/queues.py in send_payload",
) -> str:
    """The stacks of a warm shutdown that waits for a child, whose results it no longer reads."""
    return "\n".join(
        [
            f"{THREAD}MainThread",
            "  File celery/worker/worker.py, in _shutdown",
            "  File celery/concurrency/prefork.py, in on_stop",
            f"  File {waits}",
            "  File celery/utils/debug.py, in cry",
            f"{HEAD}1:",
            f"{HEAD}2:",
            f"Thread 1:\n  File {child}\n  File billiard/pool.py in workloop\n",
        ]
    )


def unreachable(
    *,
    step: str = "celery/worker/worker.py, in _shutdown",
    asks: str = "/x/kombu/transport/redis.py",
    waits: str = '/x/redis/connection.py", line 1601, in _connect',
) -> str:
    """The stacks of a shutdown that acknowledges a message at a broker out of reach."""
    return "\n".join(
        [
            f"{THREAD}MainThread",
            f"  File {step}",
            '  File "/x/kombu/asynchronous/hub.py", line 355, in _close',
            f'  File "{asks}", line 500, in ack',
            '  File "/x/redis/client.py", line 2214, in execute',
            f'  File "{waits}',
            "    sock.connect(socket_address)",
            '  File "/x/celery/apps/worker.py", line 554, in cry_handler',
            '  File "/x/celery/utils/debug.py", line 187, in cry',
            "LOCAL VARIABLES",
        ]
    )


READS = '/x/redis/_parsers/socket.py", line 64, in _read_from_socket'


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ("broken", CRASH),
        ("broken", QUEUES_GONE),
        ("never-ends", HANG),
        ("never-ends", uncounted()),
        ("never-ends", unread()),
        ("never-ends", unread(child="billiard/pool.py in _ensure_messages_consumed")),
        ("never-ends", uncounted(interrupted="celery/worker/pidbox.py, in start")),
        (
            "never-ends",
            uncounted(interrupted=f"{OURS}, in on_failure\n  File celery/x.py, in acknowledge"),
        ),
    ],
)
def test_what_celery_is_known_to_do_by_itself_is_counted_and_no_violation(
    event: str, text: str
) -> None:
    verdict = Story().add(event, 1, text=text).judge()
    assert verdict.violations == ()
    assert sum(verdict.excused.values()) == 1


def off_broker(stacks: str, fault: str = "host-unplugged", at: float = 1.0) -> Story:
    story = Story().add("fault", at, end=at + 3, name=fault)
    return story.add("never-ends", 45, text=stacks)


@pytest.mark.parametrize("fault", sorted(OFF_BROKER))
@pytest.mark.parametrize("stacks", [unreachable(), unreachable(waits=READS)])
def test_a_shutdown_may_wait_for_a_broker_out_of_reach(stacks: str, fault: str) -> None:
    assert off_broker(stacks, fault).judge().excused == {BROKER_AWAY: 1}


@pytest.mark.parametrize(("fault", "at"), [("host-off-store", 1), ("host-unplugged", -20)])
def test_a_shutdown_may_not_wait_for_a_broker_within_reach(fault: str, at: float) -> None:
    assert off_broker(unreachable(), fault, at).kinds() == [Kind.NEVER_ENDS]


def test_the_faults_that_put_the_broker_out_of_reach_are_faults() -> None:
    assert {sort.name for sort in SORTS} >= OFF_BROKER


def test_the_stacks_name_modules_of_the_package() -> None:
    assert [name for name in (OURS, HEARTBEAT) if not Path(name).is_file()] == []


def test_a_hang_with_a_frame_of_ours_is_a_violation() -> None:
    assert Story().add("never-ends", 1, text=f"{HANG}\n  File {OURS}").kinds() == [Kind.NEVER_ENDS]


@pytest.mark.parametrize(
    "stacks",
    [
        uncounted(interrupted=f"{OURS}, in _recv_message"),
        uncounted(waits="billiard/process.py, in join"),
        uncounted(waits="celery/apps/worker.py, in wait_for_soft_shutdown"),
        uncounted(child=f"{OURS} in acquire"),
        uncounted(child=f"{OURS} in close\n  File billiard/pool.py in _ensure_messages_consumed"),
        uncounted(child="billiard/connection.py in _recv"),
        uncounted().partition(HEAD)[0],
        unread(waits=f"{OURS}, in stop\n  File billiard/process.py, in join\n  File x, in wait"),
        unread(waits="billiard/process.py, in join"),
        unread(child=f"{OURS} in acquire"),
        unread(child=f"{OURS} in close\n  File billiard/queues.py in send_payload"),
        unread().partition(HEAD)[0],
        uncounted() + f"\n{HEAD}3:\nThread 1:\n  File {OURS} in acquire\n",
        unreachable(step="celery/worker/loops.py, in asynloop"),
        unreachable(step=f"celery/worker/worker.py, in _shutdown\n  File {OURS}, in stop"),
        unreachable(asks="/x/celery/backends/redis.py"),
        unreachable(asks=OURS),
        unreachable(waits='/x/redis/lock.py", line 9, in acquire'),
        unreachable(waits='/x/threading.py", line 9, in wait'),
    ],
)
def test_a_shutdown_that_waits_for_anything_else_is_a_violation(stacks: str) -> None:
    assert off_broker(stacks).kinds() == [Kind.NEVER_ENDS]


@pytest.mark.parametrize(
    "text",
    [
        "Unrecoverable error: ...\nAttributeError: 'Lease' object has no attribute 'name'",
        QUEUES_GONE.replace("get_process_queues", "next_call"),
    ],
)
def test_another_error_that_ends_a_worker_is_a_violation(text: str) -> None:
    assert Story().add("broken", 1, text=text).kinds() == [Kind.BROKEN]


def test_a_job_need_not_succeed_once_it_is_revoked() -> None:
    assert Story().published("j").add("revoked", 1, task_id="j").kinds() == []
    assert Story().published("j").add("revoked", 1, task_id="other").kinds() == [Kind.JOB_LOST]


# The newest call.


def cancelled(by_at: float) -> Story:
    story = Story().published("old", "latest", at=1).published("new", "latest", at=by_at)
    story.body("n", 3, 4, job="new", task="latest")
    return story.add("cancelled", 2.5, task_id="old", by="new")


def test_a_job_may_give_way_to_a_newer_one_only() -> None:
    assert cancelled(by_at=2).kinds() == []
    assert cancelled(by_at=0.5).kinds() == [Kind.JOB_LOST]
    assert cancelled(by_at=0.5).add("fault", 0, end=1, name="clock-step").kinds() == []


def older_runs_last(task: str = "latest", asked: float = 5) -> Story:
    story = Story().published("old", task, at=1).published("new", task, at=2)
    story.body("n", 3, 4, job="new", task=task)
    return story.body("o", 5, 6, job="old", task=task, asked=asked)


def test_an_older_call_that_begins_after_a_newer_one_is_found() -> None:
    assert older_runs_last().kinds() == [Kind.ORDER]
    assert older_runs_last(asked=2.5).kinds() == []  # it asked before the newer one began
    assert older_runs_last("late").kinds() == []
    verdict = older_runs_last().add("loss", 4.5, mark="m").judge()
    assert (verdict.violations, sum(verdict.excused.values())) == ((), 1)


def test_two_deliveries_of_the_newest_call_are_in_order() -> None:
    story = Story().published("old", "latest", at=1).published("new", "latest", at=2)
    story.add("cancelled", 2.5, task_id="old", by="new")
    story.body("a", 3, None, job="new", task="latest").add("death", 4, pid=1)
    assert story.body("b", 5, 6, job="new", task="latest", pid=2).kinds() == []


# Calls in the queue of a key.


def in_queue(
    first: str,
    second: str,
    *,
    task: str = "queued",
    placed: bool = True,
    made: Sequence[float] = (1, 2),
) -> Story:
    """The calls `a` and `b`, whose bodies begin in the order given."""
    story = Story()
    for job, entered in zip("ab", made, strict=True):
        story.published(job, task, at=entered)
        story.add("returned", entered + 0.5, task_id=job, entered=entered, placed=placed)
    for run, job, begin in (("1", first, 3), ("2", second, 5)):
        story.body(run, begin, begin + 1, job=job, task=task)
    return story


def test_a_call_that_begins_after_one_that_was_made_later_is_found() -> None:
    assert in_queue("a", "b").kinds() == []
    assert in_queue("b", "a").kinds() == [Kind.ORDER]
    assert in_queue("b", "a", placed=False).kinds() == []
    assert in_queue("b", "a", task="late").kinds() == []
    verdict = in_queue("b", "a").add("loss", 4.5, mark="m").judge()
    assert (verdict.violations, sum(verdict.excused.values())) == ((), 1)


def test_calls_that_were_made_at_one_time_may_run_in_any_order() -> None:
    assert in_queue("b", "a", made=(1, 1.25)).kinds() == []


def test_a_call_that_is_acknowledged_early_and_begins_twice_is_found() -> None:
    story = in_queue("a", "b", task="queued_early")
    assert story.body("3", 7, 8, job="b", task="queued_early").kinds() == [Kind.RUN_AGAIN]


def test_a_call_that_begins_although_it_was_refused_is_found() -> None:
    for known, kinds in ((True, [Kind.ORDER]), (False, [])):
        story = Story().published("a", "queued", at=1).add("unsent", 2, task_id="a", known=known)
        assert story.body("1", 3, 4, job="a", task="queued").kinds() == kinds


# The newest arguments.


def answers_two(call: int = 2, asked: float = 4) -> Story:
    story = Story().published("j", "newest", at=1)
    story.add("called", 1.5, task_id="j", call=1).add("called", 3, task_id="j", call=2)
    return story.body("a", 4, 5, job="j", task="newest", call=call, asked=asked)


def test_a_body_with_older_arguments_than_it_answered_is_found() -> None:
    assert answers_two().kinds() == []
    assert answers_two(call=1).kinds() == [Kind.NEWEST]
    assert answers_two(call=1, asked=2).kinds() == []  # it asked before the second call returned
    verdict = answers_two(call=1).add("loss", 3.5, mark="m").judge()
    assert (verdict.violations, sum(verdict.excused.values())) == ((), 1)


def test_a_redelivery_with_older_arguments_is_found() -> None:
    story = answers_two().body("b", 6, 7, job="j", task="newest", call=1)
    assert Kind.NEWEST in story.kinds()


# --- the ticks of beats ---------------------------------------------------------------------------


def ticking(*moments: float) -> Story:
    """Ticks that were sent when they were due."""
    story = Story()
    for moment in moments:
        story.add("tick", moment + 0.01, due=moment, beat=1)
    return story


def test_ticks_of_one_grid_are_right_and_missed_ones_within_a_takeover_too() -> None:
    assert ticking(1, 1.5, 2, 7, 7.5).kinds() == []


def test_a_tick_that_came_twice_is_found_unless_the_store_lost_its_data_in_between() -> None:
    assert ticking(1, 1.5, 1.5, 2).kinds() == [Kind.TICK_TWICE]
    lost = ticking(1, 1.5).add("loss", 2, fence_from=0, fence_to=1)
    lost.add("tick", 3.5, due=1.5, beat=2)
    assert lost.kinds() == []


def test_a_tick_off_its_grid_is_found() -> None:
    assert ticking(1, 1.5, 2.25).kinds() == [Kind.OFF_GRID]


def test_a_silence_is_found_unless_a_fault_concerned_all_beats() -> None:
    assert ticking(1, 9).kinds() == [Kind.NO_TICK]
    one = ticking(1, 9).add("fault", 2, end=8, name="cut-beat", target="beat-1")
    assert one.kinds() == [Kind.NO_TICK]
    everyone = ticking(1, 9).add("fault", 2, end=3, name="restart-kept", target="store")
    assert everyone.kinds() == []


def revoked_by_etcd(reason: str = "gone", stalled: float = 1.4) -> Story:
    """A former leader of etcd goes on, and has a lease revoked; the next body begins."""
    story = Story().body("a", 1, 2, fence=5, error="LeaseInterrupt", lease="x")
    story.add("lost", 2.1, task_id="x", fence=5, reason=reason)
    story.body("b", 1.5, 1.8, fence=6, task="early")
    return story.add("stalled-leader", stalled, until=stalled + 0.3)


def test_an_overlap_after_etcd_revoked_a_renewed_lease_is_excused_by_its_flaw() -> None:
    promise = PROMISES["etcd"]
    story = revoked_by_etcd()
    assert Kind.OVERLAP not in story.kinds(promise=promise)
    assert revoked_by_etcd(stalled=60).kinds(promise=promise).count(Kind.OVERLAP) == 1
    assert revoked_by_etcd(reason="expired").kinds(promise=promise).count(Kind.OVERLAP) == 1
