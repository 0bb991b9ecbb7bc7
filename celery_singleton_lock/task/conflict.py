"""The decision about a delivery whose acquire was refused: one table, as a pure function.

The first row that matches applies::

    this attempt is done, a newer copy of the message exists,
    or a later attempt has the key                              drop; the result is not changed
    the key or its scope is paused, and the store keeps no
    queue for this call                                         requeued; it is never skipped
    an earlier attempt of the same task has it                  requeued, shortly
    another delivery of the same attempt has it                 requeued, until that one ends
    the rate lets no call start, and this work may have begun   requeued, until it does
    the rate lets no call start                                 the policy's on_conflict
    another holder, and this work may have begun                requeued; it is never skipped
    another holder                                              the policy's on_conflict
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ..core.backoff import AGAIN, PAUSED, SHORTLY
from ..core.lease import Kind, Record
from ..core.store_requests import Refused, Relation
from ..message.header import Delivery
from ..on_conflict.rule import Conflict, Decision, OnConflict, Outcome

# The reasons of refusals by another delivery or attempt of the same task.
_REASONS: Final = {
    Relation.DONE: "done",
    Relation.SUPERSEDED: "superseded",
    Relation.DUPLICATE: "delivered-twice",
    Relation.EARLIER: "earlier-attempt",
    Relation.LATER: "later-attempt",
}


def decide(relation: Relation, rule: OnConflict, conflict: Conflict) -> Decision:
    """Decide by the table.

    Args:
        relation: The relation in the store's refusal.
        rule: The policy's ``on_conflict``.
        conflict: The refused delivery.
    """
    delivery = conflict.delivery
    if relation in (Relation.DONE, Relation.SUPERSEDED, Relation.LATER):
        return Decision(Outcome.DROP, _REASONS[relation])
    if relation is Relation.PAUSED and conflict.no_requeue is None:
        return Decision(Outcome.REQUEUED, "paused", delivery, PAUSED, queues_claim=True)
    if relation in (Relation.OTHER, Relation.RATE) and not delivery.started:
        return rule.decide(conflict)
    if conflict.no_requeue is not None:
        return Decision(Outcome.RAISE, conflict.no_requeue)
    started = replace(delivery, started=True, last=conflict.wall)
    if relation is Relation.OTHER:
        reason = "started work is not skipped"
        return Decision(Outcome.REQUEUED, reason, started, queues_claim=True)
    if relation is Relation.RATE:
        pace = (conflict.due_in, conflict.due_in)
        return Decision(Outcome.REQUEUED, "rate", started, pace, True, is_exact=True)
    pace = SHORTLY if relation is Relation.EARLIER else AGAIN
    return Decision(Outcome.REQUEUED, _REASONS[relation], started, pace)


def is_early(refused: Refused, delivery: Delivery) -> bool:
    """Whether the rate has refused work that may have begun.

    Such a call waits in the queue of its key. If all of them were requeued for the time of the next
    start, all would come back then, and all but one would be requeued again.
    """
    return refused.relation is Relation.RATE and delivery.started and refused.hint is None


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
