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

State model
    See `run_state`: `TaskRun.state` is one value of a closed set. A grant or a refusal changes the
    claim of the message in the same request; a run that got neither changes it in finish(). A
    request may have been granted without a reply, so finish() also releases by its token.

Failure handling
    No reply to the acquire: ``on_store_error``. No reply from the broker to a requeue: the message
    is retained until the broker or the store answers. No reply to the release, or to the completion
    record of an attempt that is done: it is repeated while this process lives; then the ttl frees
    the key. An exception in finish() (a soft time limit in ``after_return``): the heartbeat
    discards the lease, and ``task_postrun`` calls it again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NoReturn

from celery import signals, states
from celery.exceptions import Ignore, Reject, Retry, TaskRevokedError

from ..celery_compat import fail_as_body, is_retried, may_reject_when_done
from ..core.backoff import AGAIN
from ..core.events import Event, EventName
from ..core.lease import Holder, Lease
from ..core.locker import Locker
from ..core.store_requests import CompletionState, Release, ReleaseReply
from ..errors import LockConflict, StoreError, StoreUnavailable
from ..instrumentation.sentry import close_check_in
from ..key_queue.hint import publish_hint
from ..message.claim import Claim
from ..message.copy import why_not
from ..message.header import HEADER, Delivery
from ..message.request_data import ATTRIBUTE, RequestData
from ..option_values import OnLost, OnStoreError
from ..policy import Policy
from ..run_feature import Ending, Feature
from ..runtime import WITHOUT_SERVER, Runtime
from . import claim_changes
from . import ending as endings
from .acquire import acquire
from .context import held_here, held_lease
from .interrupt import Body, is_loss
from .requeue import refuse_newer, requeue
from .run_state import FINISHED, Asking, Finished, Holding, ReleasedEarly, State

_LEFT: Final = "lost-to-duplicate"
# The number of lost leases after which a task fails: its store can't keep a lease.
_MAX_LOSSES: Final = 3


class TaskRun:
    """One delivery of a task, from its call by Celery to ``task_postrun``.

    Attributes:
        task: The task.
        request: Its request (``celery.app.task.Context``), until the run has finished.
        runtime: The app's runtime; for ``task_always_eager`` the runtime without a server.
        delivery: The message's delivery.
        policy: The task's policy, with the options of this call.
        key: The lock key.
        key_suffix: The part of the key of the arguments after the scope; None: no lock.
        claim: The claim of the message, or the claim that the run takes for it; None: none.
        acks_late: Whether the message may be delivered again after its work is done.
        entered: Whether the body was entered. After that, calling the task is a function call.
        state: What the run has to release.
        features: The options that only some tasks have.
        locker: Set when the run asks for its lease.
    """

    key = ""
    key_suffix: str | None = None
    claim: Claim | None = None
    entered = False
    state: State = Asking()
    features: Sequence[Feature] = ()
    locker: Locker

    def __init__(self, task: Any, request: Any) -> None:
        self.task, self.request = task, request
        self.delivery = delivery = Delivery.of(request.__dict__)
        self.policy: Policy = task.singleton_policy(delivery.options)
        self.eager = bool(request.is_eager)
        local = self.eager and bool(task.app.conf.task_always_eager)
        self.runtime = runtime = Runtime.of(task.app, eager=local)
        if delivery.claim is not None and not self.eager:
            self.claim = Claim.from_header(delivery.claim, runtime.keyspace)
        self.acks_late = bool(task.acks_late) and not self.eager
        self._body = Body()
        RequestData.of(request).run = self

    @staticmethod
    def of(request: Any) -> TaskRun | None:
        """The run of ``request``; None: none has begun."""
        found = request.__dict__.get(ATTRIBUTE)
        return found.run if isinstance(found, RequestData) else None

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

        body = partial(_begin, self, own, args, kwargs)
        if self.delivery.newer is not None:
            refuse_newer(self, self.delivery.newer)
        if not self.policy.enabled:
            # A claim and a place in a queue that the message has from before end with the task.
            return body()
        self._make_key(args, kwargs)
        if self.key_suffix is None or (held_lease.get() and held_here(self.key)):
            return body()
        try:
            reply = acquire(self)
        except (Ignore, LockConflict):
            self.state = FINISHED  # requeued, or left to another delivery, or freed
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
        self.state = FINISHED
        return reply

    def finish(self, state: str | None, retval: Any) -> None:
        """Release the lease of an ended task, or change the claim of a run without a lease.

        The second call, in ``task_postrun``, has no effect. An exception from a signal handler
        during the release is propagated.

        Args:
            state: Celery's state of the task; None if SystemExit or similar ended it.
            retval: The task's result, or the exception that ended it.
        """
        current = self.state
        if not isinstance(current, Finished):
            if (leaving := sys.exception()) is not None:
                state, retval = self._outcome(state, retval, leaving)
            try:
                if isinstance(current, Holding):
                    endings.release(self, current.lease, state, retval)
                elif isinstance(current, ReleasedEarly):
                    endings.after_early_release(self, current, state, retval)
                else:
                    endings.without_lease(self, current.request, state, retval)
            except StoreError as exc:
                self.report_outage(exc, "not-recorded")
            except BaseException:
                # A soft time limit or SIGTERM. If this is after_return, task_postrun finishes the
                # run. If this is task_postrun, the ttl frees the key, because the lease is no
                # longer renewed.
                if not isinstance(current, Asking):
                    self.locker.heartbeat.stop(current.lease)
                raise
        self.state = FINISHED
        # The request and the features refer to this run. A reference cycle would keep all objects
        # of this task alive until the garbage collector runs.
        self.request, self.features = None, ()

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
            retry = None if isinstance(self.state, Asking | Finished) else self.state.retry
            return (states.FAILURE, leaving) if retry is None else (states.RETRY, retry)
        if isinstance(leaving, Reject) and not self.eager and may_reject_when_done(self.task):
            return state, leaving  # from on_success
        return state, retval

    def abandon(self) -> None:
        """Report that the lease is left to its ttl: the last :meth:`finish` was interrupted."""
        if not isinstance(self.state, Asking | Finished):
            self.locker.abandon(self.state.lease)

    @property
    def computed_key(self) -> str:
        """The key of the arguments. `key` differs from it if another key's queue has the call."""
        return self.runtime.keyspace.lock(self.task.singleton_scope, self.key_suffix or "")

    @property
    def keeps_key_for_retry(self) -> bool:
        """Whether a retry may reserve the key (``hold_on_retry``)."""
        return all(feature.keeps_key_for_retry for feature in self.features)

    def _make_key(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        task, policy, keyspace = self.task, self.policy, self.runtime.keyspace
        # The arguments of an eager call were in no message.
        suffix_of = task.singleton_key_suffix if self.eager else task.singleton_key_maker.key_suffix
        self.key_suffix = suffix = suffix_of(args, kwargs)
        self.key = keyspace.lock(task.singleton_scope, suffix or "")
        if policy.unique is not None and suffix is not None and self.claim is None:
            self.claim = claim_changes.taken_by_run(self)

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
            if isinstance(self.state, Holding):
                self.state.retry = retry
            if lease.lost:
                self._release_early(lease, Release.of(lease), self.claim is not None)
            raise
        except BaseException as error:
            for feature in self.features:
                feature.ended(lease, error)
            if lease.lost and is_loss(error, interrupted=self._body.fired):
                return self._interrupted(lease)
            if isinstance(error, Exception):
                self._ended(lease, failed=True)
            raise
        finally:
            # The outer lease now: a block around this call may have ended inside the body.
            held_lease.set(lease.outer)
        for feature in self.features:
            feature.ended(lease, None)
        self._ended(lease, failed=False)
        return result

    def store_started(self) -> None:
        """Store the state STARTED for ``track_started``, just before the body runs."""
        task, request = self.task, self.request
        if not self.eager and stores_result(task, request):
            meta = {"pid": os.getpid(), "hostname": request.hostname}
            task.backend.store_result(request.id, meta, states.STARTED, request=request)

    def on_lost(self, lease: Lease) -> str:
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
        """Whether the message of a body that is interrupted by a loss is requeued."""
        goes_back = (
            self._outcome_of_loss() is OnLost.RETRY
            and self.delivery.losses < _MAX_LOSSES
            and why_not(self.task, request) is None
        )
        return (
            self.state.first_decision(goes_back) if isinstance(self.state, Holding) else goes_back
        )

    def _ended(self, lease: Lease, *, failed: bool) -> None:
        """Handle the end of the body, by its result or by a failure."""
        request = self.request
        links = request.errbacks if failed else request.callbacks or request.chain
        triggers = (links or request.chord) and all(f.releases_early for f in self.features)
        if not triggers and not lease.lost:
            return  # the lease is released after the result is stored
        # The messages that Celery publishes next must not conflict with this lease. Until they are
        # sent, the work is not done: meanwhile a completion record that expires makes the store
        # refuse duplicates.
        claim = claim_changes.freed(self, ended=not self.acks_late)
        release = Release.of(lease, claim, min_hold=self.policy.min_hold)
        if self.acks_late:
            release.completion, release.completion_ttl = CompletionState.FINISHING, self.policy.ttl
        self._release_early(lease, release)

    def _interrupted(self, lease: Lease) -> Any:
        """Handle the end of a body that was interrupted because its lease was lost."""
        # The body's check() may have noticed the loss first.
        self.locker.heartbeat.lose(lease)
        error = lease.lost_error()  # created before the release changes the lease
        goes_back = self._goes_back(self.request)
        retried = not goes_back and is_retried(self.task, error)
        # With acks_late, the message ends with the completion record "done".
        stays = goes_back or retried
        claim = None if stays else claim_changes.freed(self, ended=not self.acks_late)
        leaves_claim = retried and self.claim is not None
        self._release_early(lease, Release.of(lease, claim), leaves_claim)
        if goes_back:
            self.state = FINISHED  # the copy is the same attempt, which is not done
            losses = self.delivery.losses + 1
            copy = replace(self.delivery, started=True, losses=losses, tries=0)
            requeue(self, copy, AGAIN, "lease-lost", self.claim)
        return fail_as_body(self.task, error)

    def _release_early(self, lease: Lease, release: Release, leaves_claim: bool = False) -> None:
        """Release before the result is stored.

        If a duplicate delivery took over, its result counts.

        Raises:
            Ignore: Another delivery of this attempt has the lease, or has finished.
        """
        # finish() ends the call.
        reply = self.send_release(lease, self.with_features(release, Ending(goes_on=True)))
        # Last: after an exception from a signal handler before this line, finish() releases the
        # lease again, because the store may not have got this release.
        retry = self.state.retry if isinstance(self.state, Holding) else None
        self.state = ReleasedEarly(lease, retry, leaves_claim)
        if reply not in (ReleaseReply.DUPLICATE, ReleaseReply.DONE):
            return
        self.state = FINISHED  # the attempt is not done, or not by this run
        is_duplicate = reply is ReleaseReply.DUPLICATE
        if is_duplicate and self.acks_late and why_not(self.task, self.request) is None:
            # With Redis as the broker, all deliveries of a message have the same delivery tag.
            # Giving up this delivery acknowledges the duplicate's too, and if the duplicate's
            # worker died now, the job would be lost. The copy waits for the duplicate's end, and is
            # dropped if the duplicate succeeds.
            copy = replace(self.delivery, started=True, tries=0)
            requeue(self, copy, AGAIN, _LEFT, None)
        self.emit(EventName.DROPPED, reason=_LEFT)
        raise Ignore

    def send_release(self, lease: Lease, release: Release) -> ReleaseReply | None:
        """Release ``lease``, and publish the call that follows in the queue of its key."""
        publish = partial(publish_hint, self.task.app) if release.queued else None
        return self.locker.release(lease, release, publish)

    def with_features(self, release: Release, ending: Ending) -> Release:
        """The release, completed by the features."""
        for feature in self.features:
            release = feature.releasing(release, ending)
        return release

    # --- for features ----------------------------------------------------------------------------

    def rewrite_header(self) -> None:
        """Let what this task publishes continue the delivery as it is now."""
        self.request.__dict__[HEADER] = self.delivery.header()

    def has_key_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a message with these arguments has the key of this run, or none."""
        return self.task.singleton_key_maker.key_suffix(args, kwargs) in (None, self.key_suffix)

    def stop_waiting(self) -> None:
        """Leave the wait queue; idempotent."""
        if isinstance(self.state, Asking) and self.state.waiter is not None:
            self.state.waiter.leave()

    def interrupt(self) -> None:
        """Interrupt the body, from another thread."""
        self._body.interrupt()

    def free_claim(self) -> None:
        """Free the claim of a message that ends without a lease."""
        if (change := claim_changes.freed(self, ended=True)) is not None:
            claim_changes.change(self, change)

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
        """Requeue the message, to run after ``seconds``; ``delivery``: see `requeue`.

        Raises:
            Ignore: The delivery has ended.
        """
        requeue(self, delivery, (seconds, seconds), reason, self.claim, exact=True)
        raise AssertionError("a requeue without an end")

    def start_over(self, lease: Lease, reason: str) -> NoReturn:
        """Release the ``lease`` before the body has begun, and requeue the message.

        Raises:
            Ignore: The delivery has ended.
        """
        self._release_early(lease, Release.of(lease))
        self.state = FINISHED  # the copy is the same attempt, which is not done
        self.requeue_in(self.delivery, 0.0, reason)

    def end_for_good(self, lease: Lease | None, *, began: bool) -> NoReturn:
        """End a delivery whose result is stored, and whose message never comes back.

        Args:
            lease: The lease, which is released; None: there is none.
            began: Whether the body has begun.

        Raises:
            Ignore: Always.
        """
        claim = claim_changes.freed(self, ended=True)
        if lease is not None:
            min_hold = self.policy.min_hold if began else 0.0
            release = Release.of(lease, claim, min_hold=min_hold)
            if began and self.acks_late:
                release.completion = CompletionState.DONE
                release.completion_ttl = self.runtime.settings.completion_ttl
            self.send_release(lease, self.with_features(release, Ending()))
        elif claim is not None:
            claim_changes.change(self, claim)
        self.state = FINISHED
        raise Ignore

    def report_outage(self, error: StoreError, action: str) -> None:
        """Report that the store did not carry out a request of this run."""
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


def _begin(
    run: TaskRun,
    own: Callable[..., Any] | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """The body of ``run``, with what its features add to the arguments; see `TaskRun.run`."""
    task = run.task
    for feature in run.features:
        lease = run.state.lease if isinstance(run.state, Holding) else None
        args, kwargs = feature.begin(lease, args, kwargs)
    if task.singleton_stores_started:
        run.store_started()
    if own is not None:
        return own(task, *args, **kwargs)
    run.entered = True
    return (task.singleton_base_call or task.run)(*args, **kwargs)


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
