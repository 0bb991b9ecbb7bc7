"""What is special about a majority: nodes that are down, slow, restarted empty, or split."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
import redis

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.events import Events
from celery_singleton_lock.core.heartbeat import Heartbeat
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Kind, Lease, LossReason, Phase
from celery_singleton_lock.core.locker import Locker
from celery_singleton_lock.core.store_requests import (
    RENEWED,
    Acquire,
    ClaimChange,
    ClaimRequest,
    CompletionState,
    Granted,
    Mark,
    Refused,
    Relation,
    Release,
    ReleaseReply,
)
from celery_singleton_lock.errors import (
    FenceUnavailable,
    SettingsError,
    StoreError,
    StoreUnavailable,
)
from celery_singleton_lock.stores.redis import scripts
from celery_singleton_lock.stores.redlock import fanout
from celery_singleton_lock.stores.redlock.fanout import Node
from celery_singleton_lock.stores.redlock.store import RedlockStore
from celery_singleton_lock.testing.contract.steps import (
    LONG,
    TIMEOUT,
    ask,
    change,
    lease_of,
    new_claim,
    new_key,
    new_token,
    take_claim,
)
from tests.harness.keys import EVERY_NAME
from tests.harness.redlock_nodes import RedlockNodes

# Several servers each: `make test` keeps memory, Redis and Valkey.
pytestmark = pytest.mark.slow

CLOCK = SystemClock()
# Seconds: more than five nodes need on a busy machine, less than what they would be waited for.
AT_ONCE = 1.5
# Seconds: of calls that a majority lets down. One after the other, three nodes would take thrice.
SILENCE = 2.0


@pytest.fixture
def store(nodes: RedlockNodes) -> Iterator[RedlockStore]:
    with closing(RedlockStore(nodes.url())) as store:
        yield store


@pytest.fixture
def other(nodes: RedlockNodes) -> Iterator[RedlockStore]:
    """As another process has it."""
    with closing(RedlockStore(nodes.url())) as store:
        yield store


def give(store: RedlockStore, key: str, token: object, **options: object) -> ReleaseReply:
    return store.leases.release(Release(keys=(key,), token=token, **options), timeout=TIMEOUT)


def take(store: RedlockStore, key: str, token: object = None) -> object:
    token = token or new_token()
    assert isinstance(ask(store, key, token), Granted)
    return token


def relation(reply: Granted | Refused) -> Relation | None:
    return reply.relation if isinstance(reply, Refused) else None


def call_for(key: str, ttl: float = 60.0) -> Acquire:
    lease = lease_of(key, new_token())
    return Acquire(slots=(key,), token=lease.token, holder=lease.holder, ttl=ttl)


def delete_on(nodes: RedlockNodes, key: str, *indexes: int) -> None:
    for index in indexes:
        with redis.Redis.from_url(nodes[index].url()) as client:
            # A minority may get the grant a moment after the caller has it.
            wait_until(lambda client=client: client.delete(key) == 1, f"node {index} has the key")


def put_on(nodes: RedlockNodes, key: str, token: object, *indexes: int, kind: str = "l") -> None:
    """Votes as a contender leaves them that is between two attempts, or dead."""
    for index in indexes:
        with redis.Redis.from_url(nodes[index].url()) as client:
            client.set(key, f"{kind} {token} 1 {{}}", ex=600)


@contextmanager
def took_at_most(seconds: float) -> Iterator[None]:
    began = CLOCK.now()
    yield
    assert CLOCK.now() - began < seconds


def wait_until(condition: Callable[[], bool], what: str, timeout: float = 10.0) -> None:
    deadline = CLOCK.now() + timeout
    while not condition():
        assert CLOCK.now() < deadline, f"waited without success until {what}"
        CLOCK.sleep(0.01)


# --- a minority is away --------------------------------------------------------------------------


@pytest.mark.parametrize("away", [[2], [0, 4]], ids=["one", "two"])
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_all_goes_on_without_a_minority(
    nodes: RedlockNodes, store: RedlockStore, away: list[int], how: str
) -> None:
    held, key = new_key(), new_key()
    token = take(store, held)
    with ExitStack() as stack:
        if how == "stopped":
            stack.enter_context(nodes.paused(away))
        else:
            for index in away:
                nodes[index].kill()
        with took_at_most(AT_ONCE):
            mine = take(store, key)
        with took_at_most(AT_ONCE):
            assert relation(ask(store, held, new_token())) is Relation.OTHER
        leases = [lease_of(held, token), lease_of(key, mine)]
        with took_at_most(AT_ONCE):
            assert store.leases.renew(leases, timeout=TIMEOUT) == [RENEWED] * 2
        marker = Mark(key=key, token=mine, state=CompletionState.WAITING, ttl=LONG)
        with took_at_most(AT_ONCE):
            store.leases.mark(marker, timeout=TIMEOUT)
        for wants_ttl in (True, False):
            claim, claimant = new_claim()[1], new_token()
            with took_at_most(AT_ONCE):
                assert take_claim(store, claim, claimant, wants_ttl=wants_ttl) is None
            with took_at_most(AT_ONCE):
                record = take_claim(store, claim, new_token(), wants_ttl=wants_ttl)
            assert record is not None
            assert record.token == claimant.call_id
            with took_at_most(AT_ONCE):
                change(store, claimant, claim, None)
            assert store.leases.inspect(claim) is None
        with took_at_most(AT_ONCE):
            assert give(store, key, mine) is ReleaseReply.OURS
            assert give(store, held, token) is ReleaseReply.OURS
        assert store.leases.inspect(key) is None


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_without_a_majority_nothing_is_granted_and_the_error_names_the_nodes(
    nodes: RedlockNodes, store: RedlockStore, how: str
) -> None:
    held, key = new_key(), new_key()
    token = take(store, held)
    with ExitStack() as stack:
        if how == "stopped":
            stack.enter_context(nodes.paused([0, 1, 2]))
        else:
            for index in range(3):
                nodes[index].kill()
        done = Mark(key=key, token=token, state=CompletionState.DONE, ttl=LONG)
        for refused in (
            lambda: store.leases.acquire(call_for(key), timeout=SILENCE),
            lambda: store.leases.renew([lease_of(held, token)], timeout=SILENCE),
            lambda: store.leases.mark(done, timeout=SILENCE),
            lambda: store.leases.inspect(held),
            lambda: store.operators.free(held, None),
        ):
            with pytest.raises(StoreUnavailable, match="2 of 5 nodes answered") as caught:
                refused()
            if how == "killed":
                assert f"127.0.0.1:{nodes[0].port}" in str(caught.value)


def test_nodes_that_say_nothing_cost_one_timeout_together(
    nodes: RedlockNodes, store: RedlockStore
) -> None:
    with nodes.paused([0, 1, 2]):
        with took_at_most(SILENCE + AT_ONCE), pytest.raises(StoreUnavailable):
            store.leases.acquire(call_for(new_key()), timeout=SILENCE)  # connects, too
        with took_at_most(SILENCE + AT_ONCE), pytest.raises(StoreUnavailable):
            store.leases.acquire(call_for(new_key()), timeout=SILENCE)


@contextmanager
def black_hole() -> Iterator[str]:
    """An address that drops every packet: its queue of connections is full and not read."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(8):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("count", [2, 3])
def test_connecting_to_black_holes_does_not_add_up(nodes: RedlockNodes, count: int) -> None:
    with ExitStack() as stack:
        hosts = [stack.enter_context(black_hole()) for _ in range(count)]
        hosts += [f"127.0.0.1:{nodes[index].port}" for index in range(5 - count)]
        url = f"redlock://{','.join(hosts)}/0?quarantine=0"
        store = stack.enter_context(closing(RedlockStore(url)))
        if count == 2:
            with took_at_most(AT_ONCE):
                take(store, new_key())
        else:
            with took_at_most(SILENCE + AT_ONCE), pytest.raises(StoreUnavailable):
                store.leases.acquire(call_for(new_key()), timeout=SILENCE)


def test_a_slow_minority_slows_no_operation_down_and_gets_it_all_in_order(
    nodes: RedlockNodes, store: RedlockStore
) -> None:
    key = new_key()
    take(store, new_key())  # the links are open
    for index in (1, 3):
        with redis.Redis.from_url(nodes[index].url()) as client:
            # Longer than the majority takes, and shorter than a node is waited for.
            client.client_pause(int(1000 * (AT_ONCE + fanout.NODE_TIMEOUT) / 2), all=True)
    with took_at_most(AT_ONCE):
        token = take(store, key)
        give(store, key, token)
        again = take(store, key, token)
    assert again == token
    # What the slow ones receive last is what stands.
    wait_until(lambda: nodes.holders(key) == [str(token)] * 5, "all five have the last grant")


def test_two_nodes_that_were_away_serve_again_without_a_new_store(
    nodes: RedlockNodes, store: RedlockStore
) -> None:
    take(store, new_key())
    for index in (0, 1):
        nodes[index].kill()
    take(store, new_key())
    for index in (0, 1):
        nodes[index].start()
    for index in (2, 3):
        nodes[index].kill()
    take(store, new_key())


def test_a_restart_of_all_nodes_costs_no_call(nodes: RedlockNodes, store: RedlockStore) -> None:
    take(store, new_key())
    for server in nodes:
        server.restart(keep_data=False)
    take(store, new_key())


# --- giving back ---------------------------------------------------------------------------------


def acquire_while_three_are_stopped(nodes: RedlockNodes, store: RedlockStore, key: str) -> None:
    # All connections are open and idle: what is sent now waits in the stopped servers.
    first = new_key()
    token = take(store, first)
    wait_until(lambda: nodes.holders(first) == [str(token)] * 5, "all five have the first grant")
    with nodes.paused([0, 1, 2]), pytest.raises(StoreUnavailable):
        store.leases.acquire(call_for(key, ttl=LONG), timeout=0.2)


def test_an_attempt_that_fails_is_given_back_on_nodes_that_did_not_answer(
    nodes: RedlockNodes, store: RedlockStore, other: RedlockStore
) -> None:
    key = new_key()
    acquire_while_three_are_stopped(nodes, store, key)
    take(other, key)


def test_released_only_where_it_was_answered_a_failed_attempt_keeps_the_key(
    nodes: RedlockNodes, store: RedlockStore, other: RedlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above, with that protection taken out."""
    submit, owing = Node.submit, set()

    def submit_to_nodes_that_answer(node: Node, job: fanout.Job) -> None:
        def answer(outcome: object) -> None:
            owing.discard(node)
            job.deliver(outcome)

        if node not in owing:
            owing.add(node)
            submit(node, job._replace(deliver=answer))

    monkeypatch.setattr(Node, "submit", submit_to_nodes_that_answer)
    key = new_key()
    acquire_while_three_are_stopped(nodes, store, key)
    monkeypatch.undo()
    reply = ask(other, key, new_token())
    assert relation(reply) is Relation.OTHER
    assert reply.record is not None
    assert reply.record.ttl > LONG - 60  # so long it would stay


def wait_for_node(node: fanout.Node) -> None:
    """Wait until the node's thread has ended all requests.

    Not until the queue is empty: then the thread may still be at the last request.
    """
    answers: queue.SimpleQueue[object] = queue.SimpleQueue()
    node.submit(fanout.Job(lambda node: None, answers.put, CLOCK.now() + 10))
    answers.get(timeout=10)


def test_an_unresponsive_node_costs_one_connection_and_a_bounded_queue(
    server: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On nodes of its own: closed stores of other tests may still end threads and connections."""
    monkeypatch.setattr(fanout, "_MAX_QUEUED", 8)
    with RedlockNodes(5) as nodes, closing(RedlockStore(nodes.url())) as store:
        take(store, new_key())
        with nodes.paused([3]):
            for _ in range(50):
                with took_at_most(AT_ONCE):
                    key = new_key()
                    give(store, key, take(store, key))
            assert store._fanout.nodes[3]._jobs.qsize() == 8
        names = sorted(thread.name for thread in threading.enumerate())
        for node in nodes:
            assert sum(str(node.port) in name for name in names) == 1, names
        with redis.Redis.from_url(nodes[3].url()) as client:
            # With the one that asks. The node sees only now which connections are closed.
            wait_until(lambda: len(client.client_list(_type="normal")) <= 2, "one is left")


def test_a_request_that_waits_for_an_unresponsive_node_for_too_long_is_not_sent(
    nodes: RedlockNodes, store: RedlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fanout, "NODE_TIMEOUT", 1.0)
    take(store, new_key())
    keys = [new_key() for _ in range(4)]
    with nodes.paused([3]):
        take(store, keys[0])
        # The node answers the first request when it goes on. The others may not wait so long.
        monkeypatch.setattr(fanout, "NODE_TIMEOUT", 0.2)
        for key in keys[1:]:
            take(store, key)
        CLOCK.sleep(0.4)
    wait_for_node(store._fanout.nodes[3])
    monkeypatch.undo()
    with nodes.paused([0, 1]):
        take(store, new_key())  # by the node that was silent, behind all the others
    assert [nodes.holders(key)[3] for key in keys[1:]] == [""] * 3


def test_what_was_released_while_a_node_was_unresponsive_for_long_is_released_there_too(
    nodes: RedlockNodes, store: RedlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fanout, "NODE_TIMEOUT", 0.3)
    before, during, held = new_key(), new_key(), new_key()
    tokens = {key: take(store, key) for key in (before, held)}
    wait_until(lambda: all(nodes.holders(before) + nodes.holders(held)), "all five have both")
    with nodes.paused([3]):
        # Sent over the open connection, and carried out when the node goes on.
        tokens[during] = take(store, during)
        give(store, during, tokens[during])
        give(store, before, tokens[before])
        CLOCK.sleep(1)
    monkeypatch.undo()
    wait_until(lambda: nodes.holders(during)[3], "the late grant")
    assert nodes.holders(before)[3]
    take(store, new_key())
    wait_until(lambda: not any(nodes.holders(before) + nodes.holders(during)), "both are free")
    assert nodes.holders(held) == [str(tokens[held])] * 5
    assert store._fanout.nodes[3]._owed == {}


def test_a_node_owes_a_bounded_number_of_releases_and_no_change_of_a_key(
    nodes: RedlockNodes, store: RedlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fanout, "_MAX_QUEUED", 8)
    kept = new_key()
    token = take(store, kept)
    wait_until(lambda: all(nodes.holders(kept)), "all five have it")
    node = store._fanout.nodes[3]
    nodes[3].kill()
    give(store, kept, token, become=Kind.RESERVED, become_ttl=LONG, next_token=token)
    keys = [new_key() for _ in range(12)]
    for key in keys:
        give(store, key, take(store, key))
        wait_for_node(node)  # a release that meets a full queue is not owed
    assert [slots for _, slots in node._owed] == [(key,) for key in keys[4:]]


def test_a_node_that_was_unresponsive_votes_again_when_it_answers(
    nodes: RedlockNodes, store: RedlockStore
) -> None:
    with nodes.paused([3]):
        for _ in range(50):
            take(store, new_key(), new_token())
    with nodes.paused([0, 1]):
        key = new_key()
        take(store, key, new_token())
    assert nodes.holders(key)[3]


def release_without_a_reply(
    nodes: RedlockNodes, store: RedlockStore, key: str, token: object, *indexes: int
) -> None:
    """Sent over open connections: the nodes may carry it out at any time."""
    wait_until(lambda: nodes.holders(key) == [str(token)] * 5, "all five have the grant")
    with nodes.paused(indexes):
        with pytest.raises(StoreUnavailable):
            give(store, key, token)
        silent = [store._fanout.nodes[index] for index in indexes]
        wait_until(lambda: all(token in node._unconfirmed for node in silent), "they are given up")


def test_a_late_release_can_not_undo_the_next_grant_unnoticed(
    nodes: RedlockNodes, store: RedlockStore
) -> None:
    key, token = new_key(), new_token()
    take(store, key, token)
    release_without_a_reply(nodes, store, key, token, 0, 1, 2)
    request = Acquire(slots=(key,), token=token, holder=call_for(key).holder, ttl=LONG)
    with pytest.raises(StoreUnavailable):
        store.leases.acquire(request, timeout=0.6)
    take(store, new_key())  # other tokens are not affected


def test_a_release_without_a_reply_bars_its_token_for_a_minute(
    nodes: RedlockNodes, store: RedlockStore
) -> None:
    key, token = new_key(), new_token()
    take(store, key, token)
    release_without_a_reply(nodes, store, key, token, 2, 3, 4)
    node = store._fanout.nodes[4]
    request = Acquire(slots=(key,), token=token, holder=call_for(key).holder, ttl=LONG)
    command = scripts.acquire_command(request, "0")
    packed = scripts.pack(command)
    assert node.acquire(request, command, packed, 0) == Granted(key=key, fence=None, ttl=0.0)
    node._unconfirmed[token] -= 60
    assert isinstance(node.acquire(request, command, packed, 0), Granted)
    node._note_unconfirmed([])
    assert node._unconfirmed == {}


def test_a_release_that_never_left_does_not_bar_its_token(
    nodes: RedlockNodes, store: RedlockStore
) -> None:
    key, token = new_key(), new_token()
    nodes[4].kill()
    nodes[3].kill()
    give(store, key, take(store, key, token))
    nodes[3].start()
    nodes[4].start()
    nodes[0].kill()
    nodes[1].kill()
    take(store, key, token)


def test_a_minority_that_grants_and_is_given_back_keeps_the_claim_of_the_message(
    nodes: RedlockNodes, store: RedlockStore
) -> None:
    key = new_key()
    claim, token = Keyspace.claim("app.sync", key), new_token()
    holder = lease_of(key, token).holder
    assert (
        store.claims.take(ClaimRequest(key=claim, token=token, holder=holder, ttl=LONG), timeout=1)
        is None
    )
    # Two nodes grant. With three holders, a node that does not answer decides nothing: one of them
    # would not have a majority with it.
    for index in range(3):
        put_on(nodes, key, new_token(), index)
    request = Acquire(
        slots=(key,),
        token=token,
        holder=holder,
        ttl=LONG,
        claim=ClaimChange(key=claim, phase=None),
    )
    with pytest.raises(StoreUnavailable, match="split"):
        store.leases.acquire(request, timeout=SILENCE)
    assert set(nodes.holders(claim)) == {token.call_id}
    record = store.leases.inspect(claim)
    assert record is not None
    assert (record.token, record.phase) == (token.call_id, Phase.QUEUED)
    assert nodes.holders(key).count(str(token)) == 0
    nodes.restore()
    store.leases.acquire(request, timeout=1)
    assert store.leases.inspect(claim) is None


# --- what counts ---------------------------------------------------------------------------------


def test_any_one_node_that_knows_of_the_tasks_own_attempts_is_enough(
    nodes: RedlockNodes, store: RedlockStore
) -> None:
    # A majority answered, of which one node is left in the only other majority.
    nodes[3].kill()
    nodes[4].kill()
    for state, expected in (("d 0 x", Relation.DONE), ("- 7 x", Relation.SUPERSEDED)):
        key, token = new_key(), new_token()
        with redis.Redis.from_url(nodes[2].url()) as client:
            client.set(Keyspace.completion(key, token.attempt), state)
        assert relation(ask(store, key, token)) is expected
        # A node's grant may come after the answer of the one that knows; then so does its release.
        wait_until(lambda key=key: not any(nodes.holders(key)), "all votes are given back")
    for held, expected in ((0, Relation.DUPLICATE), (1, Relation.LATER)):
        key, token = new_key(), new_token()
        put_on(nodes, key, new_token(token.task_id, retries=held), 2)
        assert relation(ask(store, key, token)) is expected


def test_another_task_on_a_minority_refuses_no_caller(
    nodes: RedlockNodes, store: RedlockStore
) -> None:
    key, dead = new_key(), new_token()
    put_on(nodes, key, dead, 1, 4)
    token = take(store, key)
    record = store.leases.inspect(key)
    assert record is not None
    assert record.token == str(token)
    assert [r.token for r in store.operators.scan(f"{key}*")] == [str(token)]


def test_an_earlier_attempt_of_the_task_on_a_minority_does_not_keep_it_away(
    nodes: RedlockNodes, store: RedlockStore
) -> None:
    key, token = new_key(), new_token(retries=1)
    put_on(nodes, key, new_token(token.task_id), 1, 4)
    take(store, key, token)


def test_a_message_is_not_ended_by_another_while_its_own_earlier_attempt_has_votes(
    nodes: RedlockNodes, store: RedlockStore
) -> None:
    key, token = new_key(), new_token(retries=1)
    put_on(nodes, key, new_token(token.task_id), 0)
    put_on(nodes, key, new_token(), 1, 2)
    assert relation(ask(store, key, token)) is Relation.EARLIER


def test_a_client_that_may_have_a_majority_is_believed_to_where_nodes_do_not_answer(
    nodes: RedlockNodes, store: RedlockStore
) -> None:
    key, holder = new_key(), new_token()
    put_on(nodes, key, holder, 0, 1, 2)
    nodes[2].kill()
    reply = store.leases.acquire(call_for(key), timeout=SILENCE)
    assert isinstance(reply, Refused)
    assert reply.record is not None
    assert reply.record.token == str(holder)
    record = store.leases.inspect(key)
    assert record is not None
    assert record.token == str(holder)


def test_a_lease_is_lost_once_no_majority_has_it_and_is_written_back_nowhere(
    nodes: RedlockNodes, store: RedlockStore
) -> None:
    key = new_key()
    token = take(store, key)
    delete_on(nodes, key, 0, 1)
    assert store.leases.renew([lease_of(key, token)], timeout=TIMEOUT) == [RENEWED]
    wait_until(lambda: nodes.holders(key) == ["", "", *[str(token)] * 3], "three have it")
    delete_on(nodes, key, 2)
    assert store.leases.renew([lease_of(key, token)], timeout=TIMEOUT) == [LossReason.GONE]
    assert nodes.holders(key) == ["", "", "", str(token), str(token)]
    put_on(nodes, key, new_token(), 0)
    assert store.leases.renew([lease_of(key, token)], timeout=TIMEOUT) == [LossReason.REPLACED]


def test_of_several_leases_each_is_answered_by_itself(
    nodes: RedlockNodes, store: RedlockStore
) -> None:
    leases = [lease_of(new_key(), new_token()) for _ in range(4)]
    for lease in leases:
        take(store, lease.key, lease.token)
    delete_on(nodes, leases[1].key, 0, 1, 2)
    delete_on(nodes, leases[2].key, 0, 1)
    give(store, leases[3].key, leases[3].token, become=Kind.DYING, become_ttl=LONG)
    nodes[4].kill()
    nodes[3].kill()
    # The first is renewed on three nodes, the second can be on none; the third's end is unknown.
    assert store.leases.renew(leases, timeout=TIMEOUT) == [
        RENEWED,
        LossReason.GONE,
        LossReason.UNREACHABLE,
        LossReason.DYING,
    ]


def test_a_grant_has_no_fence(store: RedlockStore) -> None:
    locker = locker_on(store)
    lease = locker.acquire(call_for(new_key()))
    assert isinstance(lease, Lease)
    with pytest.raises(FenceUnavailable):
        _ = lease.fence
    assert store.capabilities.fence is False
    locker.release(lease, Release(keys=(lease.key,), token=lease.token))


def test_a_grant_that_took_longer_than_its_ttl_is_none(
    nodes: RedlockNodes, store: RedlockStore
) -> None:
    key = new_key()
    take(store, new_key())
    threading.Timer(0.4, lambda: [server.resume() for server in nodes]).start()
    with nodes.paused([0, 1, 2]), pytest.raises(StoreUnavailable, match="its ttl"):
        store.leases.acquire(call_for(key, ttl=0.3), timeout=2)
    wait_until(lambda: not any(nodes.holders(key)), "it was given back")


def test_a_refused_login_on_a_majority_is_no_absence(nodes: RedlockNodes) -> None:
    url = nodes.url().replace("redlock://", "redlock://stranger:wrong@")
    with closing(RedlockStore(url)) as store, pytest.raises(StoreError, match="login") as caught:
        ask(store, new_key(), new_token())
    assert not isinstance(caught.value, StoreUnavailable)


def test_a_login_that_may_neither_load_scripts_nor_ask_for_info_is_enough(
    nodes: RedlockNodes,
) -> None:
    for server in nodes:
        with redis.Redis.from_url(server.url()) as client:
            client.execute_command(
                f"ACL SETUSER modest on >secret ~{EVERY_NAME} +@all -script -info"
            )
    url = nodes.url(quarantine=None).replace("redlock://", "redlock://modest:secret@")
    with closing(RedlockStore(url)) as store:
        take(store, new_key())
        assert store.operators.info("memory") == {}


def test_scripts_that_all_nodes_have_forgotten_are_taught_again(
    nodes: RedlockNodes, store: RedlockStore
) -> None:
    token, key = new_token(), new_key()
    for _ in range(3):
        take(store, key, token)
        store._fanout.drain()  # a majority has replied; the others may be asked later
        for server in nodes:
            with redis.Redis.from_url(server.url()) as client:
                client.script_flush()
                client.config_resetstat()
        assert give(store, key, token) is ReleaseReply.OURS
        store._fanout.drain()
        for server in nodes:
            with redis.Redis.from_url(server.url()) as client:
                found = client.info("commandstats")
            assert [found[f"cmdstat_{name}"]["calls"] for name in ("evalsha", "eval")] == [1, 1]


def test_one_server_under_two_names_is_refused_when_the_worker_starts(nodes: RedlockNodes) -> None:
    one, two = nodes[0].port, nodes[1].port
    url = f"redlock://127.0.0.1:{one},localhost:{one},127.0.0.1:{two}"
    with closing(RedlockStore(url)) as store, pytest.raises(SettingsError, match="one server"):
        store.operators.info("memory")


def test_a_node_that_may_evict_is_what_info_reports(
    nodes: RedlockNodes, store: RedlockStore
) -> None:
    assert store.operators.info("memory")["maxmemory_policy"] == "noeviction"
    with redis.Redis.from_url(nodes[3].url()) as client:
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            assert store.operators.info("memory")["maxmemory_policy"] == "allkeys-lru"
        finally:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", "0")


# --- nodes that come back empty ------------------------------------------------------------------


@pytest.fixture
def old_nodes() -> Iterator[RedlockNodes]:
    """Nodes that have been up for as long as the leases below last."""
    with RedlockNodes(5) as nodes:
        with redis.Redis.from_url(nodes[4].url()) as client:
            wait_until(lambda: client.info("server")["uptime_in_seconds"] >= 4, "they are old")
        yield nodes


def restart_one_under_a_holder(nodes: RedlockNodes, quarantine: float | None) -> list[Granted]:
    """A lease on nodes 0, 1 and 2, of which the last comes back empty; then another asks."""
    granted = []
    key = new_key()
    for restart in (True, False):
        with closing(RedlockStore(nodes.url(quarantine=quarantine))) as store:
            try:
                reply = store.leases.acquire(call_for(key, ttl=3), timeout=1.0)
            except StoreUnavailable:
                continue
            if isinstance(reply, Granted):
                granted.append(reply)
        if restart:
            delete_on(nodes, key, 3, 4)
            nodes[2].restart(keep_data=False)
    return granted


def test_a_node_that_came_back_empty_has_no_vote_for_a_ttl(old_nodes: RedlockNodes) -> None:
    assert len(restart_one_under_a_holder(old_nodes, None)) == 1


def test_it_says_that_nodes_have_just_been_started() -> None:
    """Not that there were contenders: there are none."""
    refused = pytest.raises(StoreUnavailable, match=r"3 node\(s\) have no vote yet")
    with (
        RedlockNodes(3) as nodes,
        closing(RedlockStore(nodes.url(quarantine=None))) as store,
        refused,
    ):
        store.leases.acquire(call_for(new_key(), ttl=60), timeout=0.5)


def test_with_a_vote_from_its_start_on_it_gives_a_second_holder(old_nodes: RedlockNodes) -> None:
    """The test above, with that protection taken out."""
    assert len(restart_one_under_a_holder(old_nodes, 0)) == 2


# --- under a running body ------------------------------------------------------------------------


_heartbeats: list[Heartbeat] = []


@pytest.fixture(autouse=True)
def heartbeats_end() -> Iterator[None]:
    """Ends those of this test, which renew what is held."""
    yield
    while _heartbeats:
        heartbeat = _heartbeats.pop()
        for lease in list(heartbeat._leases):
            heartbeat.stop(lease)
        heartbeat.close()


def locker_on(store: RedlockStore) -> Locker:
    events = Events()
    _heartbeats.append(Heartbeat(store, CLOCK, events))
    return Locker(store, CLOCK, _heartbeats[-1], events)


def hold(store: RedlockStore, ttl: float) -> tuple[Lease, threading.Event, list[float]]:
    """A lease that is renewed, an event for its loss, and when that was reported."""
    lost, reported_at = threading.Event(), []

    def on_lost(lease: Lease) -> None:
        reported_at.append(CLOCK.now())
        lost.set()

    lease = locker_on(store).acquire(call_for(new_key(), ttl=ttl), on_lost=on_lost)
    assert isinstance(lease, Lease)
    return lease, lost, reported_at


def test_a_lease_outlives_two_of_five_nodes(nodes: RedlockNodes, store: RedlockStore) -> None:
    lease, lost, _ = hold(store, ttl=2)
    nodes[0].kill()
    nodes[1].pause()
    assert not lost.wait(5)
    assert lease.remaining() > 0


@pytest.mark.parametrize("how", ["killed", "stopped", "emptied"])
def test_a_lease_is_reported_lost_before_its_validity_ends_when_three_of_five_go(
    nodes: RedlockNodes, store: RedlockStore, how: str
) -> None:
    lease, lost, reported_at = hold(store, ttl=0.9)
    for index in (0, 1, 2):
        if how == "killed":
            nodes[index].kill()
        elif how == "stopped":
            nodes[index].pause()
        else:
            nodes[index].restart(keep_data=False)
    # As soon as another thread that waits for that moment: on a busy machine both wake late.
    while (left := lease.valid_until - CLOCK.now()) > 0:
        CLOCK.sleep(left)
    awake_at = CLOCK.now()
    assert lost.wait(3)
    assert lease.loss is not None
    emptied = how == "emptied"
    assert lease.loss.reason is (LossReason.GONE if emptied else LossReason.UNREACHABLE)
    assert reported_at[0] <= awake_at + 0.05


def test_a_lease_survives_an_outage_of_all_nodes_that_is_shorter_than_it(
    nodes: RedlockNodes, store: RedlockStore
) -> None:
    lease, lost, _ = hold(store, ttl=6)
    with nodes.paused(range(5)):
        before = lease.valid_until
        CLOCK.sleep(2.3)  # a renewal fails meanwhile
    assert not lost.wait(4)
    assert lease.valid_until > before
