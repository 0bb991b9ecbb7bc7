"""A lease is renewed while its body runs, and a body whose lease is lost is ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import redis

from celery_singleton_lock import LeaseLost, hold, is_skipped
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.core.lease import Lease
from example_project.private_server import PrivateServer
from tests.harness.deliveries import RedisBroker, reported, wait_until
from tests.harness.journal import Journal, Run, events
from tests.harness.keys import Keys
from tests.harness.worker import CeleryWorker

LOSS = "tests.apps.loss"

StartWorker = Callable[..., CeleryWorker]
LoadApp = Callable[..., ModuleType]

# The ttl of most tests here, in seconds. A loss is noticed within a heartbeat (ttl/3); by its own
# deadline alone a process would end the body after 2/3 of a ttl at the earliest. The slack lies
# between.
TTL = 3.0
HEARTBEAT = TTL / 3
SLACK = 0.9


@pytest.fixture
def loss(load_app: LoadApp) -> ModuleType:
    """The app in this process; tests that change the environment call ``load_app`` themselves."""
    return load_app(LOSS)


@pytest.fixture
def keys(loss: ModuleType) -> Keys:
    return Keys(loss.app)


def wait_for_heartbeat(keys: Keys, key: str) -> None:
    """Wait until ``key`` is renewed."""
    ttl = keys.record(key).ttl

    def rises() -> bool:
        nonlocal ttl
        before, ttl = ttl, keys.record(key).ttl
        return ttl > before

    wait_until(rises, f"{key} is renewed")


@contextmanager
def replaced(loss: ModuleType, keys: Keys, key: str) -> Iterator[Lease]:
    """Take ``key`` from its holder and hold it here.

    Just after a heartbeat: one between the two would find no lease instead of another's.
    """
    name = loss.early.lock_key(key)
    wait_for_heartbeat(keys, name)
    keys.free(name)
    with hold(key, scope="loss", ttl=30, app=loss.app) as lease:
        yield lease
        # The run that lost it has not touched what is ours now.
        assert not lease.lost
        assert keys.record(lease.key).token == str(lease.token)


def wait_for_run(journal: Journal, key: str, count: int = 1) -> Run:
    """The run of ``key`` with that number, once it has ended."""
    journal.wait_for_ends(count, key=key)
    return journal.runs(key)[count - 1]


# Renewal.


@pytest.mark.parametrize("seconds", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_duplicates_every_fifth_of_a_second_never_overlap_a_body_longer_than_its_ttl(
    worker: StartWorker,
    load_app: LoadApp,
    environment: dict[str, str],
    journal: Journal,
    seconds: int,
) -> None:
    environment["TTL"] = "1"
    loss = load_app(LOSS)
    worker(LOSS)
    first = loss.early.delay("k", "until_notified", 60)
    journal.wait_for_starts(key="k")
    duplicates = []
    for _ in range(5 * seconds):
        duplicates.append(loss.early.delay("k", "sleep", 0.1))
        time.sleep(0.2)  # the pace of the calls; nothing waits for it
    assert all(is_skipped(duplicate.get(timeout=30)) for duplicate in duplicates)
    journal.note("go on")
    assert not first.get(timeout=30)["lost"]
    [run] = journal.runs("k")
    assert run.end - run.begin >= seconds


@pytest.mark.parametrize("outage", ["killed", pytest.param("stopped", marks=pytest.mark.slow)])
def test_a_store_that_is_away_at_a_renewal_and_comes_back_ends_nothing(
    private_redis: PrivateServer,
    worker: StartWorker,
    load_app: LoadApp,
    environment: dict[str, str],
    journal: Journal,
    outage: str,
) -> None:
    # A renewal that fails leaves two thirds of it to the store, to be started again.
    environment |= {"LOCK_URL": private_redis.url(), "TTL": "9"}
    loss = load_app(LOSS)
    keys, key = Keys(loss.app), loss.early.lock_key("k")
    with redis.Redis.from_url(private_redis.url()) as client:
        # Else a write may wait in the server's memory for the disk, and be gone after the kill.
        client.config_set("appendfsync", "no")
    process = worker(LOSS)
    first = loss.early.delay("k", "until_notified", 60)
    journal.wait_for_starts(key="k")

    def expires() -> float:
        return time.monotonic() + keys.record(key).ttl

    before = expires()
    private_redis.pause() if outage == "stopped" else private_redis.kill()
    duplicate = loss.early.delay("k", "sleep", 0)
    process.wait_for_event(EventName.STORE_UNREACHABLE, task_id=first.id, action="renewed-later")
    private_redis.resume() if outage == "stopped" else private_redis.start()
    wait_until(lambda: expires() > before + 0.5, "the lease is renewed")
    assert is_skipped(loss.early.delay("k", "sleep", 0).get(timeout=30))
    journal.note("go on")
    assert not first.get(timeout=30)["lost"]
    duplicate.get(timeout=30)
    assert journal.overlaps() == []
    assert journal.runs("k")[0].task_id == first.id


@pytest.mark.parametrize("task", ["early", pytest.param("deaf", marks=pytest.mark.slow)])
def test_a_body_ends_before_its_unreachable_lease_does_unless_it_is_to_continue(
    private_redis: PrivateServer,
    worker: StartWorker,
    load_app: LoadApp,
    environment: dict[str, str],
    journal: Journal,
    task: str,
) -> None:
    environment |= {"LOCK_URL": private_redis.url(), "TTL": "3"}
    loss = load_app(LOSS)
    keys, key = Keys(loss.app), loss.early.lock_key("k")
    process = worker(LOSS)
    first = getattr(loss, task).delay("k", "sleep", 60 if task == "early" else 10)
    journal.wait_for_starts(key="k")
    private_redis.pause()
    action = "interrupted,failed" if task == "early" else "continued"
    process.wait_for_event(EventName.LEASE_LOST, reason="unreachable", action=action)
    if task == "early":
        # The store is still away, so only the interruption can have ended it.
        [end] = journal.wait_for_ends(key="k", timeout=30)
        assert end.data["error"] == "LeaseInterrupt"
    private_redis.resume()
    keys.wait_until_free(key)  # what was sent meanwhile may have renewed it once more
    loss.competitor.delay("k").get(timeout=30)
    if task == "early":
        with pytest.raises(LeaseLost, match=r"unreachable .*renewals failed"):
            first.get(timeout=30)
        assert journal.overlaps() == []
    else:
        assert first.get(timeout=30)["lost"]
        assert journal.overlaps()


# Loss.

WAYS = ["sleep", "read", "loop", "swallow"]


@pytest.mark.slow
def test_a_replaced_lease_ends_its_body_within_a_heartbeat_whatever_it_does(
    worker: StartWorker, loss: ModuleType, keys: Keys, journal: Journal
) -> None:
    worker(LOSS, concurrency=4)
    results = {way: loss.early.delay(way, way, 20) for way in WAYS}
    journal.wait_for_starts(len(WAYS))
    for way, result in results.items():
        with replaced(loss, keys, way):
            at = time.monotonic()
            run = wait_for_run(journal, way)
            with pytest.raises(LeaseLost, match="replaced"):
                result.get(timeout=30)
        assert result.state == "FAILURE"
        assert run.error == "LeaseInterrupt", way
        assert run.end - at < HEARTBEAT + SLACK, way
    # The pool is as good as new. A key each: one is free again a moment after its result is there.
    ends = [loss.early.delay(f"k{n}", "sleep", 0).get(timeout=30)["lost"] for n in range(8)]
    assert ends == [False] * 8


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_replaced_lease_ends_the_event_loop_of_its_body_with_all_its_tasks(
    pool: str, worker: StartWorker, loss: ModuleType, keys: Keys, journal: Journal
) -> None:
    process = worker(LOSS, pool=pool)
    result = loss.early.delay("k", "event_loop", 60)
    journal.wait_for_starts(key="k")
    with replaced(loss, keys, "k"), pytest.raises(LeaseLost, match="replaced"):
        result.get(timeout=30)  # half of what its tasks take
    assert result.state == "FAILURE"
    [run] = journal.runs("k")
    assert run.error == "LoopInterrupt"
    cleaned = [note for note in events(journal.records(), "note") if note.at < run.end]
    assert [note.data["text"] for note in cleaned] == ["cleaned up"] * 3
    process.wait_for_event(EventName.LEASE_LOST, reason="replaced", action="interrupted,failed")
    # The pool is as good as new, and the lock of the first loop is free. A key each: one is free
    # again a moment after its result is there.
    ends = [loss.early.delay(f"k{n}", "event_loop", 0).get(timeout=30)["lost"] for n in range(4)]
    assert ends == [False] * 4


@pytest.mark.slow
def test_an_autoretry_that_names_the_loss_is_honoured(
    worker: StartWorker, loss: ModuleType, keys: Keys, journal: Journal
) -> None:
    worker(LOSS)
    result = loss.forgiving.delay("k")
    journal.wait_for_starts(key="k")
    with replaced(loss, keys, "k"):
        wait_for_run(journal, "k")
        # A due retry is started work: it meets the other's lease and is requeued, not skipped.
        wait_until(lambda: result.state == "RETRY", "the retry is stored")
    assert result.get(timeout=30)["retries"] == 1
    first, second = journal.runs("k")
    assert (first.error, second.error) == ("LeaseInterrupt", None)
    assert second.fence > first.fence


@pytest.mark.slow
def test_a_late_acknowledged_task_is_requeued_and_runs_after_the_other(
    worker: StartWorker, loss: ModuleType, keys: Keys, journal: Journal
) -> None:
    process = worker(LOSS)
    result = loss.late.delay("k", "sleep", 20, 0.0)
    journal.wait_for_starts(key="k")
    with replaced(loss, keys, "k") as other:
        wait_for_run(journal, "k")
        process.wait_for_event(EventName.REQUEUED, reason="lease-lost")
        process.wait_for_event(EventName.REQUEUED, reason="started")
        assert len(journal.runs("k")) == 1
        assert result.state == "PENDING"
        freed = time.monotonic()
    answer = result.get(timeout=30)
    first, second = journal.runs("k")
    assert answer == {"fence": second.fence, "lost": False, "retries": 0}
    assert (first.error, second.error) == ("LeaseInterrupt", None)
    assert second.begin > freed
    assert first.fence < other.fence < second.fence
    assert reported([process], EventName.LEASE_LOST) == {result.id: 1}


@pytest.mark.slow
def test_a_body_is_requeued_three_times_then_its_loss_is_its_failure(
    worker: StartWorker, load_app: LoadApp, environment: dict[str, str], journal: Journal
) -> None:
    environment["TTL"] = "1"
    loss = load_app(LOSS)
    keys, key = Keys(loss.app), loss.late.lock_key("k")
    process = worker(LOSS)
    result = loss.late.delay("k")
    for count in range(1, 5):
        journal.wait_for_starts(count, key="k")
        keys.free(key)
        journal.wait_for_ends(count, key="k")
    with pytest.raises(LeaseLost, match="gone"):
        result.get(timeout=30)
    fences = [run.fence for run in journal.runs("k")]
    assert len(fences) == 4
    assert fences == sorted(set(fences))
    assert reported([process], EventName.REQUEUED, reason="lease-lost") == {result.id: 3}
    # The heartbeat reports the last loss while the body's thread stores the failure.
    process.wait_for_event(EventName.LEASE_LOST, action="interrupted,failed")
    actions = [event.fields["action"] for event in process.events(EventName.LEASE_LOST)]
    assert actions == ["interrupted,requeued"] * 3 + ["interrupted,failed"]
    assert journal.overlaps() == []


@pytest.mark.parametrize(
    "duplicate_seconds",
    [pytest.param(0.0, id="ended"), pytest.param(4.0, id="running", marks=pytest.mark.slow)],
)
def test_a_body_lost_to_its_own_duplicate_leaves_the_others_result_alone(
    worker: StartWorker,
    loss: ModuleType,
    keys: Keys,
    redis_client: redis.Redis,
    journal: Journal,
    duplicate_seconds: float,
) -> None:
    process = worker(LOSS)
    result = loss.late.delay("k", "sleep", 20, duplicate_seconds)
    journal.wait_for_starts(key="k")
    keys.free(loss.late.lock_key("k"))
    RedisBroker(redis_client).deliver_again(result.id)
    journal.wait_for_starts(2, key="k")
    process.wait_for_event(EventName.DROPPED, EventName.REQUEUED, reason="lost-to-duplicate")
    lost, duplicate = journal.runs("k")
    assert lost.error == "LeaseInterrupt"
    assert result.get(timeout=30) == {"fence": duplicate.fence, "lost": False, "retries": 0}
    journal.wait_for_ends(2, key="k")
    # The loser wrote nothing later. A duplicate that runs on may die yet, so a copy waited for its
    # end.
    if duplicate_seconds:
        assert reported([process], EventName.REQUEUED, reason="lost-to-duplicate")
        process.wait_for_event(EventName.DROPPED, task_id=result.id, reason="done")
    else:
        assert not reported([process], EventName.REQUEUED)
    assert result.state == "SUCCESS"
    # Its result is there some milliseconds before its key is free.
    keys.wait_until_free(loss.late.lock_key("k"))
    assert not loss.early.delay("k", "sleep", 0).get(timeout=30)["lost"]
    assert len(journal.runs("k")) == 3


@pytest.mark.slow
def test_in_the_gevent_pool_a_body_is_interrupted_where_it_waits_and_its_neighbour_is_not(
    worker: StartWorker, loss: ModuleType, keys: Keys, journal: Journal
) -> None:
    pytest.importorskip("gevent")
    worker(LOSS, pool="gevent", concurrency=4)
    loser = loss.early.delay("loser", "sleep", 60)
    neighbour = loss.early.delay("neighbour", "sleep", 3 * TTL)
    journal.wait_for_starts(2)
    with replaced(loss, keys, "loser"):
        at = time.monotonic()
        with pytest.raises(LeaseLost):
            loser.get(timeout=30)
        assert not neighbour.get(timeout=30)["lost"]
    [run] = journal.runs("loser")
    assert run.end - at < HEARTBEAT + SLACK


# Bounds.


@pytest.mark.slow
def test_a_body_that_reaches_max_hold_is_ended_and_the_key_is_free(
    worker: StartWorker, load_app: LoadApp, environment: dict[str, str], journal: Journal
) -> None:
    environment["TTL"] = "1"
    loss = load_app(LOSS)
    worker(LOSS)
    result = loss.bounded.delay("k", "swallow", 20)
    journal.wait_for_starts(key="k")
    loss.competitor.delay("k").get(timeout=30)
    with pytest.raises(LeaseLost, match=r"max_hold of 1\.5 s"):
        result.get(timeout=30)
    first, second = journal.runs("k")
    # Renewed until max_hold, and then not again.
    assert 1.5 < first.end - first.begin < 1.5 + 1 + SLACK
    assert second.begin - first.begin < 1.5 + 1 + SLACK
    assert journal.overlaps() == []
