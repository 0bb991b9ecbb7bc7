"""The table of `task.conflict`: what becomes of a delivery whose acquire was refused."""

from __future__ import annotations

import pytest

from celery_singleton_lock.core.lease import Token
from celery_singleton_lock.core.store_requests import Relation
from celery_singleton_lock.message.header import Delivery
from celery_singleton_lock.on_conflict import ACTIONS, OnConflict
from celery_singleton_lock.on_conflict.rule import Conflict, Decision, Outcome
from celery_singleton_lock.task.conflict import decide

NEW = Delivery(token=Token("t", 0, 0, "a1"))
STARTED = Delivery(token=Token("t", 0, 0, "a1"), started=True)
# What a call whose key is held for the first time comes to.
OUTCOMES = {
    "skip": Outcome.SKIP,
    "revoke": Outcome.REVOKE,
    "raise": Outcome.RAISE,
    "retry": Outcome.REQUEUED,
    "wait": Outcome.WAIT,
    "cancel_running": Outcome.WAIT,
    "queue": Outcome.RAISE,  # only an eager call gets here
}
each_action = pytest.mark.parametrize("action", ACTIONS)


def decided(
    relation: Relation, delivery: Delivery, action: str, no_requeue: str | None = None
) -> Decision:
    rule = OnConflict.of(action)
    return decide(relation, rule, Conflict(delivery, no_requeue, wall=100.0, waited=0.0))


@each_action
def test_a_new_call_that_meets_another_is_treated_by_its_on_conflict(
    action: str,
) -> None:
    assert decided(Relation.OTHER, NEW, action).outcome is OUTCOMES[action]


@each_action
def test_a_new_call_above_the_rate_is_treated_by_its_on_conflict(action: str) -> None:
    decision = decided(Relation.RATE, NEW, action)
    assert decision.outcome is OUTCOMES[action]


@each_action
def test_started_work_above_the_rate_is_requeued_until_it_may_start(action: str) -> None:
    rule = OnConflict.of(action)
    conflict = Conflict(STARTED, None, wall=100.0, waited=0.0, due_in=5.0)
    decision = decide(Relation.RATE, rule, conflict)
    assert (decision.outcome, decision.queues_claim) == (Outcome.REQUEUED, True)
    assert decision.reason == "rate"
    assert decision.copy is not None
    assert decision.copy.started
    assert (decision.pace[0], decision.is_exact) == (5.0, True)


@pytest.mark.parametrize(("waited", "due_in"), [(1.0, 3.5), (0.0, 4.9)])
def test_a_call_waits_for_its_rate_within_its_timeout(waited: float, due_in: float) -> None:
    def decided(due_in: float) -> Decision:
        rule = OnConflict.wait(5)
        return decide(Relation.RATE, rule, Conflict(NEW, None, 1.0, waited, due_in))

    assert decided(due_in).outcome is Outcome.WAIT
    late = decided(5.0)
    assert (late.outcome, late.reason) == (Outcome.RAISE, "waiting for 5 s would not be enough")


@each_action
def test_started_work_that_meets_another_is_requeued_and_keeps_its_claim(
    action: str,
) -> None:
    decision = decided(Relation.OTHER, STARTED, action)
    assert (decision.outcome, decision.queues_claim) == (Outcome.REQUEUED, True)
    assert decision.copy is not None
    assert decision.copy.started


@each_action
@pytest.mark.parametrize("relation", [Relation.EARLIER, Relation.DUPLICATE])
def test_a_delivery_that_meets_its_own_attempt_is_requeued_and_leaves_the_claim_to_it(
    action: str, relation: Relation
) -> None:
    decision = decided(relation, NEW, action)
    assert (decision.outcome, decision.queues_claim) == (Outcome.REQUEUED, False)
    assert decision.copy is not None
    assert decision.copy.started, "else its copy could be skipped"


@each_action
@pytest.mark.parametrize("relation", [Relation.DONE, Relation.SUPERSEDED, Relation.LATER])
@pytest.mark.parametrize("delivery", [NEW, STARTED], ids=["new", "started"])
def test_a_delivery_whose_work_another_has_done_or_goes_on_with_is_dropped(
    action: str, relation: Relation, delivery: Delivery
) -> None:
    decision = decided(relation, delivery, action)
    assert (decision.outcome, decision.copy) == (Outcome.DROP, None)


@pytest.mark.parametrize("relation", [Relation.OTHER, Relation.EARLIER, Relation.DUPLICATE])
def test_a_delivery_that_cannot_be_requeued_fails_and_says_why(relation: Relation) -> None:
    decision = decided(relation, STARTED, "skip", "no queue")
    assert (decision.outcome, decision.reason) == (Outcome.RAISE, "no queue")
