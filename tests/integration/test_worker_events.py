"""Worker events of real workers: each lease has one end, and no broker delays a lock.

Grants and releases are counted (``singleton-counts``); the other ends of a lease are single events.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable
from types import ModuleType

import pytest

from celery_singleton_lock import hold
from celery_singleton_lock.core.events import EventName
from example_project.private_server import PrivateServer
from tests.harness.deliveries import wait_until
from tests.harness.journal import Journal
from tests.harness.listener import Listener, listening, type_of
from tests.harness.processes import kill_process
from tests.harness.worker import CeleryWorker

APP = "tests.apps.reporting"

StartWorker = Callable[..., CeleryWorker]
LoadApp = Callable[..., ModuleType]

pytestmark = pytest.mark.slow


ENDS = {
    type_of(name): name
    for name in (EventName.LEASE_LOST, EventName.RELEASE_FAILED, EventName.FREED)
}


def counted(listener: Listener) -> Counter[str]:
    """How many leases were acquired and released."""
    found = Counter[str]()
    for one in listener.of("singleton-counts"):
        for name, _, _, times in one["counts"]:
            found[name] += times
    return found


def ends_of(listener: Listener) -> dict[str, list[str]]:
    """The ends that are single events, by lease."""
    ends: dict[str, list[str]] = {}
    for event in listener.events:
        if event["type"] in ENDS:
            ends.setdefault(event["lease"], []).append(ENDS[event["type"]])
    return ends


def seen_by_receivers(journal: Journal) -> dict[str, list[str]]:
    """The events of each lease, as the receivers of signals in the worker's processes noted them.

    Celery passes a task to a second child if the first one died before its parent had read that it
    accepted the task; then the lease has two grants.
    """
    seen: dict[str, list[str]] = {}
    for record in journal.records():
        before = seen.setdefault(record.data.get("lease", ""), [])
        if record.data.get("text") != EventName.ACQUIRED or EventName.ACQUIRED not in before:
            before.append(record.data.get("text", ""))
    seen.pop("", None)
    return seen


def test_each_lease_has_one_end_whatever_ends_it(
    worker: StartWorker,
    load_app: LoadApp,
    environment: dict[str, str],
    journal: Journal,
    private_redis: PrivateServer,
) -> None:
    environment |= {"LOCK_URL": private_redis.url(), "TTL": "3"}
    tasks = load_app(APP)
    body = tasks.body
    with listening(tasks.app, worker, APP, concurrency=4) as (listener, process):
        for number in range(5):
            body.delay(f"plain-{number}")
            body.delay(f"raises-{number}", "raise")
        for number in range(3):
            body.delay(f"killed-{number}", "killed")
        first = tasks.newest.delay("newest")
        journal.wait_for_starts(1, key="newest")
        second = tasks.newest.delay("newest")
        listener.wait_for(EventName.CANCELLED, uuid=first.id)
        (tasks.gate("newest")).touch()
        second.get(timeout=30)
        tasks.holds.delay("holds", 20).get(timeout=30)
        hangs = body.apply_async(("hangs", "wait"), time_limit=1)
        revoked = body.delay("revoked", "wait")
        journal.wait_for_starts(1, key="revoked")
        revoked.revoke(terminate=True)
        listener.wait_for(EventName.FREED, uuid=hangs.id)

        def is_released(name: str) -> bool:
            notes = [r for r in journal.records() if r.data.get("text") == EventName.RELEASED]
            return any(note.key.endswith(f":{name}") for note in notes)

        wait_until(lambda: is_released("revoked"), "the revoked body's lease is released")
        # The lease of a dead child is freed by its parent, or before by a child that waits for it.
        body.delay("awaited", "wait")
        [start] = journal.wait_for_starts(1, key="awaited")
        waits = body.apply_async(("awaited",), singleton={"on_conflict": "wait"})
        listener.wait_for(EventName.CONFLICT, uuid=waits.id)
        kill_process(start.pid)
        waits.get(timeout=30)
        # A loss: the store is emptied under a body.
        lost = body.delay("lost", "wait")
        journal.wait_for_starts(1, key="lost")
        private_redis.restart(keep_data=False)
        listener.wait_for(EventName.LEASE_LOST, uuid=lost.id, reason="gone")
        # An outage: the release of one body finds no store, and so does that of a dead child.
        mute = body.delay("mute", "wait")
        dies = body.delay("dies", "wait")
        journal.wait_for_starts(1, key="mute")
        [start] = journal.wait_for_starts(1, key="dies")
        private_redis.pause()
        kill_process(start.pid)
        tasks.gate("mute").touch()
        listener.wait_for(EventName.RELEASE_FAILED, uuid=dies.id)
        wait_until(lambda: len(reported(listener, mute.id)) == 1, "the release of the body fails")
        private_redis.resume()
        body.delay("after").get(timeout=30)
        grants = 5 + 5 + 3 + 2 + 1 + 20 + 2 + 2 + 1 + 2 + 1

        def settled() -> bool:
            ended = counted(listener)[EventName.RELEASED] + len(ends_of(listener))
            return ended >= grants and all(
                len(one) > 1 for one in seen_by_receivers(journal).values()
            )

        wait_until(settled, "each lease has ended")
        ends = ends_of(listener)
        assert {len(one) for one in ends.values()} == {1}
        seen = seen_by_receivers(journal)
        assert len(seen) == grants
        assert {
            lease: one
            for lease, one in seen.items()
            if one != [EventName.ACQUIRED, EventName.RELEASED]
        } == {lease: [EventName.ACQUIRED, *end] for lease, end in ends.items()}
        released = counted(listener)[EventName.RELEASED]
        assert released == grants - len(ends) >= 5 + 5 + 2 + 1 + 20 + 1
        assert counted(listener)[EventName.ACQUIRED] >= grants
        number = Counter(one[0] for one in ends.values())
        assert number[EventName.FREED] >= 3 + 1 + 1
        assert number[EventName.LEASE_LOST] >= 1
        assert number[EventName.RELEASE_FAILED] >= 1
        assert {event["hostname"] for event in listener.events if "lease" in event} == {
            process.hostname
        }


def reported(listener: Listener, task_id: str) -> list[str]:
    names = (EventName.RELEASE_FAILED, EventName.LEASE_LOST)
    return [event["type"] for name in names for event in listener.of(name, uuid=task_id)]


def test_a_killed_child_loses_no_event_that_it_has_emitted(
    worker: StartWorker, load_app: LoadApp, journal: Journal
) -> None:
    tasks = load_app(APP)
    with listening(tasks.app, worker, APP, concurrency=1) as (listener, _):
        killed = tasks.holds.delay("k", 200, "", "killed")
        listener.wait_for(EventName.FREED, uuid=killed.id)
        wait_until(lambda: counted(listener)[EventName.ACQUIRED] >= 201, "the counts arrive")
        assert counted(listener) == {EventName.ACQUIRED: 201, EventName.RELEASED: 200}
        assert list(ends_of(listener).values()) == [[EventName.FREED]]


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_an_unresponsive_broker_delays_no_lock_and_gets_the_events_later(
    pool: str,
    worker: StartWorker,
    load_app: LoadApp,
    environment: dict[str, str],
    journal: Journal,
    private_redis: PrivateServer,
) -> None:
    environment |= {"LOCK_URL": environment["BROKER_URL"], "BROKER_URL": private_redis.url()}
    tasks = load_app(APP)
    with listening(tasks.app, worker, APP, pool=pool, concurrency=2) as (listener, _):
        result = tasks.holds.delay("k", 10, "end")
        journal.wait_for(lambda records: [r for r in records if r.data.get("text") == "held"])
        private_redis.pause()

        def held() -> int:
            return max(record.data.get("number", 0) for record in journal.records())

        before = held()
        wait_until(lambda: held() >= before + 300, "bodies hold and release without a broker")
        (tasks.gate("end")).touch()
        private_redis.resume()
        number = result.get(timeout=30)
        wait_until(
            lambda: counted(listener)[EventName.RELEASED] >= number + 1,
            "all events arrive",
            timeout=30,
        )
        assert counted(listener) == {EventName.ACQUIRED: number + 1, EventName.RELEASED: number + 1}
        assert not ends_of(listener)
        assert not listener.of("singleton-events-dropped")


def test_a_warm_shutdown_sends_what_was_emitted(
    worker: StartWorker, load_app: LoadApp, journal: Journal
) -> None:
    tasks = load_app(APP)
    with listening(tasks.app, worker, APP, concurrency=1) as (listener, process):
        tasks.holds.delay("k", 500)
        journal.wait_for(lambda records: [r for r in records if r.data.get("number") == 100])
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
        listener.wait_for("worker-offline", hostname=process.hostname)
        wait_until(lambda: counted(listener)[EventName.RELEASED] >= 501, "all events arrive")
        assert counted(listener) == {EventName.ACQUIRED: 501, EventName.RELEASED: 501}


@pytest.mark.parametrize(
    ("pool", "options"),
    [("prefork", ["--max-tasks-per-child", "2"]), ("threads", []), ("solo", [])],
)
def test_the_last_release_of_a_process_that_ends_is_counted(
    pool: str,
    options: list[str],
    worker: StartWorker,
    load_app: LoadApp,
    environment: dict[str, str],
) -> None:
    environment |= {"UNOBSERVED": "1", "TTL": "60"}
    tasks = load_app(APP)
    started = {"pool": pool, "concurrency": 2, "args": ["-E", *options]}
    with listening(tasks.app, worker, APP, **started) as (listener, process):
        for result in [tasks.body.delay(f"k{number}") for number in range(9)]:
            result.get(timeout=30)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
        listener.wait_for("worker-offline", hostname=process.hostname)
        wait_until(lambda: counted(listener)[EventName.RELEASED] >= 9, "all releases are counted")
        assert counted(listener) == {EventName.ACQUIRED: 9, EventName.RELEASED: 9}
        assert not ends_of(listener)


def test_an_idle_worker_s_last_release_is_counted_long_before_the_next_renewal(
    worker: StartWorker, load_app: LoadApp, environment: dict[str, str]
) -> None:
    environment |= {"UNOBSERVED": "1", "TTL": "600"}
    tasks = load_app(APP)
    with listening(tasks.app, worker, APP, concurrency=1) as (listener, _):
        tasks.body.delay("k").get(timeout=30)
        wait_until(lambda: counted(listener)[EventName.RELEASED] == 1, "the release is counted")
        assert counted(listener) == {EventName.ACQUIRED: 1, EventName.RELEASED: 1}


def test_remote_control_switches_the_events_on_and_off(
    worker: StartWorker, load_app: LoadApp
) -> None:
    tasks = load_app(APP)
    with listening(tasks.app, worker, APP, concurrency=1, args=[]) as (listener, process):
        tasks.body.delay("before").get(timeout=30)
        tasks.app.control.enable_events(destination=[process.hostname], reply=True)
        run = 0

        def is_counted() -> bool:
            nonlocal run
            before, run = counted(listener)[EventName.ACQUIRED], run + 1
            tasks.body.delay("k").get(timeout=30)
            try:
                wait_until(lambda: counted(listener)[EventName.ACQUIRED] > before, "", timeout=3)
            except AssertionError:
                return False
            return True

        wait_until(is_counted, "the worker sends events", timeout=30)
        assert counted(listener)[EventName.ACQUIRED] <= run, "the one before is not counted"
        tasks.app.control.disable_events(destination=[process.hostname], reply=True)
        wait_until(lambda: not is_counted(), "the worker sends no events", timeout=30)


def test_an_outage_and_its_end_are_events(
    worker: StartWorker,
    load_app: LoadApp,
    environment: dict[str, str],
    private_redis: PrivateServer,
) -> None:
    environment |= {"LOCK_URL": private_redis.url()}
    tasks = load_app(APP)
    with listening(tasks.app, worker, APP, pool="threads", concurrency=1) as (listener, process):
        tasks.body.delay("before").get(timeout=30)
        private_redis.stop()
        result = tasks.body.delay("k")
        event = listener.wait_for(EventName.STORE_UNREACHABLE, uuid=result.id)
        assert (event["action"], event["name"]) == ("requeued", f"{APP}.body")
        assert event["store"].endswith(f":{private_redis.port}/0")
        private_redis.start()
        result.get(timeout=60)
        back = listener.wait_for(EventName.STORE_BACK)
        assert back["store"] == event["store"]
        assert back["lasted"] > 0
        logged = process.wait_for_event(EventName.STORE_BACK, store=back["store"])
        assert "WARNING" in logged.line
        assert (logged.task, logged.task_id) == ("", "")
        assert logged.fields.keys() == {"key", "store", "lasted"}
        assert len(process.events(EventName.STORE_BACK)) == 1


def test_acquired_has_the_time_that_it_waited(
    worker: StartWorker, load_app: LoadApp, journal: Journal
) -> None:
    tasks = load_app(APP)
    with listening(tasks.app, worker, APP, concurrency=1) as (listener, _):
        with hold("k", scope=f"{APP}.body", app=tasks.app):
            waiting = {"on_conflict": "wait"}
            result = tasks.body.apply_async(("k",), singleton=waiting)
            conflict = listener.wait_for(EventName.CONFLICT, uuid=result.id, outcome="wait")
            held_until = time.time()
        wait_until(lambda: counted(listener)[EventName.RELEASED] == 1, "the lease has ended")
        rows = [row for one in listener.of("singleton-counts") for row in one["counts"]]
        [[_, task, waited, _]] = [row for row in rows if row[0] == EventName.ACQUIRED]
        assert task == f"{APP}.body"
        assert waited >= held_until - conflict["timestamp"]
        assert waited <= time.time() - conflict["timestamp"] + 1
