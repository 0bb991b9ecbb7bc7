"""A run asks for its lease, until it is granted or a refusal ends the delivery.

The way down: `acquire` -> `_Tries.ask` -> `core.waiter.Waiter.acquire`, if the policy waits ->
`core.locker.Locker.acquire` -> `core.store.Leases.acquire` -> ``acquire.lua``. What a refusal means
comes from `conflict.decide`, and for a new call from its rule (`on_conflict`).
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from celery import states
from celery.exceptions import Ignore

from ..celery_compat import driver_of
from ..core.backoff import AGAIN, backoff
from ..core.events import EventName
from ..core.lease import Holder, Lease, Token
from ..core.store_requests import Acquire, Refused, Relation, rate_of
from ..core.waiter import Waiter
from ..errors import LockConflict, StoreError, StoreUnavailable
from ..key_queue.feature import QueueFeature
from ..message.copy import why_not
from ..message.header import is_unnamed, mint_nonce
from ..message.request_data import RequestData
from ..message.skipped import skipped_value
from ..on_conflict import Wait
from ..on_conflict.rule import Conflict, Decision, Outcome
from ..option_values import OnStoreError
from . import claim_changes
from .cancel_running import CancelRunningFeature
from .conflict import decide, is_early, is_overtaken
from .ending import leave_queue
from .period import Period
from .rate import RateFeature
from .replace import NewestArguments
from .requeue import requeue
from .run_state import Asking, Holding

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..run_feature import Feature
    from .run import TaskRun

#: Each option that only some tasks have: makes its feature of a run, or None if the run has none.
FEATURES: Final[Sequence[Callable[[TaskRun], Feature | None]]] = (
    Period.of,
    NewestArguments.of,
    CancelRunningFeature.of,
    RateFeature.of,
    QueueFeature.of,
)

# Refusals that end the message.
_ENDS: Final = (Outcome.SKIP, Outcome.REVOKE, Outcome.RAISE)
_NOT_RUN: Final = (
    'The call has not run; send it again, or choose another on_conflict ("wait" and "retry" wait, '
    '"skip" ends quietly).'
)
_ADVICE: Final = {
    Relation.RATE: (
        "The call has not run; send it again later. "
        'With on_conflict="queue", each call runs when the rate lets it start.'
    ),
    Relation.PAUSED: "The call has not run; send it again when the key is resumed.",
}
# The relations of a refusal that say nothing about the id of this message.
_OF_ANY_MESSAGE: Final = (
    Relation.OTHER,
    Relation.EARLIER,
    Relation.NOT_DUE,
    Relation.UNQUEUED,
    Relation.PAUSED,
    Relation.RATE,
)


def acquire(run: TaskRun) -> Any:
    """Try until the lease is granted or a refusal ends this delivery.

    Returns:
        The lease, or the value that Celery stores for the refused call.

    Raises:
        Ignore: The delivery is given up: requeued, dropped or revoked.
        LockConflict, StoreError: The task fails, according to its policy.
    """
    tries = _Tries(run)
    try:
        while True:
            try:
                ahead, reply = tries.ask()
                if isinstance(reply, Lease):
                    run.state = Holding(reply)
                    if run.features:
                        _notify_of_grant(run, tries.asking, reply)
                    return reply
                final = tries.refused(reply, ahead)
                if final is not None:
                    return _carry_out(run, final, reply)
            except StoreError as exc:
                tries.failed(exc)
    finally:
        if tries.asking.waiter is not None:
            tries.asking.waiter.leave()


class _Tries:
    """The tries of one delivery for its lease: each is :meth:`ask`, and what follows a refusal.

    Attributes:
        asking: The state of the run meanwhile.
    """

    _timeout = _waited = 0.0
    _failures = 0
    _since: float | None = None  # the time of the first try without a reply
    _is_reported = False

    def __init__(self, run: TaskRun) -> None:
        self._run = run
        self._request = request = _request_of(run)
        run.locker = locker = run.runtime.locker
        run.state = self.asking = Asking(request)
        rule = run.policy.on_conflict
        if isinstance(rule, Wait):
            self._timeout, self.asking.waiter = rule.timeout, Waiter(locker, request)
        self._options: Any = {"max_hold": max_hold_of(run), "on_lost": run.on_lost}

    def ask(self) -> tuple[Decision | None, Lease | Refused]:
        """Ask for the lease once.

        Returns:
            The decision if another call refuses (None: not needed beforehand), and the reply.
        """
        run, waiter, ahead = self._run, self.asking.waiter, None
        if waiter is not None:
            self._waited = waiter.waited()
        if waiter is not None or self._request.claim is not None:
            self._request, ahead = _decide_ahead(run, self._request, self._waited)
        self.asking.request = request = self._request
        if run.features and (refused := _refusal_before_asking(run, request)):
            return ahead, refused
        if waiter is None:
            return ahead, run.locker.acquire(request, since=self._since, **self._options)
        waits = ahead is not None and ahead.outcome is Outcome.WAIT
        return ahead, waiter.acquire(request, waits=waits, **self._options)

    def refused(self, refused: Refused, ahead: Decision | None) -> Decision | None:
        """Wait for the next try; or return the decision that ends this delivery."""
        run, self.asking.request = self._run, None
        if _is_of_another_message(run, refused):
            self._request = replace(self._request, token=_renamed(run))
            return None
        parks = refused.relation is Relation.PAUSED or is_early(refused, run.delivery)
        if parks:
            self._park(refused)
        waiter = self.asking.waiter
        try:
            decision = _decision_about(run, refused, ahead, self._waited)
        except StoreError as exc:
            if not parks:
                raise
            # The store has answered that no call may start, so on_store_error decides nothing.
            return self._not_parked(refused, exc)
        if decision is None:
            return None
        if waiter is None or decision.outcome is not Outcome.WAIT:
            return decision
        if not self._is_reported:  # only once, because the wait may be long
            _report_conflict(run, decision, refused)
            self._is_reported = True
        waiter.wait(refused, self._timeout - self._waited)
        return None

    def _park(self, refused: Refused) -> None:
        """Ask as a call of the queue of the key from now on: whatever its rule, it waits there."""
        run = self._run
        feature = QueueFeature.of_parked(run, self._request, refused)
        if feature is None:
            return
        if self.asking.waiter is not None:
            self.asking.waiter.leave()
            self.asking.waiter = None
        run.features = [*run.features, feature]
        self._request = feature.prepare(self._request)

    def _not_parked(self, refused: Refused, error: StoreError) -> Decision:
        """Requeue a call that may not start yet, since the store has not kept its message."""
        run = self._run
        # A login without the rights for queues is no outage: a retry comes back when it may start.
        if isinstance(error, StoreUnavailable) or refused.relation is Relation.PAUSED:
            run.report_outage(error, "requeued")
        decision = _decide(run, refused.relation, self._waited, refused.retry_after or 0.0)
        if isinstance(error, StoreUnavailable) and decision.copy is not None:
            # It may have kept the message. The copy asks as a call of the queue, and replaces it.
            return replace(decision, copy=replace(decision.copy, queue=run.key))
        run.features = [one for one in run.features if not one.keeps_place]
        return decision

    def failed(self, error: StoreError) -> None:
        """Requeue the message, or pause before the next try."""
        self._since = self._since or self._run.runtime.clock.now()
        self._request = _retain(self._run, self._request, error, self._failures)
        self._failures += 1


def _request_of(run: TaskRun) -> Acquire:
    """The first request of a run. Makes its features, which complete the request."""
    runtime, delivery, policy = run.runtime, run.delivery, run.policy
    token = delivery.token
    request = Acquire(
        slots=runtime.keyspace.slots(run.key, policy.limit),
        token=token,
        holder=Holder(
            task=run.task.name,
            task_id=token.task_id,
            worker=run.request.hostname or runtime.worker,
            pid=os.getpid(),
            since=runtime.clock.wall(),
            first_try=delivery.since or 0.0,
            process=runtime.process,
        ),
        ttl=policy.ttl,
        sequence=delivery.sequence,
    )
    if policy.is_plain and delivery.is_plain:
        return request
    if delivery.options and "ttl" in delivery.options:
        request.holder.ttl = policy.ttl
    if run.claim is not None:
        claim_changes.prepare(run, run.claim, request)
    found = [make(run) for make in FEATURES]
    run.features = [feature for feature in found if feature is not None]
    for feature in run.features:
        request = feature.prepare(request)
    return request


def _refusal_before_asking(run: TaskRun, request: Acquire) -> Refused | None:
    """The refusal by a feature, in place of the store; None: the store is asked."""
    answers = (feature.before_asking(request) for feature in run.features)
    return next((refused for refused in answers if refused is not None), None)


def max_hold_of(run: TaskRun) -> float | None:
    """Seconds after which renewal stops; by default ttl after the hard time limit."""
    if run.policy.max_hold is not None:
        return run.policy.max_hold
    limits = run.request.timelimit
    hard_limit = (limits and limits[0]) or run.task.time_limit
    return float(hard_limit) + run.policy.ttl if hard_limit else None


def _notify_of_grant(run: TaskRun, asking: Asking, lease: Lease) -> None:
    """Call the features after a grant.

    Raises:
        Ignore: A feature has ended the delivery.
        StoreError: The store did not answer a feature; the lease is released.
    """
    try:
        for feature in run.features:
            feature.granted(lease)
    except StoreError:
        run.state = asking  # as before the grant: the next try goes on with it
        if asking.request is not None:
            run.locker.undo(asking.request)
        raise


def _decide_ahead(run: TaskRun, request: Acquire, waited: float) -> tuple[Acquire, Decision]:
    """Decide on a conflict before the request, and not again after the reply.

    The acquire script frees the claim of a message that ends, and enqueues a waiting client, in the
    same step. So it must know beforehand what a refusal would mean.

    Returns:
        The request that says whether this message ends, and the decision.
    """
    decision = _decide(run, Relation.OTHER, waited)
    # A refused call with a place waits for its turn, with its claim.
    ends = request.claim is not None and not request.queued and decision.outcome in _ENDS
    if request.frees_claim is not ends:
        request = replace(request, frees_claim=ends)
    return request, decision


def _decision_about(
    run: TaskRun, refused: Refused, ahead: Decision | None, waited: float
) -> Decision | None:
    """The decision about a refusal; None: the run asks again at once."""
    if any(feature.refused(refused) for feature in run.features):
        return None
    if ahead is None or refused.relation is not Relation.OTHER:
        return _decide(run, refused.relation, waited, refused.retry_after or 0.0)
    return ahead


def _decide(run: TaskRun, relation: Relation, waited: float, due_in: float = 0.0) -> Decision:
    no_requeue, wall = why_not(run.task, run.request), run.runtime.clock.wall()
    conflict = Conflict(run.delivery, no_requeue, wall, waited, due_in)
    return decide(relation, run.policy.on_conflict, conflict)


def _retain(run: TaskRun, request: Acquire, error: StoreError, failures: int) -> Acquire:
    """Requeue the message after a failure of the store, or pause if the broker fails too.

    Returns:
        The next request.
    """
    rule = run.policy.on_store_error
    retries = rule is OnStoreError.RETRY and not run.eager
    requeues = retries and why_not(run.task, run.request) is None
    if not request.queued:
        may_count = isinstance(error, StoreUnavailable) and error.was_sent
        if may_count and rate_of(request) is not None:
            # If this was granted, it has counted as a start, and that must not refuse the copy.
            run.delivery = replace(run.delivery, started=True)
    else:  # the copy must tell the store that no body has begun, if this was granted
        asked = (*run.delivery.asked, request.token.nonce)
        run.delivery = replace(run.delivery, asked=asked)
    run.report_outage(error, "requeued" if requeues else "retried" if retries else str(rule))
    if not retries:
        raise error
    if requeues:
        requeue(run, run.delivery, AGAIN, "store", run.claim, retain=False)
    # Neither the store nor the broker answers. An early-acknowledged message exists only in
    # this process: it is retained until one of them does.
    run.runtime.clock.sleep(backoff(*AGAIN, failures))
    # The locker has released that token without a reply. If the release arrives late, it must
    # not free the grant of the next try, so a released token is never used for another acquire.
    return request.again(mint_nonce())


def _is_of_another_message(run: TaskRun, refused: Refused) -> bool:
    """Whether the record with this task id in the store belongs to another message.

    Two messages that were sent by name, or whose headers were removed, may have the same task
    id without being copies of each other.
    """
    knows_id = (
        refused.relation not in _OF_ANY_MESSAGE
        or refused.holder.task_id == run.delivery.token.task_id
    )
    return knows_id and is_unnamed(run.request, driver_of(run.task.app))


def _renamed(run: TaskRun) -> Token:
    """Give the message a unique call name, which its retries and copies keep; the new token."""
    run.delivery = run.delivery.named()
    run.rewrite_header()
    data = RequestData.of(run.request)
    data.arrival = data.arrival._replace(is_unnamed=False)
    return run.delivery.token


def _carry_out(run: TaskRun, decision: Decision, refused: Refused) -> Any:
    """Carry out the decision; return the value of a skipped call."""
    holder, outcome = refused.known_holder, decision.outcome
    if outcome is Outcome.DROP:
        run.emit(EventName.DROPPED, reason=decision.reason)
        if refused.relation is Relation.DONE:
            claim_changes.free_if_queued(run)
        raise Ignore
    _report_conflict(run, decision, refused)
    if run.delivery.queue is not None and outcome is not Outcome.REQUEUED:
        leave_queue(run, states.FAILURE, None)  # a period has refused it, in its turn
    if outcome is Outcome.SKIP:
        phase = refused.record.phase if refused.record else None
        return skipped_value(run.task.name, run.key, holder, phase, refused.retry_after)
    if outcome is Outcome.REVOKE:
        run.revoke(refused.explain(run.key, run.policy.limit))
        raise Ignore
    if (copy := decision.copy) is not None:
        claim = run.claim if decision.queues_claim else None
        if is_overtaken(run.delivery, refused.record, run.runtime.clock.wall()):
            copy = replace(copy, tries=max(0, copy.tries - 1))
        requeue(run, copy, decision.pace, decision.reason, claim, exact=decision.is_exact)
    if refused.relation is Relation.RATE:
        run.free_claim()  # the script knew what another holder would mean, and not for how long
    advice = _ADVICE.get(refused.relation, _NOT_RUN)
    raise LockConflict(
        f"{refused.explain(run.key, run.policy.limit)}, and {decision.reason}. {advice}",
        run.key,
        refused.holder_for_error(),
        refused.retry_after,
    )


def _report_conflict(run: TaskRun, decision: Decision, refused: Refused) -> None:
    data: dict[str, Any] = {"outcome": str(decision.outcome), "reason": decision.reason}
    if refused.relation is Relation.RATE:
        data |= {"reason": "rate", "retry_after": round(refused.due_in, 3)}
    if run.delivery.tries or run.delivery.since is not None:
        data["again"] = True
    run.emit(EventName.CONFLICT, holder=refused.known_holder, **data)
