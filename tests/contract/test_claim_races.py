"""A claim between heartbeats, releases and requeues that cross each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Holder, Kind, Lease, LossReason, Phase
from celery_singleton_lock.core.store import Store
from celery_singleton_lock.core.store_requests import (
    RENEWED,
    Acquire,
    ClaimChange,
    CompletionState,
    Granted,
    Mark,
    Refused,
    Relation,
    Release,
    Renewal,
)
from celery_singleton_lock.stores import open_store
from celery_singleton_lock.testing.contract import new_key, new_token
from example_project.private_server import PrivateServer

TIMEOUT = 5.0
# Seconds: of the lease, and of a claim whose task waits for its next attempt.
TTL, UNIQUE_FOR = 60.0, 600.0


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest, server: PrivateServer) -> Iterator[Store]:
    url = "memory://" if request.param == "memory" else server.url()
    with closing(open_store(url, clock=SystemClock())) as store:
        yield store


@pytest.fixture
def running(store: Store) -> Lease:
    """A lease with a claim, just acquired."""
    key, token = new_key(), new_token()
    claim = Keyspace.claim("app.sync", key)
    change = ClaimChange(key=claim, phase=Phase.RUNNING, ttl=TTL)
    request = Acquire(slots=(key,), token=token, holder=Holder(), ttl=TTL, claim=change)
    assert isinstance(store.leases.acquire(request, timeout=TIMEOUT), Granted)
    clock = SystemClock()
    return Lease(
        key=key,
        token=token,
        ttl=2 * TTL,
        holder=Holder(),
        valid_until=clock.now() + TTL,
        acquired_at=clock.now(),
        clock=clock,
        claim_key=claim,
    )


def renew(store: Store, lease: Lease) -> Renewal:
    (reply,) = store.leases.renew([lease], timeout=TIMEOUT)
    return reply


def ttl_of_claim(store: Store, lease: Lease) -> float:
    record = store.leases.inspect(lease.claim_key)
    assert record is not None
    return record.ttl


def phase_of(store: Store, lease: Lease) -> Phase | None:
    record = store.leases.inspect(lease.claim_key)
    return None if record is None else record.phase


def end(store: Store, lease: Lease, phase: Phase, ttl: float, become: Kind | None = None) -> None:
    claim = ClaimChange(key=lease.claim_key, phase=phase, ttl=ttl)
    request = Release(
        keys=(lease.key,),
        token=lease.token,
        become=become,
        become_ttl=1.0,
        claim=claim,
    )
    store.leases.release(request, timeout=TIMEOUT)


def test_a_renewal_prolongs_the_claim_of_each_lease(store: Store, running: Lease) -> None:
    assert renew(store, running) is RENEWED
    assert ttl_of_claim(store, running) > TTL


def test_a_renewal_that_comes_after_the_release_leaves_the_claim_of_the_retry(
    store: Store, running: Lease
) -> None:
    end(store, running, Phase.RETRYING, UNIQUE_FOR)
    assert renew(store, running) is LossReason.GONE
    assert ttl_of_claim(store, running) > 2 * TTL


def test_the_heartbeat_of_a_process_that_is_being_killed_does_not_prolong_its_claim(
    store: Store, running: Lease
) -> None:
    end(store, running, Phase.RUNNING, 1.0, Kind.DYING)
    assert renew(store, running) is LossReason.DYING
    assert ttl_of_claim(store, running) <= 1.0


def test_a_lost_lease_does_not_prolong_the_claim(store: Store, running: Lease) -> None:
    assert store.operators.free(running.key, None)
    assert renew(store, running) is LossReason.GONE
    assert ttl_of_claim(store, running) <= TTL


def test_another_task_s_claim_is_not_prolonged(store: Store, running: Lease) -> None:
    assert store.operators.free(running.claim_key, None)
    theirs = ClaimChange(key=running.claim_key, phase=Phase.RUNNING)
    other = Acquire(slots=(new_key(),), token=new_token(), holder=Holder(), ttl=5.0, claim=theirs)
    assert isinstance(store.leases.acquire(other, timeout=TIMEOUT), Granted)
    assert renew(store, running) is RENEWED
    assert ttl_of_claim(store, running) <= 5.0


def test_a_retry_that_comes_before_its_predecessor_let_go_leaves_the_claim_to_that_one(
    store: Store, running: Lease
) -> None:
    next_token = replace(running.token, retries=1, nonce="n1")
    change = ClaimChange(key=running.claim_key, phase=Phase.RUNNING, ttl=TTL)
    retry = Acquire(
        slots=(running.key,),
        token=next_token,
        holder=Holder(),
        ttl=TTL,
        claim=change,
        frees_claim=True,
    )
    refused = store.leases.acquire(retry, timeout=TIMEOUT)
    assert isinstance(refused, Refused)
    assert refused.relation is Relation.EARLIER
    assert phase_of(store, running) is Phase.RUNNING
    end(store, running, Phase.RETRYING, UNIQUE_FOR)
    assert phase_of(store, running) is Phase.RETRYING
    assert isinstance(store.leases.acquire(retry, timeout=TIMEOUT), Granted)
    # Sent again after a lost reply.
    end(store, running, Phase.RETRYING, UNIQUE_FOR)
    assert phase_of(store, running) is Phase.RUNNING


def test_a_requeued_that_is_reported_late_makes_no_claim_for_an_attempt_that_is_done(
    store: Store, running: Lease
) -> None:
    freed = ClaimChange(key=running.claim_key, phase=None)
    request = Release(
        keys=(running.key,),
        token=running.token,
        completion=CompletionState.DONE,
        completion_ttl=TTL,
        claim=freed,
    )
    store.leases.release(request, timeout=TIMEOUT)
    queued = ClaimChange(key=running.claim_key, phase=Phase.QUEUED, ttl=UNIQUE_FOR)
    duplicate = replace(running.token, nonce="duplicate")
    state = CompletionState.WAITING
    marker = Mark(key=running.key, token=duplicate, state=state, ttl=TTL, sequence=1, claim=queued)
    store.leases.mark(marker, timeout=TIMEOUT)
    assert phase_of(store, running) is None


def test_discarding_a_message_leaves_the_claim_of_its_live_duplicate_and_of_others(
    store: Store, running: Lease
) -> None:
    freed = ClaimChange(key=running.claim_key, phase=None)
    store.claims.change(replace(running.token, nonce="-"), freed, timeout=TIMEOUT)
    assert phase_of(store, running) is Phase.RUNNING
    end(store, running, Phase.QUEUED, UNIQUE_FOR)
    store.claims.change(new_token(), freed, timeout=TIMEOUT)
    assert phase_of(store, running) is Phase.QUEUED
    store.claims.change(running.token, freed, timeout=TIMEOUT)
    assert phase_of(store, running) is None
