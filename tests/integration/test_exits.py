"""Whatever ends a body from outside, its key is free soon, and not before the body has ended.

The ttl is 90 s here and every wait is shorter: a key that only its ttl freed fails the test.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from types import ModuleType

import pytest
from celery.exceptions import TaskRevokedError, TimeLimitExceeded

from celery_singleton_lock.core.events import EventName
from tests.harness.deliveries import wait_until
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
