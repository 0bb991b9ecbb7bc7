"""Chains, groups, chords, links and replacements whose parts share a key."""

from __future__ import annotations

from typing import Any

import pytest
from celery import chord, group
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import LockConflict, is_skipped
from celery_singleton_lock.core.events import EventName
from tests.harness.worker import CeleryWorker
from tests.integration.stage import Stage, wait_until


@pytest.fixture(scope="module", autouse=True)
def worker(stage: Stage) -> CeleryWorker:
    return stage.worker(concurrency=4)


def ran(stage: Stage, name: str) -> list[str]:
    """The ids of the tasks whose bodies ran, in the order of their starts."""
    return [start.task_id for start in stage.starts(name)]


def wait_until_skipped(results: list[Any], count: int) -> None:
    wait_until(
        lambda: sum(r.ready() and is_skipped(r) for r in results) >= count,
        f"{count} calls are skipped",
    )


# Chains.


@pytest.mark.parametrize("task", ["work", pytest.param("work_late", marks=pytest.mark.slow)])
def test_both_links_of_a_chain_on_one_key_run_100_of_100(
    stage: Stage, name: str, task: str
) -> None:
    skipped = []
    for n in range(100):
        link = getattr(stage.app, task).si(f"{name}-{n}")
        result = (link | link).apply_async()
        skipped.append(is_skipped(result.get(timeout=20)))
        assert ran(stage, f"{name}-{n}") == [result.parent.id, result.id]
    assert skipped == [False] * 100
    assert stage.journal.overlaps() == []


def test_a_chain_goes_on_past_a_skipped_link(stage: Stage, name: str) -> None:
    blocker = stage.occupy(f"{name}-middle")
    chain = (
        stage.app.work.si(f"{name}-first")
        | stage.app.work.si(f"{name}-middle")
        | stage.app.collect.s(f"{name}-last")
    )
    value = chain.apply_async().get(timeout=20)
    assert is_skipped(value), "the last link is given what the skipped one returned"
    assert value["holder"]["task_id"] == blocker.id
    assert ran(stage, f"{name}-middle") == [blocker.id]
    assert len(ran(stage, f"{name}-last")) == 1
    stage.open(f"{name}-middle")


def test_a_chain_stops_at_a_link_revoked_by_conflict(stage: Stage, name: str) -> None:
    stage.occupy(f"{name}-middle")
    chain = (
        stage.app.work.si(f"{name}-first")
        | stage.app.revoking.si(f"{name}-middle")
        | stage.app.work.si(f"{name}-last")
    )
    result = chain.apply_async()
    with pytest.raises(TaskRevokedError):
        result.parent.get(timeout=20)
    assert result.parent.state == "REVOKED"
    with pytest.raises(TaskRevokedError):
        result.get(timeout=20)
    stage.open(f"{name}-middle")
    # Whatever was sent before this has come before it.
    assert stage.app.work.delay(f"{name}-sentinel").get(timeout=20)
    assert ran(stage, f"{name}-last") == []


def test_a_chain_stops_at_a_link_that_raises_on_a_conflict(stage: Stage, name: str) -> None:
    stage.occupy(f"{name}-middle")
    middle = stage.app.work.si(f"{name}-middle").set(singleton={"on_conflict": "raise"})
    result = (middle | stage.app.collect.s(f"{name}-last")).apply_async()
    with pytest.raises(LockConflict):
        result.get(timeout=20)
    stage.open(f"{name}-middle")
    assert ran(stage, f"{name}-last") == []


def test_a_chain_stops_behind_a_skip_at_a_link_that_looks_for_it(stage: Stage, name: str) -> None:
    def chain() -> Any:
        return (
            stage.app.work.si(f"{name}-middle")
            | stage.app.unless_skipped.s()
            | stage.app.collect.s(f"{name}-last")
        ).apply_async()

    stage.occupy(f"{name}-middle")
    with pytest.raises(RuntimeError, match="the link before was skipped"):
        chain().get(timeout=20)
    assert ran(stage, f"{name}-last") == []
    stage.open(f"{name}-middle")
    wait_until(lambda: stage.redis.get(stage.key(f"{name}-middle")) is None, "the key is free")
    assert chain().get(timeout=20) == f"{name}-middle"


def test_a_link_that_takes_no_argument_is_not_given_the_skips_completion_record(
    stage: Stage, name: str
) -> None:
    stage.occupy(f"{name}-middle")
    result = (stage.app.work.si(f"{name}-middle") | stage.app.work.si(f"{name}-last")).apply_async()
    assert result.get(timeout=20) == f"{name}-last"
    stage.open(f"{name}-middle")


def test_a_chains_link_that_waits_goes_on_with_the_chain(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    blocker = stage.occupy(name)
    chain = stage.app.patient.si(name) | stage.app.collect.s(f"{name}-last")
    result = chain.apply_async()
    worker.wait_for_event(EventName.REQUEUED, task_id=result.parent.id, sequence=2)
    assert ran(stage, name) == [blocker.id]
    stage.open(name)
    assert result.get(timeout=20) == 0
    assert len(ran(stage, f"{name}-last")) == 1


# Groups and chords.


def test_of_a_groups_equal_members_one_runs_and_the_group_ends(stage: Stage, name: str) -> None:
    result = group(stage.app.work.si(name, name) for _ in range(4)).apply_async()
    wait_until_skipped(result.results, 3)
    stage.open(name)
    values = result.get(timeout=20)
    assert sum(map(is_skipped, values)) == 3
    assert len(ran(stage, name)) == 1


def test_a_chord_with_duplicate_members_completes(stage: Stage, name: str) -> None:
    members = [stage.app.work.si(name, name) for _ in range(4)]
    result = chord(members)(stage.app.collect.s(f"{name}-body"))
    wait_until_skipped(result.parent.results, 3)
    stage.open(name)
    values = result.get(timeout=20)
    assert len(values) == 4
    assert sum(map(is_skipped, values)) == 3
    assert len(ran(stage, name)) == 1
    assert len(ran(stage, f"{name}-body")) == 1


def test_a_chord_whose_members_wait_for_the_key_completes(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    blocker = stage.occupy(name)
    members = [stage.app.patient.si(name) for _ in range(4)]
    result = chord(members)(stage.app.collect.s(f"{name}-body"))
    for member in result.parent.results:
        worker.wait_for_event(EventName.REQUEUED, task_id=member.id, sequence=1)
    stage.open(name)
    assert result.get(timeout=20) == [0] * 4
    first, *others = ran(stage, name)
    assert first == blocker.id
    assert sorted(others) == sorted(member.id for member in result.parent.results)
    assert len(ran(stage, f"{name}-body")) == 1
    assert stage.journal.overlaps() == []


def test_a_chord_with_a_member_revoked_by_conflict_fails_instead_of_hanging(
    stage: Stage, name: str
) -> None:
    stage.occupy(name)
    members = [stage.app.work.si(f"{name}-free"), stage.app.revoking.si(name)]
    result = chord(members)(stage.app.collect.s(f"{name}-body"))
    with pytest.raises(Exception, match=r"revoked|TaskRevokedError|is held by"):
        result.get(timeout=20)
    stage.open(name)
    assert ran(stage, f"{name}-body") == []


@pytest.mark.parametrize("as_chord", [False, True], ids=["group", "chord"])
def test_what_waits_for_a_chain_with_a_link_revoked_by_conflict_fails_instead_of_hanging(
    as_chord: bool, stage: Stage, name: str
) -> None:
    stage.occupy(name)
    chains = group(
        stage.app.revoking.si(name) | stage.app.work.si(f"{name}-middle") | stage.app.work.si(last)
        for last in (f"{name}-1", f"{name}-2")
    )
    after = stage.app.collect.s(f"{name}-body")
    result = (chains | after if as_chord else chains).apply_async()
    with pytest.raises(Exception, match=r"TaskRevokedError|is held by"):
        result.get(timeout=20)
    # One chain that fails is enough for that; the other one must not find the key free.
    ends = (result.parent if as_chord else result).results
    first_links = [end.parent.parent for end in ends]
    wait_until(lambda: {link.state for link in first_links} == {"REVOKED"}, "both are revoked")
    stage.open(name)
    # Whatever was sent before this has come before it.
    assert stage.app.work.delay(f"{name}-sentinel").get(timeout=20)
    for suffix in ("middle", "1", "2", "body"):
        assert ran(stage, f"{name}-{suffix}") == []


def test_a_chords_body_on_the_key_of_its_members_runs_20_of_20(stage: Stage, name: str) -> None:
    for n in range(20):
        one = f"{name}-{n}"
        # The chord's last part is sent by the member that ends last, from inside its own trace.
        result = chord([stage.app.work.si(one)], stage.app.collect.s(one)).apply_async()
        assert result.get(timeout=20) == [one]
        assert len(ran(stage, one)) == 2


# Links.


def linked(stage: Stage, name: str) -> list[str]:
    """Wait for the second body of ``name``; the tasks of both."""
    starts = stage.journal.wait_for_starts(2, key=name)
    return [start.data["task"].rpartition(".")[2] for start in starts]


def test_a_link_on_the_key_of_its_task_runs_20_of_20(stage: Stage, name: str) -> None:
    for n in range(20):
        one = f"{name}-{n}"
        stage.app.work.apply_async((one,), link=stage.app.refusing.si(one))
        assert linked(stage, one) == ["work", "refusing"]


def test_an_errback_on_the_key_of_its_failing_task_runs_20_of_20(stage: Stage, name: str) -> None:
    for n in range(20):
        one = f"{name}-{n}"
        result = stage.app.work.apply_async(
            (one,), {"fail": True}, link_error=stage.app.refusing.si(one)
        )
        with pytest.raises(ArithmeticError):
            result.get(timeout=20)
        assert linked(stage, one) == ["work", "refusing"]


def test_an_errback_of_a_chain_on_the_key_of_its_failing_link_runs(stage: Stage, name: str) -> None:
    chain = stage.app.work.si(name, fail=True) | stage.app.work.si(f"{name}-last")
    chain.apply_async(link_error=stage.app.refusing.si(name))
    assert linked(stage, name) == ["work", "refusing"]
    assert ran(stage, f"{name}-last") == []


def test_an_errback_with_celerys_own_arguments_runs_inside_the_failing_task(
    stage: Stage, name: str
) -> None:
    # Celery calls an unbound errback of three arguments as a function: no message, no lock.
    result = stage.app.work.apply_async((name,), {"fail": True}, link_error=stage.app.errback.s())
    with pytest.raises(ArithmeticError):
        result.get(timeout=20)
    note = stage.journal.wait_for(
        lambda records: [r for r in records if r.event == "note" and r.task_id == result.id]
    )
    assert note[0].data["text"] == "errback"


# Replacements.


@pytest.mark.slow
@pytest.mark.parametrize("task", ["replaced", "replaced_late"])
@pytest.mark.parametrize("by", ["itself", "another"])
def test_a_task_replaced_on_its_own_key_runs_on_20_of_20(
    stage: Stage, name: str, by: str, task: str
) -> None:
    # The replacement is published from inside the body, with the same task id.
    for n in range(20):
        one = f"{name}-{n}"
        result = getattr(stage.app, task).delay(one, by)
        assert result.get(timeout=20) == one
        assert ran(stage, one) == [result.id] * 2
    assert stage.journal.overlaps() == []


def test_a_task_replaced_by_a_chain_on_its_own_key_runs_on_5_of_5(stage: Stage, name: str) -> None:
    for n in range(5):
        one = f"{name}-{n}"
        result = stage.app.replaced.delay(one, "chain")
        assert result.get(timeout=20) == one
        first, second, third = ran(stage, one)
        assert (first, third) == (result.id, result.id)
        assert second != result.id
    assert stage.journal.overlaps() == []


def test_a_replaced_link_goes_on_with_its_chain(stage: Stage, name: str) -> None:
    chain = stage.app.replaced.si(name, "another") | stage.app.work.si(name)
    result = chain.apply_async()
    assert result.get(timeout=20) == name
    assert len(ran(stage, name)) == 3


# Retries inside of them.


def test_a_retried_link_goes_on_with_its_chain_10_of_10(stage: Stage, name: str) -> None:
    for n in range(10):
        one = f"{name}-{n}"
        result = (stage.app.flaky.si(one) | stage.app.work.si(one)).apply_async()
        assert result.get(timeout=20) == one
        assert ran(stage, one) == [result.parent.id, result.parent.id, result.id]
