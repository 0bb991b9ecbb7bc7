"""Chains, groups, chords and links with calls that claim: each message that is waited for comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import chain, chord, group

from celery_singleton_lock import is_skipped
from celery_singleton_lock.runtime import Runtime
from tests.harness.keys import EVERY_NAME
from tests.harness.worker import CeleryWorker
from tests.integration.stage import Stage, wait_until

APP = "tests.apps.unique"


@pytest.fixture(scope="module", autouse=True)
def worker(stage: Stage) -> CeleryWorker:
    return stage.worker(concurrency=4)


@pytest.fixture(autouse=True)
def no_claim_is_left(stage: Stage) -> Iterator[None]:
    yield
    store = Runtime.of(stage.app.app).store
    wait_until(
        lambda: not list(store.operators.scan(f"{EVERY_NAME}}}:claim|*")), "no claim is left"
    )


def skipped_now(results: Any) -> int:
    """How many of these calls have ended by now, and were skipped."""
    return sum(result.ready() and is_skipped(result) for result in results)


def ran(stage: Stage, name: str) -> list[str]:
    return [start.task_id for start in stage.starts(name)]


def occupy(stage: Stage, task: Any, name: str) -> Any:
    """Have a body of ``task`` wait at the gate ``name``."""
    result = task.delay(name, gate=name)
    stage.journal.wait_for(
        lambda records: [r for r in records if r.event == "start" and r.task_id == result.id],
        what=f"{name} is occupied",
    )
    return result


def noted(stage: Stage, text: str) -> None:
    stage.journal.wait_for(
        lambda records: [r for r in records if r.event == "note" and r.key == text],
        what=f"{text} is noted",
    )


def values_of(result: Any) -> list[Any]:
    """What a group or chord gave; "skipped" for each that was."""
    return ["skipped" if is_skipped(value) else value for value in result.get(timeout=20)]


# until_done: a duplicate gives way to the one that runs; the canvas goes on with its skipped value.


@pytest.mark.parametrize("task", ["once", "once_late"])
def test_a_groups_duplicates_give_way_to_one_and_the_group_ends(
    stage: Stage, name: str, task: str
) -> None:
    one = getattr(stage.app, task)
    result = group(one.si(name, gate=name) for _ in range(4)).apply_async()
    assert len({member.id for member in result.results}) == 4
    wait_until(lambda: skipped_now(result.results) == 3, "three are skipped")
    stage.open(name)
    assert sorted(values_of(result)) == sorted([name, *["skipped"] * 3])
    assert len(ran(stage, name)) == 1


def test_a_chord_whose_member_duplicates_a_long_call_outside_it_completes_at_once(
    stage: Stage, name: str
) -> None:
    outside = occupy(stage, stage.app.once, name)
    members = [stage.app.once.si(name), stage.app.once.si(f"{name}-free")]
    result = chord(members)(stage.app.collect.s())
    assert values_of(result) == ["skipped", f"{name}-free"]
    assert not outside.ready()
    stage.open(name)
    assert outside.get(timeout=20) == name
    assert ran(stage, name) == [outside.id]


@pytest.mark.parametrize("last", [False, True], ids=["middle", "last"])
def test_a_chains_link_that_is_a_duplicate_gives_way_and_the_chain_goes_on(
    stage: Stage, name: str, last: bool
) -> None:
    outside = occupy(stage, stage.app.once, name)
    links = [stage.app.once.si(f"{name}-first"), stage.app.once.si(name)]
    links += [] if last else [stage.app.flag.s()]
    value = chain(*links).apply_async().get(timeout=20)
    assert is_skipped(value) if last else value == "skipped"
    stage.open(name)
    assert outside.get(timeout=20) == name
    assert ran(stage, name) == [outside.id]


@pytest.mark.parametrize("task", ["once", "soon"])
def test_a_duplicate_with_a_link_calls_it(stage: Stage, name: str, task: str) -> None:
    one = getattr(stage.app, task)
    first = occupy(stage, one, name)
    if task == "soon":
        one.delay(name)
    text = f"{name}-link"
    second = one.apply_async((name,), link=stage.app.note.si(text))
    assert second.id != first.id
    if task == "once":
        noted(stage, text)  # skipped while the other runs
    stage.open(name)
    noted(stage, text)
    value = second.get(timeout=20)
    assert is_skipped(value) if task == "once" else value == name


# until_start: every message that is published runs, one after the other.


@pytest.mark.parametrize("behind", [False, True], ids=["running", "running and waiting"])
def test_a_chord_with_a_duplicate_of_calls_outside_it_runs_after_them(
    stage: Stage, name: str, behind: bool
) -> None:
    outside = occupy(stage, stage.app.soon, name)
    waits = stage.app.soon.delay(name) if behind else None  # it, or a member that comes first
    members = [stage.app.soon.si(name), stage.app.soon.si(f"{name}-free")]
    result = chord(members)(stage.app.soon.si(name))
    stage.journal.wait_for_ends(1, key=f"{name}-free")
    assert not result.ready()
    stage.open(name)
    assert result.get(timeout=20) == name
    if waits is not None:
        assert waits.get(timeout=20) == name
    ids = ran(stage, name)
    assert ids[0] == outside.id
    others = {waits.id} if waits else set()
    assert set(ids) == {outside.id, result.parent.results[0].id, result.id} | others


# Both.


def test_starmap_calls_the_task_as_a_function(stage: Stage, name: str) -> None:
    # One message of Celery's own runs them all: there is no call of the task to claim for.
    occupied = occupy(stage, stage.app.once, name)
    assert stage.app.once.starmap([(name, None), (name, None)]).delay().get(timeout=20) == [
        name,
        name,
    ]
    chunks = stage.app.once.chunks([(name, None)] * 4, 2).apply_async()
    assert chunks.get(timeout=20) == [[name, name]] * 2
    stage.open(name)
    assert occupied.get(timeout=20) == name
