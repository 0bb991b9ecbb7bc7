"""A lease in use: the body that runs under it, and what becomes of the key when that ends.

Promises
    Whatever way the body ends, the lease is given back once: nothing in here leaves it with the
    heartbeat. A message is marked as done only after its result is stored and its callbacks are
    sent.

States::

    IDLE -> ASKED --granted--> HELD --body ended--> (early) RELEASED --settle--> SETTLED
              |                 +----------------------settle--------------------^  ^
              +--refused--> IDLE       outcome unknown: settle releases by token ---+
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Final

from celery.exceptions import Ignore, Reject, Retry

from celery_singleton_lock.celery_compat import fail_as_body
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.core.heartbeat import MAX_TIMEOUT
from celery_singleton_lock.core.lease import Lease
from celery_singleton_lock.core.store import (
    Acquire,
    ClaimChange,
    MarkerState,
    Refused,
    Release,
    Released,
)
from celery_singleton_lock.errors import LeaseLost, StoreError
from celery_singleton_lock.policy import OnLost
from celery_singleton_lock.task.case import Case
from celery_singleton_lock.task.conflict import AGAIN
from celery_singleton_lock.task.interrupt import LeaseInterrupt, body_class
from celery_singleton_lock.task.outcome import (
    give_back,
    is_done,
    reserve,
)

__all__ = ["HeldLeases", "Tenure", "and_held", "held_leases"]

logger = logging.getLogger("celery_singleton_lock")


@dataclass(slots=True, eq=False)
class HeldLeases:
    """A lease, and those around it: of one thread, greenlet or coroutine.

    Not a tuple: of ten thousand blocks within each other, each would have one of its own.
    """

    innermost: Lease
    others: HeldLeases | None

    def __iter__(self) -> Iterator[Lease]:
        found: HeldLeases | None = self
        while found is not None:
            yield found.innermost
            found = found.others


#: What is held where this is asked; empty: nothing is.
held_leases: ContextVar[HeldLeases | tuple[()]] = ContextVar("singleton_held_leases", default=())


def and_held(lease: Lease) -> HeldLeases:
    """What is held here, once ``lease`` is too."""
    return HeldLeases(lease, held_leases.get() or None)


_LEFT: Final = "lost to its own twin"
# A body that loses its lease this often has a store that can't keep one.
_MAX_LOSSES: Final = 3


class _State(Enum):
    IDLE = auto()
    ASKED = auto()
    HELD = auto()
    RELEASED = auto()
    SETTLED = auto()


class Tenure:
    """From the request for a lease to its settlement, in one execution."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._body = body_class()()
        self._state = _State.IDLE
        self._call: Acquire | None = None
        self._lease: Lease | None = None

    def acquire(self, call: Acquire) -> Lease | Refused:
        """Ask for the lease; :meth:`settle` gives back what an interrupted call was granted.

        Raises:
            StoreError: As of the locker.
        """
        self._call, self._state = call, _State.ASKED
        reply = self._case.runtime.locker.acquire(
            call, max_hold=self._max_hold(), on_lost=self._on_lost
        )
        if isinstance(reply, Lease):
            self._lease, self._state = reply, _State.HELD
        else:
            self._state = _State.IDLE
        return reply

    def run(self, lease: Lease, body: Callable[[], Any]) -> Any:
        """Run ``body`` under ``lease``.

        Raises:
            Ignore: The lease was lost, and the message put back or its twin has finished it.
            LeaseLost: It was lost, and the policy says fail.
            Exception: What the body raised.
        """
        reset = held_leases.set(and_held(lease))
        try:
            result = self._body.run(body)
        except LeaseInterrupt:
            if not self._body.fired:
                raise  # meant for a task that called this one
            return self._interrupted(lease)
        except BaseExceptionGroup as group:
            if lease.lost and _tells_of_loss(group, interrupted=self._body.fired):
                return self._interrupted(lease)
            if isinstance(group, Exception):
                self._ended(lease, failed=True)
            raise
        except (Ignore, Reject):
            raise  # settled in task_postrun, which knows more
        except Retry:
            if lease.lost:
                self._yield_to_twin(self._release(lease, _plainly(lease)))
            raise
        except LeaseLost:
            if lease.lost:
                return self._interrupted(lease)  # its own check() was faster than the heartbeat
            self._ended(lease, failed=True)  # of another lease, a hold() in the body
            raise
        except Exception as error:
            if lease.lost and self._body.fired and _follows_interruption(error):
                return self._interrupted(lease)
            self._ended(lease, failed=True)
            raise
        finally:
            held_leases.reset(reset)
        self._ended(lease, failed=False)
        return result

    def settle(self, state: str | None, retval: Any) -> None:
        """Give back what is still held, as the outcome says. Once; raises what strikes meanwhile.

        Args:
            state: Celery's state of the task; None when SystemExit or the like ends it.
            retval: Its result, or the exception that ended it.
        """
        if self._state is _State.SETTLED:
            return  # when it was put back, or left to its twin
        try:
            self._settle(state, retval)
        except BaseException:
            # A soft time limit, or SIGTERM: task_postrun settles what after_return could not. If
            # this is task_postrun, nobody does, and what is renewed no more ends with its ttl.
            if self._lease is not None:
                self._case.runtime.heartbeat.discard(self._lease)
            raise
        self._state = _State.SETTLED

    def _settle(self, state: str | None, retval: Any) -> None:
        was = self._state
        if was is _State.ASKED and self._call is not None:
            self._case.runtime.locker.forget(self._call)
        lease = self._lease
        if lease is None or not (was is _State.HELD or was is _State.RELEASED):
            return
        done = is_done(self._case.task, state, retval)
        if was is _State.RELEASED:
            if done and self._case.acks_late:
                self._mark_done(lease)
            return
        try:
            call = self._final_release(lease, state, retval, done)
        except Exception:
            # Whatever it is, a lease that nobody gives back would be renewed for ever.
            logger.exception("singleton: %s is released plainly", lease.key)
            call = replace(_plainly(lease), claim=self._freed_claim())
        locker = self._case.runtime.locker
        if state is None or call.marker is not None:
            # This process may be about to end; or the message is acknowledged next, and nothing but
            # the marker keeps its twins from running once more.
            locker.release(lease, call)
        else:
            # Nothing that follows asks what the store says: the result is stored, and what Celery
            # sends now, it would after any reply.
            locker.give_back(lease, call)

    def _max_hold(self) -> float | None:
        case = self._case
        hard_limit = (case.request.timelimit or (None,))[0] or case.task.time_limit
        if case.policy.max_hold is None and hard_limit:
            return float(hard_limit) + case.policy.ttl
        return case.policy.max_hold

    # --- while the body runs ---------------------------------------------------------------------

    def _on_lost(self, lease: Lease) -> None:
        """Heartbeat's thread."""
        if self._outcome_of_loss() is not OnLost.CONTINUE:
            self._body.interrupt()

    def _outcome_of_loss(self) -> OnLost:
        if self._case.policy.on_lost is not None:
            return self._case.policy.on_lost
        return OnLost.RETRY if self._case.acks_late else OnLost.FAIL

    # --- when it has ended -----------------------------------------------------------------------

    def _ended(self, lease: Lease, *, failed: bool) -> None:
        """The body returned, or raised what will be its FAILURE."""
        request = self._case.request
        links = request.errbacks if failed else request.callbacks or request.chain
        if not (links or request.chord) and not lease.lost:
            return  # released once the result is stored
        # What the message triggers next must not meet this lease; but until it is sent, the work is
        # not done: a marker that expires keeps twins away meanwhile.
        marker = MarkerState.FINISHING if self._case.acks_late else None
        policy = self._case.policy
        call = give_back(lease, policy.min_hold, marker, policy.ttl, self._freed_claim())
        self._yield_to_twin(self._release(lease, call))

    def _interrupted(self, lease: Lease) -> Any:
        """The lease was lost and the body ended because of it."""
        case = self._case
        case.runtime.heartbeat.declare(lease)  # its own check() may have been faster
        error = lease.lost_error()  # of before the release, which is another end
        losses = case.delivery.losses + 1
        goes_back = (
            self._outcome_of_loss() is OnLost.RETRY
            and losses <= _MAX_LOSSES
            and case.no_put_back is None
        )
        claim = None if goes_back else self._freed_claim()
        self._yield_to_twin(self._release(lease, replace(_plainly(lease), claim=claim)))
        if goes_back:
            self._state = _State.SETTLED  # the copy is the same attempt, and that is not done
            copy = replace(case.delivery, started=True, losses=losses, tries=0)
            case.put_back(copy, AGAIN, "lease lost")
        return fail_as_body(case.task, error)

    def _yield_to_twin(self, reply: Released | None) -> None:
        """If its own twin has the lease, or has finished, the result is the twin's to write."""
        if reply not in (Released.TWIN, Released.DONE):
            return
        self._state = _State.SETTLED  # the attempt is not done, or not by this run
        case = self._case
        if reply is Released.TWIN and case.acks_late and case.no_put_back is None:
            # Redis names a message by one tag in all of its deliveries: giving up ours acknowledges
            # the twin's, and should its worker die now, nobody would deliver it again. The copy
            # waits for the twin to end, and is dropped if it ends well.
            case.put_back(
                replace(case.delivery, started=True, tries=0), AGAIN, _LEFT, queues_claim=False
            )
        case.tell(EventName.DROPPED, reason=_LEFT)
        raise Ignore

    def _release(self, lease: Lease, call: Release) -> Released | None:
        self._state = _State.RELEASED
        return self._case.runtime.locker.release(lease, call)

    def _final_release(self, lease: Lease, state: str | None, retval: Any, done: bool) -> Release:
        case, policy = self._case, self._case.policy
        retry_in = case.retry_in(retval)
        claim = case.claim_after(state, retval, retry_in)
        if not done:
            return replace(_plainly(lease), claim=claim)
        marker = MarkerState.DONE if case.acks_late else None
        call = give_back(lease, policy.min_hold, marker, case.runtime.settings.marker_ttl, claim)
        if retry_in is not None and policy.hold_on_retry:
            return reserve(call, retry_in, policy.ttl)
        return call

    def _freed_claim(self) -> ClaimChange | None:
        return self._case.claim.freed() if self._case.claim else None

    def _mark_done(self, lease: Lease) -> None:
        case = self._case
        try:
            case.runtime.store.mark(
                lease.key,
                lease.token,
                MarkerState.DONE,
                case.delivery.sequence,
                case.runtime.settings.marker_ttl,
                timeout=MAX_TIMEOUT,
            )
        except StoreError as exc:
            case.tell(EventName.RELEASE_FAILED, error=str(exc))


def _tells_of_loss(group: BaseExceptionGroup[BaseException], *, interrupted: bool) -> bool:
    """Whether a group, of ``asyncio.TaskGroup`` or the like, is the end of a body by its loss.

    Errors of its other tasks don't matter then; but what ends the process goes on, and so does what
    interrupts a task that called this one.
    """
    ours = (LeaseLost, LeaseInterrupt) if interrupted else (LeaseLost,)
    losses, others = group.split(ours)
    return losses is not None and (others is None or isinstance(others, Exception))


def _follows_interruption(error: BaseException) -> bool:
    """Whether it was raised where a body cleaned up after its interruption.

    A rollback, say, over the network that has failed the lease too.
    """
    seen: set[int] = set()
    earlier = error.__context__
    while earlier is not None and id(earlier) not in seen:
        if isinstance(earlier, LeaseInterrupt):
            return True
        seen.add(id(earlier))
        earlier = earlier.__context__
    return False


def _plainly(lease: Lease) -> Release:
    """Free the key, and say nothing of the attempt."""
    return Release(keys=(lease.key,), token=lease.token)
