"""One execution of a singleton task: acquire, run the body, release.

Promises
    The body runs under a lease, or not at all (but for ``on_store_error="run"`` and keys that are
    None). A message that is given up was put back before, or its work is done, or was never begun
    and its policy says skip. Every lease is settled on every exit that leaves Python running.

Where each step happens::

    __call__        acquire --refused--> drop | put back | on_conflict
                      | granted
                    body --interrupted--> put back | LeaseLost
                      | returned or raised
                    more to trigger? --yes--> release early, marker "finishing"
    result stored
    after_return    release, marker "done"          (SUCCESS, FAILURE, REVOKED)
    task_postrun    release what is still held      (Retry, Ignore, Reject, SystemExit ...)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from celery import signals, states
from celery.exceptions import Ignore, TaskRevokedError

from celery_singleton_lock.celery_compat import driver_of
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.core.lease import Holder, Lease
from celery_singleton_lock.core.store import Acquire, Refused, Relation
from celery_singleton_lock.errors import LockConflict, StoreError
from celery_singleton_lock.policy import ConflictAction, OnStoreError
from celery_singleton_lock.publish.header import is_unnamed, mint_nonce
from celery_singleton_lock.publish.skipped import skipped_value
from celery_singleton_lock.task.case import Case
from celery_singleton_lock.task.conflict import AGAIN, Decision, Outcome, decide
from celery_singleton_lock.task.outcome import stores_result
from celery_singleton_lock.task.put_back import backoff
from celery_singleton_lock.task.tenure import Tenure, held_leases
from celery_singleton_lock.task.waiter import Waiter

__all__ = ["Execution"]

_OTHER: Final = Refused(relation=Relation.OTHER)
# What a conflict leads to that ends the message.
_ENDS: Final = (Outcome.SKIP, Outcome.REVOKE, Outcome.RAISE)
_NOT_RUN: Final = (
    'The call has not run; send it again, or choose another on_conflict ("wait" and "retry" wait, '
    '"skip" ends quietly).'
)


class Execution:
    """From the arrival of a delivery at its body to the settling of its lease."""

    def __init__(
        self, task: Any, request: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self._case = Case.of(task, request, args, kwargs)
        self._tenure = Tenure(self._case)
        #: Whether the body was entered: a call of the task from then on is a function call.
        self.entered = False
        # Whether no answer of the store has decided about the message's claim, so that its end has
        # to: there was no lease to run under, or something struck while it was asked for.
        self._claim_is_open = self._case.claim is not None
        self._settled = False

    def run(self, body: Callable[[], Any]) -> Any:
        """Acquire and run ``body``, or what the policy says instead; Celery gets what it returns.

        Raises:
            Ignore: This delivery is given up: put back, dropped or revoked.
            LockConflict, LeaseLost, StoreError: As the policy says; the task's FAILURE.
        """
        if self._case.rest is None or self._reentered():
            return body()
        try:
            answer = self._acquire()
        except (Ignore, LockConflict):
            self._claim_is_open = False  # put back, left to a twin, or freed by the refusal
            raise
        except StoreError:
            if self._case.policy.on_store_error is OnStoreError.RUN:
                return body()
            raise
        self._claim_is_open = False  # its lease's, or freed by the refusal
        return self._tenure.run(answer, body) if isinstance(answer, Lease) else answer

    def settle(self, state: str | None, retval: Any) -> None:
        """The task has ended; see :meth:`Tenure.settle`."""
        if self._settled:
            return  # by after_return, and this is task_postrun
        # SystemExit and the like strike after the body too, while Celery sends the callbacks: it
        # has called the state SUCCESS by then, but the message comes back.
        leaving = sys.exc_info()[1]
        if leaving is not None and not isinstance(leaving, Exception):
            state = None
        self._tenure.settle(state, retval)
        if self._claim_is_open:
            self._claim_is_open = False
            self._case.settle_claim(state, retval)
        self._settled = True

    def let_go(self) -> None:
        """The last step: forget the request, which holds this execution.

        Else the two, and all that was made for this task, would be a cycle: its arguments would
        stay until the collector comes, and each task's objects would lie in memory that no task
        before it has warmed up.
        """
        del self._case, self._tenure

    def _reentered(self) -> bool:
        """Whether a calling task on this thread holds the key: an eager call, or a subtask's."""
        held = held_leases.get()
        if not held:
            return False
        keyspace, key = self._case.runtime.keyspace, self._case.key
        return any(keyspace.is_slot_of(key, lease.key) and lease.held_here for lease in held)

    def _acquire(self) -> Any:
        """Ask until there is a lease, or an answer that ends this delivery."""
        call = self._call()
        if self._case.policy.on_conflict.action is not ConflictAction.WAIT:
            return self._ask(call, None)
        waiter = Waiter(self._case.runtime.locker, call, self._tenure.acquire)
        try:
            return self._ask(call, waiter)
        finally:
            waiter.leave()

    def _ask(self, call: Acquire, waiter: Waiter | None) -> Any:
        case = self._case
        clock = case.runtime.clock
        arrived_at, waited = clock.now(), 0.0
        tries, told = 0, False
        while True:
            # Of before the store is asked: where a refusal ends the message, the script that
            # refuses frees its claim, without another round trip. It must be decided alike after.
            wall = clock.wall()
            try:
                if call.claim is not None:
                    ends = self._decide(_OTHER, wall, waited).outcome in _ENDS
                    call = replace(call, frees_claim=ends)
                if waiter is None:
                    reply = self._tenure.acquire(call)
                else:
                    waits = self._decide(_OTHER, wall, waited).outcome is Outcome.WAIT
                    reply = waiter.ask(call, waits=waits)
                if isinstance(reply, Lease):
                    return reply
                if self._is_of_another_message(reply):
                    case.rename()
                    call = replace(call, token=case.delivery.token)
                    continue
                decision = self._decide(reply, wall, waited)
                if waiter is None or decision.outcome is not Outcome.WAIT:
                    return self._carry_out(decision, reply)
                if not told:  # once: it may take long, and somebody asks why it doesn't run
                    self._tell_conflict(decision, reply)
                    told = True
                waiter.wait(reply, case.policy.on_conflict.timeout - waited)
            except StoreError as exc:
                case.tell(EventName.STORE_FAILED, error=str(exc))
                if case.policy.on_store_error is not OnStoreError.RETRY or case.request.is_eager:
                    raise
                if case.no_put_back is None:
                    case.try_to_put_back(case.delivery, AGAIN, "store")
                # Neither store nor broker answers. An early-acknowledged message exists nowhere but
                # here: hold on to it until one of them does.
                clock.sleep(backoff(AGAIN.first, AGAIN.longest, tries))
                tries += 1
                # That token was released unheard. Should this come late, it must not free a grant
                # to the next try: a token that was released is never acquired with again.
                call = replace(call, token=replace(call.token, nonce=mint_nonce()))
            waited = clock.now() - arrived_at

    def _is_of_another_message(self, refused: Refused) -> bool:
        """Whether the store has the task id from another message than this one.

        Two messages sent by name may have the same task id, and so may a message whose header was
        removed: none of them is a copy of another.
        """
        knows_id = (
            refused.relation not in (Relation.OTHER, Relation.EARLIER)
            or refused.holder.task_id == self._case.delivery.token.task_id
        )
        case = self._case
        return knows_id and is_unnamed(case.request, driver_of(case.task.app))

    def _decide(self, refused: Refused, wall: float, waited: float) -> Decision:
        case = self._case
        return decide(
            refused,
            case.delivery,
            case.policy.on_conflict,
            no_put_back=case.no_put_back,
            wall=wall,
            waited=waited,
        )

    def _call(self) -> Acquire:
        case = self._case
        runtime, request, delivery = case.runtime, case.request, case.delivery
        claim, ttl = case.claim, case.policy.ttl
        return Acquire(
            slots=runtime.keyspace.slots(case.key, case.policy.limit),
            token=delivery.token,
            holder=Holder(
                task=case.task.name,
                task_id=delivery.token.task_id,
                worker=request.hostname or runtime.worker,
                pid=os.getpid(),
                since=runtime.clock.wall(),
            ),
            ttl=ttl,
            sequence=delivery.sequence,
            claim=None if claim is None else claim.granted(ttl),
            yields=claim is not None and claim.yields and not delivery.started,
        )

    def _carry_out(self, decision: Decision, refused: Refused) -> Any:
        case, holder, outcome = self._case, refused.holder, decision.outcome
        if outcome is Outcome.DROP:
            case.tell(EventName.DROPPED, reason=decision.reason)
            if refused.relation is Relation.DONE:
                case.drop_claim()
            raise Ignore
        self._tell_conflict(decision, refused)
        if outcome is Outcome.PUT_BACK:
            case.put_back(
                decision.delivery,
                decision.pace,
                decision.reason,
                queues_claim=decision.queues_claim,
            )
        if outcome is Outcome.SKIP:
            return skipped_value(case.task.name, case.key, holder)
        if outcome is Outcome.REVOKE:
            self._revoke(f"{case.key} is held by {holder}")
            raise Ignore
        raise LockConflict(
            f"{case.key!r} is held by {holder}, and {decision.reason}. {_NOT_RUN}",
            case.key,
            holder.for_error(),
        )

    def _tell_conflict(self, decision: Decision, refused: Refused) -> None:
        outcome, reason = str(decision.outcome), decision.reason
        self._case.tell(EventName.CONFLICT, holder=refused.holder, outcome=outcome, reason=reason)

    def _revoke(self, reason: str) -> None:
        task, request = self._case.task, self._case.request
        # Not mark_as_revoked(): it leaves the later links of a chain PENDING for ever, so a group
        # of chains, which waits for the last links, would never end.
        task.backend.mark_as_failure(
            request.id,
            TaskRevokedError(reason),
            request=request,
            store_result=stores_result(task, request),
            call_errbacks=False,
            state=states.REVOKED,
        )
        signals.task_revoked.send(
            sender=task, request=request, terminated=False, signum=None, expired=False
        )
