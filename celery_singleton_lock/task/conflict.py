"""What happens to an arriving delivery that isn't granted its lease: one table, as a pure function.

The first row that fits::

    this attempt is done, a newer copy of the message exists,
    or a later attempt has the key                              drop; result state untouched
    an earlier attempt of the same task has it                  put back, shortly
    the same attempt under another nonce has it (a twin)        put back, until that one is gone
    another holder, and this work may have begun                put back: it is never skipped
    another holder                                              the policy's on_conflict
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from celery_singleton_lock.core.store import Refused, Relation
from celery_singleton_lock.policy import ConflictAction, OnConflict
from celery_singleton_lock.publish.header import Delivery

__all__ = ["AGAIN", "Decision", "Outcome", "Pace", "decide"]


@dataclass(frozen=True, slots=True)
class Pace:
    """How soon a put-back message returns: seconds, doubled at each try up to ``longest``."""

    first: float
    longest: float


# A predecessor of the same task lets go within milliseconds: its retry was published from inside
# its body. Wait that long, not longer.
_SHORTLY: Final = Pace(0.05, 1.0)
#: Started work that meets another holder, twins, a silent store: no hurry, and no end.
AGAIN: Final = Pace(1.0, 30.0)


class Outcome(StrEnum):
    DROP = "drop"
    PUT_BACK = "put-back"
    SKIP = "skip"
    REVOKE = "revoke"
    WAIT = "wait"
    RAISE = "raise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, and why.

    Attributes:
        outcome: What to do.
        reason: For the log and the error.
        delivery: What a put-back copy shall say of itself.
        pace: Of a put-back.
        queues_claim: Whether the message's claim waits with the copy. Not where another delivery or
            attempt of the task is at work: the claim is that one's, or ends with it.
    """

    outcome: Outcome
    reason: str
    delivery: Delivery
    pace: Pace = AGAIN
    queues_claim: bool = False


def decide(
    refused: Refused,
    delivery: Delivery,
    on_conflict: OnConflict,
    *,
    no_put_back: str | None,
    wall: float,
    waited: float,
) -> Decision:
    """The table.

    Args:
        refused: What the store answered.
        delivery: What arrived.
        on_conflict: The policy's.
        no_put_back: Why the message can't be put back (LockConflict then); None: it can.
        wall: Seconds since the epoch, for ``max_wait``.
        waited: Seconds this delivery has blocked, for ``timeout``.
    """
    relation = refused.relation
    if relation in (Relation.DONE, Relation.SUPERSEDED, Relation.LATER):
        return Decision(outcome=Outcome.DROP, reason=str(relation), delivery=delivery)
    if relation is Relation.OTHER and not delivery.started:
        return _on_conflict(delivery, on_conflict, no_put_back, wall, waited)
    if no_put_back is not None:
        return Decision(outcome=Outcome.RAISE, reason=no_put_back, delivery=delivery)
    started = replace(delivery, started=True)
    if relation is Relation.EARLIER:
        return Decision(
            outcome=Outcome.PUT_BACK, reason=str(relation), delivery=started, pace=_SHORTLY
        )
    if relation is Relation.TWIN:
        return Decision(outcome=Outcome.PUT_BACK, reason=str(relation), delivery=started)
    return Decision(
        outcome=Outcome.PUT_BACK,
        reason="started work is not skipped",
        delivery=started,
        queues_claim=True,
    )


def _on_conflict(
    delivery: Delivery, rule: OnConflict, no_put_back: str | None, wall: float, waited: float
) -> Decision:
    def decision(outcome: Outcome, reason: str) -> Decision:
        return Decision(outcome=outcome, reason=reason, delivery=delivery)

    if rule.action is ConflictAction.SKIP:
        return decision(Outcome.SKIP, "conflict")
    if rule.action is ConflictAction.REVOKE:
        return decision(Outcome.REVOKE, "conflict")
    if rule.action is ConflictAction.RAISE:
        return decision(Outcome.RAISE, 'on_conflict="raise" doesn\'t wait')
    if rule.action is ConflictAction.WAIT:
        if waited < rule.timeout:
            return decision(Outcome.WAIT, "conflict")
        return decision(Outcome.RAISE, f"waiting for {rule.timeout:g} s was not enough")
    if no_put_back is not None:
        return decision(Outcome.RAISE, no_put_back)
    # A first conflict that is yet to come was written by others: its message would wait for ever.
    since = wall if delivery.since is None else min(delivery.since, wall)
    left = rule.max_delay if rule.max_wait is None else since + rule.max_wait - wall
    if left <= 0:
        return decision(Outcome.RAISE, f"max_wait of {rule.max_wait:g} s is over")
    return Decision(
        outcome=Outcome.PUT_BACK,
        reason="conflict",
        delivery=replace(delivery, since=since),
        pace=Pace(rule.delay, min(rule.max_delay, left)),
        queues_claim=True,
    )
