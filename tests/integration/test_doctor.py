"""`celery -A app singleton doctor`: each finding on a server that has the fault."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import socketserver
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis
from celery import Celery, Task
from prometheus_client import CollectorRegistry

from celery_singleton_lock import PER_TASK, inspection, singleton_task
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.doctor import Severity
from celery_singleton_lock.doctor.servers import is_slow
from celery_singleton_lock.errors import DOCS, StoreError
from celery_singleton_lock.instrumentation.prometheus import PrometheusMetrics
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.serve.gauges import Gauges
from celery_singleton_lock.serve.listener import Listener
from celery_singleton_lock.serve.readings import Readings
from celery_singleton_lock.stores.redis.wait_queue import RedisWaitQueue
from example_project.private_server import PrivateServer, free_port
from tests.harness.calls import Calls
from tests.harness.deliveries import wait_until
from tests.harness.faketime import server_with_clock
from tests.harness.keys import EVERY_NAME, LOCKING, name_in_store
from tests.harness.processes import ROOT
from tests.unit.test_documented_rights import QUEUES

from .doctor_apps import app_on, findings, found, severities

# What docs/reference/settings.md says that locking needs.
LEAST_RIGHTS = (
    f"~{EVERY_NAME}", "resetchannels", "-@all", *LOCKING,
)  # fmt: skip


@pytest.fixture
def server(private_redis: PrivateServer) -> Iterator[PrivateServer]:
    return private_redis


@pytest.fixture
def raw(server: PrivateServer) -> Iterator[Any]:
    with redis.Redis.from_url(server.url()) as client:
        yield client


def test_a_sound_app_has_no_errors_and_no_warnings(server: PrivateServer, raw: Any) -> None:
    all_of_them = findings(app_on(server.url()))
    assert {finding.severity for finding in all_of_them} == {Severity.OK}
    assert not raw.keys(f"{EVERY_NAME}singleton-doctor*"), "it leaves nothing behind"
    assert any("ms each" in finding.text for finding in all_of_them)


@pytest.mark.parametrize(
    ("policy", "limit", "severity"),
    [
        ("volatile-ttl", "0", Severity.WARNING),
        ("volatile-lru", "100mb", Severity.WARNING),
        ("volatile-lfu", "100mb", Severity.WARNING),
        ("volatile-ttl", "100mb", Severity.ERROR),
        ("volatile-random", "100mb", Severity.ERROR),
        ("allkeys-lru", "100mb", Severity.ERROR),
        ("allkeys-lfu", "100mb", Severity.ERROR),
        ("allkeys-random", "100mb", Severity.ERROR),
    ],
)
def test_a_server_that_evicts_leases_early_is_an_error_and_late_a_warning(
    policy: str, limit: str, severity: Severity, server: PrivateServer, raw: Any
) -> None:
    raw.config_set("maxmemory-policy", policy)
    raw.config_set("maxmemory", limit)
    app = app_on(server.url())
    (finding,) = found(app, "eviction")
    assert finding.severity is severity
    assert policy in finding.text
    assert "noeviction" in finding.remedy
    app = app_on(server.url())
    app.conf.singleton_lock_allow_eviction = True
    (accepted,) = found(app, "eviction")
    assert accepted.severity is Severity.WARNING


def test_it_works_where_info_and_scan_are_denied(server: PrivateServer, raw: Any) -> None:
    raw.execute_command("ACL", "SETUSER", "locks", "on", ">pw", *LEAST_RIGHTS)
    app = app_on(server.url())
    app.conf.singleton_lock_url = server.url().replace("redis://", "redis://locks:pw@")
    found_here = severities(app)
    assert found_here["reachability"] is Severity.OK
    assert (found_here["server"], found_here["keys"]) == (Severity.NOTE, Severity.NOTE)
    assert Severity.ERROR not in found_here.values()
    assert not [finding for finding in findings(app) if "pw" in finding.text]


def test_rights_that_only_waiting_needs_are_a_note(server: PrivateServer, raw: Any) -> None:
    (finding,) = found(app_on(server.url()), "waiting")
    assert finding.severity is Severity.OK
    raw.execute_command("ACL", "SETUSER", "locks", "on", ">pw", *LEAST_RIGHTS, "+rpush", "+zadd")
    app = app_on(server.url())
    app.conf.singleton_lock_url = server.url().replace("redis://", "redis://locks:pw@")
    (finding,) = found(app, "waiting")
    assert finding.severity is Severity.NOTE
    assert "BLPOP, ZCOUNT, ZREM" in finding.text
    assert "+blpop +zcount +zrem" in finding.remedy
    assert raw.keys(f"{EVERY_NAME}singleton-doctor*") == []


def test_waiting_clients_are_no_foreign_keys(server: PrivateServer, raw: Any) -> None:
    queue = Keyspace.wait_queue(Keyspace().lock("checked.work", "busy"))
    raw.zadd(queue, {"waiter": 1})
    raw.rpush(f"{queue}!", "a call")
    for name in (queue, f"{queue}!"):
        raw.expire(name, 60)
    assert raw.keys(name_in_store("line|*"))
    assert found(app_on(server.url()), "keys") == []
    raw.persist(queue)
    assert len(found(app_on(server.url()), "keys")) == 1


@pytest.mark.slow
def test_a_purged_call_is_overdue_until_an_operator_frees_its_claim(
    server: PrivateServer, capsys: pytest.CaptureFixture[str]
) -> None:
    app = app_on(server.url(), unique="until_done", unique_for=20)
    task = app.tasks["checked.work"]
    purged = task.delay(1)
    assert found(app, "claims") == []
    app.start(["purge", "-f"])
    assert task.delay(1).id == purged.id, "it is answered with a call that no longer exists"
    (finding,) = wait_until(lambda: found(app, "claims"), "it is overdue")
    assert finding.severity is Severity.WARNING
    explained = inspection.explain(app, purged.id, timeout=0.2)
    (command,) = {
        re.search(r"celery -A \.\.\. (singleton release '\S+')", text)[1]  # type: ignore[index]
        for text in (finding.remedy, explained.sentences[1])
    }
    assert "It is overdue by" in explained.sentences[1]
    readings = Readings(app)
    gauges = Gauges(
        readings, Listener(app, readings.clock, PrometheusMetrics(CollectorRegistry())), "checked"
    )
    [late] = [one for one in gauges.collect() if one.name == "celery_singleton_overdue_claims"]
    assert [(sample.labels, sample.value) for sample in late.samples] == [
        ({"task": "checked.work"}, 1)
    ]
    app.start([*shlex.split(command), "--yes"])
    assert found(app, "claims") == []
    again = task.delay(1)
    assert again.id != purged.id
    task.delay(2)
    capsys.readouterr()
    app.start(shlex.split("singleton release --task checked.work --pattern '*}:claim|*' --yes"))
    assert capsys.readouterr().out.count("released ") == 2
    assert task.delay(1).id != again.id


@pytest.mark.parametrize(
    "lacking", [["+set"], ["+evalsha", "+time", "+del"], ["+eval"], ["+select"], [f"~{EVERY_NAME}"]]
)
def test_the_basic_rights_that_a_login_lacks_are_named_and_suffice_when_granted(
    server: PrivateServer, raw: Any, lacking: list[str]
) -> None:
    rights = [right for right in (*LEAST_RIGHTS, "+select") if right not in lacking]
    raw.execute_command("ACL", "SETUSER", "few", "reset", "on", ">pw", *rights)
    app = app_on(server.url())
    app.conf.singleton_lock_url = server.url(2).replace("redis://", "redis://few:pw@")
    (finding,) = found(app, "rights")
    assert finding.severity is Severity.ERROR
    grants, _, page = finding.remedy.removeprefix("grant ").partition(", see ")
    assert sorted(grants.split()) == sorted(lacking)
    assert page == f"{DOCS}reference/settings.html#rights"
    for right in lacking:
        name = right.strip("+~")
        assert (name if right.startswith("~") else name.upper()) in finding.text
    raw.execute_command("ACL", "SETUSER", "few", *grants.split())
    assert [one.severity for one in found(app, "rights")] == [Severity.NOTE]  # of pauses
    assert raw.keys(f"{EVERY_NAME}singleton-doctor*") == []


def test_the_pattern_to_grant_begins_with_the_prefix_of_the_deployment(
    server: PrivateServer, raw: Any
) -> None:
    rights = [right for right in LEAST_RIGHTS if not right.startswith("~")]
    raw.execute_command("ACL", "SETUSER", "few", "reset", "on", ">pw", *rights, "~other:*")
    app = app_on(server.url())
    app.conf.singleton_lock_url = server.url().replace("redis://", "redis://few:pw@")
    app.conf.singleton_lock_global_keyprefix = "prod:"
    (finding,) = found(app, "rights")
    assert finding.remedy.startswith("grant ~prod:csl:*, see ")


def test_rights_that_the_queue_of_a_key_lacks_are_an_error_that_names_them(
    server: PrivateServer, raw: Any
) -> None:
    raw.execute_command("ACL", "SETUSER", "locks", "on", ">pw", *LEAST_RIGHTS, "+zadd")
    app = app_on(server.url(), key="{number}", on_conflict="queue")
    app.conf.singleton_lock_url = server.url().replace("redis://", "redis://locks:pw@")
    with pytest.raises(StoreError, match="doctor` says which rights are missing"):
        app.tasks["checked.work"].delay(1)
    (finding,) = found(app, "rights")
    assert finding.severity is Severity.ERROR
    assert "checked.work" in finding.text
    rights = re.findall(r"\+\w+", finding.remedy)
    assert {right[1:].upper() for right in rights} == QUEUES - {"ZADD"}
    assert raw.keys(f"{EVERY_NAME}singleton-doctor*") == []
    raw.execute_command("ACL", "SETUSER", "locks", *rights)
    assert found(app, "rights") == []
    app.tasks["checked.work"].delay(1)


def test_the_rights_of_the_page_suffice_in_a_database_of_its_own(
    server: PrivateServer, raw: Any
) -> None:
    page = (ROOT / "docs/reference/settings.md").read_text()
    for line in re.findall(r"^ACL SETUSER .*$", page, re.MULTILINE):
        raw.execute_command(*line.split())
    app = app_on(server.url(), key="{number}", on_conflict="queue")
    url = server.url(2).replace("redis://", "redis://locks:password@")
    app.conf.singleton_lock_url = url
    app.tasks["checked.work"].delay(1)
    found_here = severities(app)
    assert Severity.ERROR not in found_here.values()
    assert (found_here["reachability"], found_here["waiting"]) == (Severity.OK, Severity.OK)
    assert "rights" not in found_here
    raw.execute_command("ACL", "SETUSER", "locks", "-zscore")
    assert severities(app)["rights"] is Severity.ERROR


def test_rights_that_a_pause_lacks_are_a_note(server: PrivateServer, raw: Any) -> None:
    raw.execute_command("ACL", "SETUSER", "locks", "on", ">pw", *LEAST_RIGHTS)
    app = app_on(server.url())
    app.conf.singleton_lock_url = server.url().replace("redis://", "redis://locks:pw@")
    (finding,) = found(app, "rights")
    assert finding.severity is Severity.NOTE
    assert "paused calls, and retries above a rate" in finding.text


def test_a_store_that_is_away_is_an_error() -> None:
    app = app_on("memory://")
    app.conf.singleton_lock_url = f"redis://127.0.0.1:{free_port()}/0"
    (finding,) = found(app, "reachability")
    assert finding.severity is Severity.ERROR


def test_a_host_that_has_no_address_is_an_error_of_its_name() -> None:
    app = app_on("memory://")
    app.conf.singleton_lock_url = "redis://no-such-host.invalid:6379/0"
    (finding,) = found(app, "name")
    assert finding.severity is Severity.ERROR
    assert "DNS" in finding.remedy


def test_tls_to_a_server_without_it_names_the_scheme(server: PrivateServer) -> None:
    app = app_on("memory://")
    app.conf.singleton_lock_url = server.url().replace("redis://", "rediss://")
    (finding,) = found(app, "reachability")  # the server waits for the rest of a command
    assert "with TLS (rediss://" in finding.remedy


@pytest.mark.parametrize("scheme", ["redis", "rediss", "etcd", "etcds"])
def test_a_port_that_closes_connections_is_not_a_store_that_must_be_started(scheme: str) -> None:
    with _Resetting(("127.0.0.1", 0), socketserver.BaseRequestHandler) as port:
        threading.Thread(target=port.serve_forever, daemon=True).start()
        app = app_on("memory://")
        app.conf.singleton_lock_url = f"{scheme}://127.0.0.1:{port.server_address[1]}/"
        (finding,) = found(app, "connection")
        port.shutdown()
    assert finding.severity is Severity.ERROR
    assert "does the server speak TLS" in finding.remedy


class _Resetting(socketserver.ThreadingTCPServer):
    """Resets each connection once the client has sent something, as a TLS port does."""

    daemon_threads = True

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.recv(1)
        request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.close()

    def shutdown_request(self, request: Any) -> None: ...


@pytest.mark.slow
def test_more_replicas_wanted_than_there_are_is_an_error(server: PrivateServer) -> None:
    app = app_on(server.url())
    app.conf.singleton_lock_wait_replicas = 1
    (finding,) = found(app, "wait_replicas")
    assert finding.severity is Severity.ERROR
    assert "0 replicas are connected" in finding.text
    assert not found(app, "reachability")
    (refusal,) = found(app, "replicas")
    assert "lower singleton_lock_wait_replicas" in refusal.remedy


@pytest.mark.slow
def test_one_replica_less_would_stop_all_grants_is_a_note(server: PrivateServer, raw: Any) -> None:
    app = app_on(server.url())
    app.conf.singleton_lock_wait_replicas = 1
    replication = ["--replicaof", "127.0.0.1", str(server.port), "--repl-diskless-sync-delay", "0"]
    with PrivateServer(arguments=replication):
        wait_until(lambda: raw.wait(1, 100) == 1, "the replica is in step")
        (finding,) = found(app, "wait_replicas")
        (note,) = found(app, "replication")
    assert (finding.severity, note.severity) == (Severity.NOTE, Severity.NOTE)
    assert "1 replicas" in note.text


def test_a_server_without_a_file_forgets_at_a_restart() -> None:
    with PrivateServer() as server:
        (finding,) = found(app_on(server.url()), "persistence")
    assert finding.severity is Severity.NOTE
    assert "appendonly yes" in finding.remedy


def test_a_server_without_a_file_is_a_warning_if_calls_wait_in_it() -> None:
    with PrivateServer() as server:
        (finding,) = found(app_on(server.url(), on_conflict="queue"), "persistence")
    assert finding.severity is Severity.WARNING
    assert "checked.work" in finding.text


def test_a_call_of_an_app_with_another_broker_is_reported(server: PrivateServer) -> None:
    app = app_on(server.url(), key="{number}", on_conflict="queue")
    app.tasks["checked.work"].delay(1)
    assert not found(app, "queues")
    other = app_on(server.url(), key="{number}", on_conflict="queue")
    other.conf.singleton_lock_url, other.conf.broker_url = server.url(), "memory://"
    (finding,) = found(other, "queues")
    assert finding.severity is Severity.WARNING
    assert f":{server.port}/" in finding.text


def test_a_call_that_no_worker_begins_is_reported(server: PrivateServer) -> None:
    app = app_on(server.url(), key="{number}", on_conflict="queue")
    task: Any = app.tasks["checked.work"]
    call = task.apply_async((1,), queue="nowhere")
    calls = Calls(Runtime.of(app).store)
    calls.key = task.lock_key(1)
    for _ in range(2):
        calls.hinted_by_sweep()
    (finding,) = found(app, "queues")
    assert finding.severity is Severity.WARNING
    assert call.id in finding.text
    assert "'nowhere'" in finding.remedy


@pytest.mark.slow
def test_a_servers_clock_that_is_off_is_reported() -> None:
    with server_with_clock("+30s") as server:
        (finding,) = found(app_on(server.url()), "clock")
    assert finding.severity is Severity.WARNING
    assert "+30." in finding.text or "+29." in finding.text


def test_another_number_of_shards_is_reported_before_anything_is_tried(
    server: PrivateServer, raw: Any
) -> None:
    """As an app that names a cluster's node as a plain server would find it."""
    raw.set(name_in_store("shards"), "256")
    app = app_on(server.url())
    (finding,) = found(app, "shards")
    assert finding.severity is Severity.ERROR
    assert "256 shard(s)" in finding.text
    assert not found(app, "rights"), "it is no matter of rights"


@pytest.mark.parametrize("url", [None, "memory://"])
def test_an_app_without_a_store_is_asked_to_name_one(url: str | None) -> None:
    app = Celery("homeless", broker="amqp://127.0.0.1:1", set_as_current=False)
    if url:
        app.conf.singleton_lock_url = url
    (finding,) = findings(app)
    assert finding.severity is Severity.ERROR
    assert "singleton_lock_url" in finding.text


def test_a_store_in_memory_is_noted_because_prefork_workers_refuse_it() -> None:
    app = Celery("alone", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_url = "memory:///"
    _, finding = found(app, "store")
    assert finding.severity is Severity.NOTE
    assert "prefork" in finding.remedy
    assert severities(app)["reachability"] is Severity.OK


def test_a_database_that_the_server_does_not_have_is_an_error_about_its_number(
    server: PrivateServer,
) -> None:
    app = app_on(server.url())
    app.conf.singleton_lock_url = f"redis://127.0.0.1:{server.port}/99999"
    (finding,) = found(app, "database")
    assert finding.severity is Severity.ERROR
    assert "database number" in finding.remedy
    assert not found(app, "server"), "INFO is not what it refuses"


def test_a_replica_is_an_error(server: PrivateServer, raw: Any) -> None:
    app = app_on(server.url())
    raw.execute_command("REPLICAOF", "127.0.0.1", str(free_port()))
    (finding,) = found(app, "replica")
    assert finding.severity is Severity.ERROR
    assert "master" in finding.remedy


def test_a_wrong_password_is_an_error_about_the_login(server: PrivateServer, raw: Any) -> None:
    raw.execute_command("ACL", "SETUSER", "default", "off")
    app = app_on(server.url())
    for login in ("", "default:wrong@", "unknown:pw@"):
        app.conf.singleton_lock_url = server.url().replace("redis://", f"redis://{login}")
        (finding,) = found(app, "login")
        assert finding.severity is Severity.ERROR
        assert "password" in finding.remedy
        assert "wrong" not in finding.text


def test_a_full_server_is_an_error_about_its_memory(server: PrivateServer, raw: Any) -> None:
    raw.config_set("maxmemory", "1mb")
    (finding,) = found(app_on(server.url()), "memory")
    assert finding.severity is Severity.ERROR
    assert "raise maxmemory" in finding.remedy


@pytest.mark.slow
def test_a_server_that_cannot_save_is_an_error_about_its_disk() -> None:
    with PrivateServer(arguments=["--save", "3600 1"]) as server:
        with redis.Redis.from_url(server.url()) as client:
            # The file that the server writes first, and then renames to this name.
            (server.directory / "dump.rdb").mkdir()
            client.bgsave()
            wait_until(
                lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err",
                "the server has failed to save",
            )
        (finding,) = found(app_on(server.url()), "disk")
        assert finding.severity is Severity.ERROR
        assert "disk" in finding.remedy


def test_a_database_of_its_own_is_advised_beside_many_keys_of_other_programs(
    server: PrivateServer, raw: Any
) -> None:
    app = app_on(server.url())
    assert found(app, "search") == []
    for start in range(0, 200_000, 10_000):
        raw.mset({f"celery-task-meta-{number}": "{}" for number in range(start, start + 10_000)})
    (finding,) = found(app, "search")
    assert finding.severity is Severity.NOTE
    assert "200,000 keys of other programs are next to" in finding.text
    assert 'singleton_lock_url = "redis://.../2"' in finding.remedy
    raw.flushdb()


def test_the_keys_of_old_recipes_are_reported_and_left_alone(
    server: PrivateServer, raw: Any
) -> None:
    """SETNX without EXPIRE, SETNX + GETSET with a timestamp, a list as a queue of one."""
    forever, a_list = name_in_store("checked.work:a"), name_in_store("checked.work:b")
    raw.set(forever, "1763714400.5")
    raw.lpush(a_list, "token")
    raw.hset(name_in_store("shard"), "|fence", 5)  # ours: a key without an expiry
    raw.set(name_in_store("checked.work:c"), "1763714400.5", ex=60)
    findings = found(app_on(server.url()), "keys")
    texts = sorted(finding.text for finding in findings)
    assert len(texts) == 2
    assert forever in texts[0]
    assert "no expiry" in texts[0]
    assert a_list in texts[1]
    assert "is a list" in texts[1]
    assert raw.exists(forever, a_list) == 2


def test_a_worker_that_would_not_start_is_an_error(server: PrivateServer) -> None:
    app = app_on(server.url(), scope="names", key="{number}", limit=2)

    @singleton_task(
        app=app, name="checked.other", shared=False, scope="names", key="{number}", limit=3
    )
    def other(number: int) -> None: ...

    (finding,) = found(app, "tasks")
    assert finding.severity is Severity.ERROR
    assert "limit=2" in finding.text
    assert "limit=3" in finding.text


def test_a_task_that_contradicts_the_settings_is_an_error_beside_the_other_findings(
    server: PrivateServer,
) -> None:
    app = app_on(server.url(), min_hold=10)
    app.conf.singleton_lock_max_hold = 5
    severity = severities(app)
    assert severity["tasks"] is Severity.ERROR
    assert severity["reachability"] is Severity.OK


def test_timeouts_that_do_not_fit_are_reported(server: PrivateServer) -> None:
    app = app_on(server.url(), ttl=120, acks_late=True)
    app.conf.broker_transport_options = {"visibility_timeout": 60}
    warning, note = found(app, "timeouts")
    assert (warning.severity, note.severity) == (Severity.WARNING, Severity.NOTE)
    assert all("checked.work" in finding.text for finding in (warning, note))


def test_a_debounce_above_the_visibility_timeout_is_a_note(server: PrivateServer) -> None:
    app = app_on(server.url(), key="{number}", debounce=90, ttl=20)
    assert not found(app, "timeouts")
    app.conf.broker_transport_options = {"visibility_timeout": 60}
    [finding] = found(app, "timeouts")
    assert finding.severity is Severity.NOTE
    assert "debounce is longer than visibility_timeout (60 s) of checked.work" in finding.text
    assert "every 20 s" in finding.text


@pytest.mark.parametrize(
    ("broker", "notes"),
    [
        ("redis://h/0", 1),
        ("rediss://h/0", 1),
        ("sentinel://h:26379;sentinel://i:26379", 1),
        ("redis+socket:///run/redis.sock", 0),
        ("amqp://h", 0),
        ("memory://", 0),
    ],
)
def test_a_redis_broker_that_workers_connect_to_without_a_limit_is_a_note(
    broker: str, notes: int, server: PrivateServer
) -> None:
    app = app_on(server.url())
    app.conf.singleton_lock_url, app.conf.broker_url = server.url(), broker
    assert found(app, "broker") == [], "it has a limit"
    app.conf.broker_transport_options = {}
    found_now = found(app, "broker")
    assert [finding.severity for finding in found_now] == [Severity.NOTE] * notes
    assert all('"socket_connect_timeout": 5' in finding.remedy for finding in found_now)


def test_a_late_job_that_its_pool_process_takes_with_it_is_a_note(server: PrivateServer) -> None:
    [finding] = found(app_on(server.url(), acks_late=True), "acks_late")
    assert finding.severity is Severity.NOTE
    assert "acks_late without reject_on_worker_lost: checked.work" in finding.text
    assert "reject_on_worker_lost=True" in finding.remedy


@pytest.mark.parametrize(
    ("options", "notes"),
    [
        ({"on_duplicate": "replace"}, 1),
        ({"on_duplicate": "replace", "key": PER_TASK}, 0),
        ({"debounce": 5, "key": PER_TASK}, 0),
        ({}, 0),
    ],
    ids=["all arguments", "a key", "debounce", "another duplicate"],
)
def test_arguments_that_nothing_can_replace_are_a_note(
    options: dict[str, Any], notes: int, server: PrivateServer
) -> None:
    app = app_on(server.url(), unique="until_start", **options)
    texts = [each.text for each in found(app, "tasks") if each.severity is Severity.NOTE]
    assert len(texts) == notes
    assert all("has no effect without a key: checked.work" in text for text in texts)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"acks_late": True, "reject_on_worker_lost": True},
        pytest.param(
            {"acks_late": True, "retry_on_worker_lost": True},
            marks=pytest.mark.skipif(
                not hasattr(Task, "retry_on_worker_lost"), reason="an option of Celery 5.7"
            ),
        ),
    ],
    ids=["early", "rejected", "retried"],
)
def test_a_job_that_survives_its_pool_process_or_need_not_is_no_finding(
    options: dict[str, bool], server: PrivateServer
) -> None:
    assert found(app_on(server.url(), **options), "acks_late") == []


def test_a_rejection_that_has_no_effect_is_a_note_unless_it_is_the_apps_default(
    server: PrivateServer,
) -> None:
    [finding] = found(app_on(server.url(), reject_on_worker_lost=True), "acks_late")
    assert finding.severity is Severity.NOTE
    assert "without acks_late has no effect: checked.work" in finding.text
    app = app_on(server.url())
    app.conf.task_reject_on_worker_lost = True
    assert found(app, "acks_late") == []


def test_results_that_reach_the_first_caller_alone_are_reported(server: PrivateServer) -> None:
    app = app_on(server.url(), unique="until_done")
    assert [finding.severity for finding in found(app, "tasks")] == [Severity.OK]
    app = app_on(server.url(), unique="until_done")
    app.conf.update(result_backend="rpc://", singleton_lock_url=server.url())
    _, finding = found(app, "tasks")
    assert finding.severity is Severity.WARNING
    assert "checked.work" in finding.text
    assert "rpc://" in finding.text


@pytest.mark.parametrize("days", [2, timedelta(days=2)], ids=["number", "timedelta"])
def test_a_period_that_outlasts_its_results_is_a_finding(server: PrivateServer, days: Any) -> None:
    period = {"unique": "until_expired", "unique_for": timedelta(days=1.5)}
    app = app_on(server.url(), **period)
    _, finding = found(app, "tasks")
    assert finding.severity is Severity.WARNING
    assert "checked.work: unique_for is longer than result_expires (86400 s)" in finding.text
    assert "on_duplicate" in finding.remedy
    for options, expires in (
        (period, days if isinstance(days, timedelta) else days * 86400),
        (period, None),
        (period | {"ignore_result": True}, 60),
        (period | {"on_duplicate": "skip"}, 60),
        ({"unique": "until_done", "unique_for": 600}, 60),
    ):
        app = app_on(server.url(), **options)
        app.conf.result_expires = expires
        assert [one.severity for one in found(app, "tasks")] == [Severity.OK]


def test_an_app_without_singleton_tasks_is_probably_the_wrong_one(server: PrivateServer) -> None:
    app = Celery("empty", broker=server.url(), backend=server.url(), set_as_current=False)
    app.finalize()
    for name in list(app.tasks):  # shared tasks of other tests' modules join every app
        app.tasks.unregister(name)
    (finding,) = found(app, "tasks")
    assert finding.severity is Severity.WARNING


def test_a_slow_store_is_a_warning_for_the_task_with_the_shortest_ttl(
    server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[is_slow.__module__], "_COMFORTABLE_SHARE", 1e-9)
    (finding,) = found(app_on(server.url(), ttl=0.5), "latency")
    assert finding.severity is Severity.WARNING
    assert "ttl=0.5" in finding.text


def test_a_server_without_blocking_commands_hides_no_other_finding(
    server: PrivateServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown_command(*_: object) -> None:
        raise StoreError("the store refuses: unknown command 'BLPOP'")

    monkeypatch.setattr(sys.modules[is_slow.__module__], "_COMFORTABLE_SHARE", 1e-9)
    monkeypatch.setattr(RedisWaitQueue, "missing_rights", unknown_command)
    all_of_them = findings(app_on(server.url()))
    assert {"latency", "reachability"} <= {finding.subject for finding in all_of_them}
    assert any("BLPOP" in finding.text for finding in all_of_them)


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [False, True], ids=["for people", "json"])
def test_the_command_reports_all_and_ends_with_1_on_an_error(
    server: PrivateServer, raw: Any, as_json: bool
) -> None:
    def doctor() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "celery", "-A", "tests.apps.pools", "singleton", "doctor"]
        env = {"BROKER_URL": server.url(), "RESULT_URL": server.url(), "JOURNAL": os.devnull}
        return subprocess.run(
            command + ["--json"] * as_json,
            cwd=ROOT,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    sound = doctor()
    raw.config_set("maxmemory-policy", "allkeys-lru")
    raw.config_set("maxmemory", "100mb")
    broken = doctor()
    assert (sound.returncode, broken.returncode) == (0, 1), sound.stderr + broken.stderr
    if as_json:
        rows = json.loads(broken.stdout)
        (row,) = [row for row in rows if row["subject"] == "eviction"]
        assert row["severity"] == "error"
        assert row["remedy"]
    else:
        assert "ERROR    eviction: maxmemory-policy is allkeys-lru" in broken.stdout
        assert "-> CONFIG SET maxmemory-policy noeviction" in broken.stdout
