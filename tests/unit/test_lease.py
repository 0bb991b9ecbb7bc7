"""What a process may believe of its lease, by its own clock alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_singleton_lock import FenceUnavailable, LeaseLost
from celery_singleton_lock.core.clock_drift import drift
from celery_singleton_lock.core.lease import (
    Holder,
    Kind,
    Lease,
    Loss,
    LossReason,
    Phase,
    Record,
    Token,
)
from celery_singleton_lock.testing import ManualClock


def lease(clock: ManualClock, ttl: float = 60.0, **fields: Any) -> Lease:
    return Lease(
        key="csl:{p:0}:report:42",
        token=Token("t", 0, 0, "n"),
        ttl=ttl,
        holder=Holder(),
        valid_until=clock.now() + ttl - drift(ttl),
        acquired_at=clock.now(),
        clock=clock,
        **fields,
    )


def test_the_trust_ends_before_the_stores_expiry() -> None:
    assert drift(60) == pytest.approx(0.602)
    clock = ManualClock()
    held = lease(clock)
    assert held.remaining() == pytest.approx(59.398)


def test_a_lease_is_lost_by_the_clock_alone() -> None:
    clock = ManualClock()
    held = lease(clock)
    clock.advance(59.397)
    assert not held.lost
    held.check()
    clock.advance(0.002)
    assert held.lost
    assert held.remaining() == 0.0
    with pytest.raises(LeaseLost, match=r"'csl:\{p:0\}:report:42' was lost 0.0 s ago: expired"):
        held.check()


def test_a_declared_loss_ends_the_lease_before_its_deadline() -> None:
    clock = ManualClock()
    held = lease(clock)
    held.loss = Loss(reason=LossReason.REPLACED, at=clock.now(), detail="the store has another")
    clock.advance(1.8)
    assert held.lost
    assert held.remaining() == 0.0
    with pytest.raises(LeaseLost) as caught:
        held.check()
    assert (caught.value.key, caught.value.reason) == (held.key, "replaced")
    assert "1.8 s ago: replaced (the store has another)" in str(caught.value)
    assert "stop writing shared data" in str(caught.value)


def test_a_lease_is_printed_in_one_line() -> None:
    clock = ManualClock()
    held = lease(clock, fence_number=7)
    assert repr(held) == "<Lease 'csl:{p:0}:report:42' fence=7, valid for 59.4 s>"
    held.loss = Loss(reason=LossReason.REPLACED, at=clock.now())
    assert repr(held).endswith("fence=7, lost (replaced)>")
    held = lease(clock)
    held.released_at = clock.now()
    assert repr(held) == "<Lease 'csl:{p:0}:report:42', released>"


def test_a_fence_is_a_number_or_says_why_there_is_none() -> None:
    assert lease(ManualClock(), fence_number=7).fence == 7
    with pytest.raises(FenceUnavailable, match=r"limit > 1.*needs_fence=True"):
        _ = lease(ManualClock()).fence


@given(st.text(min_size=1), st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_token_survives_its_text(task_id: str, nesting: int, retries: int) -> None:
    if any("\ud800" <= character <= "\udfff" for character in task_id):
        return  # lone surrogates are no text; no message carries them
    token = Token(task_id, nesting, retries, "a1")
    text = str(token)
    assert Token.parse(text) == token
    assert " " not in text
    assert text.count("|") == 2


@pytest.mark.parametrize("text", ["", "a", "a|b|c", "a|0.0", "a|0.0|b|c", "a|0|n", "a|x.y|n"])
def test_what_is_no_token_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        Token.parse(text)


def test_a_reservation_is_for_the_next_attempt_whatever_its_delivery() -> None:
    assert str(Token("t", 1, 2, "abc").next_attempt()) == "t|1.3|-"


def test_a_holder_survives_its_text() -> None:
    holder = Holder(task="app.sync", task_id="a b", worker="w@ü", pid=1, since=2.5)
    assert Holder.from_json(holder.to_json()) == holder
    assert Holder.from_json(holder.to_json("another"), "another") == holder
    assert "a b" not in holder.to_json("a b")
    assert Holder.from_json(holder.to_json("a b"), "a b") == holder
    assert str(holder) == "app.sync[a b] on w@ü (pid 1)"
    assert str(Holder(task_id="hold-1", worker="h", pid=2)) == "hold-1 on h (pid 2)"


@given(
    st.text()
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.sampled_from(["task", "pid", "since", "x"]), inner)
        ),
    ).map(json.dumps)
)
def test_a_holder_that_another_program_wrote_is_read_as_far_as_it_can_be(text: str) -> None:
    assert isinstance(Holder.from_json(text), Holder)


@pytest.mark.parametrize(
    "text", ['{"pid": 1e999}', '{"since": 1' + "0" * 400 + "}", "[" * 100_000, '{"pid": Infinity}']
)
def test_a_holder_with_absurd_numbers_is_read_as_an_empty_one(text: str) -> None:
    assert Holder.from_json(text) == Holder()


def test_a_record_is_read_from_its_value() -> None:
    record = Record.parse("k", 'l t|0.0|n 12 {"task":"a"}', 3.5)
    assert (record.kind, record.token, record.fence) == (Kind.LEASE, "t|0.0|n", 12)
    assert (record.holder.task, record.holder.task_id, record.ttl) == ("a", "t", 3.5)
    assert record.phase is None
    assert Record.parse("k", "l t|0.0|n 0 {}", 1).fence is None


@pytest.mark.parametrize("phase", list(Phase))
def test_a_claim_is_read_from_its_value(phase: Phase) -> None:
    record = Record.parse("k", f'q t+a1 {phase} {{"task":"a","worker":"w x"}}', 3.5)
    assert (record.key, record.kind, record.token) == ("k", Kind.CLAIM, "t+a1")
    assert (record.phase, record.fence, record.ttl) == (phase, None, 3.5)
    assert (record.holder.task, record.holder.task_id) == ("a", "t")
    assert record.holder.worker == "w x"


@pytest.mark.parametrize(
    "value",
    [
        "",
        "l",
        "l t 0",
        "z t|0.0|n 1 {}",
        "l t|0.0|n x {}",
        "123",
        "q t",
        "q t queued",
        "q t sleeping {}",
        "q t 0 {}",
        "q t  {}",
        "l t|0.0|n queued {}",
    ],
)
def test_what_is_no_record_is_a_value_error(value: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        Record.parse("k", value, 1)


def test_a_manual_clock_never_runs_backwards() -> None:
    clock = ManualClock(now=1, wall=10)
    clock.sleep(2)
    assert (clock.now(), clock.wall()) == (3, 12)
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)
