"""The harness itself: what the other tests rely on, and that it sees an overlap if there is one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import redis
from pytest_celery import CeleryTestSetup

from example_project import private_server
from example_project.private_server import PrivateServer, ServerStartFailed
from tests.harness.journal import Journal, Record, most_at_once, overlaps, runs
from tests.harness.processes import ROOT, Process, is_running, kill_process
from tests.harness.rabbit import RabbitServer
from tests.harness.worker import CeleryBeat, CeleryWorker

PLAIN = "tests.apps.plain"

StartWorker = Callable[..., CeleryWorker]
LoadApp = Callable[..., ModuleType]


def line(event: str, at: float, run: str, *, key: str = "k", pid: int = 1) -> Record:
    return Record(event=event, at=at, pid=pid, run=run, key=key)


def body(run: str, begin: float, end: float) -> list[Record]:
    return [line("start", begin, run), line("end", end, run)]


# The journal's arithmetic.


def test_runs_that_follow_each_other_do_not_overlap() -> None:
    records = body("a", 1, 2) + body("b", 2, 3)
    assert overlaps(records) == []
    assert most_at_once(records, "k") == 1


def test_runs_that_cross_overlap() -> None:
    records = body("a", 1, 3) + body("b", 2, 4)
    [(first, second)] = overlaps(records)
    assert (first.begin, second.begin) == (1, 2)
    assert most_at_once(records, "k") == 2


def test_runs_of_different_keys_do_not_overlap() -> None:
    records = [line("start", 1, "a", key="x"), line("start", 2, "b", key="y")]
    assert overlaps(records) == []


def test_a_run_without_an_end_runs_for_ever() -> None:
    records = [line("start", 1, "a"), *body("b", 1000, 1001)]
    assert len(overlaps(records)) == 1


def test_a_run_without_an_end_ended_with_its_process() -> None:
    records = [line("start", 1, "a"), line("start", 1000, "b", pid=2)]
    assert overlaps(records, deaths={1: 2.0}) == []
    assert overlaps([*records, line("death", 2.0, "")]) == []
    assert len(overlaps(records, deaths={1: 1000.5})) == 1


def test_an_earlier_death_under_the_same_pid_ends_nothing() -> None:
    [run] = runs([line("start", 5, "a")], deaths={1: 2.0})
    assert run.end == float("inf")


def test_a_body_that_raises_leaves_its_error_in_the_journal(journal: Journal) -> None:
    with pytest.raises(ZeroDivisionError), journal.run("k", task_id="t", fence=7):
        raise ZeroDivisionError
    [run] = journal.runs()
    assert (run.error, run.finished, run.fence, run.task_id) == ("ZeroDivisionError", True, 7, "t")


def test_waiting_for_what_never_comes_fails(journal: Journal) -> None:
    journal.note("here")
    with pytest.raises(AssertionError, match=r"without success.*\n.*here"):
        journal.wait_for(lambda records: len(records) > 1, timeout=0.05)


# Servers.


def test_a_private_server_keeps_its_data_only_when_asked(private_redis: PrivateServer) -> None:
    client = redis.Redis.from_url(private_redis.url())
    client.set("a", "1")
    private_redis.kill()
    private_redis.start()
    assert client.get("a") == b"1"
    private_redis.restart(keep_data=True)
    assert client.get("a") == b"1"
    private_redis.restart(keep_data=False)
    assert client.get("a") is None


def test_a_server_without_a_log_on_disk_saves_before_a_stop_that_keeps_data() -> None:
    with PrivateServer() as server:
        client = redis.Redis.from_url(server.url())
        client.set("a", "1")
        server.restart(keep_data=True)
        assert client.get("a") == b"1"
        # What was loaded must not come back after a crash: it would be older than the crash.
        server.kill()
        server.start()
        assert client.get("a") is None


def test_a_paused_server_keeps_connections_and_answers_later(private_redis: PrivateServer) -> None:
    connected = redis.Redis.from_url(private_redis.url(), retry=None)
    connected_as = connected.client_id()
    impatient = redis.Redis.from_url(private_redis.url(), socket_timeout=0.1, retry=None)
    private_redis.pause()
    with pytest.raises(redis.TimeoutError):
        impatient.ping()
    private_redis.resume()
    assert connected.client_id() == connected_as


def test_a_server_whose_port_is_taken_says_so(private_redis: PrivateServer) -> None:
    with pytest.raises(ServerStartFailed, match="in use"):
        PrivateServer(port=private_redis.port).start()


def test_a_server_dies_with_the_process_that_started_it() -> None:
    program = (
        "import os\n"
        "from example_project.private_server import PrivateServer\n"
        "print(PrivateServer().start().pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    orphan = Process([sys.executable, "-c", WAIT_FOR_END, done.stdout.strip()]).start()
    assert orphan.wait() == 0


# Ends when the process named by its argument is dead.
WAIT_FOR_END = """\
import os, sys, time
stat = f"/proc/{sys.argv[1]}/stat"
while os.path.exists(stat) and open(stat).read().rsplit(")")[1].split()[0] != "Z":
    time.sleep(0.01)
"""


def test_each_test_has_an_empty_database(redis_client: redis.Redis) -> None:
    assert redis_client.dbsize() == 0
    redis_client.set("left", "behind")


test_each_test_has_an_empty_database_again = test_each_test_has_an_empty_database


# Workers.


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_a_worker_runs_tasks_in_every_pool(
    pool: str, worker: StartWorker, load_app: LoadApp, journal: Journal
) -> None:
    plain = load_app(PLAIN)
    process = worker(PLAIN, pool=pool)
    pid = plain.occupy.delay("k", 0).get(timeout=20)
    assert pid in (process.children() if pool == "prefork" else [process.pid])
    [run] = journal.runs("k")
    assert (run.pid, run.error, run.finished) == (pid, None, True)
    process.terminate()
    assert process.wait() == 0
    process.assert_none_left()


def test_without_a_lock_two_bodies_of_one_key_overlap(
    worker: StartWorker, load_app: LoadApp, journal: Journal
) -> None:
    plain = load_app(PLAIN)
    worker(PLAIN, concurrency=2)
    for _ in range(2):
        plain.occupy.delay("k", 60)
    journal.wait_for_starts(2)
    assert len(journal.overlaps()) == 1


@pytest.mark.slow
def test_a_killed_pool_child_ends_its_run(
    worker: StartWorker, load_app: LoadApp, journal: Journal
) -> None:
    plain = load_app(PLAIN)
    process = worker(PLAIN, concurrency=1)
    plain.occupy.delay("k", 60)
    [start] = journal.wait_for_starts(1)
    assert start.pid in process.children()
    journal.death(start.pid, kill_process(start.pid))
    assert not is_running(start.pid)
    process.wait_for_log("WorkerLostError")
    # The pool has a new child, and the dead run is no overlap with the next.
    plain.occupy.delay("k", 0).get(timeout=20)
    assert [run.finished for run in journal.runs("k")] == [False, True]
    assert journal.overlaps() == []


def test_a_killed_worker_group_leaves_nothing(
    worker: StartWorker, load_app: LoadApp, journal: Journal
) -> None:
    plain = load_app(PLAIN)
    process = worker(PLAIN)
    children = process.children()
    assert len(children) == 2
    plain.occupy.delay("k", 60)
    journal.wait_for_starts(1)
    process.kill_group()
    assert process.exit_status == -signal.SIGKILL
    assert not any(map(is_running, children))


def test_a_log_line_that_never_comes_fails_with_the_log() -> None:
    process = Process([sys.executable, "-c", "print('only this')"]).start()
    with pytest.raises(AssertionError, match="only this"):
        process.wait_for_log("something else")
    assert process.wait_for_log("only (this)").group(1) == "this"
    process.wait()


def test_beat_sends_what_its_app_schedules(
    worker: StartWorker,
    beat: Callable[..., CeleryBeat],
    environment: dict[str, str],
    journal: Journal,
) -> None:
    environment["TICK"] = "0.2"
    worker(PLAIN)
    beat(PLAIN)
    journal.wait_for_ends(3, key="tick")


# RabbitMQ.


@pytest.mark.slow
def test_a_task_runs_over_rabbitmq(
    rabbit_url: str,
    environment: dict[str, str],
    worker: StartWorker,
    load_app: LoadApp,
    journal: Journal,
) -> None:
    environment["BROKER_URL"] = rabbit_url
    plain = load_app(PLAIN)
    worker(PLAIN)
    plain.occupy.delay("k", 0).get(timeout=20)
    assert len(journal.runs("k")) == 1


@pytest.mark.slow
def test_a_worker_survives_a_cut_rabbitmq_connection(
    rabbit: RabbitServer,
    environment: dict[str, str],
    worker: StartWorker,
    load_app: LoadApp,
) -> None:
    vhost = rabbit.vhost()
    environment["BROKER_URL"] = rabbit.url(vhost)
    plain = load_app(PLAIN)
    process = worker(PLAIN)
    plain.occupy.delay("k", 0).get(timeout=20)
    before = len(process.lines)
    rabbit.close_connections(vhost)
    process.wait_for_log("Connected to amqp", since=before)
    # Our own connection was cut too; a fresh copy of the app opens another.
    load_app(PLAIN).occupy.delay("k", 0).get(timeout=20)


@pytest.mark.slow
def test_a_short_consumer_timeout_redelivers_what_was_not_acknowledged(
    rabbit: RabbitServer,
    rabbit_url: str,
    environment: dict[str, str],
    worker: StartWorker,
    load_app: LoadApp,
    journal: Journal,
) -> None:
    environment |= {"BROKER_URL": rabbit_url, "ACKS_LATE": "1"}
    plain = load_app(PLAIN)
    with rabbit.consumer_timeout(1):
        processes = [worker(PLAIN), worker(PLAIN)]
        result = plain.occupy.delay("k", 60)
        [first, second] = journal.wait_for_starts(2)
        # Celery takes the closed channel for unrecoverable: that worker ends once its body is done.
        [ending] = [process for process in processes if first.pid in process.children()]
        ending.wait_for_log("PRECONDITION_FAILED")
    assert (first.task_id, second.task_id) == (result.id, result.id)
    assert len(journal.overlaps()) == 1


# pytest-celery without Docker.


def test_a_pytest_celery_setup_runs_on_local_processes(
    celery_setup: CeleryTestSetup, journal: Journal
) -> None:
    assert celery_setup.ready(control=True, docker=True)
    occupy = celery_setup.app.tasks[f"{PLAIN}.occupy"]
    assert occupy.delay("k", 0).get(timeout=20) != os.getpid()
    assert len(journal.runs("k")) == 1
    celery_setup.worker.assert_log_exists("succeeded")


@pytest.mark.slow
def test_pytest_celery_nodes_can_be_killed_and_restarted(
    celery_setup: CeleryTestSetup, journal: Journal
) -> None:
    occupy = celery_setup.app.tasks[f"{PLAIN}.occupy"]
    celery_setup.worker.kill()
    assert celery_setup.worker.container.status == "exited"
    result = occupy.delay("k", 0)
    celery_setup.broker.kill()
    celery_setup.broker.restart()
    celery_setup.worker.restart()
    result.get(timeout=20)
    assert len(journal.runs("k")) == 1


def test_servers_that_do_not_listen_yet_get_different_ports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(private_server, "_PORTS", range(10_240, 10_340))
    ports = [private_server.free_port() for _ in range(20)]
    assert len(set(ports)) == 20
