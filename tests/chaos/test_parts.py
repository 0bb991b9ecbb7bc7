"""The parts of a campaign: the guarded resource, the timetable, the proxy, the pictures."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.chaos.bodies import bodies
from tests.chaos.campaign import last_words
from tests.chaos.history import VARIABLE, History
from tests.chaos.pictures import draw
from tests.chaos.process_faults import struck_by
from tests.chaos.promises import PROMISES
from tests.chaos.proxy import Kind, Mode, Proxy
from tests.chaos.report import last_traces
from tests.chaos.resource import Resource
from tests.chaos.schedule import SORTS, Fault, Lane, sorts_for, timetable
from tests.chaos.site import Post
from tests.chaos.stacks import HEAD, dumps, stacks
from tests.chaos.story import story
from tests.chaos.usage import Usage, changes
from tests.chaos.usage import draw as draw_usage
from tests.chaos.verdict import Kind as What
from tests.chaos.verdict import Violation
from tests.harness.journal import Record
from tests.harness.processes import ROOT, Process


def test_the_resource_refuses_what_is_older_than_the_newest_it_has_seen(tmp_path: Path) -> None:
    resource = Resource(tmp_path, "k")
    answers = [resource.write("a", 5), resource.write("b", 7), resource.write("a", 5)]
    assert [*answers, resource.write("b", 7)] == [True, True, False, True]
    assert [write.accepted for write in resource.writes()] == [True, True, False, True]


def test_a_resource_that_does_not_compare_takes_everything(tmp_path: Path) -> None:
    resource = Resource(tmp_path, "k", compares=False)
    assert [resource.write("a", 5), resource.write("b", 7), resource.write("a", 5)] == [True] * 3


def test_a_history_that_is_read_while_it_is_written_ends_where_the_reading_began(
    tmp_path: Path,
) -> None:
    history = History(tmp_path)
    history.write("start", run="a", at=time.monotonic())
    history.write("start", run="b", at=time.monotonic() + 3600)
    assert [record.run for record in history.records()] == ["a"]


def test_a_task_that_a_shutdown_struck_after_its_body_has_no_state(tmp_path: Path) -> None:
    """Celery has called it SUCCESS by then."""
    struck = textwrap.dedent("""
        import contextlib
        from celery.app.trace import build_tracer
        from tests.chaos.app import app
        def shut_down(*args, **kwargs):
            raise SystemExit
        @app.task(name="plain")
        def plain():
            return 1
        plain.backend.mark_as_done = shut_down
        request = {"id": "j", "task": "plain"}
        with contextlib.suppress(SystemExit):
            build_tracer("plain", plain, app=app)("j", [], {}, request)
    """)
    unused = {"BROKER_URL": "memory://", "RESULT_URL": "cache+memory://", "LOCK_URL": "memory://"}
    environment = {"TTL": "2", "VISIBILITY_TIMEOUT": "3", VARIABLE: str(tmp_path), **unused}
    program = [sys.executable, "-c", struck]
    subprocess.run(program, check=True, cwd=ROOT, env=os.environ | environment, timeout=60)
    (left,) = [record for record in History(tmp_path).records() if record.event == "left"]
    assert left.data["state"] is None


def test_a_plain_task_whose_retry_could_not_be_published_is_delivered_again(
    tmp_path: Path,
) -> None:
    """Celery would discard its message."""
    rejected = textwrap.dedent("""
        from celery.exceptions import Reject
        from tests.chaos.app import app, held, held_async
        app.conf.task_publish_retry = False
        for task in (held, held_async):
            task.push_request(id="j", delivery_info={}, called_directly=False)
            try:
                task.run("k", 1, 0.0)
            except Reject as reject:
                print(reject.requeue)
    """)
    nowhere = dict.fromkeys(("BROKER_URL", "RESULT_URL", "LOCK_URL"), "redis://127.0.0.1:1/0")
    environment = {"TTL": "2", "VISIBILITY_TIMEOUT": "3", VARIABLE: str(tmp_path), **nowhere}
    program = [sys.executable, "-c", rejected]
    answer = subprocess.check_output(
        program, cwd=ROOT, env=os.environ | environment, timeout=60, text=True
    )
    assert answer.split() == ["True", "True"]


def test_one_seed_gives_one_timetable() -> None:
    sorts = sorts_for((), clock=False)
    first, again, other = (timetable(sorts, seconds=300, seed=seed, ttl=2.0) for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_the_faults_of_a_lane_never_meet_and_all_of_them_come() -> None:
    known = [sorts_for((), clock=False, churn=True, hosts=True, store=s) for s in PROMISES]
    sorts = list(dict.fromkeys(sort for sorts in known for sort in sorts))
    lanes = timetable(sorts, seconds=900, seed=1, ttl=2.0)
    for faults in lanes.values():
        for fault, following in pairwise(faults):
            assert fault.at + fault.seconds <= following.at
    struck = {fault.name for faults in lanes.values() for fault in faults}
    assert struck == {sort.name for sort in SORTS} - {"clock-step"}


def test_clock_steps_and_losses_of_data_are_not_mixed() -> None:
    names = {sort.name for sort in sorts_for((), clock=True)}
    assert "clock-step" in names
    assert not names & {"restart-empty", "failover"}


def test_calls_are_revoked_only_where_it_is_wanted() -> None:
    revoking = {"revoke-running", "revoke-waiting"}
    assert {sort.name for sort in sorts_for((), clock=False, churn=True)} >= revoking
    assert not {sort.name for sort in sorts_for((), clock=False)} & revoking


def test_the_faults_of_hosts_need_hosts() -> None:
    assert not [sort for sort in sorts_for((), clock=False) if sort.lane is Lane.HOST]
    with pytest.raises(ValueError, match="need several hosts"):
        sorts_for(["host-killed"], clock=False)


@pytest.mark.parametrize("store", sorted(PROMISES))
def test_each_store_has_faults_of_its_own_and_none_of_another(store: str) -> None:
    sorts = [sort for sort in sorts_for((), clock=False, store=store) if sort.lane is Lane.STORE]
    assert sorts
    other = "restart-empty" if store == "etcd" else "quorum-lost"
    if store != "zookeeper":
        with pytest.raises(ValueError, match="do not concern"):
            sorts_for([other], clock=False, store=store)


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="no such faults"):
        sorts_for(["rain"], clock=False)


def test_only_wanted_faults_come() -> None:
    lanes = timetable(sorts_for(["cut"], clock=False), seconds=60, seed=1, ttl=2.0)
    assert {fault.name for fault in lanes[Lane.NETWORK]} == {"cut"}
    assert not lanes[Lane.PROCESS]


def test_a_fault_strikes_only_workers_with_a_pool_that_has_it() -> None:
    pools = ("prefork", "threads", "gevent")
    prefork, threads, gevent = posts = [Post(pool, pool, None, None) for pool in pools]
    for name, struck in (
        ("kill-child", [prefork]),
        ("shutdown-cold", [prefork, threads]),
        ("kill-worker", [prefork, threads, gevent]),
    ):
        assert struck_by(Fault(name=name, at=0, seconds=1, chance=0.9), posts) == struck


# The proxy.


class Echo:
    """A server that answers each line with the same line, and remembers what it has read."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.news = threading.Condition()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # ends accept() in the other thread
        self._socket.close()

    def wait_until_received(self, line: bytes) -> None:
        with self.news:
            assert self.news.wait_for(lambda: line in self.received, timeout=30)

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        try:
            with client, client.makefile("rwb") as stream:
                for line in stream:
                    with self.news:
                        self.received.append(line)
                        self.news.notify_all()
                    stream.write(line)
                    stream.flush()
        except OSError:
            pass  # the proxy has cut it


@contextmanager
def proxied() -> Iterator[tuple[Echo, Proxy]]:
    with closing(Echo()) as echo, Proxy(echo.port) as proxy:
        yield echo, proxy


@contextmanager
def connected(proxy: Proxy, *, timeout: float = 30.0) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=timeout) as client:
        yield client


def answer(client: socket.socket) -> bytes:
    """What comes; empty if the connection is cut."""
    try:
        return client.recv(100)
    except ConnectionError:
        return b""


def test_the_proxy_lets_pass_what_it_must() -> None:
    with proxied() as (_, proxy), connected(proxy) as client:
        client.sendall(b"one\n")
        assert answer(client) == b"one\n"


def test_a_stalled_network_delivers_late() -> None:
    with proxied() as (echo, proxy), connected(proxy) as client:
        client.sendall(b"one\n")
        assert answer(client) == b"one\n"
        proxy.set(Mode(kind=Kind.STALL))
        client.sendall(b"two\n")
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(100)
        assert echo.received == [b"one\n"]
        client.settimeout(30)
        proxy.set(Mode())
        assert answer(client) == b"two\n"


@pytest.mark.parametrize(
    ("kind", "is_executed"), [(Kind.CUT, False), (Kind.NO_REQUESTS, False), (Kind.NO_REPLIES, True)]
)
def test_what_a_partition_swallows_never_comes(kind: Kind, is_executed: bool) -> None:
    with proxied() as (echo, proxy), connected(proxy) as client:
        client.sendall(b"one\n")
        assert answer(client) == b"one\n"
        proxy.set(Mode(kind=kind))
        client.sendall(b"two\n")
        if is_executed:
            echo.wait_until_received(b"two\n")
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(100)
        proxy.set(Mode())
        client.settimeout(30)
        assert answer(client) == b""
        assert (b"two\n" in echo.received) == is_executed


def test_a_lost_reply_is_that_of_a_request_that_was_executed() -> None:
    with proxied() as (echo, proxy):
        proxy.set(Mode(kind=Kind.LOSE_REPLIES, probability=1.0))
        with connected(proxy) as client:
            client.sendall(b"one\n")
            assert answer(client) == b""
        echo.wait_until_received(b"one\n")


def test_one_reply_alone_is_lost() -> None:
    with proxied() as (echo, proxy):
        proxy.lose_next_reply()
        with connected(proxy) as client:
            client.sendall(b"one\n")
            assert answer(client) == b""
        with connected(proxy) as client:
            client.sendall(b"two\n")
            assert answer(client) == b"two\n"
        assert echo.received == [b"one\n", b"two\n"]


def test_a_network_that_refuses_closes_what_comes() -> None:
    with proxied() as (echo, proxy):
        proxy.set(Mode(kind=Kind.REFUSE))
        with connected(proxy) as client:
            assert answer(client) == b""
        assert echo.received == []


def test_a_change_of_the_server_cuts_the_connections_to_the_old_one() -> None:
    with proxied() as (_, proxy), closing(Echo()) as other:
        with connected(proxy) as client:
            client.sendall(b"one\n")
            assert answer(client) == b"one\n"
            proxy.lead_to(other.port)
            assert answer(client) == b""
        with connected(proxy) as client:
            client.sendall(b"two\n")
            assert answer(client) == b"two\n"
        assert other.received == [b"two\n"]


# What a worker that doesn't end is at.


def test_the_stacks_of_a_worker_are_read_to_the_end_of_the_main_thread(tmp_path: Path) -> None:
    """They come thread by thread, and only the main one's says what the worker waits for."""
    hanging = textwrap.dedent("""
        import signal, threading, time
        from celery.utils.debug import cry
        def cry_handler(*args):
            first, mark, rest = cry().partition("LOCAL VARIABLES")
            print(first + mark, flush=True)
            time.sleep(0.5)
            print(rest, flush=True)
        def wait_for_children():
            print("ready.", flush=True)
            time.sleep(60)
        threading.Thread(target=time.sleep, args=(60,), name="other", daemon=True).start()
        signal.signal(signal.SIGUSR1, cry_handler)
        wait_for_children()
    """)
    worker = Process([sys.executable, "-c", hanging]).start()
    try:
        worker.wait_for_log("ready.")
        printed = stacks(worker, tmp_path).partition("MainThread")[2]
        assert "in wait_for_children" in printed
    finally:
        worker.kill_group()


def test_a_child_that_waits_for_a_lock_shows_where_it_is(tmp_path: Path) -> None:
    """It runs no Python meanwhile, nor does its parent, which waits for it."""
    hanging = textwrap.dedent("""
        import multiprocessing, os, sys
        from pathlib import Path
        from tests.chaos.stacks import dump_on_signal
        def wait_for_lock():
            print("ready.", flush=True)
            taken.acquire()
        dump_on_signal(Path(sys.argv[1]))
        taken = multiprocessing.Lock()
        taken.acquire()
        child = os.fork()
        if not child:
            wait_for_lock()
        def wait_for_child():
            print("forked.", flush=True)
            os.waitpid(child, 0)
        wait_for_child()
    """)
    worker = Process([sys.executable, "-c", hanging, str(tmp_path)]).start()
    try:
        worker.wait_for_log("ready.")
        worker.wait_for_log("forked.")
        _, parent, child = dumps(worker, tmp_path).split(HEAD)
        assert "in wait_for_child\n" in parent
        assert "in wait_for_lock\n" in child
    finally:
        worker.kill_group()


# What a worker that ends by itself leaves.


def test_the_error_that_ended_a_worker_is_kept_however_much_its_children_write_after_it() -> None:
    error = ["[CRITICAL/MainProcess] Unrecoverable error: AttributeError()", "AttributeError: why"]
    assert last_words(["before", *error, *["after"] * 300]).splitlines()[:2] == error


def test_the_end_of_the_log_is_kept_of_a_worker_that_ended_without_an_error() -> None:
    assert last_words([*["before"] * 300, "last"]).splitlines() == [*["before"] * 199, "last"]


# The pictures and stories.


def test_the_picture_of_a_violation_shows_its_bodies_and_what_was_broken() -> None:
    both = {"asked": 1.0, "worker": "w", "task": "late"}
    records = [
        Record(event="start", at=1, pid=1, run="a", task_id="job-of-a", key="k", data=both),
        Record(event="check", at=1, pid=1, run="a", key="k", data={"until": 9.0}),
        Record(event="fault", at=1, pid=9, data={"end": 2.0, "name": "cut", "target": "w"}),
        Record(event="fault", at=500, pid=9, data={"end": 501.0, "name": "stall", "target": "w"}),
        Record(event="start", at=2, pid=2, run="b", task_id="job-of-b", key="k", data=both),
        Record(event="start", at=2, pid=3, run="c", task_id="job-of-c", key="other", data=both),
    ]
    violation = Violation(kind=What.OVERLAP, key="k", at=2, runs=("a", "b"), text="so <it> was")
    picture = draw(violation, bodies(records), records)
    ElementTree.fromstring(picture)
    assert "job-of-a" in picture
    assert "job-of-b" in picture
    assert "cut (w)" in picture
    assert "so &lt;it&gt; was" in picture
    assert "job-of-c" not in picture
    assert "stall" not in picture


def test_a_report_shows_what_the_brokers_file_says_of_jobs_that_did_not_go_on() -> None:
    records = [
        Record(event="traced", at=1, pid=9, task_id="went-on"),
        Record(event="traced", at=1, pid=9, task_id="stayed"),
        Record(event="taken", at=2, pid=1, task_id="went-on"),
        Record(event="traced", at=3, pid=9, task_id="stayed"),
        Record(event="fault", at=4, pid=9),
    ]
    assert last_traces(records) == {"stayed": records[3]}


def test_the_story_of_a_violation_is_that_of_its_jobs_and_of_what_was_broken_meanwhile() -> None:
    records = [
        Record(event="fault", at=0, pid=9, data={"end": 0.1, "name": "cut", "target": "w1"}),
        Record(event="published", at=0.1, pid=9, task_id="job-of-a", data={"task": "app.late"}),
        Record(event="taken", at=1, pid=1, task_id="job-of-a", data={"worker": "w1"}),
        Record(
            event="start",
            at=1.25,
            pid=1,
            run="a",
            task_id="job-of-a",
            key="k",
            fence=7,
            data={"asked": 1.2, "worker": "w1", "task": "app.late"},
        ),
        Record(event="check", at=1.3, pid=1, run="a", task_id="job-of-a", data={"until": 9.0}),
        Record(event="taken", at=1.5, pid=2, task_id="other", data={"worker": "w2"}),
        Record(event="fault", at=1.6, pid=9, data={"end": 1.9, "name": "stall", "target": "all"}),
        Record(event="left", at=2, pid=1, task_id="job-of-a", data={"state": "FAILURE"}),
        Record(event="down", at=12, pid=9, data={"worker": "w2", "how": "soft"}),
        Record(event="down", at=13, pid=9, data={"worker": "w1", "how": "soft", "until": 14.5}),
        Record(event="death", at=14, pid=1, data={"worker": "w1"}),
        Record(event="death", at=14, pid=3, data={"worker": "w1"}),
        Record(event="fault", at=90, pid=9, data={"end": 91.0, "name": "cut", "target": "w1"}),
    ]
    lost = Violation(kind=What.JOB_LOST, at=2, runs=("a",), job="job-of-a", text="it was lost")
    assert story(lost, bodies(records), records) == [
        "   0.000  fault: cut (w1), for 0.100 s",
        "   0.100  published job-of-a pid 9",
        "   1.000  taken     job-of-a w1 1",
        "   1.250  start     job-of-a w1 1 key=k fence=7",
        "   1.600  fault: stall (all), for 0.300 s",
        "   2.000  left      job-of-a pid 1 state=FAILURE",
        "  13.000  down               w1 9 how=soft until=14.5",
        "  14.000  death              w1 1",
    ]
    late = Violation(kind=What.FENCE, key="k", at=1.25, runs=("a",), text="a fence fell")
    assert len(story(late, bodies(records), records)) == 4, "from a second before it asked"
    assert story(Violation(kind=What.NO_TICK), bodies(records), records) == []


def test_what_grows_while_a_campaign_runs_is_in_its_report_and_picture() -> None:
    rows = [
        Usage(at=at, kind=kind, pid=7, mib=60.0, descriptors=9 + grown * at, threads=3, **more)
        for at in range(101)
        for kind, grown, more in (("worker", 0, {}), ("store", 1, {"clients": at, "keys": 5}))
    ]
    assert [*changes(rows)] == [
        "worker: mib 60 -> 60, descriptors 9 -> 9, threads 3 -> 3",
        "store: mib 60 -> 60, descriptors 34 -> 101, threads 3 -> 3, clients 25 -> 92, keys 5 -> 5",
    ]
    assert all(name in draw_usage(rows) for name in ("worker", "store", "descriptors", "keys"))
