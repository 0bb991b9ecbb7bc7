"""One delivery of a singleton task at the worker: acquire the lease, run the body, release.

Overview
    A `TaskRun` is created when Celery calls the task, and ends at ``task_postrun``::

        __call__        acquire --refused--> drop | requeue | on_conflict   (see `conflict`)
                          | granted
                        body --interrupted--> requeue | LeaseLost | REVOKED
                          | returned or raised
                        the message triggers more --> release early, completion record "finishing"
        result stored
        after_return    release, completion record "done"       (SUCCESS, FAILURE, REVOKED)
        task_postrun    release what is still held   (Retry, Ignore, Reject, SystemExit ...)

    The code that only some options need is in the features of a run (see `run_feature`), which the
    run calls at fixed points.

Guarantees
    The body runs only under a lease. (Exceptions: ``on_store_error="run"``, and keys that are
    None.) A delivery is given up only if the message was requeued, its work is done, or its body
    never began and its policy drops it. Every lease is released once, on every exit that leaves
    Python running. An attempt is marked as done only after its result is stored and its callbacks
    are sent.

Non-guarantees
    Exactly-once execution: a worker that dies between two steps leaves the message to the broker,
    and the lease to the worker parent or the ttl.

State model::

    OPEN     -> SETTLED   the acquire is refused, which ends the delivery: dropped, requeued,
                          skipped, failed
    OPEN     -> RELEASED  the body ended, and the message triggers more; or the lease was lost
    RELEASED -> SETTLED   requeued after a loss, or left to another delivery
    any      -> SETTLED   finish: the lease is released, an early release is marked as done, the
                          claim of a run without a lease is changed

    In OPEN, ``_held`` is the lease, a request or None. Without a lease, no reply of the store has
    changed the message's claim, so finish() changes it. A request may have been granted without a
    reply, so finish() also releases by its token.

Failure handling
    No reply to the acquire: ``on_store_error``. No reply from the broker to a requeue: the message
    is retained until the broker or the store answers. No reply to the release, or to the completion
    record of an attempt that is done: it is repeated while this process lives; then the ttl frees
    the key. An exception in finish() (a soft time limit in ``after_return``): the heartbeat
    discards the lease, and ``task_postrun`` calls it again.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any, Final, NoReturn

from celery import signals, states
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded, TaskRevokedError
from kombu.exceptions import EncodeError

from ..celery_compat import (
    acks_failures,
    driver_of,
    fail_as_body,
    is_retried,
    is_revoked_here,
    may_reject_when_done,
)
from ..core.backoff import backoff
from ..core.events import Event, EventName
from ..core.heartbeat import MAX_TIMEOUT
from ..core.lease import Holder, Lease, Token
from ..core.locker import Locker
from ..core.store import (
    CLAIM_NOT_CHANGED,
    Acquire,
    ClaimChange,
    CompletionState,
    Mark,
    Refused,
    Relation,
    Release,
    ReleaseReply,
)
from ..core.waiter import Waiter
from ..errors import LockConflict, SingletonLockError, StoreError, StoreUnavailable
from ..instrumentation.sentry import close_check_in
from ..key_queue.run_part import Queue, leave, publish_next
from ..message.claim import JOINED, TASK_RUN, Claim
from ..message.header import HEADER, UNNAMED_KEY, VERSION, Delivery, is_unnamed, mint_nonce
from ..message.requeue import AGAIN, FOR_ANOTHER_WORKER, Pace, publish_copy, why_not
from ..message.skipped import skipped_value
from ..message.times import seconds_until
from ..policy import ACTIONS, OnLost, OnStoreError, Policy
from ..run_feature import Ending, Feature
from ..runtime import WITHOUT_SERVER, Runtime
from . import claim as claims
from .cancel_running import CancelRunning
from .conflict import Decision, Outcome, decide, is_overtaken
from .context import held_here, held_lease
from .interrupt import Body, is_loss
from .period import Period
from .replace import NewestArguments

logger = logging.getLogger("celery_singleton_lock")

# Refusals that end the message.
_ENDS: Final = (Outcome.SKIP, Outcome.REVOKE, Outcome.RAISE)
_NOT_RUN: Final = (
    'The call has not run; send it again, or choose another on_conflict ("wait" and "retry" wait, '
    '"skip" ends quietly).'
)
# The relations of a refusal that say nothing about the id of this message.
_OF_ANY_MESSAGE: Final = (
    Relation.OTHER,
    Relation.EARLIER,
    Relation.NOT_DUE,
    Relation.UNQUEUED,
)
_LEFT: Final = "lost to its own duplicate"
# The number of lost leases after which a task fails: its store can't keep a lease.
_MAX_LOSSES: Final = 3
# Exceptions that publishing raises for a message that can't be copied, because its headers are
# wrong. (One that is also an OSError comes from the network, such as a certificate that can't be
# verified.) Clients may also raise them once, from a connection that broke during the call. The
# next try uses another connection.
_UNSENDABLE: Final = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
_TRIES_OF_THE_UNSENDABLE: Final = 3


#: Each option that only some tasks have: makes its feature of a run, or None if the run has none.
FEATURES: Final[Sequence[Callable[[TaskRun], Feature | None]]] = (
    Period.of,
    NewestArguments.of,
    CancelRunning.of,
    Queue.of,
)


class _State(Enum):
    OPEN = auto()
    RELEASED = auto()
    SETTLED = auto()


class TaskRun:
    """One delivery of a task, from its call by Celery to ``task_postrun``.

    Attributes:
        task: The task.
        request: Its request (``celery.app.task.Context``), until the run has finished.
        runtime: The app's runtime; for ``task_always_eager`` the runtime without a server.
        delivery: The message's delivery.
        policy: The task's policy, with the options of this call.
        key: The lock key.
        claim: The claim of the message, or the claim that the run takes for it; None: none.
        acks_late: Whether the message may be delivered again after its work is done.
        entered: Whether the body was entered. After that, calling the task is a function call.
        keeps_key_for_retry: Whether a retry may reserve the key (``hold_on_retry``).
        releases_early: Whether the lease is released before Celery publishes the links of the task.
    """

    key = ""
    claim: Claim | None = None
    entered = False
    keeps_key_for_retry = True
    releases_early = True
    _key_suffix: str | None = None  # the part of the key after the scope; None: no lock
    _state = _State.OPEN
    _features: Sequence[Feature] = ()
    _waiter: Waiter | None = None
    # The lease, or the request that may have been granted without a reply; None: neither.
    _held: Lease | Acquire | None = None
    _retry: Retry | None = None  # the body's
    # Whether the early release of a lost lease has left the claim to a retry, which finish()
    # decides.
    _leaves_claim = False
    _locker: Locker

    def __init__(self, task: Any, request: Any) -> None:
        self.task, self.request = task, request
        self.delivery = delivery = Delivery.of(request)
        self.policy: Policy = task.singleton_policy(delivery.options)
        self.eager = bool(request.is_eager)
        local = self.eager and bool(task.app.conf.task_always_eager)
        self.runtime = runtime = Runtime.of(task.app, eager=local)
        if delivery.claim is not None and not self.eager:
            self.claim = Claim.from_header(delivery.claim, runtime.keyspace)
        self.acks_late = bool(task.acks_late) and not self.eager
        self._body = Body()
        request.__dict__[TASK_RUN] = self

    @classmethod
    def of(cls, request: Any) -> TaskRun | None:
        """The run of ``request``; None: none has begun."""
        # The type is checked: headers of foreign publishers become attributes of the request too,
        # and such an attribute must not count as a run.
        found = request.__dict__.get(TASK_RUN)
        return found if isinstance(found, cls) else None

    def run(
        self, own: Callable[..., Any] | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Acquire and run the body, or apply the policy to a conflict.

        Args:
            own: The ``__call__`` of a subclass of the task's class, which calls the body itself.
            args, kwargs: The arguments of the call.

        Returns:
            The value that Celery stores: the body's result, or the value of a skipped call.

        Raises:
            Ignore: This delivery is given up: requeued, dropped or revoked.
            TypeError, LockKeyError: No key can be computed from the arguments.
            LockConflict, LeaseLost, StoreError: The task fails, according to its policy.
            Exception: An exception of the body.
        """

        def body() -> Any:
            nonlocal args, kwargs
            task = self.task
            for feature in self._features:
                lease = self._held if isinstance(self._held, Lease) else None
                args, kwargs = feature.begin(lease, args, kwargs)
            if task.singleton_stores_started:
                self._store_started()
            if own is not None:
                return own(task, *args, **kwargs)
            self.entered = True
            return (task.singleton_base_call or task.run)(*args, **kwargs)

        if self.delivery.newer is not None:
            self._refuse_newer(self.delivery.newer)
        if not self.policy.enabled:
            # A claim and a place in a queue that the message has from before end with the task.
            return body()
        self._make_key(args, kwargs)
        if self._key_suffix is None or (held_lease.get() and held_here(self.key)):
            return body()
        try:
            reply = self._acquire()
        except (Ignore, LockConflict):
            self._state = _State.SETTLED  # requeued, or left to another delivery, or freed
            raise
        except StoreError as exc:
            if self.policy.on_store_error is OnStoreError.RUN:
                return body()
            if self.eager and isinstance(exc, StoreUnavailable):
                text = str(exc).removesuffix(".")
                raise StoreUnavailable(f"{text}. {WITHOUT_SERVER}") from exc
            raise
        if isinstance(reply, Lease):
            return self._run_under(reply, body)
        self._state = _State.SETTLED
        return reply

    def finish(self, state: str | None, retval: Any) -> None:
        """Release the lease of an ended task, or change the claim of a run without a lease.

        The second call, in ``task_postrun``, has no effect. An exception from a signal handler
        during the release is propagated.

        Args:
            state: Celery's state of the task; None if SystemExit or similar ended it.
            retval: The task's result, or the exception that ended it.
        """
        if self._state is _State.SETTLED:
            self.request, self._features, self._retry = None, (), None
            return
        if (leaving := sys.exception()) is not None:
            state, retval = self._outcome(state, retval, leaving)
        held = self._held
        try:
            if not isinstance(held, Lease):
                self._finish_without_lease(held, state, retval)
            elif self._state is not _State.RELEASED:
                self._release(held, state, retval)
            else:
                if self._leaves_claim:
                    self._change_claim_of_lost(state, retval)
                if self.acks_late and is_done(self.task, state, retval):
                    # The early release has left them to a redelivery of the message, or to a retry.
                    is_retry = isinstance(retval, Retry)
                    deleted = None if is_retry else claims.arguments_deleted(self)
                    self._mark_done(deleted)
                for feature in self._features:
                    feature.finished(self._ending(state, retval))
        except StoreError as exc:
            self._report_silence(exc, "not-marked-as-done")
        except BaseException:
            # A soft time limit or SIGTERM. If this is after_return, task_postrun finishes the run.
            # If this is task_postrun, the ttl frees the key, because the lease is no longer
            # renewed.
            if isinstance(held, Lease):
                self._locker.heartbeat.stop(held)
            raise
        self._state = _State.SETTLED
        # The request, the features and the retry refer to this run. A reference cycle would keep
        # all objects of this task alive until the garbage collector runs.
        self.request, self._features, self._retry = None, (), None

    def _outcome(
        self, state: str | None, retval: Any, leaving: BaseException
    ) -> tuple[str | None, Any]:
        """State and result that correspond to what Celery does with the message.

        Args:
            state, retval: See :meth:`finish`.
            leaving: The exception that ends Celery's tracer.
        """
        if not isinstance(leaving, Exception):
            # SystemExit and similar exceptions may also be raised after the body, while Celery
            # sends the callbacks. The state is SUCCESS then, but the message is delivered again.
            return None, retval
        if state is None:
            # The result backend did not store the failure or the retry. Celery handles the message
            # as that of a failed task.
            return (states.FAILURE, leaving) if self._retry is None else (states.RETRY, self._retry)
        if isinstance(leaving, Reject) and not self.eager and may_reject_when_done(self.task):
            return state, leaving  # from on_success
        return state, retval

    def abandon(self) -> None:
        """Report that the lease is left to its ttl: the last :meth:`finish` was interrupted."""
        if isinstance(self._held, Lease):
            self._locker.abandon(self._held)

    @property
    def computed_key(self) -> str:
        """The key of the arguments. `key` differs from it if another key's queue has the call."""
        return self.runtime.keyspace.lock(self.task.singleton_scope, self._key_suffix or "")

    def _refuse_newer(self, header: Mapping[str, Any]) -> NoReturn:
        """Requeue a message with the header of a newer version, unread, for a worker that reads it.

        Raises:
            Ignore: The message was requeued.
            SingletonLockError: It can't be requeued.
        """
        self._state = _State.SETTLED
        text = (
            f"{self.task.name}[{self.request.id}] was sent by a newer version of "
            f"celery-singleton-lock: its message has version {header['version']}, and this worker "
            f"reads messages up to version {VERSION}. Upgrade this worker"
        )
        if (reason := why_not(self.task, self.request)) is not None:
            raise SingletonLockError(f"{text}. The message is not requeued: {reason}")
        logger.error("singleton: %s. The message is requeued for a worker that can read it", text)
        self._requeue(self.delivery, FOR_ANOTHER_WORKER, "newer message", None)
        raise AssertionError("a requeue without an end")

    # --- before the body -------------------------------------------------------------------------

    def _make_key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        task, policy, keyspace = self.task, self.policy, self.runtime.keyspace
        # The arguments of an eager call were in no message.
        suffix_of = task.singleton_key_suffix if self.eager else task.singleton_key_maker.key_suffix
        self._key_suffix = suffix = suffix_of(args, kwargs)
        self.key = keyspace.lock(task.singleton_scope, suffix or "")
        if policy.unique is not None and suffix is not None and self.claim is None:
            self.claim = claims.taken_by_run(self)

    def _operation(self) -> Acquire:
        runtime, delivery, policy = self.runtime, self.delivery, self.policy
        token = delivery.token
        request = Acquire(
            slots=runtime.keyspace.slots(self.key, policy.limit),
            token=token,
            holder=Holder(
                task=self.task.name,
                task_id=token.task_id,
                worker=self.request.hostname or runtime.worker,
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
        return self._add_features(request)

    def _add_features(self, request: Acquire) -> Acquire:
        """Make the features of this run, and complete the ``request`` by them and by the claim."""
        if self.delivery.options and "ttl" in self.delivery.options:
            request.holder.ttl = self.policy.ttl
        if self.claim is not None:
            claims.prepare(self, self.claim, request)
        found = [make(self) for make in FEATURES]
        self._features = [feature for feature in found if feature is not None]
        for feature in self._features:
            request = feature.prepare(request)
        return request

    def _acquire(self) -> Any:
        """Try until the lease is granted or a refusal ends this delivery.

        Returns:
            The lease, or the value that Celery stores for the refused call.
        """
        request, rule = self._operation(), self.policy.on_conflict
        locker = self._locker = self.runtime.locker
        waiter = None
        if ACTIONS[rule.action].waits:
            waiter = self._waiter = Waiter(locker, request)
        waited, failures, is_reported, since = 0.0, 0, False, None
        try:
            while True:
                conflict = None
                if waiter is not None or request.claim is not None:
                    request, conflict = self._decide_ahead(request, waited)
                try:
                    self._held = request
                    reply: Lease | Refused
                    if self._features and (refused := self._answer(request)):
                        reply = refused
                    elif waiter is None:
                        reply = locker.acquire(
                            request, max_hold=self._max_hold(), on_lost=self._on_lost, since=since
                        )
                    else:
                        waits = conflict is not None and conflict.outcome is Outcome.WAIT
                        options = {"max_hold": self._max_hold(), "on_lost": self._on_lost}
                        reply = waiter.acquire(request, waits=waits, **options)
                    if isinstance(reply, Lease):
                        self._held = reply
                        if self._features:
                            self._notify_of_grant(request, reply)
                        return reply
                    self._held = None
                    if self._is_of_another_message(reply):
                        request = replace(request, token=self._renamed())
                        continue
                    if any(feature.refused(reply) for feature in self._features):
                        continue
                    if conflict is None or reply.relation is not Relation.OTHER:
                        conflict = self._decide(reply.relation, waited)
                    if waiter is None or conflict.outcome is not Outcome.WAIT:
                        return self._refuse(conflict, reply)
                    if not is_reported:  # only once, because the wait may be long
                        self._report_conflict(conflict, reply)
                        is_reported = True
                    waiter.wait(reply, rule.timeout - waited)
                except StoreError as exc:
                    since = since or self.runtime.clock.now()
                    request = self._retain(request, exc, failures)
                    failures += 1
                if waiter is not None:
                    waited = waiter.waited()
        finally:
            if waiter is not None:
                waiter.leave()

    def _answer(self, request: Acquire) -> Refused | None:
        """The refusal by a feature, in place of the store; None: the store is asked."""
        answers = (feature.answer(request) for feature in self._features)
        return next((refused for refused in answers if refused is not None), None)

    def _notify_of_grant(self, request: Acquire, lease: Lease) -> None:
        """Call the features after a grant.

        Raises:
            Ignore: A feature has ended the delivery.
            StoreError: The store did not answer a feature; the lease is released.
        """
        try:
            for feature in self._features:
                feature.granted(lease)
        except StoreError:
            self._held = request
            self._locker.undo(request)
            raise

    def _decide_ahead(self, request: Acquire, waited: float) -> tuple[Acquire, Decision]:
        """Decide on a conflict before the request, and not again after the reply.

        The script that refuses also frees the claim of a message that ends, and queues a waiting
        client.

        Returns:
            The request that says whether this message ends, and the decision.
        """
        conflict = self._decide(Relation.OTHER, waited)
        # A refused call with a place waits for its turn, with its claim.
        ends = request.claim is not None and not request.queued and conflict.outcome in _ENDS
        if request.frees_claim is not ends:
            request = replace(request, frees_claim=ends)
        return request, conflict

    def _max_hold(self) -> float | None:
        """Seconds after which renewal stops; by default ttl after the hard time limit."""
        if self.policy.max_hold is not None:
            return self.policy.max_hold
        limits = self.request.timelimit
        hard_limit = (limits and limits[0]) or self.task.time_limit
        return float(hard_limit) + self.policy.ttl if hard_limit else None

    def _retain(self, operation: Acquire, error: StoreError, failures: int) -> Acquire:
        """Put the message back after a failure of the store, or pause if the broker fails too.

        Returns:
            The next request.
        """
        rule = self.policy.on_store_error
        retries = rule is OnStoreError.RETRY and not self.eager
        requeues = retries and why_not(self.task, self.request) is None
        action = "requeued" if requeues else "retried" if retries else str(rule)
        self._report_silence(error, action)
        if not retries:
            raise error
        if requeues:
            self._requeue(self.delivery, AGAIN, "store", self.claim, retain=False)
        # Neither the store nor the broker answers. An early-acknowledged message exists only in
        # this process: it is retained until one of them does.
        self.runtime.clock.sleep(backoff(*AGAIN, failures))
        # The locker has released that token without a reply. If the release arrives late, it must
        # not free the grant of the next try, so a released token is never used for another acquire.
        return operation.again(mint_nonce())

    def _decide(self, relation: Relation, waited: float) -> Decision:
        rule, wall = self.policy.on_conflict, self.runtime.clock.wall()
        reason = why_not(self.task, self.request)
        return decide(relation, self.delivery, rule, no_requeue=reason, wall=wall, waited=waited)

    def _is_of_another_message(self, refused: Refused) -> bool:
        """Whether the record with this task id in the store belongs to another message.

        Two messages that were sent by name, or whose headers were removed, may have the same task
        id without being copies of each other.
        """
        knows_id = (
            refused.relation not in _OF_ANY_MESSAGE
            or refused.holder.task_id == self.delivery.token.task_id
        )
        return knows_id and is_unnamed(self.request, driver_of(self.task.app))

    def _renamed(self) -> Token:
        """Give the message a unique call name, which its retries and copies keep; the new token."""
        self.delivery = self.delivery.named()
        self.rewrite_header()
        self.request.__dict__.pop(UNNAMED_KEY, None)
        return self.delivery.token

    # --- a refusal -------------------------------------------------------------------------------

    def _refuse(self, decision: Decision, refused: Refused) -> Any:
        """Carry out the decision; return the value of a skipped call."""
        holder, outcome = refused.holder, decision.outcome
        if outcome is Outcome.DROP:
            self.emit(EventName.DROPPED, reason=decision.reason)
            if refused.relation is Relation.DONE:
                claims.free_if_queued(self)
            raise Ignore
        self._report_conflict(decision, refused)
        if self.delivery.queue is not None and outcome is not Outcome.REQUEUED:
            self._leave_queue(states.FAILURE, None)  # a period has refused it, in its turn
        if outcome is Outcome.SKIP:
            phase = refused.record.phase if refused.record else None
            return skipped_value(self.task.name, self.key, holder, phase)
        if outcome is Outcome.REVOKE:
            self.revoke(refused.explain(self.key, self.policy.limit))
            raise Ignore
        if outcome is Outcome.REQUEUED:  # does not return
            claim = self.claim if decision.queues_claim else None
            delivery = decision.delivery
            if is_overtaken(self.delivery, refused.record, self.runtime.clock.wall()):
                delivery = replace(delivery, tries=max(0, delivery.tries - 1))
            self._requeue(delivery, decision.pace, decision.reason, claim)
        raise LockConflict(
            f"{refused.explain(self.key, self.policy.limit)}, and {decision.reason}. {_NOT_RUN}",
            self.key,
            holder.for_error(),
        )

    def _report_conflict(self, decision: Decision, refused: Refused) -> None:
        data: dict[str, Any] = {"outcome": str(decision.outcome), "reason": decision.reason}
        if self.delivery.tries or self.delivery.since is not None:
            data["again"] = True
        self.emit(EventName.CONFLICT, holder=refused.holder, **data)

    # --- putting the message back ----------------------------------------------------------------

    def _requeue(
        self,
        delivery: Delivery,
        pace: Pace,
        reason: str,
        claim: Claim | None,
        retain: bool = True,
        exact: bool = False,
    ) -> None:
        """Publish the message again, then give this delivery up: raise Ignore.

        Args:
            delivery: The content of the copy's header.
            pace: The delay of the copy.
            reason: The reason, for the log.
            claim: The message's claim, if it is queued with the copy.
            retain: If the broker does not answer, retain the message and try again; else return.
            exact: Whether the delay is ``pace[0]``, without a backoff.

        Raises:
            Exception: The message can't be published at all. The task fails, because a retained
                message would block this process endlessly.
        """
        copy, tries, refusals = replace(delivery, tries=delivery.tries + 1).copied(), 0, 0
        if retain:  # else the store does not answer
            for feature in self._features:
                feature.requeue(copy)
        while True:
            try:
                delay = pace[0] if exact else backoff(*pace, delivery.tries)
                delay = self._publish_copy(copy, delay, claim)
            except (SoftTimeLimitExceeded, EncodeError):
                raise  # a soft time limit, or an error that another try would not change
            except Exception as exc:
                unsendable = isinstance(exc, _UNSENDABLE) and not isinstance(exc, OSError)
                refusals = refusals + 1 if unsendable else 0
                if refusals == _TRIES_OF_THE_UNSENDABLE:
                    raise
                if unsendable:
                    continue
                logger.warning(
                    "singleton: could not requeue %s[%s]: the broker or the store is unreachable; "
                    "retrying until one of them answers",
                    *(self.task.name, self.request.id),
                    exc_info=True,
                )
            else:
                sequence = copy.sequence
                self.emit(EventName.REQUEUED, delay=delay, reason=reason, sequence=sequence)
                raise Ignore
            if not retain:
                return
            self.runtime.clock.sleep(backoff(*AGAIN, tries))
            tries += 1

    def _publish_copy(self, copy: Delivery, delay: float, claim: Claim | None) -> float:
        """Publish and mark a copy; return the seconds until it arrives."""
        longest = self.runtime.settings.longest_countdown
        delay = delay if longest is None else min(delay, longest)
        delay = publish_copy(self.task, self.request, copy.header(), delay)
        if copy.newer is not None:
            return round(delay, 3)  # its sequence can't be read, so the copy has the same
        try:
            queued = claims.queued(self, claim, delay) if claim else None
            self._mark(CompletionState.WAITING, copy.sequence, delay, queued)
        except StoreError:
            pass  # without the record, a redelivery of this message would be a second copy
        return round(delay, 3)

    # --- the body --------------------------------------------------------------------------------

    def _run_under(self, lease: Lease, body: Callable[[], Any]) -> Any:
        """Run ``body`` under ``lease``; raises the exceptions of :meth:`run`."""
        lease.outer = held_lease.get()
        held_lease.set(lease)
        try:
            result = self._body.run(body)
        except (Ignore, Reject):
            raise  # task_postrun finishes the run
        except Retry as retry:
            self._retry = retry
            if lease.lost:
                self._leaves_claim = self.claim is not None
                self._release_early(lease, Release.of(lease))
            raise
        except BaseException as error:
            for feature in self._features:
                feature.ended(lease, error)
            if lease.lost and is_loss(error, interrupted=self._body.fired):
                return self._interrupted(lease)
            if isinstance(error, Exception):
                self._ended(lease, failed=True)
            raise
        finally:
            # The outer lease now: a block around this call may have ended inside the body.
            held_lease.set(lease.outer)
        for feature in self._features:
            feature.ended(lease, None)
        self._ended(lease, failed=False)
        return result

    def _store_started(self) -> None:
        """Store the state STARTED for ``track_started``, just before the body runs."""
        task, request = self.task, self.request
        if not self.eager and stores_result(task, request):
            meta = {"pid": os.getpid(), "hostname": request.hostname}
            task.backend.store_result(request.id, meta, states.STARTED, request=request)

    def _on_lost(self, lease: Lease) -> str:
        """Handle the loss of the lease. Called on the heartbeat's thread."""
        request = self.request
        if request is None:
            return "task-ended"  # the body's thread has finished the run meanwhile
        if self._outcome_of_loss() is OnLost.CONTINUE:
            return "continued"
        self._body.interrupt()
        return "interrupted,requeued" if self._goes_back(request) else "interrupted,failed"

    def _outcome_of_loss(self) -> OnLost:
        return self.policy.on_lost or (OnLost.RETRY if self.acks_late else OnLost.FAIL)

    def _goes_back(self, request: Any) -> bool:
        """Whether the message of a body that is interrupted by a loss is requeued.

        The heartbeat's thread says so in the event, and the body's thread does it. The first of
        them decides, because settings and queues may change between the two.
        """
        goes_back = (
            self._outcome_of_loss() is OnLost.RETRY
            and self.delivery.losses < _MAX_LOSSES
            and why_not(self.task, request) is None
        )
        decided: bool = self.__dict__.setdefault("_is_requeued", goes_back)  # one atomic step
        return decided

    def _ended(self, lease: Lease, *, failed: bool) -> None:
        """Handle the end of the body, by its result or by a failure."""
        request = self.request
        links = request.errbacks if failed else request.callbacks or request.chain
        if not ((links or request.chord) and self.releases_early) and not lease.lost:
            return  # the lease is released after the result is stored
        # The messages that Celery publishes next must not conflict with this lease. Until they are
        # sent, the work is not done: meanwhile a completion record that expires makes the store
        # refuse duplicates.
        claim = claims.freed(self, ended=not self.acks_late)
        release = Release.of(lease, claim, min_hold=self.policy.min_hold)
        if self.acks_late:
            release.completion, release.completion_ttl = CompletionState.FINISHING, self.policy.ttl
        self._release_early(lease, release)

    def _interrupted(self, lease: Lease) -> Any:
        """Handle the end of a body that was interrupted because its lease was lost."""
        # The body's check() may have noticed the loss first.
        self._locker.heartbeat.lose(lease)
        error = lease.lost_error()  # created before the release changes the lease
        goes_back = self._goes_back(self.request)
        retried = not goes_back and is_retried(self.task, error)
        self._leaves_claim = retried and self.claim is not None
        # With acks_late, the message ends with the completion record "done".
        claim = None if goes_back or retried else claims.freed(self, ended=not self.acks_late)
        self._release_early(lease, Release.of(lease, claim))
        if goes_back:
            self._state = _State.SETTLED  # the copy is the same attempt, which is not done
            losses = self.delivery.losses + 1
            copy = replace(self.delivery, started=True, losses=losses, tries=0)
            self._requeue(copy, AGAIN, "lease lost", self.claim)
        return fail_as_body(self.task, error)

    def _release_early(self, lease: Lease, release: Release) -> None:
        """Release before the result is stored. If a duplicate took over, the duplicate's result
        counts.

        Raises:
            Ignore: Another delivery of this attempt has the lease, or has finished.
        """
        ending = Ending(goes_on=release.completion is None)
        reply = self._send(lease, self._completed(release, ending))
        # Last: after an exception from a signal handler before this line, finish() releases the
        # lease again, because the store may not have got this release.
        self._state = _State.RELEASED
        if reply not in (ReleaseReply.DUPLICATE, ReleaseReply.DONE):
            return
        self._state = _State.SETTLED  # the attempt is not done, or not by this run
        is_duplicate = reply is ReleaseReply.DUPLICATE
        if is_duplicate and self.acks_late and why_not(self.task, self.request) is None:
            # With Redis as the broker, all deliveries of a message have the same delivery tag.
            # Giving up this delivery acknowledges the duplicate's too, and if the duplicate's
            # worker died now, the job would be lost. The copy waits for the duplicate's end, and is
            # dropped if the duplicate succeeds.
            copy = replace(self.delivery, started=True, tries=0)
            self._requeue(copy, AGAIN, _LEFT, None)
        self.emit(EventName.DROPPED, reason=_LEFT)
        raise Ignore

    def _send(self, lease: Lease, release: Release) -> ReleaseReply | None:
        """Release ``lease``, and publish the call that follows in the queue of its key."""
        publish = partial(publish_next, self) if release.queued else None
        return self._locker.release(lease, release, publish)

    def _completed(self, release: Release, ending: Ending) -> Release:
        for feature in self._features:
            release = feature.releasing(release, ending)
        return release

    # --- for features ----------------------------------------------------------------------------

    def rewrite_header(self) -> None:
        """Let what this task publishes continue the delivery as it is now."""
        self.request.__dict__[HEADER] = self.delivery.header()

    def has_key_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a message with these arguments has the key of this run, or none."""
        return self.task.singleton_key_maker.key_suffix(args, kwargs) in (None, self._key_suffix)

    def stop_waiting(self) -> None:
        """Leave the wait queue; idempotent."""
        if self._waiter is not None:
            self._waiter.leave()

    def interrupt(self) -> None:
        """Interrupt the body, from another thread."""
        self._body.interrupt()

    def free_claim(self) -> None:
        """Free the claim of a message that ends without a lease."""
        if (change := claims.freed(self, ended=True)) is not None:
            claims.change(self, change)

    def revoke(self, reason: str) -> None:
        """Store the result REVOKED."""
        task, request = self.task, self.request
        error, store_result = TaskRevokedError(reason), stores_error(task, request)
        options = {"store_result": store_result, "call_errbacks": False, "state": states.REVOKED}
        # mark_as_revoked() would leave the later links of a chain PENDING forever. A group of
        # chains, which waits for the last links, would never end.
        task.backend.mark_as_failure(request.id, error, request=request, **options)
        signals.task_revoked.send(
            sender=task, request=request, terminated=False, signum=None, expired=False
        )
        close_check_in(request.headers)

    def requeue_in(self, delivery: Delivery, seconds: float, reason: str) -> NoReturn:
        """Requeue the message, to run after ``seconds``; ``delivery``: see :meth:`_requeue`.

        Raises:
            Ignore: The delivery has ended.
        """
        self._requeue(delivery, (seconds, seconds), reason, self.claim, exact=True)
        raise AssertionError("a requeue without an end")

    def start_over(self, lease: Lease, reason: str) -> NoReturn:
        """Release the ``lease`` before the body has begun, and put the message back.

        Raises:
            Ignore: The delivery has ended.
        """
        self._release_early(lease, Release.of(lease))
        self._state = _State.SETTLED  # the copy is the same attempt, which is not done
        self.requeue_in(self.delivery, 0.0, reason)

    def end_for_good(self, lease: Lease | None, *, began: bool) -> NoReturn:
        """End a delivery whose result is stored, and whose message never comes back.

        Args:
            lease: The lease, which is released; None: there is none.
            began: Whether the body has begun.

        Raises:
            Ignore: Always.
        """
        claim = claims.freed(self, ended=True)
        if lease is not None:
            min_hold = self.policy.min_hold if began else 0.0
            release = Release.of(lease, claim, min_hold=min_hold)
            if began and self.acks_late:
                release.completion = CompletionState.DONE
                release.completion_ttl = self.runtime.settings.completion_ttl
            self._send(lease, self._completed(release, Ending()))
        elif claim is not None:
            claims.change(self, claim)
        self._state = _State.SETTLED
        raise Ignore

    # --- the end ---------------------------------------------------------------------------------

    def _release(self, lease: Lease, state: str | None, retval: Any) -> None:
        """Release the lease, and change the claim with it."""
        try:
            release = self._final_release(lease, state, retval)
        except Exception:
            # Any exception is caught: a lease that is not released would be renewed endlessly.
            logger.exception("singleton: %s is released without a completion record", self.key)
            release = Release.of(lease, claims.freed(self))
        if self._features:
            release = self._completed(release, self._ending(state, retval))
        if state is None or release.completion is not None or release.queued:
            # This process may be about to end, or the message is acknowledged next and only the
            # completion record keeps its duplicates from running again. So this release waits for
            # the reply.
            self._send(lease, release)
        else:
            # No later step depends on the reply: the result is stored, and Celery sends the same
            # messages after any reply.
            self._locker.give_back(lease, release)

    def _final_release(self, lease: Lease, state: str | None, retval: Any) -> Release:
        """The release of the lease, with the change of the claim."""
        claim = retry_in = None
        if isinstance(retval, Retry):
            retry_in = self._retry_in(retval)
        if self.claim is not None:
            claim = claims.after(self, self.claim, state, retval, retry_in)
        if not is_done(self.task, state, retval):
            return Release.of(lease, claim)
        release = Release.of(lease, claim, min_hold=self.policy.min_hold)
        if self.acks_late:
            release.completion = CompletionState.DONE
            release.completion_ttl = self.runtime.settings.completion_ttl
        if retry_in is not None and self.policy.hold_on_retry and self.keeps_key_for_retry:
            release.reserve(retry_in + self.policy.ttl)  # its countdown, and a ttl in the queue
        return release

    def _ending(self, state: str | None, retval: Any) -> Ending:
        """What becomes of the call, after the outcome of its task."""
        joined, is_retry = self.request.__dict__.get(JOINED), isinstance(retval, Retry)
        if joined == self.key and not is_retry:
            return Ending(goes_on=True)  # self.replace(), or another message with the task's id
        if state is None or (isinstance(retval, Reject) and getattr(retval, "requeue", False)):
            # Celery acknowledges the message of a greenlet that `revoke(terminate=True)` ended.
            return Ending(goes_on=self.acks_late and not is_revoked_here(self.request.id))
        if is_retry and (due_in := self._retry_in(retval)) is not None:
            return Ending(goes_on=True, due_in=due_in)
        retries = self.delivery.token.retries
        if is_retry or joined is not None:
            return Ending(may_return_from=retries + 1)
        return Ending(may_return_from=None if is_done(self.task, state, retval) else retries)

    def _finish_without_lease(
        self, request: Acquire | None, state: str | None, retval: Any
    ) -> None:
        """Change the claim and the place in a queue of a run that has no lease.

        Release the lease that its ``request`` without a reply may have got.
        """
        change = None
        if self.claim is not None:
            try:
                # The retry of a task that is switched off is a plain message, without the claim.
                is_retry = isinstance(retval, Retry) and self.policy.enabled
                retry_in = self._retry_in(retval) if is_retry else None
                change = claims.after(self, self.claim, state, retval, retry_in)
            except Exception:
                logger.exception("singleton: the claim %s is freed", self.claim.key)
                change = claims.freed(self)
        if request is not None:
            self._locker.undo(request)
        if change is not None:
            claims.change(self, change)
        if self.delivery.queue is not None and not self.eager:
            self._leave_queue(state, retval)

    def _change_claim_of_lost(self, state: str | None, retval: Any) -> None:
        """Settle the claim of a lost lease, which a release does not change.

        The change is sent once: later, the retry may have changed the claim.
        """
        assert self.claim is not None
        retry_in = self._retry_in(retval) if isinstance(retval, Retry) else None
        change = claims.after(self, self.claim, state, retval, retry_in)
        try:
            self._mark(CompletionState.WAITING, self.delivery.sequence, 0.0, change)
        except StoreError as exc:
            logger.warning(CLAIM_NOT_CHANGED, change.key, exc, change.key)

    def _leave_queue(self, state: str | None, retval: Any) -> None:
        """Take a call out of its queue that ends without a lease."""
        ending = self._ending(state, retval)
        if self._key_suffix is None and isinstance(retval, Retry):
            ending = Ending(may_return_from=self.delivery.token.retries + 1)  # it has no key either
        leave(self, ending)

    def _mark(
        self, state: CompletionState, sequence: int, delay: float, claim: ClaimChange | None
    ) -> None:
        """Raise the completion record of this attempt.

        Raises:
            StoreError: The store did not answer.
        """
        request = self._mark_request(state, sequence, delay, claim)
        self.runtime.store.mark(request, timeout=MAX_TIMEOUT)

    def _mark_request(
        self, state: CompletionState, sequence: int, delay: float, claim: ClaimChange | None
    ) -> Mark:
        token, ttl = self.delivery.token, self.runtime.settings.completion_ttl + delay
        return Mark(key=self.key, token=token, state=state, ttl=ttl, sequence=sequence, claim=claim)

    def _mark_done(self, claim: ClaimChange | None) -> None:
        """Mark this attempt as done; repeated until the store answers."""
        runtime, key, task, task_id = self.runtime, self.key, self.task.name, str(self.request.id)
        mark = self._mark_request(CompletionState.DONE, self.delivery.sequence, 0.0, claim)

        def report(why: object, action: str = "not-marked-as-done") -> None:
            runtime.outages.report(why, action, key=key, task=task, task_id=task_id, repeats=True)

        error = runtime.locker.queue.ask(
            lambda store: store.mark(mark, timeout=MAX_TIMEOUT), mark.ttl, report
        )
        if error is not None:
            report(error, "marked-later")

    def _retry_in(self, retry: Retry) -> float | None:
        """Seconds until the next attempt; None: it needs no reservation of the key.

        The retry has changed the arguments and the key, or its time is one that no worker can read.
        """
        signature, when = getattr(retry, "sig", None), retry.when
        if signature is not None:
            # If both are given, Celery uses the countdown, but ``retry.when`` is the eta.
            when = signature.options.get("countdown") or when
        if signature is not None and self.key:
            try:
                suffix = self.task.singleton_key_suffix(signature.args, signature.kwargs)
            except (TypeError, ValueError):
                return None
            if suffix != self._key_suffix:
                return None
        return seconds_until(when, self.task.app)

    def _report_silence(self, error: StoreError, action: str) -> None:
        task, task_id = self.task.name, str(self.request.id)
        self.runtime.outages.report(
            error, action, key=self.key, task=task, task_id=task_id, repeats=True
        )

    def emit(self, name: EventName, *, holder: Holder | None = None, **data: Any) -> None:
        events, task, task_id = self.runtime.events, self.task.name, str(self.request.id)
        if events.observes(name):
            who = holder or Holder()
            events.emit(
                Event(name=name, key=self.key, task=task, task_id=task_id, holder=who, data=data)
            )


def is_done(task: Any, state: str | None, retval: Any) -> bool:
    """Whether this attempt's message is acknowledged, so that it will not run again.

    A rejected message is not done. If it is requeued, it comes back at once. If it is
    dead-lettered, it may come back later, with the same id and the same attempt.

    Args:
        task: The task.
        state: Celery's state; None if the body, or a step after it, ended by SystemExit or similar,
            so that a message acknowledged late is delivered again.
        retval: The task's result, or the exception that ended it.
    """
    if state is None or isinstance(retval, Reject):
        return False
    if state != states.FAILURE or not task.acks_late:
        return True
    return acks_failures(task)


def stores_result(task: Any, request: Any) -> bool:
    """Whether this call's result is stored: the call's ``ignore_result``, else the task's."""
    # Celery's Context has a class-level False that means "not set".
    of_call = vars(request).get("ignore_result")
    return not (task.ignore_result if of_call is None else of_call)


def stores_error(task: Any, request: Any) -> bool:
    """Whether Celery stores this call's error, by the task's options and those of the call."""
    if not stores_result(task, request):
        return bool(task.store_errors_even_if_ignored)
    return not request.is_eager or bool(task.store_eager_result)
