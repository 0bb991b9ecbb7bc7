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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from celery import signals
from celery.exceptions import Ignore

from celery_singleton_lock.arrival import AGAIN, Decision, Outcome, decide
from celery_singleton_lock.case import Case
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.core.lease import Holder, Lease
from celery_singleton_lock.core.policy import OnStoreError
from celery_singleton_lock.core.store import Acquire, Refused
from celery_singleton_lock.errors import LockConflict, StoreError
from celery_singleton_lock.put_back import backoff, polling_pause
from celery_singleton_lock.settlement import stores_result
from celery_singleton_lock.skipped import skipped_value
from celery_singleton_lock.tenure import Tenure, held_leases

__all__ = ["Execution"]

_NOT_RUN: Final = (
    'The call has not run; send it again, or choose another on_conflict ("retry" waits, "skip" '
    "ends quietly)."
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
        except StoreError:
            if self._case.policy.on_store_error is OnStoreError.RUN:
                return body()
            raise
        return self._tenure.run(answer, body) if isinstance(answer, Lease) else answer

    def settle(self, state: str | None, retval: Any) -> None:
        """The task has ended; see :meth:`Tenure.settle`."""
        self._tenure.settle(state, retval)

    def _reentered(self) -> bool:
        """Whether a calling task on this thread holds the key: an eager call, or a subtask's."""
        runtime, key = self._case.runtime, self._case.key
        return any(
            runtime.keyspace.is_slot_of(key, lease.key) and not lease.lost
            for lease in held_leases.get()
        )

    def _acquire(self) -> Any:
        """Ask until there is a lease, or an answer that ends this delivery."""
        case = self._case
        clock = case.runtime.clock
        call = self._call()
        arrived_at = clock.now()
        tries = 0
        while True:
            pause = polling_pause(tries)
            try:
                reply = self._tenure.acquire(call)
                if isinstance(reply, Lease):
                    return reply
                decision = decide(
                    reply,
                    case.delivery,
                    case.policy.on_conflict,
                    can_put_back=not case.request.is_eager,
                    wall=clock.wall(),
                    waited=clock.now() - arrived_at,
                )
                if decision.outcome is not Outcome.WAIT:
                    return self._carry_out(decision, reply)
            except StoreError as exc:
                case.tell(EventName.STORE_FAILED, error=str(exc))
                if case.policy.on_store_error is not OnStoreError.RETRY or case.request.is_eager:
                    raise
                case.try_to_put_back(case.delivery, AGAIN, "store")
                # Neither store nor broker answers. An early-acknowledged message exists nowhere but
                # here: hold on to it until one of them does.
                pause = backoff(AGAIN.first, AGAIN.longest, tries)
            clock.sleep(pause)
            tries += 1

    def _call(self) -> Acquire:
        case = self._case
        return Acquire(
            slots=case.runtime.keyspace.slots(case.key, case.policy.limit),
            token=case.delivery.token,
            holder=Holder(
                task=case.task.name,
                task_id=str(case.request.id),
                worker=case.request.hostname or case.runtime.worker,
                pid=os.getpid(),
                since=case.runtime.clock.wall(),
            ),
            ttl=case.policy.ttl,
            sequence=case.delivery.sequence,
        )

    def _carry_out(self, decision: Decision, refused: Refused) -> Any:
        case, holder, outcome = self._case, refused.holder, decision.outcome
        if outcome is Outcome.DROP:
            case.tell(EventName.DROPPED, reason=decision.reason)
            raise Ignore
        case.tell(EventName.CONFLICT, holder=holder, outcome=str(outcome), reason=decision.reason)
        if outcome is Outcome.PUT_BACK:
            case.put_back(decision.delivery, decision.pace, decision.reason)
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

    def _revoke(self, reason: str) -> None:
        task, request = self._case.task, self._case.request
        task.backend.mark_as_revoked(
            request.id, reason, request=request, store_result=stores_result(task, request)
        )
        signals.task_revoked.send(
            sender=task, request=request, terminated=False, signum=None, expired=False
        )
