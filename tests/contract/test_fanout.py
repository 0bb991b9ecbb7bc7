"""Redlock's threads: forks, the end of the process, greenlets, and callers that are interrupted."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.store_requests import Granted, Release, ReleaseReply
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.stores.redlock.fanout import Fanout, Node
from celery_singleton_lock.stores.redlock.store import RedlockStore, read_nodes
from celery_singleton_lock.testing.contract import TIMEOUT, ask, new_key, new_token
from tests.harness.processes import ROOT
from tests.harness.redlock_nodes import RedlockNodes

# Several servers each: `make test` keeps memory, Redis and Valkey.
pytestmark = pytest.mark.slow

CLOCK = SystemClock()


@pytest.fixture
def store(nodes: RedlockNodes) -> Iterator[RedlockStore]:
    with closing(RedlockStore(nodes.url())) as store:
        yield store


@pytest.fixture
def fanout() -> Iterator[Fanout]:
    """A fan-out to nodes that get no request."""
    members = read_nodes("redlock://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3")[0]
    with closing(Fanout(members, CLOCK)) as fanout:
        yield fanout


def node_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("singleton-127.0.0.1")]


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_node_gets_the_requests_of_all_callers_in_the_order_of_the_calls(fanout: Fanout) -> None:
    seen: list[tuple[Node, int]] = []
    go_on = threading.Event()
    fanout.ask(lambda node: go_on.wait(10), timeout=0, decide=bool)
    for number in range(100):
        fanout.ask(lambda node, number=number: seen.append((node, number)), timeout=0, decide=bool)
    go_on.set()
    fanout.drain()
    for node in fanout.nodes:
        assert [number for other, number in seen if other is node] == list(range(100))


def test_an_unresponsive_node_has_a_thread_of_its_own(fanout: Fanout) -> None:
    silent, go_on = fanout.nodes[0], threading.Event()

    def operation(node: Node) -> str:
        if node is silent:
            go_on.wait(10)
        return "answer"

    try:
        for _ in range(10):
            poll, _ = fanout.ask(operation, timeout=5, decide=lambda poll: poll.has_majority())
            assert (poll.answers, poll.pending) == (["answer"] * 2, 1)
    finally:
        go_on.set()


def test_an_error_that_is_not_the_stores_is_raised_by_the_caller(fanout: Fanout) -> None:
    with pytest.raises(ZeroDivisionError):
        fanout.ask(lambda node: 1 / 0, timeout=5, decide=lambda poll: False)
    poll, _ = fanout.ask(lambda node: 1, timeout=5, decide=lambda poll: False)
    assert poll.answers == [1, 1, 1], "the threads go on"


def test_a_connection_that_breaks_while_idle_costs_no_request(fanout: Fanout) -> None:
    calls = []

    def breaks_once(node: Node) -> str:
        calls.append(node)
        if calls.count(node) == 1:
            error = StoreUnavailable("reset")
            error.was_idle = True
            raise error
        return "answer"

    poll, _ = fanout.ask(breaks_once, timeout=5, decide=lambda poll: False)
    assert poll.answers == ["answer"] * 3


def test_a_request_on_connections_that_break_again_and_again_is_made_twice(fanout: Fanout) -> None:
    calls = []

    def breaks(node: Node) -> None:
        calls.append(node)
        error = StoreUnavailable("reset")  # after an earlier command of the same request
        error.was_idle = True
        raise error

    poll, _ = fanout.ask(breaks, timeout=5, decide=lambda poll: False)
    assert (len(poll.errors), len(calls)) == (3, 6)


def test_no_thread_is_left_of_a_closed_store_and_it_can_be_used_again(
    nodes: RedlockNodes, store: RedlockStore
) -> None:
    before = node_threads()
    key, token = new_key(), new_token()
    assert isinstance(ask(store, key, token), Granted)
    threads = [thread for thread in node_threads() if thread not in before]
    assert len(threads) == 5
    store.close()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert (
        store.leases.release(Release(keys=(key,), token=token), timeout=TIMEOUT)
        is ReleaseReply.OURS
    )


def test_no_thread_is_left_of_a_store_that_was_forgotten(nodes: RedlockNodes) -> None:
    before = node_threads()
    store = RedlockStore(nodes.url())
    ask(store, new_key(), new_token())
    threads = [thread for thread in node_threads() if thread not in before]
    del store
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


def test_a_store_that_was_used_before_a_fork_works_in_the_child(
    nodes: RedlockNodes, store: RedlockStore
) -> None:
    key, token = new_key(), new_token()
    assert isinstance(ask(store, key, token), Granted)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            released = store.leases.release(Release(keys=(key,), token=token), timeout=5)
            status = 0 if released is ReleaseReply.OURS else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert isinstance(ask(store, key, new_token()), Granted), "and in the parent"


def test_no_child_is_forked_while_a_thread_is_inside_the_client(fanout: Fanout) -> None:
    inside: list[Node] = []

    def operation(node: Node) -> None:
        inside.append(node)
        CLOCK.sleep(0.02)
        inside.remove(node)

    fanout.ask(operation, timeout=0, decide=bool)
    pid = os.fork()
    if pid == 0:
        os._exit(len(inside))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_no_fork_sends_a_release_that_an_unresponsive_node_owes(fanout: Fanout) -> None:
    inside: list[Node] = []

    def is_silent(node: Node) -> None:
        def release_all(releases: object) -> None:
            inside.append(node)
            CLOCK.sleep(0.5)
            inside.remove(node)

        node.store.release_all = release_all  # type: ignore[method-assign]
        node._owe(Release(keys=(new_key(),), token=new_token()))

    fanout.ask(is_silent, timeout=5, decide=lambda poll: False)
    pid = os.fork()
    if pid == 0:
        os._exit(len(inside))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_last_requests_of_a_process_reach_all_nodes(nodes: RedlockNodes) -> None:
    program = """
        import sys
        from celery_singleton_lock.stores import open_store
        from celery_singleton_lock.testing.contract import ask, new_token
        store = open_store(sys.argv[1])
        ask(store, sys.argv[2], new_token())
    """
    for _ in range(5):
        key = new_key()
        done = run(program, nodes.url(), key)
        assert done.returncode == 0, done.stderr
        assert all(nodes.holders(key))


@pytest.mark.alone
def test_a_body_that_ends_with_the_process_releases_and_an_unresponsive_node_delays_nothing(
    nodes: RedlockNodes,
) -> None:
    program = """
        import atexit, sys, threading, time
        from celery_singleton_lock.core.store_requests import Release
        from celery_singleton_lock.stores import open_store
        from celery_singleton_lock.testing.contract import ask, new_token
        store, token = open_store(sys.argv[1]), new_token()
        ask(store, sys.argv[2], token)

        def body():
            threading.main_thread().join()
            ask(store, sys.argv[2], token)
            release()

        def release():
            print(store.leases.release(Release(keys=(sys.argv[2],), token=token), timeout=5))

        atexit.register(release)
        threading.Thread(target=body).start()
    """
    key = new_key()
    with nodes.paused([1]):
        began = CLOCK.now()
        done = run(program, nodes.url(), key)
        took = CLOCK.now() - began
    assert done.stdout == "released\nnot_ours\n", done.stderr
    assert took < 5
    assert done.stderr == ""


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_a_greenlet_that_waits_for_nodes_does_not_block_the_others(
    nodes: RedlockNodes, library: str
) -> None:
    # In a process of its own: patches can't be undone.
    program = """
        import sys
        library = sys.argv[1]
        if library == "gevent":
            import gevent.monkey; gevent.monkey.patch_all()
            from gevent import spawn, sleep
        else:
            import eventlet; eventlet.monkey_patch()
            from eventlet import spawn, sleep
        import time
        from celery_singleton_lock.core.store_requests import Granted, Release
        from celery_singleton_lock.errors import StoreUnavailable
        from celery_singleton_lock.stores import open_store
        from celery_singleton_lock.testing.contract import ask, new_key, new_token
        from tests.contract.test_redlock import call_for

        store, ticks, found = open_store(sys.argv[2]), [], []

        def one():
            key, token = new_key(), new_token()
            found.append(isinstance(ask(store, key, token), Granted))
            store.leases.release(Release(keys=(key,), token=token), timeout=5)

        def silence():
            try:
                store.leases.acquire(call_for(new_key()), timeout=0.5)
            except StoreUnavailable:
                found.append("unavailable")

        def wait(greenlets):
            for greenlet in greenlets:
                greenlet.get() if library == "gevent" else greenlet.wait()

        wait([spawn(one) for _ in range(50)])
        assert found == [True] * 50, found
        print("granted", flush=True)
        sys.stdin.readline()
        found.clear()
        waiting = spawn(silence)
        while not found:
            ticks.append(time.monotonic())
            sleep(0.01)
        wait([waiting])
        assert len(ticks) > 20, len(ticks)
        print(found[0], flush=True)
    """
    pytest.importorskip(library)
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), library, nodes.url()]
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "granted\n"
        with nodes.paused([0, 1, 2]):
            assert process.communicate("go\n", timeout=30)[0] == "unavailable\n"
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
