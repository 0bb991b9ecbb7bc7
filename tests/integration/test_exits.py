"""However a body is left, its key is free soon, and not before the body has ended.

The ttl is 90 s here and every wait is shorter: a key that only its ttl freed fails the test.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError, TimeLimitExceeded

from celery_singleton_lock.core.events import EventName
from tests.harness.deliveries import reported, wait_until
from tests.harness.journal import Journal, events, overlaps
from tests.harness.keys import Keys
from tests.harness.worker import CeleryWorker

LOSS = "tests.apps.loss"

StartWorker = Callable[..., CeleryWorker]
LoadApp = Callable[..., ModuleType]

# Seconds, far from the ttl.
SOON = 30.0


@pytest.fixture
def environment(environment: dict[str, str]) -> dict[str, str]:
    return {**environment, "TTL": "90"}


@pytest.fixture
def loss(load_app: LoadApp) -> ModuleType:
    return load_app(LOSS)


@pytest.fixture
def keys(loss: ModuleType) -> Keys:
    return Keys(loss.app)


def last_breaths(journal: Journal) -> Mapping[int, float]:
    """When each stubborn body surely still ran: the last note of its process."""
    return {note.pid: note.at for note in events(journal.records(), "note")}


def watch_until_let_go(keys: Keys, key: str, task_id: str) -> float:
    """Wait until the key is free or another's; returns a moment at which it was."""

    def gone() -> bool:
        record = keys.find(key)
        return record is None or not record.token.startswith(task_id)

    wait_until(gone, f"{task_id} lets go of {key}", timeout=SOON)
    return time.monotonic()


# Exits by the body's own doing.


def exits_of_bodies(loss: ModuleType) -> dict[str, Any]:
    """Every way in which a body ends by itself, by the key it is called with."""
    return {
        "success": loss.early.s("success", "sleep", 0.5),
        "failure": loss.leaving.s("failure", "ValueError"),
        "ignore": loss.leaving.s("ignore", "Ignore"),
        "reject": loss.leaving.s("reject", "Reject"),
        "exit": loss.leaving.s("exit", "SystemExit"),
        "bad on_success": loss.bad_success.s("bad on_success"),
        "bad after_return": loss.bad_return.s("bad after_return"),
        "no super()": loss.silent_return.s("no super()"),
        "soft limit": loss.early.s("soft limit").set(soft_time_limit=1),
    }


def test_after_every_exit_of_a_body_the_key_is_free_at_once(
    worker: StartWorker, loss: ModuleType, keys: Keys, journal: Journal
) -> None:
    worker(LOSS, concurrency=10)
    exits = exits_of_bodies(loss)
    for signature in exits.values():
        signature.delay()
    journal.wait_for_starts(len(exits))
    competitors = {name: loss.competitor.delay(name) for name in exits}
    for name, competitor in competitors.items():
        assert not competitor.get(timeout=SOON)["lost"], name
    assert journal.overlaps() == []
    assert {name: len(journal.runs(name)) for name in exits} == dict.fromkeys(exits, 2)
    wait_until(lambda: not keys.held(), "no key is left", timeout=SOON)


@pytest.mark.slow
def test_without_the_settling_in_task_postrun_some_exits_leave_their_key_behind(
    worker: StartWorker, loss: ModuleType, keys: Keys, journal: Journal
) -> None:
    process = worker(LOSS, concurrency=10, env={"WITHOUT": "postrun,parent"})
    exits = exits_of_bodies(loss)
    for signature in exits.values():
        signature.delay()
    journal.wait_for_ends(len(exits))
    for line in (
        "ignored",
        "reject requeue=False",
        "WorkerLostError|SystemExit is not JSON serializable",  # the latter before Celery 5.7
        r"silent_return\S+ succeeded",
    ):
        process.wait_for_log(line, timeout=SOON)
    for name in ("success", "failure", "soft limit"):
        keys.wait_until_free(loss.early.lock_key(name), timeout=SOON)
    for name in ("ignore", "reject", "exit", "no super()"):
        assert keys.record(loss.early.lock_key(name)).ttl > SOON, name


def test_a_rejected_message_that_is_requeued_runs_again_alone(
    worker: StartWorker, loss: ModuleType, keys: Keys, journal: Journal
) -> None:
    worker(LOSS, concurrency=2)
    result = loss.rejecting.delay("k")
    journal.wait_for_starts(key="k")
    competitor = loss.competitor.delay("k")
    competitor.get(timeout=SOON)
    result.get(timeout=SOON)
    assert [run.task_id for run in journal.runs("k")].count(result.id) == 2
    assert journal.overlaps() == []
    wait_until(lambda: not keys.held(), "no key is left", timeout=SOON)


@pytest.mark.slow
def test_children_that_end_after_one_task_leave_nothing_behind(
    worker: StartWorker, loss: ModuleType, keys: Keys, journal: Journal
) -> None:
    worker(LOSS, concurrency=2, args=["--max-tasks-per-child", "1"])
    results = [loss.competitor.delay("k", "sleep", 0.1) for _ in range(6)]
    for result in results:
        result.get(timeout=SOON)
    runs = journal.runs("k")
    assert len({run.pid for run in runs}) == len(runs) == 6
    assert journal.overlaps() == []
    wait_until(lambda: not keys.held(), "no key is left", timeout=SOON)


# Exits from outside.


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sleep", "stubborn"])
def test_at_a_hard_time_limit_no_body_starts_before_the_child_is_dead(
    worker: StartWorker, loss: ModuleType, keys: Keys, journal: Journal, way: str
) -> None:
    worker(LOSS)
    result = loss.early.apply_async(("k", way), time_limit=1)
    [start] = journal.wait_for_starts(key="k")
    competitor = loss.competitor.delay("k")
    let_go = watch_until_let_go(keys, loss.early.lock_key("k"), result.id)
    competitor.get(timeout=SOON)
    assert last_breaths(journal).get(start.pid, start.at) <= let_go
    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=SOON)
    assert overlaps(journal.records(), deaths=last_breaths(journal)) == []
    assert len(journal.runs("k")) == 2
    wait_until(lambda: not keys.held(), "no key is left", timeout=SOON)


@pytest.mark.slow
def test_a_body_that_a_hard_time_limit_ends_is_not_requeue_for_its_lost_lease(
    worker: StartWorker,
    load_app: LoadApp,
    environment: dict[str, str],
    journal: Journal,
) -> None:
    # The child has 0.1 s until it is killed, in which a heartbeat may find that the parent took its
    # key. With this ttl about one child of three comes so far.
    environment["TTL"] = "0.9"
    loss = load_app(LOSS)
    # Celery kills one after another: many at a time would reach their max_hold first.
    process = worker(LOSS, concurrency=3)
    names = [f"k{number}" for number in range(12)]
    results = [loss.late.apply_async((n, "stubborn"), time_limit=1) for n in names]
    for result in results:
        with pytest.raises(TimeLimitExceeded):
            result.get(timeout=SOON)
    wait_until(lambda: not Keys(loss.app).held(), "no key is left", timeout=SOON)
    assert loss.early.delay("next", "sleep", 1).get(timeout=SOON)
    assert len(journal.runs()) == 13
    assert not reported([process], EventName.REQUEUED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "seconds", "number"),
    [("sleep", 30, "SIGTERM"), ("stubborn", 2, "SIGTERM"), ("stubborn", 30, "SIGKILL")],
)
def test_no_body_starts_before_a_revoked_one_has_ended(
    worker: StartWorker,
    loss: ModuleType,
    keys: Keys,
    journal: Journal,
    way: str,
    seconds: int,
    number: str,
) -> None:
    process = worker(LOSS)
    result = loss.early.delay("k", way, seconds)
    [start] = journal.wait_for_starts(key="k")
    competitor = loss.competitor.delay("k")
    process.wait_for_event(EventName.CONFLICT)  # so the worker parent knows which child has what
    result.revoke(terminate=True, signal=number)
    let_go = watch_until_let_go(keys, loss.early.lock_key("k"), result.id)
    competitor.get(timeout=SOON)
    assert last_breaths(journal).get(start.pid, start.at) <= let_go
    assert overlaps(journal.records(), deaths=last_breaths(journal)) == []
    assert len(journal.runs("k")) == 2
    if journal.runs("k")[0].error is None and journal.runs("k")[0].finished:
        # It swallowed every SystemExit and returned: that comes after the REVOKED announced before.
        assert (way, number) == ("stubborn", "SIGTERM")
        wait_until(lambda: loss.app.AsyncResult(result.id).state == "SUCCESS", "it has succeeded")
    else:
        with pytest.raises(TaskRevokedError):
            result.get(timeout=SOON)
    wait_until(lambda: not keys.held(), "no key is left", timeout=SOON)


@pytest.mark.parametrize(
    "shutdown",
    [
        "warm",
        *(
            pytest.param(shutdown, marks=pytest.mark.slow)
            for shutdown in ("soft", "remapped", "cold")
        ),
    ],
)
def test_a_shutdown_frees_the_keys_of_what_it_ends_and_only_then(
    worker: StartWorker, loss: ModuleType, keys: Keys, journal: Journal, shutdown: str
) -> None:
    seconds = 3 if shutdown == "warm" else 30
    environment = {
        "soft": {"SOFT_SHUTDOWN": "1"},
        "remapped": {"SOFT_SHUTDOWN": "1", "REMAP_SIGTERM": "SIGQUIT"},
    }.get(shutdown, {})
    ending = worker(LOSS, concurrency=2, queues=["ending"], env=environment)
    worker(LOSS, concurrency=2)
    early = loss.early.apply_async(("early", "sleep", seconds), queue="ending")
    late = loss.late.apply_async(("late", "sleep", seconds, 0.5), queue="ending")
    journal.wait_for_starts(2)
    competitors = [loss.competitor.delay("early"), loss.competitor.delay("late")]
    ending.send_signal(signal.SIGTERM if shutdown in ("warm", "remapped") else signal.SIGQUIT)
    for competitor in competitors:
        competitor.get(timeout=SOON)
    assert ending.wait(SOON) is not None
    if shutdown == "warm":
        assert not early.get(timeout=SOON)["lost"]
        assert not late.get(timeout=SOON)["lost"]
    else:
        # What was acknowledged is gone, as Celery has it; what was not comes back, and runs.
        worker(LOSS, concurrency=2, queues=["ending"])
        assert not late.get(timeout=SOON)["lost"]
        assert [run.task_id for run in journal.runs("late")].count(late.id) == 2
    assert journal.overlaps() == []
    wait_until(lambda: not keys.held(), "no key is left", timeout=SOON)


@pytest.mark.slow
def test_a_child_that_outlives_a_cold_shutdown_keeps_its_key_until_it_ends(
    worker: StartWorker, loss: ModuleType, keys: Keys, journal: Journal
) -> None:
    ending = worker(LOSS, queues=["ending"])
    worker(LOSS)
    loss.early.apply_async(("k", "stubborn", 4), queue="ending")
    journal.wait_for_starts(key="k")
    competitor = loss.competitor.delay("k")
    ending.send_signal(signal.SIGQUIT)
    competitor.get(timeout=SOON)
    assert overlaps(journal.records(), deaths=last_breaths(journal)) == []
    assert len(journal.runs("k")) == 2
    wait_until(lambda: not keys.held(), "no key is left", timeout=SOON)
