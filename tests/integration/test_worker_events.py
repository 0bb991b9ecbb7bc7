"""Worker events of real workers: each lease has one end, and no broker delays a lock."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from celery_singleton_lock import hold
from example_project.private_server import PrivateServer
from tests.harness.deliveries import wait_until
from tests.harness.journal import Journal
from tests.harness.listener import Listener, listening
from tests.harness.processes import kill_process
from tests.harness.worker import CeleryWorker

APP = "tests.apps.reporting"

StartWorker = Callable[..., CeleryWorker]
LoadApp = Callable[..., ModuleType]

pytestmark = pytest.mark.slow


def ends_of(events: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The ends that were reported, by lease, of leases whose grant was reported."""
    names = {f"singleton-{name}" for name in ("released", "lease-lost", "release-failed", "freed")}
    ends: dict[str, list[str]] = {
        event["lease"]: [] for event in events if event["type"] == "singleton-acquired"
    }
    for event in events:
        if event["type"] in names:
            ends[event["lease"]].append(event["type"].removeprefix("singleton-"))
    return ends


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
        listener.wait_for("singleton-cancelled", uuid=first.id)
        (tasks.gate("newest")).touch()
        second.get(timeout=30)
        tasks.holds.delay("holds", 20).get(timeout=30)
        hangs = body.apply_async(("hangs", "wait"), time_limit=1)
        revoked = body.delay("revoked", "wait")
        journal.wait_for_starts(1, key="revoked")
        revoked.revoke(terminate=True)
        listener.wait_for("singleton-freed", uuid=hangs.id)
        listener.wait_for("singleton-released", uuid=revoked.id)
        # The lease of a dead child is freed by its parent, or before by a child that waits for it.
        body.delay("awaited", "wait")
        [start] = journal.wait_for_starts(1, key="awaited")
        waits = body.apply_async(("awaited",), singleton={"on_conflict": "wait"})
        listener.wait_for("singleton-conflict", uuid=waits.id)
        kill_process(start.pid)
        waits.get(timeout=30)
        # A loss: the store is emptied under a body.
        lost = body.delay("lost", "wait")
        journal.wait_for_starts(1, key="lost")
        private_redis.restart(keep_data=False)
        listener.wait_for("singleton-lease-lost", uuid=lost.id, reason="gone")
        # An outage: the release of one body finds no store, and so does that of a dead child.
        mute = body.delay("mute", "wait")
        dies = body.delay("dies", "wait")
        journal.wait_for_starts(1, key="mute")
        [start] = journal.wait_for_starts(1, key="dies")
        private_redis.pause()
        kill_process(start.pid)
        tasks.gate("mute").touch()
        listener.wait_for("singleton-release-failed", uuid=dies.id)
        wait_until(lambda: len(told(listener, mute.id)) == 1, "the release of the body fails")
        private_redis.resume()
        body.delay("after").get(timeout=30)
        grants = 5 + 5 + 3 + 2 + 1 + 20 + 2 + 2 + 1 + 2 + 1

        def settled() -> bool:
            ends = ends_of(listener.events)
            return len(ends) >= grants and all(ends.values())

        wait_until(settled, "each lease has ended")
        ends = ends_of(listener.events)
        assert Counter(len(one) for one in ends.values()) == {1: grants}
        number = Counter(one[0] for one in ends.values())
        assert number["released"] >= 5 + 5 + 2 + 1 + 20 + 1
        assert number["freed"] >= 3 + 1 + 1
        assert number["lease-lost"] >= 1
        assert number["release-failed"] >= 1
        assert {event["hostname"] for event in listener.events if "lease" in event} == {
            process.hostname
        }
        # The signals are the same, in the processes of the worker. Celery passes a task to a second
        # child if the first one died before its parent had read that it accepted the task.
        heard: dict[str, list[str]] = {}
        for record in journal.records():
            told_before = heard.setdefault(record.data.get("lease", ""), [])
            if record.data.get("text") != "acquired" or "acquired" not in told_before:
                told_before.append(record.data.get("text", ""))
        del heard[""]
        assert heard == {lease: ["acquired", *end] for lease, end in ends.items()}


def told(listener: Listener, task_id: str) -> list[str]:
    names = ("singleton-release-failed", "singleton-lease-lost")
    return [event["type"] for name in names for event in listener.of(name, uuid=task_id)]


def test_a_killed_child_loses_no_event_that_it_has_emitted(
    worker: StartWorker, load_app: LoadApp, journal: Journal
) -> None:
    tasks = load_app(APP)
    with listening(tasks.app, worker, APP, concurrency=1) as (listener, _):
        killed = tasks.holds.delay("k", 200, "", "killed")
        listener.wait_for("singleton-freed", uuid=killed.id)
        assert Counter(map(tuple, ends_of(listener.events).values())) == {
            ("released",): 200,
            ("freed",): 1,
        }


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_a_silent_broker_delays_no_lock_and_gets_the_events_later(
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
            lambda: len(ends_of(listener.events)) == number + 1, "all events arrive", timeout=30
        )
        listener.wait_for("singleton-released", uuid=result.id)
        assert {tuple(ends) for ends in ends_of(listener.events).values()} == {("released",)}
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
        wait_until(lambda: len(ends_of(listener.events)) == 501, "all events arrive")
        assert {tuple(ends) for ends in ends_of(listener.events).values()} == {("released",)}


def test_remote_control_switches_the_events_on_and_off(
    worker: StartWorker, load_app: LoadApp
) -> None:
    tasks = load_app(APP)
    with listening(tasks.app, worker, APP, concurrency=1, args=[]) as (listener, process):
        first = tasks.body.delay("first")
        first.get(timeout=30)
        tasks.app.control.enable_events(destination=[process.hostname], reply=True)

        def is_heard(name: str) -> bool:
            result = tasks.body.delay(name)
            result.get(timeout=30)
            return bool(listener.of("singleton-acquired", uuid=result.id))

        wait_until(lambda: is_heard("second"), "the worker sends events")
        assert not listener.of("singleton-acquired", uuid=first.id)
        tasks.app.control.disable_events(destination=[process.hostname], reply=True)
        wait_until(lambda: not is_heard("third"), "the worker sends no events")


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
        event = listener.wait_for("singleton-store-unreachable", uuid=result.id)
        assert (event["action"], event["name"]) == ("requeued", f"{APP}.body")
        assert event["store"].endswith(f":{private_redis.port}/0")
        private_redis.start()
        result.get(timeout=60)
        back = listener.wait_for("singleton-store-back")
        assert back["store"] == event["store"]
        assert back["lasted"] > 0
        process.wait_for_log(r"WARNING.*singleton store-back: key=\S+ store=\S+ lasted=[\d.]+$")
        assert process.log.count("singleton store-back") == 1


def test_acquired_has_the_time_that_it_waited(
    worker: StartWorker, load_app: LoadApp, journal: Journal
) -> None:
    tasks = load_app(APP)
    with listening(tasks.app, worker, APP, concurrency=1) as (listener, _):
        with hold("k", scope=f"{APP}.body", app=tasks.app):
            waiting = {"on_conflict": "wait"}
            result = tasks.body.apply_async(("k",), singleton=waiting)
            conflict = listener.wait_for("singleton-conflict", uuid=result.id, outcome="wait")
            held_until = time.time()
        acquired = listener.wait_for("singleton-acquired", uuid=result.id)
        assert acquired["waited"] >= held_until - conflict["timestamp"]
        assert acquired["waited"] <= acquired["timestamp"] - conflict["timestamp"] + 1
        assert listener.wait_for("singleton-released", uuid=result.id)["held"] >= 0
