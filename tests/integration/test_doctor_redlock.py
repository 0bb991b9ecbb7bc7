"""`celery -A app singleton doctor` on Redlock: each finding on nodes that have the fault."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import pytest
import redis

from celery_singleton_lock.doctor import Severity
from celery_singleton_lock.doctor.servers import is_slow
from example_project.private_server import PrivateServer, ServerNotFound, find_binary
from tests.conftest import missing
from tests.harness.deliveries import wait_until
from tests.harness.faketime import server_with_clock
from tests.harness.keys import EVERY_NAME, LOCKING, name_in_store
from tests.harness.redlock_nodes import RedlockNodes
from tests.harness.sentinels import client_of

from .doctor_apps import app_on, findings, found, severities, worst

# Several servers each: `make test` keeps memory, Redis and Valkey.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def nodes() -> Iterator[RedlockNodes]:
    """Three that keep what they have acknowledged."""
    try:
        find_binary()
    except ServerNotFound as error:
        missing(str(error))
    with RedlockNodes(3) as nodes:
        set_everywhere(nodes, "appendonly", "yes")
        yield nodes


def set_everywhere(nodes: RedlockNodes, name: str, value: str) -> None:
    for server in nodes:
        with client_of(server) as client:
            client.config_set(name, value)
    if name == "appendonly":
        wait_until(partial(aof_is, nodes, value == "yes"), "the files are as wanted")


def aof_is(nodes: RedlockNodes, wanted: bool) -> bool:
    found = []
    for server in nodes:
        with client_of(server) as client:
            found.append(bool(client.info("persistence")["aof_enabled"]))
    return found == [wanted] * len(nodes)


def url_of(*servers: PrivateServer, query: str = "quarantine=0") -> str:
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    return f"redlock://{hosts}/0?{query}"


def test_sound_ones_have_no_warnings(nodes: RedlockNodes) -> None:
    app = app_on(nodes.url())
    assert worst(app) is Severity.OK
    (count,) = found(app, "nodes")
    assert count.text == "3 of 3 answer"
    assert severities(app)["clock"] is Severity.OK


def test_a_minority_that_is_away_is_a_warning_and_a_majority_an_error(nodes: RedlockNodes) -> None:
    app = app_on(nodes.url())
    nodes[0].pause()
    away = found(app, "nodes")[0]
    assert away.severity is Severity.WARNING
    assert str(nodes[0].port) in away.text
    assert worst(app) is Severity.WARNING, "it works without"
    nodes[1].kill()
    assert "1 of 3 answer, and a lease takes 2" in found(app, "nodes")[-1].text
    assert worst(app) is Severity.ERROR
    nodes[0].resume()


def test_a_minority_that_takes_no_writes_is_a_warning(nodes: RedlockNodes) -> None:
    """It answers, and the locks work without it: only a write shows that its vote is missing."""
    with redis.Redis.from_url(nodes[0].url()) as client:
        client.config_set("maxmemory", "1")
        try:
            every = findings(app_on(nodes.url()))
        finally:
            client.config_set("maxmemory", "0")
    (finding,) = [one for one in every if one.subject == "memory"]
    assert any("acquire, renew and release work" in one.text for one in every)
    assert finding.severity is Severity.WARNING
    assert str(nodes[0].port) in finding.text
    assert "its vote is missing" in finding.text
    assert "raise maxmemory" in finding.remedy


def test_a_node_that_may_forget_and_votes_at_once_is_a_warning(nodes: RedlockNodes) -> None:
    set_everywhere(nodes, "appendfsync", "everysec")
    (kept_late,) = found(app_on(nodes.url()), "persistence")
    set_everywhere(nodes, "appendonly", "no")
    (forgotten,) = found(app_on(nodes.url()), "persistence")
    assert kept_late.severity is forgotten.severity is Severity.WARNING
    assert "quarantine=0" in forgotten.text
    assert all(str(server.port) in forgotten.text for server in nodes)


def test_a_node_that_votes_later_may_forget(nodes: RedlockNodes) -> None:
    set_everywhere(nodes, "appendonly", "no")
    app = app_on(url_of(*nodes, query=""), ttl=3600)
    (memory,) = found(app, "persistence")
    assert memory.severity is Severity.OK
    (young, _) = found(app, "nodes")
    assert young.severity is Severity.OK
    notes = [f for f in found(app, "nodes") if f.severity is Severity.NOTE]
    assert "less than 3600 s ago" in notes[0].text


def test_a_node_of_unknown_age_that_may_forget_is_a_warning(nodes: RedlockNodes) -> None:
    set_everywhere(nodes, "appendonly", "no")
    rights = [f"~{EVERY_NAME}", "resetchannels", "-@all", *LOCKING]
    for server in nodes:
        with client_of(server) as client:
            client.execute_command("ACL", "SETUSER", "locks", "on", ">pw", *rights)
    app = app_on(url_of(*nodes, query="").replace("://", "://locks:pw@"))
    here = severities(app)
    assert here["reachability"] is Severity.OK
    assert here["server"] is Severity.NOTE
    (finding,) = found(app, "persistence")
    assert finding.severity is Severity.WARNING
    assert "+info" in finding.remedy


def test_nodes_that_replicate_each_other_are_reported(nodes: RedlockNodes) -> None:
    with client_of(nodes[2]) as client:
        client.execute_command("REPLICAOF", "127.0.0.1", str(nodes[0].port))
    app = app_on(nodes.url())
    wait_until(lambda: len(found(app, "replication")) == 2, "they are connected")
    by_severity = {f.severity: f.text for f in found(app, "replication")}
    assert str(nodes[2].port) in by_severity[Severity.ERROR]
    assert str(nodes[0].port) in by_severity[Severity.WARNING]


def test_two_names_of_one_server_are_an_error(nodes: RedlockNodes) -> None:
    port = nodes[0].port
    twice = f"redlock://127.0.0.1:{port},localhost:{port},127.0.0.1:{nodes[1].port}/0?quarantine=0"
    (finding,) = found(app_on(twice), "identity")
    assert finding.severity is Severity.ERROR
    assert f"localhost:{port}" in finding.text


def test_an_even_number_is_an_error(nodes: RedlockNodes) -> None:
    app = app_on(f"{url_of(*nodes).partition('/0')[0]},127.0.0.1:1/0")
    (finding,) = found(app, "settings")
    assert finding.severity is Severity.ERROR
    assert "names 4 nodes" in finding.text


def test_a_node_that_may_evict_votes_is_an_error(nodes: RedlockNodes) -> None:
    with client_of(nodes[1]) as client:
        client.config_set("maxmemory-policy", "volatile-ttl")
        client.config_set("maxmemory", "100mb")
    (finding,) = [f for f in found(app_on(nodes.url()), "eviction") if f.severity != Severity.OK]
    assert finding.severity is Severity.ERROR
    assert str(nodes[1].port) in finding.text


def test_clocks_that_are_apart_by_more_than_the_allowance_are_a_warning(
    nodes: RedlockNodes,
) -> None:
    with server_with_clock("-2s") as slow:
        (finding,) = found(app_on(url_of(nodes[0], nodes[1], slow), ttl=10), "clock")
        # 1 % of the ttl: a lease that is long enough stands it.
        app = app_on(url_of(nodes[0], nodes[1], slow), ttl=1000)
        app.conf.singleton_lock_beat_ttl = 1000
        (stood,) = found(app, "clock")
    assert finding.severity is Severity.WARNING
    assert f"ahead of that of 127.0.0.1:{slow.port}" in finding.text
    assert "0.102 s" in finding.text
    assert stood.severity is Severity.OK


def test_the_keys_of_old_recipes_are_reported_once_and_left_alone(nodes: RedlockNodes) -> None:
    forever, a_list = name_in_store("checked.work:a"), name_in_store("checked.work:b")
    for server in nodes:
        with client_of(server) as client:
            client.set(forever, "1763714400.5")  # SETNX without EXPIRE
    with client_of(nodes[1]) as client:
        client.lpush(a_list, "token")
    nodes[2].kill()
    texts = sorted(finding.text for finding in found(app_on(nodes.url()), "keys"))
    assert len(texts) == 2
    assert forever in texts[0]
    assert "no expiry" in texts[0]
    assert a_list in texts[1]
    with client_of(nodes[1]) as client:
        assert client.exists(forever, a_list) == 2


def test_slow_nodes_are_a_warning(nodes: RedlockNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[is_slow.__module__], "_COMFORTABLE_SHARE", 1e-9)
    (finding,) = [f for f in found(app_on(nodes.url(), ttl=0.5), "latency") if "127" in f.text]
    assert finding.severity is Severity.WARNING
    assert "lease of 0.5 s" in finding.text
