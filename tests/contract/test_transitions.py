"""The transitions agree with the Lua scripts: random operations, same replies, same state."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Holder, Kind, Token
from celery_singleton_lock.core.lease import Phase as ClaimPhase
from celery_singleton_lock.core.store import Store
from celery_singleton_lock.core.store_requests import (
    Acquire,
    AuthorizeRun,
    ClaimChange,
    ClaimRequest,
    CompletionState,
    Granted,
    Mark,
    Refused,
    Release,
)
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores import open_store
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.testing.contract import TIMEOUT, lease_of
from example_project.private_server import PrivateServer
from tests.harness.etcd import EtcdCluster
from tests.harness.zookeeper import ZooKeeperEnsemble

# Few of each, so that they meet.
KEYS = st.sampled_from(("one", "one", "one", "two"))
LIMITS = st.sampled_from((1, 1, 1, 1, 3))
TASKS = st.sampled_from(("a", "ab"))
NONCES = st.sampled_from(("x", "y"))
# Seconds that no example lasts, and so far apart that none is taken for the other.
TTLS = st.sampled_from((600.0, 1200.0, 2400.0))
TOKENS = st.builds(Token, TASKS, st.just(0), st.integers(0, 2), NONCES)
LAST_RUNS = ("1.5 x", "2.5 y")
PHASES = st.sampled_from((None, *ClaimPhase))

# An operation, given a store and the keys of its names.
Operation = Callable[[Store, Callable[[str], str]], Any]


def claim_key(key: str) -> str:
    return Keyspace.claim("app.task", key)


def change(phase: ClaimPhase | None, ttl: float, key: str) -> ClaimChange:
    return ClaimChange(key=claim_key(key), phase=phase, ttl=ttl)


@st.composite
def operations(draw: st.DrawFn, tokens: list[Token]) -> tuple[str, Operation]:
    name, token, ttl = draw(KEYS), draw(st.sampled_from(tokens)), draw(TTLS)
    phase, has_claim = draw(PHASES), draw(st.booleans())
    kind = draw(st.sampled_from(sorted(_OPERATIONS)))
    return _OPERATIONS[kind](draw, name, token, ttl, phase if has_claim else "none")


def acquire(draw: Any, name: str, token: Token, ttl: float, phase: Any) -> tuple[str, Operation]:
    limit, sequence = draw(LIMITS), draw(st.integers(0, 2))
    frees, claimed = draw(st.booleans()), draw(st.booleans())
    phase = phase if phase in ("none", None) else ClaimPhase.RUNNING

    def run(store: Store, key_of: Callable[[str], str]) -> Any:
        key = key_of(name)
        request = Acquire(
            slots=Keyspace.slots(key, limit),
            token=token,
            holder=Holder(task="t", task_id=token.task_id),
            ttl=ttl,
            sequence=sequence,
            claim=None if phase == "none" else change(phase, ttl, key),
            frees_claim=frees,
            refused_if_claimed=claimed,
        )
        return store.leases.acquire(request, timeout=TIMEOUT)

    return f"acquire {name} {token} {ttl} {limit=} {sequence=} {phase=} {frees=} {claimed=}", run


def release(draw: Any, name: str, token: Token, ttl: float, phase: Any) -> tuple[str, Operation]:
    become = draw(st.sampled_from((None, None, Kind.RESERVED, Kind.COOLING, Kind.DYING)))
    # Seldom: nothing is granted to an attempt that is done.
    marker = draw(st.sampled_from((None,) * 8 + (CompletionState.FINISHING, CompletionState.DONE)))
    limit = draw(LIMITS)

    def run(store: Store, key_of: Callable[[str], str]) -> Any:
        key = key_of(name)
        request = Release(
            keys=Keyspace.slots(key, limit),
            token=token,
            become=become,
            become_ttl=ttl,
            next_token=token.next_attempt() if become is Kind.RESERVED else None,
            completion=marker,
            completion_ttl=ttl,
            claim=None if phase == "none" else change(phase, ttl, key),
        )
        return store.leases.release(request, timeout=TIMEOUT)

    return f"release {name} {token} {ttl} {become=} {marker=} {limit=} {phase=}", run


def mark(draw: Any, name: str, token: Token, ttl: float, phase: Any) -> tuple[str, Operation]:
    state, sequence = (
        draw(st.sampled_from((CompletionState.WAITING, *CompletionState))),
        draw(st.integers(0, 2)),
    )

    def run(store: Store, key_of: Callable[[str], str]) -> Any:
        key = key_of(name)
        claim = None if phase == "none" else change(phase, ttl, key)
        request = Mark(key=key, token=token, state=state, ttl=ttl, sequence=sequence, claim=claim)
        store.leases.mark(request, timeout=TIMEOUT)

    return f"mark {name} {token} {ttl} {state=} {sequence=} {phase=}", run


def take_claim(draw: Any, name: str, token: Token, ttl: float, phase: Any) -> tuple[str, Operation]:
    instead_of = draw(st.sampled_from(("", "a", "ab")))
    # The lease's own key too: then there is something that is no claim.
    forged = draw(st.sampled_from((False, False, False, True)))
    wants_ttl = draw(st.booleans())

    def run(store: Store, key_of: Callable[[str], str]) -> Any:
        key = key_of(name) if forged else claim_key(key_of(name))
        request = ClaimRequest(
            key=key,
            token=token,
            holder=Holder(task="p"),
            ttl=ttl,
            instead_of=instead_of,
            wants_ttl=wants_ttl,
        )
        found = store.claims.take(request, timeout=TIMEOUT)
        return found if wants_ttl or found is None else replace(found, ttl=0.0)

    return f"take_claim {name} {token} {ttl} {instead_of=} {forged=} {wants_ttl=}", run


def settle(draw: Any, name: str, token: Token, ttl: float, phase: Any) -> tuple[str, Operation]:
    phase = None if phase == "none" else phase

    def run(store: Store, key_of: Callable[[str], str]) -> Any:
        store.claims.change(token, change(phase, ttl, key_of(name)), timeout=TIMEOUT)

    return f"settle {name} {token} {ttl} {phase=}", run


def renew(draw: Any, name: str, token: Token, ttl: float, phase: Any) -> tuple[str, Operation]:
    def run(store: Store, key_of: Callable[[str], str]) -> Any:
        key = key_of(name)
        claim = "" if phase == "none" else claim_key(key)
        # The longest: what lives with a shared heartbeat is never shortened by one.
        leases = [lease_of(slot, token, 2400.0, claim) for slot in Keyspace.slots(key, 2)]
        return store.leases.renew(leases, timeout=TIMEOUT)

    return f"renew {name} {token} {ttl} {phase=}", run


def authorize_run(
    draw: Any, name: str, token: Token, ttl: float, phase: Any
) -> tuple[str, Operation]:
    expected = draw(st.sampled_from((None, *LAST_RUNS)))
    new = draw(st.sampled_from(LAST_RUNS))

    def run(store: Store, key_of: Callable[[str], str]) -> Any:
        leader = key_of(name)
        entry = Keyspace.last_run(leader, "every minute")
        request = AuthorizeRun(
            leader=leader, token=token, entry=entry, expected=expected, new=new, ttl=ttl
        )
        return store.schedule.authorize(request, timeout=TIMEOUT), store.schedule.last_runs(
            [entry], timeout=TIMEOUT
        )

    return f"authorize {name} {token} {ttl} {expected=} {new=}", run


def free(draw: Any, name: str, token: Token, ttl: float, phase: Any) -> tuple[str, Operation]:
    named = draw(st.booleans())

    def run(store: Store, key_of: Callable[[str], str]) -> Any:
        return store.operators.free(key_of(name), str(token) if named else None)

    return f"free {name} {token} {named=}", run


_OPERATIONS = {
    "acquire": acquire,
    "acquire again": acquire,
    "acquire once more": acquire,
    "release": release,
    "release again": release,
    "mark": mark,
    "take_claim": take_claim,
    "settle": settle,
    "renew": renew,
    "authorize": authorize_run,
    "free": free,
}


def comparable(value: Any) -> Any:
    """A reply or record without what may differ: fences' numbers, and times to the minute."""
    if isinstance(value, Granted):
        return replace(value, fence=value.fence is not None, ttl=None)
    if isinstance(value, Refused):
        return replace(value, record=comparable(value.record))
    if hasattr(value, "ttl"):
        return replace(value, fence=value.fence is not None, ttl=round(value.ttl / 120))
    return value


def outcome(store: Store, operation: Operation, key_of: Callable[[str], str]) -> Any:
    try:
        return comparable(operation(store, key_of))
    except StoreError as exc:
        return type(exc)


def state(store: Store, key_of: Callable[[str], str]) -> list[Any]:
    names = [key_of(name) for name in ("one", "two")]
    keys = [slot for key in names for slot in (*Keyspace.slots(key, 3), claim_key(key))]
    return [comparable(store.leases.inspect(key)) for key in keys]


def assert_same(store: Store, script: list[tuple[str, Operation]]) -> None:
    """Run ``script`` on ``store`` and on memory, side by side."""
    reference = MemoryStore(SystemClock())
    # Completion records are by task: earlier runs' must not be met.
    keyspace = Keyspace(f"transitions-{secrets.token_hex(8)}")

    def key_of(name: str) -> str:
        return keyspace.lock("transitions", name)

    done = []
    for what, operation in script:
        done.append(what)
        expected = outcome(reference, operation, key_of)
        assert outcome(store, operation, key_of) == expected, done
    assert state(store, key_of) == state(reference, key_of), done


@contextmanager
def opened(url: str) -> Iterator[Store]:
    with closing(open_store(url)) as store:
        yield store


# No shrinking: a failing script is printed, and the servers are slow.
def examples(count: int) -> Any:
    return settings(
        max_examples=count,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )


# A few deliveries meet all the time: one's release is of what it has, and of what another has.
SCRIPTS = st.lists(TOKENS, min_size=2, max_size=3).flatmap(
    lambda tokens: st.lists(operations(tokens), min_size=10, max_size=30)
)


@pytest.mark.slow
def test_the_transitions_agree_with_the_scripts(server: PrivateServer) -> None:
    with opened(server.url()) as store:

        @examples(250)
        @given(SCRIPTS)
        def check(script: list[tuple[str, Operation]]) -> None:
            assert_same(store, script)

        check()


@pytest.mark.slow
def test_etcd_agrees_with_the_transitions(etcd: EtcdCluster) -> None:
    with opened(etcd.url("transitions")) as store:

        @examples(40)
        @given(SCRIPTS)
        def check(script: list[tuple[str, Operation]]) -> None:
            assert_same(store, script)

        check()


@pytest.mark.slow
def test_zookeeper_agrees_with_the_transitions(zookeeper: ZooKeeperEnsemble) -> None:
    with opened(zookeeper.url("transitions")) as store:

        @examples(40)
        @given(SCRIPTS)
        def check(script: list[tuple[str, Operation]]) -> None:
            assert_same(store, script)

        check()
