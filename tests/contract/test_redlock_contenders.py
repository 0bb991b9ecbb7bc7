"""Contenders that split the vote: never two holders, and all of them get the key."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import pairwise

import pytest
import redis

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Record, Token
from celery_singleton_lock.core.store_requests import ClaimRequest, Granted, Refused, Release
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.stores.redlock.store import RedlockStore
from celery_singleton_lock.testing.contract import ask, lease_of, new_key, new_token
from tests.harness.deliveries import wait_until
from tests.harness.processes import ROOT
from tests.harness.redlock_nodes import RedlockNodes

from .test_redis_interrupted import fault, struck_at_random, thousand_times

# Several servers each: `make test` keeps memory, Redis and Valkey.
pytestmark = pytest.mark.slow

__all__ = ["fault"]  # a fixture

CLOCK = SystemClock()
# Seconds for what takes two on two idle cores.
PATIENCE = 90.0

Hold = tuple[float, float]


@contextmanager
def stores(nodes: RedlockNodes, count: int) -> Iterator[list[RedlockStore]]:
    """As so many processes have them."""
    with ExitStack() as stack:
        yield [stack.enter_context(closing(RedlockStore(nodes.url()))) for _ in range(count)]


def at_once(count: int, run: Callable[[int], object]) -> list[object]:
    ready = threading.Barrier(count)

    def one(number: int) -> object:
        ready.wait(30)
        return run(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


# --- threads -------------------------------------------------------------------------------------


def grants_of_rounds(
    nodes: RedlockNodes, contenders: int, rounds: int, quorum: int, *, shared: bool = False
) -> list[int]:
    """How many of the contenders were granted the key of a round.

    Each has a store of its own, or (``shared``) all have one, and its links.
    """
    found = []
    with stores(nodes, 1 if shared else contenders) as all_stores:
        for store in all_stores:
            store._fanout.majority = quorum
            ask(store, new_key(), new_token())  # the links are open
        all_stores = all_stores * (contenders if shared else 1)
        for _ in range(rounds):
            key = new_key()

            def one(number: int, key: str = key) -> object:
                try:
                    return ask(all_stores[number], key, new_token())
                except StoreUnavailable:
                    return None

            replies = at_once(contenders, one)
            found.append(sum(isinstance(reply, Granted) for reply in replies))
    return found


@pytest.mark.parametrize("contenders", range(2, 9))
def test_of_contenders_that_split_the_vote_one_is_granted(
    nodes: RedlockNodes, contenders: int
) -> None:
    assert grants_of_rounds(nodes, contenders, 12, quorum=3) == [1] * 12


@pytest.mark.parametrize("contenders", [2, 8])
def test_of_threads_that_share_links_one_is_granted(nodes: RedlockNodes, contenders: int) -> None:
    # A give-back that goes by another link than the next attempt arrives after it, and undoes it.
    assert grants_of_rounds(nodes, contenders, 40, quorum=3, shared=True) == [1] * 40


def test_with_any_one_node_for_a_majority_there_are_two_holders(nodes: RedlockNodes) -> None:
    """The test above, with that protection taken out."""
    assert max(grants_of_rounds(nodes, 8, 12, quorum=1)) > 1


@pytest.mark.parametrize("down", [0, 2])
def test_of_publishers_that_split_the_vote_one_has_the_claim(
    nodes: RedlockNodes, down: int
) -> None:
    for index in range(down):
        nodes[index].kill()
    with stores(nodes, 8) as all_stores:
        for _ in range(10):
            claim = Keyspace.claim("app.sync", new_key())
            tokens = [new_token() for _ in range(8)]

            def one(number: int, claim: str = claim, tokens: list[Token] = tokens) -> Record | None:
                token = tokens[number]
                holder = lease_of(claim, token).holder
                call = ClaimRequest(key=claim, token=token, holder=holder, ttl=60)
                return all_stores[number].claims.take(call, timeout=5)

            replies = at_once(8, one)
            [winner] = [
                token.call_id for token, reply in zip(tokens, replies, strict=True) if reply is None
            ]
            assert {reply.token for reply in replies if isinstance(reply, Record)} == {winner}


def test_threads_of_one_store_alternate(nodes: RedlockNodes) -> None:
    key, inside, most = new_key(), [], []
    with stores(nodes, 1) as [store]:

        def one(number: int) -> int:
            turns = 0
            deadline = CLOCK.now() + PATIENCE
            while turns < 5 and CLOCK.now() < deadline:
                token = new_token()
                if isinstance(ask(store, key, token), Refused):
                    continue
                inside.append(number)
                most.append(len(inside))
                CLOCK.sleep(0.001)
                inside.remove(number)
                store.leases.release(Release(keys=(key,), token=token), timeout=5)
                turns += 1
            return turns

        assert at_once(8, one) == [5] * 8
    assert max(most) == 1


@pytest.mark.slow
def test_cut_links_never_make_two_holders(nodes: RedlockNodes) -> None:
    """Links that connect again are slow, and what goes by others overtakes what they carry.

    Without the order that links keep, and the votes that late releases bar, 1 round of 150 had two
    holders; each of the two has a test of its own that fails at once.
    """
    clients = [redis.Redis.from_url(server.url()) for server in nodes]

    def cut(over: threading.Event) -> None:
        while not over.wait(0.0007):
            with suppress(redis.ConnectionError):
                random.choice(clients).client_kill_filter(_type="normal", skipme=True)

    with stores(nodes, 1) as [store]:
        for _ in range(100):
            key, over = new_key(), threading.Event()

            def one(number: int, key: str = key) -> object:
                CLOCK.sleep(random.uniform(0, 0.004))
                try:
                    return ask(store, key, new_token())
                except StoreUnavailable:
                    return None

            troubles = threading.Thread(target=cut, args=(over,))
            troubles.start()
            replies = at_once(8, one)
            over.set()
            troubles.join()
            assert sum(isinstance(reply, Granted) for reply in replies) <= 1
    for client in clients:
        client.close()


# --- processes -----------------------------------------------------------------------------------


def holds_of_processes(
    nodes: RedlockNodes,
    contenders: int,
    grants: int,
    quorum: int = 0,
    meanwhile: Callable[[threading.Event], None] = lambda over: None,
) -> list[Hold]:
    """When each of the processes had the key, by their begin; each had it ``grants`` times."""
    arguments = [nodes.url(), new_key(), str(grants), str(quorum)]
    command = [sys.executable, "-m", "tests.apps.redlock_contender", *arguments]
    over = threading.Event()
    with ExitStack() as stack:
        processes = []
        for _ in range(contenders):
            process = subprocess.Popen(
                command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        troubles = threading.Thread(target=meanwhile, args=(over,))
        troubles.start()
        stack.callback(troubles.join)
        stack.callback(over.set)
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        with ThreadPoolExecutor(contenders) as pool:
            texts = list(pool.map(lambda p: p.communicate(timeout=PATIENCE)[0], processes))
    lines = [line for text in texts for line in text.splitlines()]
    assert len(lines) == contenders * grants, "each had it as often"
    return sorted((float(begin), float(end)) for begin, end in map(str.split, lines))


def overlaps(holds: list[Hold]) -> list[tuple[Hold, Hold]]:
    return [pair for pair in pairwise(holds) if pair[1][0] < pair[0][1]]


@pytest.mark.parametrize(
    "contenders", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8)]
)
def test_processes_never_hold_a_key_at_once_and_all_make_progress(
    nodes: RedlockNodes, contenders: int
) -> None:
    assert overlaps(holds_of_processes(nodes, contenders, 10)) == []


def stalling(
    nodes: RedlockNodes, count: int, *, at_most: float, pause: float
) -> Callable[[threading.Event], None]:
    """Stop ``count`` of the nodes, for ``at_most`` seconds, again after a ``pause`` at most."""

    def stall(over: threading.Event) -> None:
        while not over.is_set():
            with nodes.paused(random.sample(range(5), count)):
                over.wait(random.uniform(0.01, at_most))
            over.wait(random.uniform(0, pause))

    return stall


@pytest.mark.slow
def test_processes_never_hold_a_key_at_once_while_nodes_stall(nodes: RedlockNodes) -> None:
    stalls = stalling(nodes, 2, at_most=0.2, pause=0.05)
    holds = holds_of_processes(nodes, 4, 40, meanwhile=stalls)
    assert overlaps(holds) == []


@pytest.mark.slow
def test_processes_never_hold_a_key_at_once_while_majorities_stall(nodes: RedlockNodes) -> None:
    stalls = stalling(nodes, 3, at_most=0.1, pause=0.2)
    holds = holds_of_processes(nodes, 4, 25, meanwhile=stalls)
    assert overlaps(holds) == []


def test_with_any_one_node_for_a_majority_processes_hold_a_key_at_once(
    nodes: RedlockNodes,
) -> None:
    """The test above, with that protection taken out."""
    assert overlaps(holds_of_processes(nodes, 4, 40, quorum=1))


# --- interrupted calls ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupted_call_never_gives_its_reply_to_the_next(
    nodes: RedlockNodes, fault: type[BaseException]
) -> None:
    with stores(nodes, 2) as [store, witness]:
        holder, owner = new_token(), new_token()
        held, free = new_key(), new_key()
        ask(witness, held, holder)

        def once(fresh: bool) -> None:
            if fresh:
                store.close()  # so that faults strike connecting, too
            try:
                with struck_at_random(0.002):
                    ask(store, free, owner)
            finally:
                reply = ask(store, held, new_token())
                assert isinstance(reply, Refused), reply
                assert reply.record is not None
                assert reply.record.token == str(holder)
                wait_until(lambda: is_decided(Release(keys=(free,), token=owner)), "it is free")

        def is_decided(release: Release) -> bool:
            """Not if two nodes had the lease, two didn't, and one takes longer than 50 ms."""
            try:
                store.leases.release(release, timeout=5)
            except StoreUnavailable:
                return False
            return True

        thousand_times(fault, once)


# --- greenlets -----------------------------------------------------------------------------------


def test_greenlets_and_the_keepers_native_thread_share_no_link(nodes: RedlockNodes) -> None:
    # In a process of its own: gevent can't be undone.
    program = """
        import gevent.monkey; gevent.monkey.patch_all()
        import sys, gevent
        from celery_singleton_lock.core.lease import Lease
        from celery_singleton_lock.core.store_requests import Release
        from celery_singleton_lock.stores import open_store
        from celery_singleton_lock.testing.contract import new_key
        from tests.contract.test_redlock import call_for, locker_on

        locker = locker_on(open_store(sys.argv[1]))
        leases = []

        def body():
            leases.append(locker.acquire(call_for(new_key(), ttl=2)))
            gevent.sleep(5)

        gevent.joinall([gevent.spawn(body) for _ in range(20)], raise_error=True)
        assert all(isinstance(lease, Lease) and not lease.lost for lease in leases)
        for lease in leases:
            locker.release(lease, Release(keys=(lease.key,), token=lease.token))
        print("renewed")
    """
    pytest.importorskip("gevent")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), nodes.url()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "renewed\n", done.stderr
