"""`celery -A app singleton doctor` behind Sentinel: each finding on servers that have the fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis

from celery_singleton_lock.doctor import Severity
from tests.harness.deliveries import wait_until
from tests.harness.faketime import server_with_clock
from tests.harness.keys import EVERY_NAME, LOCKING
from tests.harness.sentinels import MASTER, Sentinels, client_of, cut_replication
from tests.harness.servers import server_version

from .doctor_apps import app_on, found, severities, worst

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

LEAST_RIGHTS = (
    f"~{EVERY_NAME}", "resetchannels", "-@all", *LOCKING, "+role",
)  # fmt: skip


@pytest.fixture
def master(sentinels: Sentinels) -> Iterator[Any]:
    """A client of the shared master, whose settings are as they were afterwards."""
    names = ("maxmemory", "maxmemory-policy", "appendonly", "min-replicas-to-write")
    with client_of(sentinels.master()) as client:
        before = {name: client.config_get(name)[name] for name in names}
        yield client
        for name, value in before.items():
            client.config_set(name, value)


def in_persistence(client: Any) -> None:
    client.config_set("appendonly", "yes")
    wait_until(
        lambda: client.info("persistence")["aof_enabled"] == 1, "the append-only file is there"
    )


def test_a_sound_one_has_no_warnings(sentinels: Sentinels, master: Any) -> None:
    in_persistence(master)
    master.config_set("min-replicas-to-write", "1")
    app = app_on(sentinels.url)
    if server_version() >= (7, 0):
        assert worst(app) is Severity.OK
    else:
        (note,) = found(app, "min-replicas")
        assert worst(app) is Severity.NOTE
        assert "does not apply min-replicas-to-write to scripts" in note.text
    assert {"sentinels", "quorum", "master", "replicas", "persistence", "clock"} <= set(
        severities(app)
    )
    (quorum,) = found(app, "quorum")
    assert "3 usable Sentinels" in quorum.text


def test_what_narrows_the_gap_of_a_failover_is_recommended(
    sentinels: Sentinels, master: Any
) -> None:
    app = app_on(sentinels.url)
    (file,) = found(app, "persistence")
    (replicas,) = found(app, "min-replicas")
    assert (file.severity, replicas.severity) == (Severity.WARNING, Severity.NOTE)
    assert "appendonly yes" in file.remedy
    assert "min-replicas-to-write 1" in replicas.remedy


def test_a_master_that_may_evict_leases_is_an_error(sentinels: Sentinels, master: Any) -> None:
    master.config_set("maxmemory-policy", "allkeys-lru")
    master.config_set("maxmemory", "100mb")
    (finding,) = found(app_on(sentinels.url), "eviction")
    assert finding.severity is Severity.ERROR
    assert str(sentinels.master().port) in finding.text


@pytest.mark.parametrize(("wanted", "severity"), [(2, Severity.NOTE), (3, Severity.ERROR)])
def test_replicas_that_are_waited_for_are_counted(
    sentinels: Sentinels, wanted: int, severity: Severity
) -> None:
    app = app_on(sentinels.url)
    app.conf.singleton_lock_wait_replicas = wanted
    (finding,) = found(app, "wait_replicas")
    assert finding.severity is severity
    assert "2 replicas are connected" in finding.text


def test_a_url_that_names_some_of_the_sentinels_is_noted(sentinels: Sentinels) -> None:
    app = app_on(f"sentinel://127.0.0.1:{sentinels.sentinel_ports[0]}/0?master_name={MASTER}")
    notes = [f for f in found(app, "sentinels") if f.severity is Severity.NOTE]
    assert "3 watch this master, and the URL names 1" in notes[0].text


def test_it_works_where_nearly_all_is_denied(private_sentinels: Sentinels) -> None:
    sentinels = private_sentinels
    for server in sentinels.servers:
        with client_of(server) as client:
            client.execute_command("ACL", "SETUSER", "locks", "on", ">pw", *LEAST_RIGHTS)
    for port in sentinels.sentinel_ports:
        with redis.Redis(port=port) as client:
            rights = ("-@all", "+sentinel|get-master-addr-by-name", "+sentinel|master")
            client.execute_command("ACL", "SETUSER", "asks", "on", ">pw2", *rights)
    logins = "&sentinel_username=asks&sentinel_password=pw2"
    app = app_on(sentinels.url.replace("://", "://locks:pw@") + logins)
    here = severities(app)
    assert here["reachability"] is Severity.OK
    assert here["quorum"] is here["server"] is here["replicas"] is Severity.NOTE
    assert worst(app) is Severity.NOTE
    with redis.Redis(port=sentinels.sentinel_ports[0]) as client:
        client.execute_command("ACL", "SETUSER", "asks", "-sentinel|master")
    denied = [f for f in found(app, "sentinels") if f.severity is Severity.WARNING]
    assert "right to SENTINEL" in denied[0].remedy


def test_replicas_that_are_away_or_out_of_step_are_warnings(private_sentinels: Sentinels) -> None:
    sentinels = private_sentinels
    app = app_on(sentinels.url)
    first, second = sentinels.replicas()
    first.kill()
    away = [f for f in found(app, "replicas") if f.severity is Severity.WARNING]
    assert [str(first.port) in finding.text for finding in away] == [True]
    assert worst(app) is Severity.WARNING, "it works without"
    cut_replication(sentinels.master(), [second])
    wait_until(
        lambda: any("out of step" in finding.text for finding in found(app, "replicas")),
        "the sentinels have noticed",
        timeout=60,
    )
    assert any("none that could be promoted" in f.text for f in found(app, "replicas"))


def test_sentinels_that_are_away_are_a_warning_and_no_quorum_is_an_error(
    private_sentinels: Sentinels,
) -> None:
    sentinels = private_sentinels
    app = app_on(sentinels.url)
    sentinels.sentinels[0].kill()
    assert severities(app)["quorum"] is Severity.OK
    (away, *_) = found(app, "sentinels")
    assert away.severity is Severity.WARNING
    assert str(sentinels.sentinel_ports[0]) in away.text
    assert worst(app) is Severity.WARNING
    sentinels.sentinels[1].kill()
    wait_until(
        lambda: severities(app)["quorum"] is Severity.ERROR, "the last one notices", timeout=60
    )
    (quorum,) = found(app, "quorum")
    assert "NOQUORUM" in quorum.text
    with redis.Redis(port=sentinels.sentinel_ports[2]) as client:
        client.execute_command("SENTINEL RESET", MASTER)  # now it knows no other sentinel
    wait_until(
        lambda: any("there are 1 for this master" in f.text for f in found(app, "sentinels")),
        "it has forgotten the others",
    )
    sentinels.sentinels[2].kill()
    (alone,) = found(app, "sentinels")
    assert alone.severity is Severity.ERROR


def test_a_master_that_is_down_is_an_error(private_sentinels: Sentinels) -> None:
    sentinels = private_sentinels
    app = app_on(sentinels.url)
    for replica in sentinels.replicas():
        with client_of(replica) as client:
            client.config_set("replica-priority", "0")  # no replica may be promoted
    sentinels.master().kill()

    def said() -> bool:
        return any("think that it is down" in finding.text for finding in found(app, "master"))

    wait_until(said, "a quorum of sentinels has noticed", timeout=60)
    assert {finding.severity for finding in found(app, "master")} == {Severity.ERROR}
    assert len(found(app, "master")) == 2, "nor does it answer us"


def test_sentinels_that_name_different_masters_are_a_warning(private_sentinels: Sentinels) -> None:
    sentinels = private_sentinels
    [other, _] = sentinels.replicas()
    with redis.Redis(port=sentinels.sentinel_ports[2]) as client:
        client.execute_command("SENTINEL REMOVE", MASTER)
        client.execute_command("SENTINEL MONITOR", MASTER, "127.0.0.1", other.port, 2)
    findings = found(app_on(sentinels.url), "master")
    assert findings[0].severity is Severity.WARNING
    assert "different masters" in findings[0].text
    assert str(other.port) in findings[0].text


def test_a_replica_whose_clock_is_behind_is_a_warning(private_sentinels: Sentinels) -> None:
    sentinels = private_sentinels
    app = app_on(sentinels.url)
    replication = ["--replicaof", "127.0.0.1", str(sentinels.master().port)]
    with ExitStack() as stack:
        behind = stack.enter_context(server_with_clock("-30s", replication))
        wait_until(
            lambda: severities(app)["clock"] is Severity.WARNING,
            "the sentinels have found it",
            timeout=60,
        )
        (finding,) = found(app, "clock")
    assert f"ahead of that of 127.0.0.1:{behind.port}" in finding.text
    assert "fences may be lower" in finding.text
