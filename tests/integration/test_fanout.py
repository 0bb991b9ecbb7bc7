"""One message in several queues: each copy is a call of its own, and goes back to its own queue.

Plain Celery is the reference: under the lock a task runs as often, one run after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import redis

from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.core.keyspace import Keyspace
from tests.apps.gate import Gate
from tests.harness.deliveries import received, reported, wait_until
from tests.harness.journal import Journal, events
from tests.harness.keys import EVERY_NAME
from tests.harness.rabbit import RabbitServer
from tests.harness.worker import CeleryWorker

pytestmark = pytest.mark.slow

APP = "tests.apps.fanout"
PAIR = {"exchange": "pair", "routing_key": "pair.one"}

StartWorker = Callable[..., CeleryWorker]
LoadApp = Callable[..., ModuleType]


@pytest.fixture
def on_rabbit(rabbit: RabbitServer, environment: dict[str, str]) -> None:
    environment["BROKER_URL"] = rabbit.url(rabbit.vhost())


@pytest.fixture
def site(load_app: LoadApp) -> ModuleType:
    """The app in this process, on Redis unless `on_rabbit` came before."""
    return load_app(APP)


def wait_until_settled(
    workers: list[CeleryWorker], task_id: str, copies: int, journal: Journal
) -> None:
    """Wait until the ``copies`` of one message have run, and nothing else is under way."""

    def settled() -> bool:
        ended = [run for run in journal.runs() if run.finished]
        assert len(ended) <= copies
        arrived, back = received(workers)[task_id], reported(workers, EventName.REQUEUED)[task_id]
        return len(ended) == copies and arrived == copies + back

    wait_until(settled, f"{copies} runs have ended, and each copy has arrived once")


def run_copies(
    task: Any,
    route: dict[str, Any],
    queues: list[list[str]],
    worker: StartWorker,
    journal: Journal,
    client: redis.Redis,
    site: ModuleType | None = None,
) -> list[str]:
    """Send one message, of which each worker gets one copy; the workers that ran it, in order.

    Args:
        task: The task.
        route: Celery's routing options.
        queues: The queues of each worker.
        worker, journal, client: The fixtures.
        site: The app, where its workers have to be subscribed first.
    """
    workers = [worker(APP, concurrency=2, queues=names) for names in queues]
    if site is not None:
        wait_until_subscribed(site, journal, len(workers))
    copies = sum(map(len, queues))
    result = task.apply_async(("k", "go"), **route)
    journal.wait_for_starts(1)
    if task.name.endswith(".plain"):
        journal.wait_for_starts(copies)
    else:
        # One holds the key: each of the others has met it.
        wait_until(
            lambda: sum(reported(workers, EventName.CONFLICT).values()) >= copies - 1,
            "there were conflicts",
        )
    Gate(client, "go").open()
    wait_until_settled(workers, result.id, copies, journal)
    return [run.data["worker"] for run in journal.runs()]


def wait_until_subscribed(site: ModuleType, journal: Journal, count: int) -> None:
    """A worker that is ready may not be subscribed to its Redis broker's exchange yet."""

    def all_receive() -> bool:
        site.hello.apply_async(queue="news", declare=[site.NEWS])
        return len({note.key for note in events(journal.records(), "note")}) >= count

    wait_until(all_receive, "each worker has received a broadcast")


@pytest.mark.usefixtures("on_rabbit")
@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param("plain", 3, id="plain"),
        pytest.param("patient", 2, id="patient"),
        pytest.param("patient", 3, id="patient-3"),
        pytest.param("late", 3, id="late"),
        pytest.param("unique", 3, id="unique"),
    ],
)
def test_a_broadcast_runs_once_in_each_worker(
    name: str,
    count: int,
    site: ModuleType,
    worker: StartWorker,
    journal: Journal,
    redis_client: redis.Redis,
) -> None:
    task = getattr(site, name)
    workers = run_copies(task, {"queue": "news"}, [["news"]] * count, worker, journal, redis_client)
    assert len(set(workers)) == count
    assert (journal.overlaps() == []) == (name != "plain")

    def no_claim() -> bool:
        return not [
            key for key in redis_client.keys(EVERY_NAME) if Keyspace("celery").is_claim(key)
        ]

    # The journal has a run's end from its body, and the claim ends after the body.
    wait_until(no_claim, "the claim has ended")


@pytest.mark.usefixtures("on_rabbit")
@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
@pytest.mark.parametrize("name", ["plain", "patient", "late"])
def test_a_message_in_two_queues_runs_once_for_each(
    name: str,
    queue_type: str,
    load_app: LoadApp,
    environment: dict[str, str],
    worker: StartWorker,
    journal: Journal,
    redis_client: redis.Redis,
) -> None:
    environment["QUEUE_TYPE"] = queue_type
    task = getattr(load_app(APP), name)
    workers = run_copies(task, PAIR, [["left"], ["right"]], worker, journal, redis_client)
    assert len(set(workers)) == 2
    assert (journal.overlaps() == []) == (name != "plain")


@pytest.mark.usefixtures("on_rabbit")
@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
def test_a_message_in_two_queues_of_one_worker_runs_twice(
    queue_type: str,
    load_app: LoadApp,
    environment: dict[str, str],
    worker: StartWorker,
    journal: Journal,
    redis_client: redis.Redis,
) -> None:
    environment["QUEUE_TYPE"] = queue_type
    task = load_app(APP).patient
    run_copies(task, PAIR, [["left", "right"]], worker, journal, redis_client)
    assert journal.overlaps() == []


def test_what_came_by_a_pattern_of_a_redis_broker_is_requeued_to_its_queue(
    site: ModuleType,
    worker: StartWorker,
    journal: Journal,
    redis_client: redis.Redis,
) -> None:
    """A pool child does not know the exchanges of such a broker, and treats them as direct."""
    process = worker(APP, concurrency=2, queues=["all", "celery"])
    # The publisher has to say of which type the exchange is, with plain Celery too.
    route = {
        "exchange": "any",
        "routing_key": "any.thing",
        "declare": [site.app.amqp.queues["all"]],
    }
    site.patient.apply_async(("k", "go"), **route)
    journal.wait_for_starts(1)
    waiting = site.patient.apply_async(("k", "go"), **route)
    # Twice: what comes from a requeue is requeued as well.
    wait_until(
        lambda: reported([process], EventName.REQUEUED)[waiting.id] >= 2, "it was requeued twice"
    )
    Gate(redis_client, "go").open()
    journal.wait_for_ends(2)
    assert journal.overlaps() == []


def test_messages_sent_by_name_under_one_id_to_a_shared_queue_all_run(
    site: ModuleType, worker: StartWorker, journal: Journal
) -> None:
    """They get a name from their queue, which is no name of their own."""
    worker(APP, concurrency=1, queues=["left"])
    queues = [site.app.amqp.queues[name] for name in ("left", "right")]
    for count in (1, 2):
        site.app.send_task(site.late.name, ("k",), task_id="one", declare=queues, **PAIR)
        journal.wait_for_ends(count)


@pytest.mark.parametrize("name", ["routed", "addressed"])
def test_a_copy_goes_to_its_queue_and_not_where_the_route_or_the_class_leads(
    name: str,
    site: ModuleType,
    worker: StartWorker,
    journal: Journal,
    redis_client: redis.Redis,
) -> None:
    check_that_a_copy_comes_back(site, name, worker, journal, redis_client)


@pytest.mark.usefixtures("on_rabbit")
@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
@pytest.mark.parametrize("name", ["routed", "addressed"])
def test_a_copy_goes_to_its_queue_on_rabbitmq(
    name: str,
    queue_type: str,
    load_app: LoadApp,
    environment: dict[str, str],
    worker: StartWorker,
    journal: Journal,
    redis_client: redis.Redis,
) -> None:
    environment["QUEUE_TYPE"] = queue_type
    check_that_a_copy_comes_back(load_app(APP), name, worker, journal, redis_client)


def check_that_a_copy_comes_back(
    site: ModuleType, name: str, worker: StartWorker, journal: Journal, client: redis.Redis
) -> None:
    process = worker(APP, concurrency=2, queues=["all"])
    queue = site.app.amqp.queues["all"]
    route = {"queue": queue, "exchange": "any", "routing_key": "any.thing", "declare": [queue]}
    task = getattr(site, name)
    task.apply_async(("k", "go"), **route)
    journal.wait_for_starts(1)
    waiting = task.apply_async(("k", "go"), **route)
    wait_until(
        lambda: reported([process], EventName.REQUEUED)[waiting.id] >= 2, "it was requeued twice"
    )
    Gate(client, "go").open()
    journal.wait_for_ends(2)
    assert journal.overlaps() == []


@pytest.mark.parametrize("name", ["plain", "waiting"])
def test_a_broadcast_by_redis_runs_in_each_worker_when_calls_wait_there(
    name: str,
    site: ModuleType,
    worker: StartWorker,
    journal: Journal,
    redis_client: redis.Redis,
) -> None:
    route = {"queue": "news", "declare": [site.NEWS]}
    task = getattr(site, name)
    queues = [["news"], ["news"]]
    workers = run_copies(task, route, queues, worker, journal, redis_client, site)
    assert len(set(workers)) == 2
    assert (journal.overlaps() == []) == (name != "plain")


def test_a_broadcast_by_redis_that_would_have_to_go_back_fails_and_says_why(
    site: ModuleType,
    worker: StartWorker,
    journal: Journal,
    redis_client: redis.Redis,
) -> None:
    """Its queue is a subscription: what is published there by the queue's name reaches nothing."""
    workers = [worker(APP, concurrency=1, queues=["news"]) for _ in range(2)]
    wait_until_subscribed(site, journal, 2)
    site.patient.apply_async(("k", "go"), queue="news", declare=[site.NEWS])
    journal.wait_for_starts(1)
    wait_until(lambda: any("LockConflict" in process.log for process in workers), "one has failed")
    Gate(redis_client, "go").open()
    journal.wait_for_ends(1)
    logs = "".join(process.log for process in workers)
    assert "it came by the fanout exchange 'news', on which redis can't put a message back" in logs
    assert reported(workers, EventName.REQUEUED) == {}


@pytest.mark.usefixtures("on_rabbit")
def test_each_copy_of_a_call_with_a_place_in_a_queue_runs(
    site: ModuleType, worker: StartWorker, journal: Journal
) -> None:
    for names in (["left"], ["right", "celery"]):
        worker(APP, concurrency=2, queues=names)
    site.queued.apply_async(("k",), **PAIR)
    site.queued.apply_async(("k",), queue="celery")
    wait_until(lambda: [run.finished for run in journal.runs()] == [True] * 3, "all have run")
    assert journal.overlaps() == []
