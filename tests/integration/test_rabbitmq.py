"""RabbitMQ, classic and quorum queues: deliveries that come again, and messages that are requeued.

RabbitMQ has no visibility_timeout: an unacknowledged message comes back when its connection ends,
or its channel, which the node closes when an acknowledgement is overdue (``consumer_timeout``).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import celery
import pytest

from celery_singleton_lock.core.events import EventName
from tests.harness.bodies import assert_one_run_each, ids, wait_until_received
from tests.harness.deliveries import received, reported, wait_until
from tests.harness.journal import Journal
from tests.harness.rabbit import RabbitServer
from tests.harness.worker import CeleryWorker

CRASH = "tests.apps.crash"
SLOW = pytest.mark.slow
#: Before 5.7 a message that comes again to a worker waits there for the first run to end.
COMES_AT_ONCE = celery.VERSION >= (5, 7)
COUNTS = [pytest.param(4, id="4"), pytest.param(20, id="20", marks=SLOW)]

StartWorker = Callable[..., CeleryWorker]
LoadApp = Callable[..., ModuleType]


@pytest.fixture
def vhost(rabbit: RabbitServer, environment: dict[str, str]) -> str:
    """The virtual host of this test."""
    name = rabbit.vhost()
    environment["BROKER_URL"] = rabbit.url(name)
    return name


@pytest.fixture(params=["classic", "quorum"])
def crash(
    request: pytest.FixtureRequest,
    load_app: LoadApp,
    vhost: str,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> ModuleType:
    """The app in this process."""
    environment["QUEUE_TYPE"] = request.param
    module = load_app(CRASH)
    # The gates of this test, seen from here.
    monkeypatch.setenv("JOURNAL", environment["JOURNAL"])
    return module


def wait_until_dropped(process: CeleryWorker, task_ids: set[str]) -> None:
    """Wait for the last word on the copies: the worker found their work done."""
    wait_until(
        lambda: set(reported([process], EventName.DROPPED, reason="done")) >= task_ids,
        "the copies have ended",
        timeout=60,
    )


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
def test_a_connection_cut_in_mid_body_makes_no_second_body(
    count: int,
    crash: ModuleType,
    rabbit: RabbitServer,
    vhost: str,
    worker: StartWorker,
    journal: Journal,
) -> None:
    process = worker(CRASH, concurrency=count + 2)
    results = [crash.late.delay(f"k{number}", "all") for number in range(count)]
    journal.wait_for_starts(count)
    rabbit.close_connections(vhost)
    wait_until_received([process], results, 4 if COMES_AT_ONCE else 2)
    crash.open_gate("all")
    marks = [result.get(timeout=60) for result in results]
    wait_until_dropped(process, ids(results))
    if count > 4:
        rabbit.wait_until_empty(vhost)
    if COMES_AT_ONCE:
        assert_all_copies_were_dropped(process, results)
    assert_one_run_each(journal, results, marks)


def assert_all_copies_were_dropped(process: CeleryWorker, results: list[Any]) -> None:
    print(
        received([process]),
        reported([process], EventName.REQUEUED),
        reported([process], EventName.DROPPED),
    )
    assert (
        set(reported([process], EventName.REQUEUED))
        == set(reported([process], EventName.DROPPED))
        == ids(results)
    )


def let_acknowledgements_be_overdue(
    count: int, task: Any, rabbit: RabbitServer, worker: StartWorker, journal: Journal
) -> tuple[list[Any], CeleryWorker]:
    """Let the node close the channel of a worker in mid-body, and start the next worker.

    Celery (5.7) calls that an unrecoverable error: the worker ends, once its bodies have. So there
    is another one, as a supervisor would start, for what comes back.

    Returns:
        The results, and the next worker.
    """
    # In force for the channels that are opened meanwhile: of the first worker alone.
    with rabbit.consumer_timeout(3):
        first = worker(CRASH, concurrency=count)
        results = [task.delay(f"k{number}", "all") for number in range(count)]
        journal.wait_for_starts(count)
        first.wait_for_log("PRECONDITION_FAILED - delivery acknowledgement", timeout=60)
    return results, worker(CRASH, concurrency=count + 2)


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 20])
def test_an_overdue_acknowledgement_makes_no_second_body(
    count: int,
    crash: ModuleType,
    rabbit: RabbitServer,
    vhost: str,
    worker: StartWorker,
    journal: Journal,
) -> None:
    results, second = let_acknowledgements_be_overdue(count, crash.late, rabbit, worker, journal)
    wait_until_received([second], results, 3)
    crash.open_gate("all")
    marks = [result.get(timeout=60) for result in results]
    wait_until_dropped(second, ids(results))
    rabbit.wait_until_empty(vhost)
    assert_all_copies_were_dropped(second, results)
    assert_one_run_each(journal, results, marks)


@pytest.mark.slow
@pytest.mark.parametrize("count", COUNTS)
def test_a_job_whose_worker_was_killed_runs_again(
    count: int,
    crash: ModuleType,
    rabbit: RabbitServer,
    vhost: str,
    worker: StartWorker,
    journal: Journal,
) -> None:
    """It comes back at once, before the ttl has freed its key, and waits for that."""
    process = worker(CRASH, concurrency=count)
    results = [crash.late.delay(f"k{number}", "all") for number in range(count)]
    journal.wait_for_starts(count)
    pids = process.group()
    at = process.kill_group()
    for pid in pids:
        journal.death(pid, at)
    worker(CRASH, concurrency=count)
    journal.wait_for_starts(2 * count)
    crash.open_gate("all")
    marks = [result.get(timeout=60) for result in results]
    for number in range(count):
        killed, again = journal.runs(f"k{number}")
        assert (killed.finished, again.data["mark"]) == (False, marks[number])
    assert journal.overlaps() == []


@pytest.mark.parametrize(
    "route",
    [
        pytest.param({"queue": "reports"}, id="queue", marks=SLOW),
        pytest.param({"exchange": "work", "routing_key": "work.report"}, id="exchange"),
        pytest.param({"exchange": "any", "routing_key": "any.thing"}, id="pattern", marks=SLOW),
    ],
)
def test_what_is_requeued_comes_to_its_own_queue_again(
    route: dict[str, str],
    crash: ModuleType,
    rabbit: RabbitServer,
    vhost: str,
    worker: StartWorker,
    journal: Journal,
) -> None:
    process = worker(CRASH, concurrency=2, queues=["reports", "all"])
    holder = crash.patient.apply_async(("k", "all"), **route)
    journal.wait_for_starts(1)
    waiting = crash.patient.apply_async(("k", "all"), **route)
    # Twice: what comes from a requeue is requeued as well.
    wait_until_received([process], [waiting], 3)
    crash.open_gate("all")
    marks = [holder.get(timeout=30), waiting.get(timeout=30)]
    assert [run.data["mark"] for run in journal.runs("k")] == marks
    assert journal.overlaps() == []
