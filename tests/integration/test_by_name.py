"""Claims of publishers that have the name of a task and not its code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import DuplicateTask, LockKeyError, claim_and_send
from tests.harness.keys import EVERY_NAME
from tests.harness.worker import CeleryWorker
from tests.integration.stage import APP, Stage, wait_until

WORK = f"{APP}.work"
UNTIL_DONE: Any = {"unique": "until_done"}


@pytest.fixture(scope="module")
def worker(stage: Stage) -> CeleryWorker:
    return stage.worker(concurrency=2)


@pytest.fixture(scope="module")
def publisher(stage: Stage) -> Iterator[Celery]:
    url = stage.environment["BROKER_URL"]
    app = Celery("publisher", broker=url, backend=url, set_as_current=False)
    assert WORK not in app.tasks
    yield app
    app.close()


def send(app: Celery, name: str, singleton: Any = UNTIL_DONE, **options: Any) -> Any:
    return claim_and_send(app, WORK, [name], {"gate": name}, singleton=singleton, **options)


def claims(stage: Stage) -> list[str]:
    return list(stage.redis.scan_iter(f"{EVERY_NAME}:claim|*"))


@pytest.fixture(autouse=True)
def no_claim_is_left(stage: Stage) -> Iterator[None]:
    """A result can be read a moment before its claim is free, and the next test counts claims."""
    yield
    wait_until(lambda: not claims(stage), "no claim is left")


def test_equal_calls_by_name_are_one_until_it_is_done(
    stage: Stage, worker: CeleryWorker, publisher: Celery, name: str
) -> None:
    first = send(publisher, name)
    stage.journal.wait_for_starts(1, key=name)
    assert [send(publisher, name).id for _ in range(3)] == [first.id] * 3
    stage.open(name)
    first.get(timeout=30)
    assert len(stage.starts(name)) == 1


def test_with_the_key_of_the_task_it_meets_the_claims_of_publishers_that_have_the_code(
    stage: Stage, worker: CeleryWorker, publisher: Celery, name: str
) -> None:
    with_code = stage.app.work.apply_async((name,), {"gate": name}, singleton=UNTIL_DONE)
    by_name = send(publisher, name, key=name, scope=stage.app.NAMES)
    assert by_name.id == with_code.id
    stage.open(name)
    with_code.get(timeout=30)


def test_an_app_that_has_the_task_uses_the_task(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    first = send(stage.app.app, name)
    assert stage.app.work.apply_async((name,), singleton=UNTIL_DONE).id == first.id
    stage.open(name)
    first.get(timeout=30)


def test_what_is_wrong_is_said_where_it_is_written(publisher: Celery, stage: Stage) -> None:
    with pytest.raises(TypeError, match="until_done"):
        send(publisher, "x", {"ttl": 5})
    with pytest.raises(ValueError, match="unique_for=5 has no effect without unique"):
        send(publisher, "x", {"unique_for": 5})
    for typo, known in (("keyy", "key"), ("scopes", "scope"), ("singelton", "singleton")):
        options: Any = {typo: "x"}
        with pytest.raises(TypeError, match=f"unknown option '{typo}' .did you mean '{known}'"):
            claim_and_send(publisher, WORK, ["x"], singleton=UNTIL_DONE, **options)
    with pytest.raises(TypeError, match="did you mean 'unique'"):
        send(publisher, "x", {"uniqe": "until_done"})
    with pytest.raises(LockKeyError, match="key="):
        claim_and_send(publisher, WORK, [object()], singleton=UNTIL_DONE)
    wrong: Any
    for wrong in (stage.app.work, None, ""):
        with pytest.raises(TypeError, match="name of a task"):
            claim_and_send(publisher, wrong, ["x"], singleton=UNTIL_DONE)
    for wrong in ("south", (name for name in "xy"), {"name": "x"}, 5):
        with pytest.raises(TypeError, match="give a list or tuple"):
            claim_and_send(publisher, WORK, wrong, singleton=UNTIL_DONE)
    wrong = [("gate", "x")]
    with pytest.raises(TypeError, match="give a dict"):
        claim_and_send(publisher, WORK, ["x"], wrong, singleton=UNTIL_DONE)
    for wrong in ("", 5):
        with pytest.raises(LockKeyError, match="non-empty str"):
            send(publisher, "x", key=wrong)
    for wrong in ("", 5, "s" * 201):
        with pytest.raises((TypeError, ValueError), match="give a name"):
            send(publisher, "x", scope=wrong)
    assert claims(stage) == []


@pytest.mark.parametrize("options", [{}, {"key": "k"}, {"key": "k", "scope": "s"}], ids=str)
def test_a_task_that_would_never_free_its_claim_is_refused(
    stage: Stage, options: dict[str, str]
) -> None:
    with pytest.raises(TypeError, match="isn't a singleton task"):
        claim_and_send(stage.app.app, "celery.backend_cleanup", singleton=UNTIL_DONE, **options)
    assert claims(stage) == []


@pytest.mark.slow
def test_a_duplicate_by_name_can_be_reported_by_an_exception(
    stage: Stage, worker: CeleryWorker, publisher: Celery, name: str
) -> None:
    first = send(publisher, name)
    with pytest.raises(DuplicateTask) as caught:
        send(publisher, name, {**UNTIL_DONE, "on_duplicate": "raise"})
    assert caught.value.task_id == first.id
    stage.open(name)
    first.get(timeout=30)


def test_the_worker_says_once_per_task_that_the_word_singleton_had_no_effect(
    stage: Stage, worker: CeleryWorker, publisher: Celery, name: str
) -> None:
    """As a plain Beat sends it, which doesn't know the task."""
    for number in range(3):
        sent = publisher.send_task(WORK, [f"{name}-{number}"], singleton=UNTIL_DONE)
        sent.get(timeout=30)
    # The log is behind the results; what a later call had said would be behind this one's line.
    worker.wait_for_log(rf"Task \S+\[{sent.id}\] succeeded")
    assert worker.log.count("that no code read") == 1
    assert f"a call of {WORK} came with" in worker.log
