"""One execution of a singleton task: acquire, run the body, release.

Promises
    The body runs under a lease, or not at all (but for ``on_store_error="run"`` and keys that are
    None). A message that is given up was put back before, or its work is done, or was never begun
    and its policy says skip. Every lease is settled on every exit that leaves Python running.

States, and where each step happens (DESIGN: one message, from ``.delay()`` to release)::

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

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Final, NoReturn

from celery import signals
from celery.exceptions import Ignore, Reject, Retry

from celery_singleton_lock.arrival import AGAIN, Decision, Outcome, Pace, decide
from celery_singleton_lock.core.events import Event, EventName
from celery_singleton_lock.core.keeper import MAX_TIMEOUT
from celery_singleton_lock.core.lease import Holder, Kind, Lease, LossReason
from celery_singleton_lock.core.policy import OnLost, OnStoreError, Policy
from celery_singleton_lock.core.store import (
    Acquire,
    MarkerState,
    Refused,
    Release,
    Released,
)
from celery_singleton_lock.delivery import Delivery
from celery_singleton_lock.errors import LeaseLost, LockConflict, StoreError
from celery_singleton_lock.interrupt import Body, LeaseInterrupt
from celery_singleton_lock.put_back import backoff, put_back
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.settlement import fail_with, give_back, is_done, reserve
from celery_singleton_lock.skipped import skipped_value

__all__ = ["Execution", "held_leases"]

logger = logging.getLogger("celery_singleton_lock")

#: Leases of the running thread, greenlet or coroutine, outermost first.
held_leases: ContextVar[tuple[Lease, ...]] = ContextVar("singleton_held_leases", default=())

# wait: a poll is one round trip.
_POLL: Final = 0.05
_POLL_MAX: Final = 0.5
# A body that loses its lease this often has a store that can't keep one.
_MAX_LOSSES: Final = 3


class Execution:
    """From the arrival of a delivery at its body to the settling of its lease."""

    def __init__(
        self, task: Any, request: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self.task = task
        self.request = request
        eager = bool(request.is_eager and task.app.conf.task_always_eager)
        self.runtime = Runtime.of(task.app, eager=eager)
        self.delivery = Delivery.of(request)
        self.policy: Policy = task.singleton_policy(self.delivery.options, eager=eager)
        self.rest = task.singleton_key_maker(args, kwargs)
        self.key = self.runtime.keyspace.lock(self.policy.scope or task.name, self.rest or "")
        self.lease: Lease | None = None
        self._asked: Acquire | None = None  # an acquire whose lease is not in our hands yet
        self._released = False
        self._body = Body()

    # --- before the body -----------------------------------------------------------------------

    def run(self, body: Callable[[], Any]) -> Any:
        """Acquire and run ``body``, or what the policy says instead; Celery gets what it returns.

        Raises:
            Ignore: This delivery is given up: put back, dropped or revoked.
            LockConflict, LeaseLost, StoreError: As the policy says; the task's FAILURE.
        """
        if self.rest is None or self._reentered():
            return body()
        try:
            outcome = self._acquire()
        except StoreError:
            if self.policy.on_store_error is OnStoreError.RUN:
                return body()
            raise
        if self.lease is None:
            return outcome
        return self._run_body(self.lease, body)

    def _reentered(self) -> bool:
        """Whether a calling task on this thread holds the key: an eager call, or a subtask's."""
        return any(
            lease.key.partition("#")[0] == self.key and not lease.lost
            for lease in held_leases.get()
        )

    def _acquire(self) -> Any:
        """Ask until there is a lease, or an answer that ends this delivery."""
        call = Acquire(
            slots=self.runtime.keyspace.slots(self.key, self.policy.limit),
            token=self.delivery.token,
            holder=Holder(
                task=self.task.name,
                task_id=str(self.request.id),
                worker=self.request.hostname or self.runtime.worker,
                pid=os.getpid(),
                since=self.runtime.clock.wall(),
            ),
            ttl=self.policy.ttl,
            sequence=self.delivery.sequence,
        )
        arrived_at = self.runtime.clock.now()
        tries = 0
        while True:
            pause = backoff(_POLL, _POLL_MAX, tries)
            try:
                self._asked = call
                reply = self.runtime.locker.acquire(
                    call, max_hold=self._max_hold(), on_lost=self._on_lost
                )
                self._asked = None
                if isinstance(reply, Lease):
                    self.lease = reply
                    return None
                decision = decide(
                    reply,
                    self.delivery,
                    self.policy.on_conflict,
                    can_put_back=not self.request.is_eager,
                    wall=self.runtime.clock.wall(),
                    waited=self.runtime.clock.now() - arrived_at,
                )
                if decision.outcome is not Outcome.WAIT:
                    return self._carry_out(decision, reply)
            except StoreError as exc:
                self._tell(EventName.STORE_FAILED, error=str(exc))
                if self.policy.on_store_error is not OnStoreError.RETRY or self.request.is_eager:
                    raise
                self._put_back_once(self.delivery, AGAIN, "store")
                # Neither store nor broker answers. An early-acknowledged message exists nowhere but
                # here: hold on to it until one of them does.
                pause = backoff(AGAIN.first, AGAIN.longest, tries)
            self.runtime.clock.sleep(pause)
            tries += 1

    def _max_hold(self) -> float | None:
        hard_limit = (self.request.timelimit or (None,))[0] or self.task.time_limit
        if self.policy.max_hold is None and hard_limit:
            return float(hard_limit) + self.policy.ttl
        return self.policy.max_hold

    def _carry_out(self, decision: Decision, refused: Refused) -> Any:
        holder = refused.holder
        outcome = decision.outcome
        if outcome is Outcome.DROP:
            self._tell(EventName.DROPPED, reason=decision.reason)
            raise Ignore
        self._tell(EventName.CONFLICT, holder=holder, outcome=str(outcome), reason=decision.reason)
        if outcome is Outcome.PUT_BACK:
            self._put_back(decision.delivery, decision.pace, decision.reason)
        if outcome is Outcome.SKIP:
            return skipped_value(self.task.name, self.key, holder)
        if outcome is Outcome.REVOKE:
            self._revoke(f"{self.key} is held by {holder}")
            raise Ignore
        raise LockConflict(
            f"{self.key!r} is held by {holder}, and {decision.reason}. The call has not run; send "
            'it again, or choose another on_conflict ("retry" waits, "skip" ends quietly).',
            self.key,
            holder.for_error(),
        )

    def _revoke(self, reason: str) -> None:
        self.task.backend.mark_as_revoked(
            self.request.id,
            reason,
            request=self.request,
            store_result=not (self.request.ignore_result or self.task.ignore_result),
        )
        signals.task_revoked.send(
            sender=self.task, request=self.request, terminated=False, signum=None, expired=False
        )

    def _put_back(self, delivery: Delivery, pace: Pace, reason: str) -> NoReturn:
        """Put back and give this delivery up; holds on to it until the broker has the copy."""
        tries = 0
        while True:
            self._put_back_once(delivery, pace, reason)
            self.runtime.clock.sleep(backoff(AGAIN.first, AGAIN.longest, tries))
            tries += 1

    def _put_back_once(self, delivery: Delivery, pace: Pace, reason: str) -> None:
        """Raises Ignore once the broker has the copy; returns if it couldn't be published."""
        try:
            put_back(
                self.task,
                self.request,
                replace(delivery, tries=delivery.tries + 1),
                self.key,
                runtime=self.runtime,
                delay=backoff(pace.first, pace.longest, delivery.tries),
                reason=reason,
            )
        except Exception:
            logger.warning(
                "singleton: %s[%s] can't be put back now; it is held here until the broker or the "
                "store answers",
                self.task.name,
                self.request.id,
                exc_info=True,
            )
            return
        raise Ignore

    # --- the body --------------------------------------------------------------------------------

    def _run_body(self, lease: Lease, body: Callable[[], Any]) -> Any:
        self.task.singleton_started(self.request)
        reset = held_leases.set((*held_leases.get(), lease))
        try:
            result = self._body.run(body)
        except LeaseInterrupt:
            if not self._body.fired:
                raise  # meant for a task that called this one
            return self._interrupted(lease)
        except (Ignore, Reject, Retry):
            raise  # settled in task_postrun, which knows more
        except LeaseLost:
            if not lease.lost:
                raise  # of another lease, a hold() in the body
            return self._interrupted(lease)  # its own check() was faster than the keeper
        except Exception:
            self._ended(lease, failed=True)
            raise
        finally:
            held_leases.reset(reset)
        self._ended(lease, failed=False)
        return result

    def _on_lost(self, lease: Lease) -> None:
        """Keeper's thread."""
        if self._outcome_of_loss() is not OnLost.CONTINUE:
            self._body.interrupt()

    def _outcome_of_loss(self) -> OnLost:
        if self.policy.on_lost is not None:
            return self.policy.on_lost
        return OnLost.RETRY if self.task.acks_late else OnLost.FAIL

    def _ended(self, lease: Lease, *, failed: bool) -> None:
        """The body returned, or raised what will be its FAILURE."""
        request = self.request
        links = request.errbacks if failed else request.callbacks or request.chain
        triggers_more = links or request.chord
        if not triggers_more and not lease.lost:
            return  # released once the result is stored
        # What the message triggers next must not meet this lease; but until it is sent, the work is
        # not done: a marker that expires keeps twins away meanwhile.
        marker = MarkerState.FINISHING if self.task.acks_late else None
        call = give_back(lease, self.policy.min_hold, marker, self.policy.ttl)
        reply = self._release(lease, call)
        self._yield_to_twin(reply)

    def _yield_to_twin(self, reply: Released | None) -> None:
        """If its own twin has the lease, or has finished, the result is the twin's to write."""
        if reply in (Released.TWIN, Released.DONE):
            self.lease = None  # nothing to settle: the attempt is not done, or not by this run
            self._tell(EventName.DROPPED, reason="lost to its own twin")
            raise Ignore

    def _interrupted(self, lease: Lease) -> Any:
        """The lease was lost and the body ended because of it."""
        if self._is_being_killed(lease):
            raise Ignore  # the parent has told the outcome: a hard time limit
        reply = self._release(lease, Release(keys=(lease.key,), token=lease.token))
        self._yield_to_twin(reply)
        losses = self.delivery.losses + 1
        if (
            self._outcome_of_loss() is OnLost.RETRY
            and losses <= _MAX_LOSSES
            and not self.request.is_eager
        ):
            self.lease = None  # nothing to settle: the copy is the same attempt, and not done
            copy = replace(self.delivery, started=True, losses=losses, tries=0)
            self._put_back(copy, AGAIN, "lease lost")
        return fail_with(self.task, lease.lost_error())

    def _is_being_killed(self, lease: Lease) -> bool:
        """Whether the worker parent took the key, in the 0.1 s between TERM and KILL."""
        if lease.loss is None or lease.loss.reason is not LossReason.REPLACED:
            return False
        try:
            record = self.runtime.store.inspect(lease.key)
        except StoreError:
            return False
        return record is not None and record.kind is Kind.DYING and record.token == str(lease.token)

    # --- after the body --------------------------------------------------------------------------

    def settle(self, state: str | None, retval: Any) -> None:
        """Give back what is still held, as the outcome says. Runs once; never raises.

        Args:
            state: Celery's state of the task; None when the body was left by SystemExit or the
                like.
            retval: Its result, or the exception that ended it.
        """
        if self._asked is not None:
            asked, self._asked = self._asked, None
            self.runtime.locker.forget(asked)
        lease, self.lease = self.lease, None
        if lease is None:
            return
        done = is_done(self.task, state, retval)
        marker = MarkerState.DONE if done and self.task.acks_late else None
        if not self._released:
            call = self._release_call(lease, state, retval, marker)
            self._release(lease, call)
        elif marker is not None:
            self._mark_done(lease)

    def _release_call(
        self, lease: Lease, state: str | None, retval: Any, marker: MarkerState | None
    ) -> Release:
        if not is_done(self.task, state, retval):
            return Release(keys=(lease.key,), token=lease.token)
        call = give_back(lease, self.policy.min_hold, marker, self._marker_ttl())
        if isinstance(retval, Retry) and self.policy.hold_on_retry and self._same_key(retval):
            return reserve(call, retval, self.policy.ttl, self.task.app.now())
        return call

    def _same_key(self, retry: Retry) -> bool:
        """Whether the next attempt has this key; ``self.retry(args=...)`` may have changed it."""
        signature = getattr(retry, "sig", None)
        if signature is None:
            return True
        try:
            rest = self.task.singleton_key_maker(signature.args, signature.kwargs)
        except (TypeError, ValueError):
            return False
        return bool(rest == self.rest)

    def _mark_done(self, lease: Lease) -> None:
        try:
            self.runtime.store.mark(
                lease.key,
                lease.token,
                MarkerState.DONE,
                self.delivery.sequence,
                self._marker_ttl(),
                timeout=MAX_TIMEOUT,
            )
        except StoreError as exc:
            self._tell(EventName.RELEASE_FAILED, error=str(exc))

    def _release(self, lease: Lease, call: Release) -> Released | None:
        self._released = True
        return self.runtime.locker.release(lease, call)

    def _marker_ttl(self) -> float:
        # An eager task has no message that could come twice.
        return 0.001 if self.request.is_eager else self.runtime.settings.marker_ttl

    def _tell(self, name: EventName, *, holder: Holder | None = None, **data: Any) -> None:
        self.runtime.events.emit(
            Event(
                name=name,
                key=self.key,
                task=self.task.name,
                task_id=str(self.request.id),
                holder=holder or Holder(),
                data=data,
            )
        )
