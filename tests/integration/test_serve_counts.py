"""The metrics of `celery singleton serve` against what happened, with real workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from celery_singleton_lock import inspection, is_skipped
from celery_singleton_lock.core.events import EventName
from example_project.private_server import PrivateServer
from tests.harness.bodies import power_cut
from tests.harness.deliveries import wait_until
from tests.harness.journal import Journal
from tests.harness.processes import kill_process
from tests.harness.serve import ServeProcess
from tests.harness.worker import CeleryWorker

POOLS = "tests.apps.pools"
BRIEF, INTERRUPTIBLE = f"{POOLS}.brief", f"{POOLS}.interruptible"
# Each counter of events that a worker logs at INFO or above: the event, and the field of its label.
LOGGED = {
    "conflicts_total": (EventName.CONFLICT, "outcome"),
    "losses_total": (EventName.LEASE_LOST, "reason"),
    "release_failures_total": (EventName.RELEASE_FAILED, ""),
    "freed_total": (EventName.FREED, ""),
    "requeues_total": (EventName.REQUEUED, "reason"),
    "drops_total": (EventName.DROPPED, "reason"),
    "store_failures_total": (EventName.STORE_UNREACHABLE, ""),
    "store_recoveries_total": (EventName.STORE_BACK, ""),
}


def counted(server: ServeProcess) -> dict[str, Counter[tuple[str, str]]]:
    """The counters, by name; each by task and the value of the other label."""
    found: dict[str, Counter[tuple[str, str]]] = {}
    for (name, labels), value in server.samples().items():
        if name.endswith("_total"):
            by_name = dict(labels)
            task = by_name.pop("task", "")
            rest = "".join(by_name.values())
            found.setdefault(name, Counter())[task, rest] = int(value)
    return found


def logged(workers: list[CeleryWorker]) -> dict[str, Counter[tuple[str, str]]]:
    """The same, from the lines of the workers' logs."""
    return {
        name: Counter(
            (one.task, one.fields.get(label, ""))
            for worker in workers
            for one in worker.events(event)
        )
        for name, (event, label) in LOGGED.items()
    }


def gauges(server: ServeProcess, name: str) -> dict[frozenset[tuple[str, str]], float]:
    return {labels: value for (found, labels), value in server.samples().items() if found == name}


@pytest.fixture
def environment(environment: dict[str, str], private_redis: PrivateServer) -> dict[str, str]:
    """The lock store is apart from the broker."""
    return {**environment, "LOCK_URL": private_redis.url(), "TTL": "2"}


@pytest.mark.slow
def test_counters_equal_the_journal_and_gauges_the_store(
    private_redis: PrivateServer,
    journal: Journal,
    worker: Callable[..., CeleryWorker],
    load_app: Callable[..., ModuleType],
    serve: Callable[..., ServeProcess],
) -> None:
    pools, server = load_app(POOLS), serve(POOLS)
    wait_until(lambda: server.sample("events_up"), "serve receives worker events")
    workers = [worker(POOLS, concurrency=4, args=["-E"]) for _ in range(2)]

    # Bodies that run, calls that are skipped, and calls that wait for the end of the bodies.
    bodies = [pools.brief.delay(key, until_open=True) for key in ("a", "b", "c")]
    journal.wait_for_starts(3)
    skipped = [pools.brief.delay(key) for key in ("a", "b", "b", "c", "c", "c")]
    assert all(is_skipped(result.get(timeout=60)) for result in skipped)
    waiting = [
        pools.brief.apply_async((key,), singleton={"on_conflict": "wait"}) for key in ("a", "b")
    ]
    label = frozenset({("task", BRIEF)})
    wait_until(lambda: gauges(server, "waiting_clients") == {label: 2}, "two clients wait")
    held = Counter((one.task, one.state) for one in inspection.held_keys(pools.app))
    assert held == {(BRIEF, "running"): 3}
    assert gauges(server, "keys") == {
        frozenset({("task", task), ("state", state)}): count
        for (task, state), count in held.items()
    }
    for key in ("a", "b", "c"):
        pools.gate(key).touch()
    for result in [*bodies, *waiting]:
        assert not is_skipped(result.get(timeout=60))

    # A child that is killed.
    pools.brief.delay("killed", until_open=True)
    [start] = journal.wait_for_starts(1, key="killed")
    journal.death(start.pid, kill_process(start.pid))
    wait_until(lambda: logged(workers)["freed_total"], "the parent frees the key")

    # A store that goes away while bodies run, and comes back after their leases have ended.
    for key in ("x", "y"):
        pools.interruptible.delay(key)
        journal.wait_for_starts(1, key=key)
    private_redis.kill()
    late = pools.brief.delay("late")
    wait_until(lambda: logged(workers)["requeues_total"], "the late call is requeued")
    journal.wait_for_ends(1, key="x")
    journal.wait_for_ends(1, key="y")
    private_redis.start()
    assert not is_skipped(late.get(timeout=60))

    def settled() -> bool:
        numbers = counted(server)
        ends = ("releases", "losses", "freed", "release_failures")
        ended = sum(sum(numbers.get(f"{end}_total", {}).values()) for end in ends)
        return ended == numbers["acquisitions_total"].total() == len(journal.runs())

    wait_until(settled, "each lease of the journal has ended, and is counted")
    # Events come in order, so what was counted too often would be there before the last.
    pools.brief.delay("last").get(timeout=60)
    assert len(journal.runs()) == 10
    wait_until(settled, "the last one too")

    found = counted(server)
    starts = Counter((INTERRUPTIBLE if r.key in "xy" else BRIEF, "") for r in journal.runs())
    assert found["acquisitions_total"] == starts == {(BRIEF, ""): 8, (INTERRUPTIBLE, ""): 2}
    expected = logged(workers)
    assert {name: found.get(name, Counter()) for name in LOGGED} == expected
    assert expected["conflicts_total"] == {(BRIEF, "skip"): len(skipped), (BRIEF, "wait"): 2}
    assert expected["freed_total"] == {(BRIEF, ""): 1}
    # A stalled machine loses them by the deadline instead.
    losses = expected["losses_total"]
    assert losses.total() == 2
    assert {reason for _, reason in losses} <= {"unreachable", "expired"}
    samples: Any = server.samples()
    assert samples["wait_seconds_count", label] == 8
    assert samples["hold_seconds_count", label] == found["releases_total"][BRIEF, ""] == 7
    wait_until(lambda: gauges(server, "keys") == {}, "the gauges follow")
    assert list(inspection.held_keys(pools.app)) == []


@pytest.mark.slow
def test_leases_of_a_worker_that_was_killed_as_a_whole_are_acquisitions_without_an_end(
    journal: Journal,
    worker: Callable[..., CeleryWorker],
    load_app: Callable[..., ModuleType],
    serve: Callable[..., ServeProcess],
) -> None:
    pools, server = load_app(POOLS), serve(POOLS)
    wait_until(lambda: server.sample("events_up"), "serve receives worker events")
    doomed = worker(POOLS, concurrency=2, args=["-E"])

    def unreported() -> float:
        found = counted(server)
        ends = ("releases", "losses", "freed", "release_failures")
        ended = sum(sum(found[f"{end}_total"].values()) for end in ends)
        held = sum(gauges(server, "keys").values())
        return sum(found["acquisitions_total"].values()) - ended - held

    pools.gate("done").touch()
    pools.work.delay("done").get(timeout=60)
    for key in ("a", "b"):
        pools.work.delay(key)
        journal.wait_for_starts(1, key=key)
    label = frozenset({("task", f"{POOLS}.work"), ("state", "running")})
    wait_until(lambda: gauges(server, "keys") == {label: 2}, "two leases are held")
    wait_until(lambda: unreported() == 0, "all events have arrived")
    power_cut(doomed, journal)
    wait_until(lambda: unreported() == 2, "the leases expire")

    successor = worker(POOLS, concurrency=2, args=["-E"])
    for key in ("a", "b"):
        pools.gate(key).touch()
        pools.work.delay(key).get(timeout=60)
    wait_until(lambda: counted(server)["releases_total"].total() == 3, "the next ones are counted")
    wait_until(lambda: unreported() == 2, "and hide nothing")
    found = logged([doomed, successor])
    assert not found["freed_total"] + found["losses_total"], "nothing reports those two"


@pytest.mark.slow
def test_events_come_through_rabbitmq(
    environment: dict[str, str],
    rabbit_url: str,
    worker: Callable[..., CeleryWorker],
    load_app: Callable[..., ModuleType],
    serve: Callable[..., ServeProcess],
) -> None:
    environment["BROKER_URL"] = rabbit_url
    pools, server = load_app(POOLS), serve(POOLS)
    wait_until(lambda: server.sample("events_up"), "serve receives worker events")
    worker(POOLS, concurrency=1, args=["-E"])
    pools.brief.delay("k").get(timeout=60)
    wait_until(lambda: server.sample("releases_total", task=BRIEF) == 1, "the release is counted")
    assert server.sample("acquisitions_total", task=BRIEF) == 1
    assert server.state()["broker"]["received"] == 2, "and no event of Celery's own"
