"""A holder that is dead on this host, and one of which that can not be proven.

The leases have a ttl of 60 s, longer than any test here waits: what frees a key is not the ttl.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import redis
from celery import Celery

from celery_singleton_lock import LockConflict, hold, singleton_task
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.core.process import identity_of_this_process
from celery_singleton_lock.core.store_requests import RENEWED
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.testing.contract import lease_of
from celery_singleton_lock.testing.contract.steps import take
from tests.harness.bodies import power_cut
from tests.harness.deliveries import RedisBroker, reported, wait_until
from tests.harness.journal import Journal, events
from tests.harness.processes import Process
from tests.harness.redlock_nodes import RedlockNodes
from tests.harness.worker import CeleryWorker

CRASH = "tests.apps.crash"
#: Runs another command where no death of this host's processes can be proven.
ELSEWHERE = {
    "pid": ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"],
    "hostname": ["unshare", "--uts", "sh", "-c", 'hostname another && exec "$@"', "sh"],
}

StartWorker = Callable[..., CeleryWorker]
LoadApp = Callable[..., ModuleType]

#: Of workers to which only the test delivers a message again, and once. The sweep that would do it
#: comes every 100 s before kombu 5.7.
NO_SWEEP = {"VISIBILITY_TIMEOUT": "3600"}

pytestmark = pytest.mark.skipif(
    not identity_of_this_process(), reason="needs Linux's /proc, of this PID namespace"
)


@pytest.fixture
def crash(load_app: LoadApp, environment: dict[str, str], monkeypatch: Any) -> ModuleType:
    """The app in this process; an unacknowledged message comes back after 2 s."""
    environment.update(VISIBILITY_TIMEOUT="2", TTL="60")
    module = load_app(CRASH)
    monkeypatch.setenv("JOURNAL", environment["JOURNAL"])
    return module


@pytest.fixture
def broker(redis_client: redis.Redis) -> RedisBroker:
    return RedisBroker(redis_client)


@pytest.mark.parametrize("where", ["pid", pytest.param("hostname", marks=pytest.mark.slow)])
def test_a_worker_elsewhere_waits_for_the_ttl(
    where: str,
    crash: ModuleType,
    worker: StartWorker,
    journal: Journal,
    redis_client: redis.Redis,
) -> None:
    try:
        subprocess.run([*ELSEWHERE[where], "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as exc:
        pytest.skip(f"new namespaces are not permitted here: {exc}")
    process = worker(CRASH, concurrency=1, env=NO_SWEEP)
    crash.late.delay("k0", "end")
    journal.wait_for_starts(1)
    power_cut(process, journal)
    elsewhere = worker(CRASH, concurrency=1, env=NO_SWEEP, prefix=ELSEWHERE[where])
    assert_it_waits(elsewhere, crash, journal, redis_client)


def assert_it_waits(
    worker: CeleryWorker, crash: ModuleType, journal: Journal, redis_client: redis.Redis
) -> None:
    """The redelivered message is requeued, and the dead holder's lease left to its ttl."""
    key = crash.late.lock_key("k0", "end")
    before = redis_client.get(key)
    (start,) = events(journal.records(), "start")
    RedisBroker(redis_client).deliver_again(start.task_id)
    wait_until(
        lambda: reported([worker], EventName.REQUEUED, reason="delivered-twice"),
        "it met the dead holder's lease",
    )
    assert redis_client.get(key) == before
    assert redis_client.pttl(key) > 30_000
    assert len(events(journal.records(), "start")) == 1
    assert not worker.events(EventName.FREED)


def popping(redis_client: redis.Redis) -> list[Any]:
    """The clients that wait for a message in the database of the test."""
    own = redis_client.get_connection_kwargs()["db"]
    clients: Any = redis_client.client_list()
    return [each for each in clients if "b" in each["flags"] and int(each["db"]) == own]


def test_a_stopped_holder_keeps_its_lease(
    crash: ModuleType, worker: StartWorker, journal: Journal, redis_client: redis.Redis
) -> None:
    stopped = worker(CRASH, concurrency=1, env=NO_SWEEP)
    crash.late.delay("k0", "end")
    journal.wait_for_starts(1)
    group = stopped.group()
    subprocess.run(["kill", "-STOP", *map(str, group)], check=True)
    # It waits for a message for up to a second, and the server would give it the next one.
    wait_until(lambda: not popping(redis_client), "the server gives the stopped worker nothing")
    assert_it_waits(worker(CRASH, concurrency=1, env=NO_SWEEP), crash, journal, redis_client)
    power_cut(stopped, journal)


# --- hold(), on every store -----------------------------------------------------------------------

HOLD = """
import os, signal, sys
from celery import Celery
from celery_singleton_lock import hold, runtime
url, then, wait = sys.argv[1:]
if then == "stop":
    runtime.identity_of_this_process = lambda: ""
app = Celery("script", broker="memory://")
app.conf.singleton_lock_url = url
with hold("k", scope="s", ttl=60, wait=float(wait), app=app) as lease:
    print("fence", lease.fence_number or 0, flush=True)
    os.kill(os.getpid(), signal.SIGKILL if then == "die" else signal.SIGSTOP)
"""


def script(url: str, then: str, wait: float = 0.0) -> Process:
    """A process that holds ``k``, and dies or stops there; one that stops has no identity."""
    return Process([sys.executable, "-c", HOLD, url, then, str(wait)], name=then).start()


@pytest.fixture(
    params=[
        "redis_url",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("sentinels", "cluster", "redlock", "etcd", "zookeeper")
        ),
    ]
)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a store."""
    if request.param == "redlock":
        with RedlockNodes(3) as nodes:
            yield nodes.url()
        return
    found = request.getfixturevalue(request.param)
    if request.param in ("etcd", "zookeeper"):
        yield found.url(f"t{time.monotonic_ns()}")
    else:
        yield found if isinstance(found, str) else found.url


@pytest.fixture
def app(url: str) -> Iterator[Celery]:
    app = Celery("here", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_url = url
    yield app
    Runtime.of(app).close()


def test_hold_does_not_wait_for_a_dead_script_on_any_store(url: str, app: Celery) -> None:
    dead = script(url, "die")
    fence = int(dead.wait_for_log(r"^fence (\d+)")[1])
    dead.wait()
    with hold("k", scope="s", ttl=60, app=app) as lease:
        assert (lease.fence_number or 1) > fence


@pytest.mark.parametrize("url", ["redis_url"], indirect=True)
def test_the_client_that_has_waited_longest_gets_the_key_of_a_dead_holder(
    url: str, app: Celery, redis_client: redis.Redis
) -> None:
    dead = script(url, "die")
    dead.wait_for_log(r"^fence")
    dead.wait()
    key = Runtime.of(app).keyspace.lock("s", "k")
    waiting = script(url, "stop", wait=30)  # as from another host: it can't prove the death
    wait_until(lambda: redis_client.get(key).endswith(" "), "it waits")
    # It stops while it holds the key: the second try of this process may come after its grant.
    with pytest.raises(LockConflict, match="is held by"), hold("k", scope="s", app=app):
        pass
    waiting.wait_for_log(r"^fence", timeout=5)
    stopped = psutil.Process(waiting.pid)  # it writes the line before it stops itself
    wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED, "it has stopped")
    waiting.cont()
    assert waiting.wait() == 0


@pytest.mark.parametrize("url", ["redis_url"], indirect=True)
def test_a_client_that_waits_gets_the_key_of_a_dead_holder_at_once(url: str, app: Celery) -> None:
    dead = script(url, "die")
    dead.wait_for_log(r"^fence")
    dead.wait()
    began = time.monotonic()
    with hold("k", scope="s", wait=30, app=app):
        assert time.monotonic() - began < 2


@pytest.mark.parametrize("url", ["redis_url"], indirect=True)
def test_a_dead_holder_among_many_slots_is_found_once_the_living_have_renewed(
    url: str, app: Celery
) -> None:
    """A refusal names the eight leases that expire first."""

    @singleton_task(app=app, name="many", scope="s", key="{name}", limit=12, shared=False)
    def many(name: str) -> None: ...

    dead = script(url, "die")
    dead.wait_for_log(r"^fence")
    dead.wait()
    runtime = Runtime.of(app)
    store = runtime.store
    key, *others = runtime.keyspace.slots(runtime.keyspace.lock("s", "k"), 12)
    living = [lease_of(slot, take(store, slot, ttl=50), ttl=61) for slot in others]
    with (
        pytest.raises(LockConflict, match=r"all 12 slots of .* are held, one of them by"),
        hold("k", scope="s", app=app),
    ):
        pass
    assert store.leases.renew(living, timeout=5) == [RENEWED] * 11
    with hold("k", scope="s", app=app) as lease:
        assert lease.key == key


# --- killed at random -----------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [4, pytest.param(30, marks=pytest.mark.slow)])
def test_holders_that_are_killed_at_random_never_overlap_and_block_no_other(
    seconds: float, redis_url: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.apps.mortal", redis_url, str(seconds)]
    process = Process([*command, str(tmp_path / "bodies")]).start()
    counts = json.loads(process.wait_for_log(r"^\{.*\}$", timeout=seconds + 30)[0])
    process.wait()
    assert counts["overlap"] == 0
    assert counts["kills"] > 5 * seconds
    assert counts["alone"] > counts["kills"]
