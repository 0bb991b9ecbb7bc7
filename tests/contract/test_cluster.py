"""What is special about a Redis Cluster: redirects, nodes that are away, claims in other shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import redis

from celery_singleton_lock.core.call_queue import Place
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.heartbeat import release_notes_on
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import (
    Holder,
    Kind,
    Lease,
    LossReason,
    OperatorRelease,
    Phase,
    Token,
)
from celery_singleton_lock.core.retry_queue import RetryQueue
from celery_singleton_lock.core.store_requests import (
    RENEWED,
    Acquire,
    ClaimChange,
    ClaimRequest,
    CompletionState,
    Granted,
    GrantedArguments,
    Mark,
    Refused,
    Relation,
    Release,
    ReleaseReply,
    ReplaceArguments,
    Replaced,
)
from celery_singleton_lock.errors import SettingsError, StoreError, StoreUnavailable
from celery_singleton_lock.stores import open_store
from celery_singleton_lock.stores.redis import connection
from celery_singleton_lock.stores.redis.cluster import ClusterStore, Topology, slot_of
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.testing.contract import TIMEOUT, ask, lease_of, new_token
from example_project.private_server import PrivateServer, free_port
from tests.harness.calls import Calls
from tests.harness.cluster import Cluster
from tests.harness.deliveries import wait_until
from tests.harness.keys import EVERY_NAME, LOCKING
from tests.harness.sentinels import client_of

# Several servers each: `make test` keeps memory, Redis and Valkey.
pytestmark = pytest.mark.slow

SPACE = Keyspace("spread", 256)
NUMBERS = iter(range(1_000_000))

# Seconds for a reply of a node that has no majority.
PATIENCE = 2.0

slow = pytest.mark.slow


@pytest.fixture
def store(cluster: Cluster) -> Iterator[ClusterStore]:
    with closing(ClusterStore(cluster.url)) as store:
        yield store


def new_key() -> str:
    return SPACE.lock("cluster", str(next(NUMBERS)))


def take(store: RedisStore, key: str, token: Token | None = None) -> Token:
    token = token or new_token()
    reply = ask(store, key, token)
    assert isinstance(reply, Granted), reply
    return token


def give(store: RedisStore, key: str, token: Token) -> ReleaseReply:
    return store.leases.release(Release(keys=(key,), token=token), timeout=TIMEOUT)


def key_on(cluster: Cluster, node: PrivateServer) -> str:
    return next(key for key in iter(new_key, "") if cluster.master_of(key) is node)


def evalshas(cluster: Cluster) -> int:
    calls = 0
    for node in cluster.nodes:
        with client_of(node) as client:
            stats = client.info("commandstats")
            calls += sum(
                stats.get(f"cmdstat_{n}", {"calls": 0})["calls"] for n in ("evalsha", "eval")
            )
    return calls


def holds_no_lease(store: ClusterStore) -> bool:
    return not list(store.operators.scan(SPACE.match_all()))


# --- round trips ---------------------------------------------------------------------------------


@slow
def test_one_round_trip_each_for_an_acquire_a_release_and_a_refusal(
    store: ClusterStore, cluster: Cluster
) -> None:
    keys = [new_key() for _ in range(40)]
    for key in keys:  # the connections, the scripts of all nodes, the note of the shards
        give(store, key, take(store, key))
    before = evalshas(cluster)
    for key in keys:
        token = take(store, key)
        assert isinstance(ask(store, key, new_token()), Refused)
        give(store, key, token)
    assert evalshas(cluster) - before == 3 * len(keys)


@slow
def test_leases_are_renewed_in_one_pipeline_per_node(store: ClusterStore, cluster: Cluster) -> None:
    leases = [lease_of(new_key(), new_token()) for _ in range(600)]
    for lease in leases[::2]:
        take(store, lease.key, lease.token)
    expected = [RENEWED, LossReason.GONE] * 300
    assert store.leases.renew(leases, timeout=TIMEOUT) == expected
    for node in cluster.nodes:
        with client_of(node) as client:
            client.script_flush()
    assert store.leases.renew(leases, timeout=TIMEOUT) == expected
    for lease in leases[::2]:
        give(store, lease.key, lease.token)


# --- redirects -----------------------------------------------------------------------------------


@slow
def test_a_moved_slot_is_followed_and_learnt(store: ClusterStore, cluster: Cluster) -> None:
    source, target, _ = cluster.masters()
    key = key_on(cluster, source)
    token = take(store, key)
    cluster.begin_to_move(slot_of(key), source, target)
    cluster.move_keys(cluster.keys_in(slot_of(key), source), source, target)
    cluster.end_move(slot_of(key), target)
    try:
        assert store.leases.renew([lease_of(key, token)], timeout=TIMEOUT) == [RENEWED]
        assert isinstance(ask(store, key, new_token()), Refused)
        assert give(store, key, token) is ReleaseReply.OURS
        give(store, key, take(store, key))  # now the target knows the scripts, too
        before = evalshas(cluster)
        give(store, key, take(store, key))
        assert evalshas(cluster) - before == 2
    finally:
        move_back(cluster, slot_of(key), target, source)


@slow
@pytest.mark.parametrize("next_one_asks", [True, False])
def test_an_asynchronous_release_follows_its_slot(
    store: ClusterStore, cluster: Cluster, next_one_asks: bool
) -> None:
    source, target, _ = cluster.masters()
    key, other = key_on(cluster, source), key_on(cluster, source)
    give(store, key, take(store, key))  # the script is known
    token = take(store, key)
    cluster.begin_to_move(slot_of(key), source, target)
    cluster.move_keys(cluster.keys_in(slot_of(key), source), source, target)
    cluster.end_move(slot_of(key), target)
    try:
        outcomes: list[tuple[ReleaseReply | StoreError, bool]] = []
        request = Release(keys=(key,), token=token)
        assert store.async_releases.send(
            request, timeout=TIMEOUT, on_reply=lambda *outcome: outcomes.append(outcome)
        )
        if next_one_asks:
            take(store, other)
        else:
            store.async_releases.drain(timeout=TIMEOUT)
        assert outcomes == [(ReleaseReply.OURS, False)]
        assert cluster.keys_in(slot_of(key), target).count(key) == 0
    finally:
        move_back(cluster, slot_of(key), target, source)


@slow
def test_an_asynchronous_release_outlives_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine the node takes so long to end that its connection would be checked first.
    monkeypatch.setattr(connection, "_CHECKED_AFTER", float("inf"))
    with Cluster() as cluster, closing(ClusterStore(cluster.url)) as store:
        first = cluster.masters()[0]
        key = key_on(cluster, first)
        give(store, key, take(store, key))
        token = take(store, key)
        first.kill()
        outcomes: list[tuple[ReleaseReply | StoreError, bool]] = []
        request = Release(keys=(key,), token=token)
        assert store.async_releases.send(
            request, timeout=TIMEOUT, on_reply=lambda *outcome: outcomes.append(outcome)
        )
        cluster.wait_until_promoted(key, first)
        store.async_releases.drain(timeout=TIMEOUT)
        ((outcome, resent),) = outcomes
        assert not isinstance(outcome, StoreError)
        assert resent, "its node died before it replied"
        assert store.leases.inspect(key) is None


def move_back(cluster: Cluster, slot: int, source: PrivateServer, target: PrivateServer) -> None:
    cluster.begin_to_move(slot, source, target)
    keys = cluster.keys_in(slot, source)
    if keys:
        cluster.move_keys(keys, source, target)
    cluster.end_move(slot, target)


@slow
def test_leases_of_a_slot_that_is_half_moved_are_renewed_on_both_sides(
    store: ClusterStore, cluster: Cluster
) -> None:
    source, target, _ = cluster.masters()
    first = key_on(cluster, source)
    # Slots of a limit are in one shard: the simplest way to have many leases there.
    keys = Keyspace.slots(first, 6)
    leases = [lease_of(key, new_token()) for key in keys]
    for lease in leases:
        take(store, lease.key, lease.token)
    cluster.begin_to_move(slot_of(first), source, target)
    try:
        for moved in range(len(keys)):
            assert store.leases.renew(leases, timeout=TIMEOUT) == [RENEWED] * len(keys)
            cluster.move_keys([keys[moved]], source, target)
        assert store.leases.renew(leases, timeout=TIMEOUT) == [RENEWED] * len(keys)
    finally:
        rest = cluster.keys_in(slot_of(first), source)
        if rest:
            cluster.move_keys(rest, source, target)
        cluster.end_move(slot_of(first), target)
    for lease in leases:
        assert isinstance(ask(store, lease.key, new_token()), Refused)
        assert give(store, lease.key, lease.token) is ReleaseReply.OURS
    move_back(cluster, slot_of(first), target, source)


@slow
def test_a_lease_asked_for_in_a_slot_that_is_half_moved_is_granted_once_or_not_answered(
    store: ClusterStore, cluster: Cluster
) -> None:
    source, target, _ = cluster.masters()
    held = key_on(cluster, source)
    free = Keyspace.slots(held, 2)[1]
    token = take(store, held)
    cluster.begin_to_move(slot_of(held), source, target)
    try:
        # Fence and lease are here, the completion record is nowhere: the server can't say where the
        # script belongs before all keys have moved.
        for key in (held, free):
            with pytest.raises(StoreUnavailable):
                ask(store, key, new_token())
    finally:
        cluster.move_keys(cluster.keys_in(slot_of(held), source), source, target)
        cluster.end_move(slot_of(held), target)
    assert isinstance(ask(store, held, new_token()), Refused)
    other = take(store, free)
    assert give(store, free, other) is give(store, held, token) is ReleaseReply.OURS
    move_back(cluster, slot_of(held), target, source)


@slow
def test_calls_of_a_queue_whose_slot_is_half_moved_keep_their_order_and_none_is_lost(
    store: ClusterStore, cluster: Cluster
) -> None:
    source, target, _ = cluster.masters()
    calls = Calls(store)
    calls.key = key_on(cluster, source)
    first, second = calls.joined(2)
    calls.begin(first)
    slot, third = slot_of(calls.key), new_token()
    cluster.begin_to_move(slot, source, target)
    try:
        # Part of the queue's keys is here, part there.
        moved = cluster.keys_in(slot, source)
        assert len(moved) > 5
        cluster.move_keys(moved[::2], source, target)
        for request in (lambda: calls.join(third), lambda: calls.end(first), calls.sweep):
            with pytest.raises(StoreUnavailable):
                request()
    finally:
        cluster.move_keys(cluster.keys_in(slot, source), source, target)
        cluster.end_move(slot, target)
    assert calls.join(third) is Place.WAITING
    for token, following in ((first, second), (second, third), (third, None)):
        calls.begin(token)
        hint = calls.end(token)
        assert (hint and hint.call_id) == (following and following.call_id)
    move_back(cluster, slot, target, source)


@slow
def test_leases_of_a_slot_that_is_half_moved_are_released_when_it_has_moved(
    store: ClusterStore, cluster: Cluster
) -> None:
    source, target, _ = cluster.masters()
    key = key_on(cluster, source)
    slots = Keyspace.slots(key, 2)
    token = take(store, key)
    marked = Release(
        keys=(key,), token=token, completion=CompletionState.DONE, completion_ttl=TIMEOUT
    )
    cluster.begin_to_move(slot_of(key), source, target)
    try:
        with pytest.raises(StoreUnavailable):
            store.leases.release(marked, timeout=TIMEOUT)
        cluster.move_keys([key], source, target)
        with pytest.raises(StoreUnavailable):
            ask(store, slots[1], new_token())
        assert store.leases.renew([lease_of(key, token)], timeout=TIMEOUT) == [RENEWED]
    finally:
        rest = cluster.keys_in(slot_of(key), source)
        if rest:
            cluster.move_keys(rest, source, target)
        cluster.end_move(slot_of(key), target)
    assert store.leases.release(marked, timeout=TIMEOUT) is ReleaseReply.OURS
    move_back(cluster, slot_of(key), target, source)


# --- nodes that are away -------------------------------------------------------------------------


@slow
def test_a_node_without_the_majority_grants_loses_and_releases_nothing() -> None:
    """It replies CLUSTERDOWN."""
    with Cluster() as cluster, closing(ClusterStore(cluster.url)) as store:
        first, *others = cluster.masters()
        key, free = key_on(cluster, first), key_on(cluster, first)
        token = take(store, key)
        lease, release = lease_of(key, token), Release(keys=(key,), token=token)
        with redis.Redis(port=first.port) as raw:
            client: Any = raw
            for other in others:
                other.pause()
            try:
                wait_until(lambda: client.cluster("INFO")["cluster_state"] == "fail", "it is alone")
                acquire = Acquire(slots=(free,), token=new_token(), holder=lease.holder, ttl=60.0)
                for request in (
                    lambda: store.leases.acquire(acquire, timeout=PATIENCE),
                    lambda: store.leases.renew([lease], timeout=PATIENCE),
                    lambda: store.leases.release(release, timeout=PATIENCE),
                ):
                    with pytest.raises(StoreUnavailable):
                        request()
            finally:
                for other in others:
                    other.resume()
            wait_until(lambda: client.cluster("INFO")["cluster_state"] == "ok", "it is not alone")
        assert store.leases.renew([lease], timeout=TIMEOUT) == [RENEWED]
        assert store.leases.release(release, timeout=TIMEOUT) is ReleaseReply.OURS
        assert isinstance(ask(store, free, new_token()), Granted)


@slow
def test_an_unresponsive_node_takes_no_leases_with_it_but_its_own() -> None:
    # Without full coverage the others answer on, which is what is measured here.
    with (
        Cluster(
            ["--cluster-require-full-coverage", "no", "--cluster-replica-no-failover", "yes"]
        ) as cluster,
        closing(ClusterStore(cluster.url)) as store,
    ):
        silent, *others = cluster.masters()
        leases = [lease_of(key_on(cluster, node), new_token()) for node in (silent, *others) * 20]
        for lease in leases:
            take(store, lease.key, lease.token)
        store.leases.renew(leases, timeout=1.0)  # the connections that wait so long
        clock = SystemClock()
        silent.pause()
        try:
            for _ in range(3):
                asked = clock.now()
                replies = store.leases.renew(leases, timeout=1.0)
                took = clock.now() - asked
                expected = [LossReason.UNREACHABLE, RENEWED, RENEWED] * 20
                assert replies == expected
                assert took < 2.5
        finally:
            silent.resume()
        assert set(store.leases.renew(leases, timeout=TIMEOUT)) == {RENEWED}


@slow
def test_a_first_node_that_is_dead_is_not_needed(cluster: Cluster) -> None:
    url = cluster.url.replace("//", f"//127.0.0.1:{free_port()},", 1)
    with closing(ClusterStore(url)) as store:
        key = new_key()
        assert give(store, key, take(store, key)) is ReleaseReply.OURS


def test_no_node_at_all_is_store_unavailable() -> None:
    url = f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    with closing(ClusterStore(url)) as store, pytest.raises(StoreUnavailable):
        ask(store, new_key(), new_token())


# --- one store, named in two ways ----------------------------------------------------------------


@slow
def test_two_apps_that_count_shards_differently_are_reported(
    store: ClusterStore, cluster: Cluster
) -> None:
    one_shard = Keyspace("disagree")
    key = one_shard.lock("s", "k")
    plain_url = cluster.master_of(key).url(0)
    with closing(RedisStore(plain_url)) as plain:
        take(plain, key)
        assert plain.operators.problems(key) == []
        with pytest.raises(StoreError, match=r"in 1 shard.*looks for them in 256"):
            ask(store, Keyspace("disagree", 256).lock("s", "k"), new_token())
        [problem] = store.operators.problems(key)
        assert "redis+cluster://" in problem
        with pytest.raises(StoreError, match="looks for them in 256"):
            store.claims.take(
                ClaimRequest(
                    key=Keyspace.claim("t", key), token=new_token(), holder=Holder(), ttl=60
                ),
                timeout=TIMEOUT,
            )


@slow
def test_a_node_of_a_cluster_named_as_a_plain_server_is_reported(cluster: Cluster) -> None:
    first, second, _ = cluster.masters()
    with (
        closing(RedisStore(first.url(0))) as plain,
        pytest.raises(StoreError, match=r"one node of a Redis Cluster.*redis\+cluster://"),
    ):
        plain.leases.inspect(key_on(cluster, second))


def test_a_plain_server_named_as_a_cluster_is_reported(server: PrivateServer) -> None:
    url = f"redis+cluster://127.0.0.1:{server.port}"
    with (
        closing(ClusterStore(url)) as store,
        pytest.raises(StoreError, match=f"^127.0.0.1:{server.port} belongs to no Redis Cluster: "),
    ):
        ask(store, new_key(), new_token())


@pytest.mark.parametrize(
    "url", ["redis+cluster://h:x", "redis+cluster://h:1/3", "redis+cluster://h?no_such_option=1"]
)
def test_a_url_that_cannot_be_meant_is_refused_before_its_first_use(url: str) -> None:
    with pytest.raises(SettingsError):
        open_store(url)


@slow
def test_a_login_with_the_rights_that_the_documentation_lists_is_enough(cluster: Cluster) -> None:
    rights = " ".join((*LOCKING, "+cluster|slots", "+asking", "+wait"))
    for node in cluster.nodes:
        with client_of(node) as client:
            client.execute_command(
                f"ACL SETUSER locks on >pw ~{EVERY_NAME} resetchannels -@all {rights}"
            )
    url = cluster.url.replace("//", "//locks:pw@")
    with closing(ClusterStore(url, wait_replicas=1)) as store:
        for _ in range(20):
            key = new_key()
            token = take(store, key)
            assert store.leases.renew([lease_of(key, token)], timeout=TIMEOUT) == [RENEWED]
            assert give(store, key, token) is ReleaseReply.OURS
        assert store.operators.info("memory") == {}


# --- claims in other shards ----------------------------------------------------------------------


def claim_in_another_shard(key: str) -> str:
    while True:
        claim = Keyspace.claim("app.sync", new_key())
        if not Keyspace.same_shard(key, claim):
            return claim


def took_claim(store: ClusterStore, claim: str, token: Token) -> bool:
    request = ClaimRequest(key=claim, token=token, holder=Holder(task="app.sync"), ttl=600)
    return store.claims.take(request, timeout=TIMEOUT) is None


def acquire(
    store: ClusterStore,
    key: str,
    token: Token,
    change: ClaimChange,
    *,
    timeout: float = TIMEOUT,
    **options: bool,
):
    request = Acquire(slots=(key,), token=token, holder=Holder(), ttl=60, claim=change, **options)
    return store.leases.acquire(request, timeout=timeout)


@slow
@pytest.mark.parametrize("ends", [True, False])
def test_a_claim_in_another_shard_goes_with_its_lease(store: ClusterStore, ends: bool) -> None:
    key, token = new_key(), new_token()
    claim = claim_in_another_shard(key)
    assert took_claim(store, claim, token)
    running = ClaimChange(key=claim, phase=Phase.RUNNING, ttl=60)
    assert isinstance(acquire(store, key, token, running), Granted)
    record = store.leases.inspect(claim)
    assert record is not None
    assert record.phase is Phase.RUNNING
    lease = lease_with_claim(key, token, claim)
    assert store.leases.renew([lease], timeout=TIMEOUT) == [RENEWED]
    record = store.leases.inspect(claim)
    assert record is not None
    assert record.ttl > 500, "it is prolonged with its lease"
    assert not took_claim(store, claim, new_token())
    after = ClaimChange(key=claim, phase=None if ends else Phase.QUEUED, ttl=300)
    reply = store.leases.release(Release(keys=(key,), token=token, claim=after), timeout=TIMEOUT)
    assert reply is ReleaseReply.OURS
    record = store.leases.inspect(claim)
    if ends:
        assert record is None
    else:
        assert record is not None
        assert record.phase is Phase.QUEUED
        store.operators.free(claim, None)


def lease_with_claim(key: str, token: Token, claim: str) -> Lease:
    clock = SystemClock()
    return Lease(
        key=key,
        token=token,
        ttl=600,
        holder=Holder(),
        valid_until=clock.now() + 600,
        acquired_at=clock.now(),
        clock=clock,
        claim_key=claim,
    )


@slow
def test_a_claim_in_another_shard_is_freed_by_a_refusal_that_ends_its_message(
    store: ClusterStore,
) -> None:
    key, holder, token = new_key(), new_token(), new_token()
    claim = claim_in_another_shard(key)
    take(store, key, holder)
    assert took_claim(store, claim, token)
    running = ClaimChange(key=claim, phase=Phase.RUNNING, ttl=60)
    acquire(store, key, token, running)
    assert store.leases.inspect(claim) is not None
    acquire(store, key, token, running, frees_claim=True)
    assert store.leases.inspect(claim) is None
    give(store, key, holder)


@slow
@pytest.mark.parametrize("by", ["release", "mark", "acquire", "refusal"])
def test_a_claim_in_another_shard_is_freed_when_its_node_answers_again(
    store: ClusterStore, cluster: Cluster, by: str
) -> None:
    queue = RetryQueue(store, SystemClock())
    key, token, holder = new_key(), new_token(), new_token()
    claim = claim_on_another_node(cluster, key)
    node = cluster.master_of(claim)
    assert took_claim(store, claim, token)
    free = ClaimChange(key=claim, phase=None)
    if by == "release":
        take(store, key, token)
    elif by == "refusal":
        take(store, key, holder)
    with client_of(node) as client:
        client.execute_command("CLIENT", "PAUSE", 4000, "ALL")
    if by == "release":
        reply = store.leases.release(Release(keys=(key,), token=token, claim=free), timeout=1)
        assert reply is ReleaseReply.OURS
    elif by == "mark":
        mark = Mark(
            key=key, token=token, state=CompletionState.DONE, sequence=0, ttl=60, claim=free
        )
        store.leases.mark(mark, timeout=1)
    elif by == "acquire":
        assert isinstance(acquire(store, key, token, free, timeout=1), Granted)
    else:
        running = ClaimChange(key=claim, phase=Phase.RUNNING, ttl=60)
        acquire(store, key, token, running, frees_claim=True, timeout=1)
    assert not queue.is_empty
    wait_until(lambda: queue.is_empty, "the claim is settled", timeout=30)
    assert store.leases.inspect(claim) is None
    queue.close()


def claim_on_another_node(cluster: Cluster, key: str) -> str:
    while True:
        claim = claim_in_another_shard(key)
        if cluster.master_of(claim) is not cluster.master_of(key):
            return claim


@slow
def test_a_claim_in_another_shard_is_not_queued_by_a_dying_holder(store: ClusterStore) -> None:
    # The worker parent has reported the end of the message, and keeps its claim as long as the key.
    key, token = new_key(), new_token()
    claim = claim_in_another_shard(key)
    assert took_claim(store, claim, token)
    take(store, key, token)
    kept = ClaimChange(key=claim, phase=Phase.RUNNING, ttl=60)
    dying = Release(keys=(key,), token=token, become=Kind.DYING, become_ttl=60, claim=kept)
    assert store.leases.release(dying, timeout=TIMEOUT) is ReleaseReply.OURS
    queued = ClaimChange(key=claim, phase=Phase.QUEUED, ttl=3600)
    last = Release(keys=(key,), token=token, claim=queued)
    assert store.leases.release(last, timeout=TIMEOUT) is ReleaseReply.OURS
    record = store.leases.inspect(claim)
    assert record is not None
    assert record.phase is Phase.RUNNING


@slow
def test_a_message_whose_claim_is_in_another_shard_starts_when_it_is_due(
    store: ClusterStore,
) -> None:
    key, token = new_key(), new_token()
    claim = claim_in_another_shard(key)
    arguments = Keyspace.arguments(claim, token.call_id)
    request = ClaimRequest(
        key=claim, token=token, holder=Holder(), ttl=600, arguments=arguments, due_in=60
    )
    assert store.claims.take(request, timeout=TIMEOUT) is None
    running = ClaimChange(key=claim, phase=Phase.RUNNING, ttl=60, arguments=arguments)
    reply = acquire(store, key, token, running)
    assert isinstance(reply, Refused)
    assert reply.relation is Relation.NOT_DUE
    assert 59 < reply.due_in <= 60
    newest = ReplaceArguments(
        claim=claim, call_id=token.call_id, key=arguments, arguments=b"newest", ttl=600
    )
    assert store.arguments.replace(newest, timeout=TIMEOUT) is Replaced.YES
    granted = acquire(store, key, token, running)
    assert isinstance(granted, GrantedArguments)
    assert granted.arguments == b"newest"


@slow
def test_a_message_gives_way_to_a_claim_in_another_shard(store: ClusterStore) -> None:
    key, token, other = new_key(), new_token(), new_token()
    claim = claim_in_another_shard(key)
    assert took_claim(store, claim, other)
    running = ClaimChange(key=claim, phase=Phase.RUNNING, ttl=60)
    reply = acquire(store, key, token, running, refused_if_claimed=True)
    assert isinstance(reply, Refused)
    assert reply.relation is Relation.OTHER
    assert store.leases.inspect(key) is None
    store.operators.free(claim, None)
    assert isinstance(acquire(store, key, token, running, refused_if_claimed=True), Granted)
    give(store, key, token)


@slow
def test_operators_read_completion_records_notes_and_wait_queues_of_all_shards(
    store: ClusterStore,
) -> None:
    by = OperatorRelease(user="ann", host="ops-1", reason="stuck")
    keys, tokens = [new_key() for _ in range(8)], [new_token() for _ in range(8)]
    assert len({slot_of(key) for key in keys}) > 1
    for key, token in zip(keys, tokens, strict=True):
        take(store, key, token)
        mark = Mark(key=key, token=token, state=CompletionState.WAITING, sequence=2, ttl=60)
        store.leases.mark(mark, timeout=TIMEOUT)
    waiter = Acquire(
        slots=(keys[3],), token=new_token(), holder=Holder(), ttl=60, wait_ttl=60, handoff=""
    )
    assert isinstance(store.leases.acquire(waiter, timeout=TIMEOUT), Refused)
    assert store.wait_queue.lengths(keys) == [0, 0, 0, 1, 0, 0, 0, 0]
    leases = [lease_of(key, token) for key, token in zip(keys, tokens, strict=True)]
    assert release_notes_on(store, leases, TIMEOUT) == [None] * 8
    assert all(store.operators.free(key, None, by) for key in keys)
    notes = release_notes_on(store, leases, TIMEOUT)
    assert notes == [f"{token} {by.to_json()}" for token in tokens]
    texts = {key: text for key, text, _ in store.operators.texts(SPACE.match_all())}
    for key, token in zip(keys, tokens, strict=True):
        assert texts[Keyspace.release_note(key)] == f"{token} {by.to_json()}"
        assert texts[Keyspace.completion(key, token.attempt)] == f"- 2 {token.nonce}"


# --- its picture ---------------------------------------------------------------------------------


def test_a_slot_is_that_of_the_hash_tag() -> None:
    # The example of the cluster specification.
    assert slot_of("{123456789}") == slot_of(b"x{123456789}y") == 12739
    key = SPACE.lock("s", "k")
    assert slot_of(key) == slot_of(Keyspace.shard_hash(key)) == slot_of(Keyspace.claim("t", key))


def test_a_node_without_a_name_is_the_one_that_was_asked() -> None:
    reply = [
        [0, 8191, [b"", 7000, b"id"], [b"other", 7003, b"id"]],
        [8192, 16000, [None, 7001, b"id", [b"hostname", b"h"]]],
    ]
    topology = Topology(reply, ("asked", 7000))
    assert topology.master_of[5] == ("asked", 7000)
    assert topology.master_of[8192] == ("asked", 7001)
    assert topology.master_of[16001] is None
    assert topology.nodes == [("asked", 7000), ("asked", 7001), ("other", 7003)]
