"""What becomes of a claim at each step of its message, and that no step makes its task a rival.

The steps are those that a worker takes: the decisions are the package's own, the store is the one
in memory, on a clock that stands still.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from celery.exceptions import Ignore, Reject, Retry
from hypothesis import Phase as RunPhase
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Holder, Kind, Lease, Phase, Token
from celery_singleton_lock.core.store_requests import (
    Acquire,
    ClaimRequest,
    CompletionState,
    Granted,
    Mark,
    Refused,
    Relation,
    Release,
)
from celery_singleton_lock.message.claim import Claim
from celery_singleton_lock.option_values import Unique
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.testing import ManualClock
from tests.harness.keys import name_in_store

KEYSPACE = Keyspace("unit")
LOCK = KEYSPACE.lock("app.sync", "42")
CLAIM = KEYSPACE.claim("app.sync", LOCK)
START = Claim(key=CLAIM, unique=Unique.UNTIL_START, unique_for=100)
DONE = replace(START, unique=Unique.UNTIL_DONE)
TTL = 6.0


# The header.


@pytest.mark.parametrize("claim", [START, DONE, replace(DONE, duplicate=True)], ids=repr)
def test_a_claim_is_read_from_the_header_that_it_was_written_to(claim: Claim) -> None:
    sent = json.loads(json.dumps(claim.to_header()))
    assert Claim.from_header(sent, KEYSPACE) == claim


@pytest.mark.parametrize(
    "change",
    [
        {"key": None},
        {"key": 7},
        {"key": LOCK},
        {"key": name_in_store("fence", prefix="unit")},
        {"key": name_in_store("done|t|0.0", prefix="unit")},
        {"key": name_in_store("claim|app.sync|app.sync:42", prefix="other")},
        {"key": name_in_store("claim|app.sync|app.sync:42", prefix="unit", shard=1)},
        {"key": name_in_store("claim|app.sync|app.sync:42", prefix="unit", shard="x")},
        {"key": name_in_store("claim|", prefix="unit")},
        {"key": KEYSPACE.period("app.sync", LOCK)},
        {"key": CLAIM + "x" * 8000},
        {"key": CLAIM + "\ud800"},
        {"unique": None},
        {"unique": "until_now"},
        {"unique_for": None},
        {"unique_for": -1},
        {"unique_for": "1"},
        {"unique_for": float("inf")},
        {"unique_for": True},
    ],
    ids=repr,
)
def test_a_header_that_we_did_not_write_is_no_claim(change: dict[str, Any]) -> None:
    assert Claim.from_header({**DONE.to_header(), **change}, KEYSPACE) is None


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["key", "unique"]), inner),
        max_leaves=5,
    )
)
def test_no_header_is_fatal(value: Any) -> None:
    assert Claim.from_header(value, KEYSPACE) is None


@pytest.mark.parametrize("value", [1, "true", None, [], {}], ids=repr)
def test_only_true_makes_a_duplicate(value: Any) -> None:
    claim = Claim.from_header({**DONE.to_header(), "duplicate": value}, KEYSPACE)
    assert claim is not None
    assert not claim.duplicate


# The decisions.


@pytest.mark.parametrize(
    ("delay", "expires_in", "ttl"),
    [
        (0.0, None, 100.0),
        (50.0, None, 150.0),
        (0.0, 30.0, 30.0),
        (50.0, 200.0, 150.0),
        (0.0, 0.0, 0.0),
        (0.0, -5.0, 0.0),
    ],
)
def test_a_claim_stays_through_the_delay_but_not_beyond_the_expiry(
    delay: float, expires_in: float | None, ttl: float
) -> None:
    assert START.admitted_for(delay, expires_in) == ttl


def test_a_grant_ends_the_one_claim_and_lets_the_other_run() -> None:
    assert START.granted(TTL) == START.freed()
    running = DONE.granted(TTL)
    assert (running.phase, running.ttl) == (Phase.RUNNING, TTL)


@pytest.mark.parametrize(
    ("claim", "refused"),
    [
        (START, False),
        (DONE, False),
        (replace(START, duplicate=True), False),
        (replace(DONE, duplicate=True), True),
    ],
    ids=repr,
)
def test_a_duplicate_gives_way_until_the_other_is_done_and_never_to_one_that_started(
    claim: Claim, refused: bool
) -> None:
    assert claim.refused_if_claimed is refused


@pytest.mark.parametrize("claim", [START, DONE], ids=str)
@pytest.mark.parametrize(
    ("state", "retval", "options", "phase"),
    [
        ("SUCCESS", 1, {}, None),
        ("FAILURE", ValueError(), {}, None),
        ("RETRY", Retry(), {"retry_in": 7.0}, Phase.RETRYING),
        ("RETRY", Retry(), {"retry_in": 0.0}, Phase.RETRYING),
        ("RETRY", Retry(), {}, None),  # its next attempt has another key
        ("IGNORED", Ignore(), {}, None),
        ("IGNORED", Ignore(), {"replaced": True}, Phase.QUEUED),
        ("REJECTED", Reject(requeue=False), {"comes_back": True}, None),
        ("REJECTED", Reject(requeue=True), {"comes_back": True}, Phase.QUEUED),
        ("REJECTED", Reject(requeue=True), {}, None),
        (None, None, {}, None),
        (None, None, {"comes_back": True}, Phase.QUEUED),
        (None, Reject(requeue=False), {"comes_back": True}, None),
    ],
    ids=repr,
)
def test_a_claim_outlives_a_run_only_where_its_work_goes_on(
    claim: Claim, state: str | None, retval: Any, options: dict[str, Any], phase: Phase | None
) -> None:
    settings = {"comes_back": False, "retry_in": None, "replaced": False, **options}
    change = claim.after(state, retval, **settings)
    assert (change.key, change.phase) == (CLAIM, phase)
    if phase is not None:
        assert change.ttl == 100 + (options.get("retry_in") or 0)


# A life of messages: whatever happens to them, no task is refused for its own claim, and a claim
# that stands is one of a message that is still there.


class Message:
    """A published message, and what its deliveries know."""

    def __init__(self, number: int, duplicate: bool) -> None:
        self.token = Token(f"t{number}", 0, 0, "n0", "c")
        self.sequence = 0
        self.started = False
        self.duplicate = duplicate
        self.lease: Lease | None = None
        self.ended = False
        self.deliveries = 0


class Lives(RuleBasedStateMachine):
    """Calls of one task with one key: published, granted, requeued, retried, redelivered, ended."""

    unique: Unique

    @initialize(acks_late=st.booleans(), limit=st.sampled_from([1, 2]))
    def begin(self, acks_late: bool, limit: int) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        self.claim = replace(START, unique=self.unique, unique_for=1e6)
        self.acks_late, self.limit = acks_late, limit
        self.messages: list[Message] = []

    def alive(self) -> list[Message]:
        return [message for message in self.messages if not message.ended]

    def holder(self) -> str | None:
        record = self.store.leases.inspect(CLAIM)
        return record.token if record else None

    def waiting(self) -> list[Message]:
        return [message for message in self.alive() if message.lease is None]

    def running(self) -> list[Message]:
        return [message for message in self.alive() if message.lease is not None]

    @rule(in_canvas=st.booleans())
    def publish(self, in_canvas: bool) -> None:
        message = Message(len(self.messages), duplicate=False)
        request = ClaimRequest(key=CLAIM, token=message.token, holder=Holder(task="t"), ttl=1e6)
        existing = self.store.claims.take(request)
        if existing is None:
            assert self.store.claims.take(request) is None, (
                "sent again after a lost reply, it is its own"
            )
            self.messages.append(message)
            return
        owners = [m.token.call_id for m in self.alive()]
        assert existing.token in owners, "a call is answered with one that will run, or runs"
        if in_canvas:
            message.duplicate = True
            self.messages.append(message)

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        message = data.draw(st.sampled_from(self.waiting()))
        message.deliveries += 1
        message.token = replace(message.token, nonce=f"n{message.deliveries}")
        claim = replace(self.claim, duplicate=message.duplicate)
        request = Acquire(
            slots=KEYSPACE.slots(LOCK, self.limit),
            token=message.token,
            holder=Holder(task="t", task_id=message.token.task_id),
            ttl=TTL,
            sequence=message.sequence,
            claim=claim.granted(TTL),
            refused_if_claimed=claim.refused_if_claimed and not message.started,
        )
        before = self.holder()
        reply = self.store.leases.acquire(request)
        if isinstance(reply, Refused):
            assert reply.relation is Relation.OTHER
            assert reply.record is not None
            if reply.record.kind is Kind.CLAIM:
                assert reply.record.token != message.token.call_id, "refused for its own claim"
                assert reply.record.token == before
            self.requeue(message, claim)
            return
        assert isinstance(reply, Granted)
        message.started = True
        message.lease = Lease(
            key=reply.key,
            token=message.token,
            ttl=TTL,
            holder=request.holder,
            valid_until=self.clock.now() + TTL,
            acquired_at=self.clock.now(),
            clock=self.clock,
            claim_key=CLAIM if request.claim and request.claim.phase else "",
        )

    def requeue(self, message: Message, claim: Claim) -> None:
        message.sequence += 1
        self.store.leases.mark(
            Mark(
                key=LOCK,
                token=message.token,
                state=CompletionState.WAITING,
                ttl=1e6,
                sequence=message.sequence,
                claim=claim.queued(1),
            )
        )

    @precondition(lambda self: self.running())
    @rule(
        data=st.data(),
        end=st.sampled_from(["success", "retry", "replace", "requeue", "exit", "early"]),
    )
    def end(self, data: st.DataObject, end: str) -> None:
        message = data.draw(st.sampled_from(self.running()))
        lease, message.lease = message.lease, None
        assert lease is not None
        outcomes: dict[str, tuple[str | None, Any]] = {
            "success": ("SUCCESS", 1),
            "early": ("SUCCESS", 1),
            "retry": ("RETRY", Retry()),
            "replace": ("IGNORED", Ignore()),
            "requeue": ("REJECTED", Reject(requeue=True)),
            "exit": (None, None),
        }
        state, retval = outcomes[end]
        change = self.claim.after(
            state,
            retval,
            comes_back=self.acks_late,
            retry_in=3.0 if end == "retry" else None,
            replaced=end == "replace",
        )
        request = Release(keys=(lease.key,), token=lease.token, claim=change)
        if end == "retry":
            following = message.token.next_attempt()
            request = replace(
                request, become=Kind.RESERVED, become_ttl=TTL, next_token=following, completion=None
            )
        if end == "success" and self.acks_late:
            request = replace(request, completion=CompletionState.DONE, completion_ttl=1e6)
        self.store.leases.release(request)
        self.store.leases.release(request)  # sent again after a lost reply
        if end == "retry":
            message.token = replace(message.token, retries=message.token.retries + 1)
            message.sequence = 0
        elif end == "replace":
            message.token = replace(message.token, nesting=message.token.nesting + 1, retries=0)
            message.sequence = 0
        else:
            message.ended = not (end in ("requeue", "exit") and self.acks_late)

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def lose_the_worker(self, data: st.DataObject) -> None:
        """Its process is killed, and its message delivered again if it was not acknowledged."""
        message = data.draw(st.sampled_from(self.running()))
        lease, message.lease = message.lease, None
        assert lease is not None
        change = self.claim.queued() if self.acks_late else self.claim.freed()
        self.store.leases.release(Release(keys=(lease.key,), token=lease.token, claim=change))
        message.ended = not self.acks_late

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        """Revoked or expired, before it ran."""
        message = data.draw(st.sampled_from(self.waiting()))
        self.store.claims.change(message.token, self.claim.freed())
        message.ended = True

    @rule(seconds=st.floats(0, TTL / 3))
    def renew(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.store.leases.renew([message.lease for message in self.running() if message.lease])

    @invariant()
    def a_claim_is_that_of_a_message_that_is_still_there(self) -> None:
        if self.messages:
            assert self.holder() in {None, *(m.token.call_id for m in self.alive())}

    @invariant()
    def never_two_bodies(self) -> None:
        if self.messages:
            assert len(self.running()) <= self.limit


@pytest.mark.parametrize("unique", Unique)
def test_no_task_is_refused_for_its_own_claim_whatever_happens_to_it(unique: Unique) -> None:
    machine: Callable[[], Lives] = type("Machine", (Lives,), {"unique": unique})
    # Which life fails is shown by its steps; making it shorter would take longer than finding it.
    options = settings(
        max_examples=40,
        stateful_step_count=25,
        deadline=None,
        database=None,
        phases=[RunPhase.generate],
    )
    run_state_machine_as_test(machine, settings=options)
