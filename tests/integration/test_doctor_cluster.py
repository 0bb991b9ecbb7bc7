"""`celery -A app singleton doctor` on a Redis Cluster: each finding on nodes with the fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from celery_singleton_lock.doctor import Severity
from example_project.private_server import PrivateServer, free_port
from tests.harness.cluster import Cluster, cluster_options, cluster_ports
from tests.harness.deliveries import wait_until
from tests.harness.faketime import server_with_clock
from tests.harness.keys import EVERY_NAME, LOCKING
from tests.harness.sentinels import client_of

from .doctor_apps import app_on, found, severities, worst

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

# What docs/reference/settings.md and docs/reference/stores.md say that locking needs.
LEAST_RIGHTS = (
    f"~{EVERY_NAME}", "resetchannels", "-@all", *LOCKING, "+cluster|slots", "+asking",
)  # fmt: skip


@pytest.fixture
def masters(cluster: Cluster) -> Iterator[list[Any]]:
    """Clients of the shared cluster's masters, whose settings are as they were afterwards."""
    names = ("maxmemory", "maxmemory-policy", "appendonly")
    with ExitStack() as stack:
        clients = [stack.enter_context(client_of(node)) for node in cluster.masters()]
        yield clients
        for client in clients:
            for name, value in zip(names, ("0", "noeviction", "no"), strict=True):
                client.config_set(name, value)


def test_a_sound_one_has_no_warnings(cluster: Cluster, masters: list[Any]) -> None:
    for client in masters:
        client.config_set("appendonly", "yes")
    app = app_on(cluster.url)
    assert worst(app) is Severity.OK
    (shards,) = found(app, "shards")
    assert shards.text == "256, on 3 masters"
    assert {"cluster", "slots", "server", "clock"} <= set(severities(app))


def test_masters_without_a_file_are_reported_in_one_finding(cluster: Cluster) -> None:
    (finding,) = found(app_on(cluster.url), "persistence")
    assert finding.severity is Severity.WARNING
    assert all(f"127.0.0.1:{node.port}" in finding.text for node in cluster.masters())


def test_one_master_that_may_evict_leases_is_an_error(cluster: Cluster, masters: list[Any]) -> None:
    masters[1].config_set("maxmemory-policy", "allkeys-lru")
    masters[1].config_set("maxmemory", "100mb")
    (evicting,) = [
        f for f in found(app_on(cluster.url), "eviction") if f.severity is Severity.ERROR
    ]
    ports = [str(node.port) in evicting.text for node in cluster.masters()]
    assert ports == [False, True, False]


def test_more_replicas_wanted_than_each_master_has_is_an_error(cluster: Cluster) -> None:
    app = app_on(cluster.url)
    app.conf.singleton_lock_wait_replicas = 2
    (finding,) = found(app, "wait_replicas")
    assert finding.severity is Severity.ERROR
    assert "1 replicas are connected" in finding.text


def test_a_named_node_that_is_none_is_a_warning(cluster: Cluster) -> None:
    missing = f"127.0.0.1:{free_port()}"
    app = app_on(f"{cluster.url},{missing}")
    (finding,) = found(app, "nodes")
    assert finding.severity is Severity.WARNING
    assert missing in finding.text


def test_it_works_where_info_and_the_state_are_denied(cluster: Cluster) -> None:
    clients = [client_of(node) for node in cluster.nodes]
    try:
        for client in clients:
            client.execute_command("ACL", "SETUSER", "locks", "on", ">pw", *LEAST_RIGHTS)
        app = app_on(cluster.url.replace("://", "://locks:pw@"))
        here = severities(app)
        assert here["reachability"] is here["slots"] is Severity.OK
        assert here["cluster"] is here["server"] is Severity.NOTE
        assert worst(app) is Severity.NOTE
    finally:
        for client in clients:
            client.execute_command("ACL", "DELUSER", "locks")
            client.close()


def test_a_dead_replica_is_a_warning_and_a_dead_master_without_one_an_error(
    private_cluster: Cluster,
) -> None:
    cluster = private_cluster
    app = app_on(cluster.url)
    master = cluster.masters()[0]
    cluster.replica_of(master).kill()
    alone = [f for f in found(app, "replicas") if f.severity is Severity.WARNING]
    assert [str(master.port) in finding.text for finding in alone] == [True]
    assert worst(app) is Severity.WARNING
    master.kill()
    (slots,) = found(app, "slots")
    assert slots.severity is Severity.ERROR
    assert "master that doesn't answer" in slots.text
    wait_until(
        lambda: severities(app)["cluster"] is Severity.ERROR, "the others have noticed", timeout=60
    )
    (state,) = found(app, "cluster")
    assert "state fail" in state.text
    assert worst(app) is Severity.ERROR


def test_a_cluster_of_which_no_node_lives_is_an_error() -> None:
    app = app_on(f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{free_port()}")
    (finding,) = found(app, "cluster")
    assert finding.severity is Severity.ERROR


def test_slots_without_a_master_are_an_error(private_cluster: Cluster) -> None:
    cluster = private_cluster
    for node in cluster.nodes:
        with client_of(node) as client:
            client.execute_command("CLUSTER DELSLOTS", 7)
    (finding,) = found(app_on(cluster.url), "slots")
    assert finding.severity is Severity.ERROR
    assert "1 of 16384 have no master" in finding.text


def test_too_few_masters_and_clocks_apart_are_warnings() -> None:
    def options(bus_port: int) -> list[str]:
        return [word for pair in cluster_options(bus_port).items() for word in pair]

    port, bus = cluster_ports()
    with PrivateServer(port=port, arguments=options(bus)) as node, client_of(node) as client:
        client.execute_command("CLUSTER ADDSLOTS", *range(16384))
        app = app_on(f"redis+cluster://127.0.0.1:{node.port}")
        wait_until(lambda: severities(app)["cluster"] is Severity.OK, "it is a cluster", timeout=60)
        here = severities(app)
        assert here["masters"] is here["replicas"] is Severity.WARNING
        bus = free_port()
        # Its server is a Valkey in any case.
        arguments = ["--cluster-enabled", "yes", "--cluster-port", str(bus)]
        with server_with_clock("+30s", arguments) as fast:
            client.execute_command("CLUSTER MEET", "127.0.0.1", fast.port, bus)
            wait_until(
                lambda: severities(app).get("clock") is Severity.WARNING,
                "they have met",
                timeout=60,
            )
            (finding,) = found(app, "clock")
    assert f"the clock of 127.0.0.1:{fast.port} is" in finding.text


def test_the_basic_rights_that_a_login_lacks_on_a_cluster_are_named(cluster: Cluster) -> None:
    rights = [right for right in LEAST_RIGHTS if right not in ("+set", "+time")]
    clients = [client_of(node) for node in cluster.nodes]
    try:
        for client in clients:
            client.execute_command("ACL", "SETUSER", "few", "on", ">pw", *rights)
        app = app_on(cluster.url.replace("://", "://few:pw@"))
        (finding,) = found(app, "rights")
        assert finding.remedy.startswith("grant +set +time, see ")
    finally:
        for client in clients:
            client.execute_command("ACL", "DELUSER", "few")
            client.close()
