"""Deployments that share a Redis server, each with a ``global_keyprefix`` of its own."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import redis
from celery import Celery

from celery_singleton_lock import LockConflict, hold, inspection, singleton_task
from celery_singleton_lock.beat.election import Election
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.store import operators_of
from celery_singleton_lock.doctor import Severity
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.inspection import Fate
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.redis.cluster import slot_of
from celery_singleton_lock.testing import hold_lock
from celery_singleton_lock.worker.bootstep import check_app
from example_project.private_server import PrivateServer
from tests.harness.cluster import Cluster
from tests.harness.processes import ROOT
from tests.harness.ticks import Ticks
from tests.harness.worker import CeleryBeat

from .doctor_apps import findings, found

TASK = "shop.sync"


@pytest.fixture(autouse=True)
def _nothing_watches_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that does notices up to a ttl later that its term is over."""
    monkeypatch.setattr(Election, "_watch_progress", lambda election, term: None)


@pytest.fixture
def server(private_redis: PrivateServer) -> PrivateServer:
    return private_redis


@pytest.fixture
def raw(server: PrivateServer) -> Iterator[Any]:
    with redis.Redis.from_url(server.url(), decode_responses=True) as client:
        client.flushall()
        yield client


@contextmanager
def deployment(url: str, prefix: str | None, **settings: Any) -> Iterator[Celery]:
    """An app of the same project, whose keys begin with ``prefix``."""
    app = Celery("shop", broker=url, backend=url, set_as_current=False)
    if prefix is not None:
        options = {"global_keyprefix": prefix}
        app.conf.update(broker_transport_options=options, result_backend_transport_options=options)
    app.conf.update(settings)

    @singleton_task(app=app, name=TASK, key="{number}", unique="until_done", shared=False)
    def sync(number: int) -> None: ...

    @singleton_task(app=app, name="shop.book", key="{number}", on_conflict="queue", shared=False)
    def book(number: int) -> None: ...

    with app, closing(Runtime.of(app)):
        yield app
    Runtime.install(app, None)


def held(app: Celery) -> set[str]:
    return {key.key for key in inspection.held_keys(app)}


def sync_of(app: Celery) -> Any:
    return app.tasks[TASK]


def test_every_key_of_ours_begins_with_the_prefix(server: PrivateServer, raw: Any) -> None:
    with deployment(server.url(), "prod:") as app:
        assert sync_of(app).lock_key(42) == "prod:csl:{celery:0}:shop.sync:42"
        with hold("42", scope=TASK, app=app):
            sync_of(app).delay(1)
            app.tasks["shop.book"].delay(1)
            election = Election(Runtime.of(app))
            election.campaign()
            names = set(raw.scan_iter())
            election.resign("the test ends")
    assert {name for name in names if "csl:" in name} >= {"prod:csl:{celery:0}:shop.sync:42"}
    assert all(name.startswith("prod:") for name in names)


def test_a_call_without_a_prefix_has_the_keys_of_before(server: PrivateServer) -> None:
    for prefix in (None, ""):
        with deployment(server.url(), prefix) as app:
            assert sync_of(app).lock_key(42) == "csl:{celery:0}:shop.sync:42"


def test_deployments_with_own_prefixes_do_not_exclude_each_other(
    server: PrivateServer, raw: Any
) -> None:
    url = server.url()
    with (
        deployment(url, "prod:") as prod,
        deployment(url, "staging:") as staging,
        deployment(url, "prod:") as same,
        hold_lock(sync_of(staging), 42),
        hold_lock(sync_of(prod), 42),
    ):
        with pytest.raises(LockConflict):
            hold("42", scope=TASK, app=same).__enter__()
        first = sync_of(staging).delay(7).id
        assert sync_of(prod).delay(7).id != first
        assert sync_of(staging).delay(7).id == first
        for app in (prod, staging):
            task = app.tasks["shop.book"]
            result = task.delay(1)
            assert [call.task_id for call in inspection.calls_in_queue(app, task.lock_key(1))] == [
                result.id
            ]


def test_each_deployment_sees_its_own_keys_only(server: PrivateServer, raw: Any) -> None:
    url = server.url()
    with (
        deployment(url, "prod:") as prod,
        deployment(url, "staging:") as staging,
        deployment(url, None) as bare,
        hold("42", scope=TASK, app=prod) as lease,
    ):
        assert held(prod) == {lease.key}
        assert held(staging) == held(bare) == set()
        for name in (lease.key, "shop.sync:42", "42"):
            key = inspection.find_key(prod, name)
            assert key is not None
            assert key.key == lease.key
            assert inspection.find_key(staging, name) is None
            assert inspection.find_key(bare, name) is None
        task_id = sync_of(prod).delay(1).id
        assert inspection.explain(prod, task_id, timeout=0.1).fate is not Fate.UNKNOWN
        assert inspection.explain(staging, task_id, timeout=0.1).fate is Fate.UNKNOWN


def test_beats_with_own_prefixes_both_lead(server: PrivateServer, raw: Any) -> None:
    url = server.url()
    with (
        deployment(url, "prod:") as prod,
        deployment(url, "staging:") as staging,
        deployment(url, "prod:") as same,
    ):
        elections = [Election(Runtime.of(app)) for app in (prod, staging, same)]
        leaders = [election.campaign() for election in elections]
        for election in elections:
            election.resign("the test ends")
    assert leaders == [True, True, False]


@pytest.mark.slow
def test_real_beats_with_own_prefixes_both_tick(
    beat: Callable[..., CeleryBeat], ticks: Ticks, environment: dict[str, str]
) -> None:
    beats = []
    for prefix in ("prod:", "staging:"):
        settings = {
            "singleton_lock_url": None,
            "result_backend_transport_options": {"global_keyprefix": prefix},
        }
        env = {**environment, "EVERY": "0.5", "SETTINGS": json.dumps(settings)}
        beats.append(beat("tests.apps.ticks", scheduler="singleton", env=env, name=prefix[:-1]))
    ticks.wait_for(8)
    assert {tick.beat for tick in ticks.of()} == {process.pid for process in beats}


def _with_rights(raw: Any, server: PrivateServer, *rights: str) -> str:
    """The URL of a login with all rights of the page, for keys of one prefix, and ``rights``."""
    page = (ROOT / "docs/reference/settings.md").read_text()
    for line in re.findall(r"^ACL SETUSER .*$", page, re.MULTILINE):
        raw.execute_command(*line.replace("~csl:*", "~prod:*").split())
    raw.execute_command("ACL", "SETUSER", "locks", *rights)
    return server.url().replace("redis://", "redis://locks:password@")


def test_a_login_for_keys_of_the_prefix_suffices(server: PrivateServer, raw: Any) -> None:
    url = f"{_with_rights(raw, server, '+scan')}?global_keyprefix=prod:"
    with deployment(server.url(), None, singleton_lock_url=url) as app:
        assert not [f for f in findings(app) if f.severity in (Severity.ERROR, Severity.WARNING)]
    with deployment(server.url(), None, singleton_lock_url=url) as app:
        with hold("42", scope=TASK, app=app) as lease:
            assert held(app) == {lease.key}
            assert inspection.release(app, lease.key, None)
        first, second = (sync_of(app).delay(1).id for _ in range(2))
        assert first == second
        app.tasks["shop.book"].delay(1)
        election = Election(Runtime.of(app))
        assert election.campaign()
        check_app(app)
        election.resign("the test ends")
    assert all(name.startswith("prod:") for name in raw.scan_iter("*csl:*"))


def test_such_a_login_can_not_use_the_library_without_the_prefix(
    server: PrivateServer, raw: Any
) -> None:
    url = _with_rights(raw, server)
    with deployment(server.url(), None, singleton_lock_url=url) as app, pytest.raises(StoreError):
        hold("42", scope=TASK, app=app).__enter__()


# --- another prefix -------------------------------------------------------------------------------


def _warnings(app: Celery, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What a worker that starts with ``app`` says about other prefixes."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "celery_singleton_lock"):
        check_app(app)
    return [r.getMessage() for r in caplog.records if "global_keyprefix" in r.getMessage()]


def test_a_worker_that_sees_leases_of_its_tasks_without_its_prefix_says_so_once(
    server: PrivateServer, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with deployment(server.url(), None) as before, deployment(server.url(), "prod:") as app:
        assert _warnings(app, caplog) == []
        with hold("42", scope="others", app=before):
            assert _warnings(app, caplog) == [], "it is of another project"
        with hold("42", scope=TASK, app=before) as lease, hold("43", scope=TASK, app=before):
            (text,) = _warnings(app, caplog)
            assert lease.key[:-2] in text
            assert "2 such leases" in text
            (finding,) = found(app, "prefix")
            assert finding.severity is Severity.WARNING
        assert _warnings(app, caplog) == []
        assert found(app, "prefix") == []


def test_a_worker_that_keeps_the_old_keys_sees_those_with_the_prefix(
    server: PrivateServer, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    own = {"singleton_lock_global_keyprefix": ""}
    with (
        deployment(server.url(), "prod:") as other,
        deployment(server.url(), "prod:", **own) as app,
    ):
        assert sync_of(app).lock_key(42) == "csl:{celery:0}:shop.sync:42"
        with hold("42", scope=TASK, app=other) as lease:
            (text,) = _warnings(app, caplog)
            assert lease.key in text


def test_deployments_with_own_prefixes_are_no_reason_for_a_warning(
    server: PrivateServer, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    url = server.url()
    with deployment(url, "staging:") as other, hold("42", scope=TASK, app=other):
        for prefix in ("prod:", None):
            with deployment(url, prefix) as app:
                assert _warnings(app, caplog) == []


def test_the_leader_of_another_prefix_is_seen(
    server: PrivateServer, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with deployment(server.url(), None) as before, deployment(server.url(), "prod:") as app:
        election = Election(Runtime.of(before))
        assert election.campaign()
        (text,) = _warnings(app, caplog)
        election.resign("the test ends")
        assert Runtime.of(before).keyspace.leader("shop") in text


def test_a_search_through_many_keys_delays_no_worker(
    server: PrivateServer,
    raw: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("celery_singleton_lock.worker.other_prefix._MAX_SEARCH", 0.0)
    raw.mset({f"other:{number}": "x" for number in range(2000)})
    with (
        deployment(server.url(), None) as before,
        deployment(server.url(), "prod:") as app,
        hold("42", scope=TASK, app=before),
    ):
        assert _warnings(app, caplog) == []
        assert operators_of(Runtime.of(app).store).progress is None


# --- a cluster ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_keys_of_a_shard_are_in_one_slot_of_a_cluster_with_a_prefix(cluster: Cluster) -> None:
    settings = {"singleton_lock_url": f"{cluster.url}?global_keyprefix=prod:"}
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.update(settings)
    with closing(Runtime.of(app)) as runtime:
        for number in range(20):
            with hold(f"{number}", scope="cluster", app=app) as lease:
                assert lease.key.startswith("prod:csl:{celery:")
                bare = Keyspace("celery", 256).lock("cluster", f"{number}")
                assert slot_of(lease.key) == slot_of(bare)
                assert runtime.store.leases.inspect(lease.key) is not None
    Runtime.install(app, None)
