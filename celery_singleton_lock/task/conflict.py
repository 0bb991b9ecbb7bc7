"""The decision about a delivery whose acquire was refused: one table, as a pure function.

The first row that matches applies::

    this attempt is done, a newer copy of the message exists,
    or a later attempt has the key                              drop; the result is not changed
    an earlier attempt of the same task has it                  requeued, shortly
    another delivery of the same attempt has it                 requeued, until that one ends
    another holder, and this work may have begun                requeued; it is never skipped
    another holder                                              the policy's on_conflict
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from ..core.lease import Kind, Record
from ..core.store import Relation
from ..message.copy import AGAIN, SHORTLY, Pace
from ..message.header import Delivery
from ..policy import ConflictAction, OnConflict

_ASKED: Final = "the holder is asked to end"
_NO_PLACE: Final = "an eager call takes no place in its queue"
_NO_WAIT: Final = 'on_conflict="queue" doesn\'t wait for the end of a period'
# The reasons of refusals by another delivery or attempt of the same task.
_REASONS: Final = {
    Relation.DONE: "done",
    Relation.SUPERSEDED: "superseded",
    Relation.DUPLICATE: "delivered-twice",
    Relation.EARLIER: "earlier-attempt",
    Relation.LATER: "later-attempt",
}


class Outcome(StrEnum):
    DROP = "drop"
    REQUEUED = "requeued"
    SKIP = "skip"
    REVOKE = "revoke"
    WAIT = "wait"
    RAISE = "raise"


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about a refused delivery.

    Attributes:
        outcome: The outcome.
        reason: The reason, for the log and the error.
        delivery: The content of the header of a requeue copy.
        pace: The delay of a requeue.
        queues_claim: Whether the message's claim is queued with the copy. False if another delivery
            or attempt of the task has the key, because that one changes the claim.
    """

    outcome: Outcome
    reason: str
    delivery: Delivery
    pace: Pace = AGAIN
    queues_claim: bool = False


def decide(
    relation: Relation,
    delivery: Delivery,
    rule: OnConflict,
    *,
    no_requeue: str | None,
    wall: float,
    waited: float,
) -> Decision:
    """Decide by the table.

    Args:
        relation: The relation in the store's refusal.
        delivery: The delivery.
        rule: The policy's ``on_conflict``.
        no_requeue: Why the message can't be requeued (LockConflict then); None: it can.
        wall: Seconds since the epoch, for ``max_wait``.
        waited: Seconds for which this delivery has blocked the worker, for ``timeout``.
    """
    if relation in (Relation.DONE, Relation.SUPERSEDED, Relation.LATER):
        return Decision(Outcome.DROP, _REASONS[relation], delivery)
    is_new, action = relation is Relation.OTHER and not delivery.started, rule.action
    if is_new and action is not ConflictAction.RETRY:
        if action is ConflictAction.SKIP:
            return Decision(Outcome.SKIP, "conflict", delivery)
        if action is ConflictAction.REVOKE:
            return Decision(Outcome.REVOKE, "conflict", delivery)
        if action is ConflictAction.RAISE:
            return Decision(Outcome.RAISE, 'on_conflict="raise" doesn\'t wait', delivery)
        if action is ConflictAction.QUEUE:  # the store gives all others a place
            return Decision(Outcome.RAISE, _NO_PLACE if no_requeue else _NO_WAIT, delivery)
        if waited < rule.timeout:
            is_cancel = action is ConflictAction.CANCEL_RUNNING
            return Decision(Outcome.WAIT, _ASKED if is_cancel else "conflict", delivery)
        return Decision(Outcome.RAISE, f"waiting for {rule.timeout:g} s was not enough", delivery)
    if no_requeue is not None:
        return Decision(Outcome.RAISE, no_requeue, delivery)
    if is_new:
        # Other software or a wrong clock wrote a first conflict in the future. Without this limit,
        # the message would wait endlessly.
        since = wall if delivery.since is None else min(delivery.since, wall)
        left = rule.max_delay if rule.max_wait is None else since + rule.max_wait - wall
        if left <= 0:
            return Decision(Outcome.RAISE, f"max_wait of {rule.max_wait:g} s is over", delivery)
        pace = (rule.delay, min(rule.max_delay, left))
        copy = replace(delivery, since=since, last=wall)
        return Decision(Outcome.REQUEUED, "conflict", copy, pace, queues_claim=True)
    started = replace(delivery, started=True, last=wall)
    if relation is Relation.OTHER:
        reason = "started work is not skipped"
        return Decision(Outcome.REQUEUED, reason, started, queues_claim=True)
    pace = SHORTLY if relation is Relation.EARLIER else AGAIN
    return Decision(Outcome.REQUEUED, _REASONS[relation], started, pace)


def is_overtaken(delivery: Delivery, record: Record | None, wall: float) -> bool:
    """Whether a call that came later got the key since the last try of this one.

    Then the delay of this call does not grow. Otherwise the delays of the oldest calls would be the
    longest, because they have met the most conflicts, and newer calls would get the key again and
    again. The rule applies once to each holder, so the delays grow as usual while one body runs.

    Args:
        delivery: The refused delivery, as it came.
        record: The record of the key; None: unknown.
        wall: Seconds since the epoch. A holder from the future has a wrong clock.
    """
    if delivery.since is None or delivery.last is None or record is None:
        return False
    if record.kind is not Kind.LEASE:
        return False  # nothing has run since the last try
    holder = record.holder
    came_later = (holder.first_try or holder.since) > delivery.since
    return came_later and delivery.last < holder.since <= wall
