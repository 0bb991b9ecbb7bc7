"""The end of a run: what becomes of its key, its claim, its place in a queue and its record."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from celery import states
from celery.exceptions import Reject, Retry

from ..celery_compat import acks_failures, is_revoked_here
from ..core.lease import Lease
from ..core.store_requests import CLAIM_NOT_CHANGED, Acquire, CompletionState, Release
from ..errors import StoreError
from ..key_queue.feature import leave
from ..message.request_data import RequestData
from ..message.times import seconds_until
from ..run_feature import Ending
from . import claim_changes
from .requeue import mark, mark_done
from .run_state import ReleasedEarly

if TYPE_CHECKING:
    from .run import TaskRun

logger = logging.getLogger("celery_singleton_lock")


def release(run: TaskRun, lease: Lease, state: str | None, retval: Any) -> None:
    """Release the lease, and change the claim with it."""
    try:
        request = final_release(run, lease, state, retval)
    except Exception:
        # Any exception is caught: a lease that is not released would be renewed endlessly.
        logger.exception("singleton: %s is released without a completion record", run.key)
        request = Release.of(lease, claim_changes.freed(run))
    if run.features:
        request = run.with_features(request, ending_of(run, state, retval))
    if state is None or request.completion is not None or request.queued:
        # This process may be about to end, or the message is acknowledged next and only the
        # completion record keeps its duplicates from running again. So this release waits for the
        # reply.
        run.send_release(lease, request)
    else:
        # No later step depends on the reply: the result is stored, and Celery sends the same
        # messages after any reply.
        run.locker.give_back(lease, request)


def final_release(run: TaskRun, lease: Lease, state: str | None, retval: Any) -> Release:
    """The release of the lease, with the change of the claim."""
    claim = due_in = None
    if isinstance(retval, Retry):
        due_in = retry_in(run, retval)
    if run.claim is not None:
        claim = claim_changes.after(run, run.claim, state, retval, due_in)
    if not is_done(run.task, state, retval):
        return Release.of(lease, claim)
    request = Release.of(lease, claim, min_hold=run.policy.min_hold)
    if run.acks_late:
        request.completion = CompletionState.DONE
        request.completion_ttl = run.runtime.settings.completion_ttl
    if due_in is not None and run.policy.hold_on_retry and run.keeps_key_for_retry:
        request.reserve(due_in + run.policy.ttl)  # its countdown, and a ttl in the queue
    return request


def after_early_release(run: TaskRun, early: ReleasedEarly, state: str | None, retval: Any) -> None:
    """Do what the early release has left to a redelivery of the message, or to a retry.

    Raises:
        StoreError: The store did not answer.
    """
    if early.leaves_claim:
        _change_claim_of_lost(run, state, retval)
    if run.acks_late and is_done(run.task, state, retval):
        deleted = None if isinstance(retval, Retry) else claim_changes.arguments_deleted(run)
        mark_done(run, deleted)
    for feature in run.features:
        feature.finished(ending_of(run, state, retval))


def without_lease(run: TaskRun, request: Acquire | None, state: str | None, retval: Any) -> None:
    """Change the claim and the place in a queue of a run that has no lease.

    Only grants and refusals change the claim; this run got neither. Release the lease that its
    ``request`` without a reply may have got.
    """
    change = None
    if run.claim is not None:
        try:
            # The retry of a task that is switched off is a plain message, without the claim.
            is_retry = isinstance(retval, Retry) and run.policy.enabled
            due_in = retry_in(run, retval) if is_retry else None
            change = claim_changes.after(run, run.claim, state, retval, due_in)
        except Exception:
            logger.exception("singleton: the claim %s is freed", run.claim.key)
            change = claim_changes.freed(run)
    if request is not None:
        run.locker.undo(request)
    if change is not None:
        claim_changes.change(run, change)
    if run.delivery.queue is not None and not run.eager:
        leave_queue(run, state, retval)


def leave_queue(run: TaskRun, state: str | None, retval: Any) -> None:
    """Take a call out of its queue that ends without a lease."""
    ending = ending_of(run, state, retval)
    if run.key_suffix is None and isinstance(retval, Retry):
        ending = Ending(may_return_from=run.delivery.token.retries + 1)  # it has no key either
    leave(run, ending)


def ending_of(run: TaskRun, state: str | None, retval: Any) -> Ending:
    """What becomes of the call, after the outcome of its task."""
    joined, is_retry = RequestData.of(run.request).joined, isinstance(retval, Retry)
    if joined == run.key and not is_retry:
        return Ending(goes_on=True)  # self.replace(), or another message with the task's id
    if state is None or (isinstance(retval, Reject) and getattr(retval, "requeue", False)):
        # Celery acknowledges the message of a greenlet that `revoke(terminate=True)` ended.
        return Ending(goes_on=run.acks_late and not is_revoked_here(run.request.id))
    if is_retry and (due_in := retry_in(run, retval)) is not None:
        return Ending(goes_on=True, due_in=due_in)
    retries = run.delivery.token.retries
    if is_retry or joined is not None:
        return Ending(may_return_from=retries + 1)
    return Ending(may_return_from=None if is_done(run.task, state, retval) else retries)


def retry_in(run: TaskRun, retry: Retry) -> float | None:
    """Seconds until the next attempt; None: it needs no reservation of the key.

    The retry has changed the arguments and the key, or its time is one that no worker can read.
    """
    signature, when = getattr(retry, "sig", None), retry.when
    if signature is not None:
        # If both are given, Celery uses the countdown, but ``retry.when`` is the eta.
        when = signature.options.get("countdown") or when
    if signature is not None and run.key:
        try:
            suffix = run.task.singleton_key_suffix(signature.args, signature.kwargs)
        except (TypeError, ValueError):
            return None
        if suffix != run.key_suffix:
            return None
    return seconds_until(when, run.task.app)


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


def _change_claim_of_lost(run: TaskRun, state: str | None, retval: Any) -> None:
    """Change the claim of a lost lease, which a release does not change.

    The change is sent once: later, the retry may have changed the claim.
    """
    assert run.claim is not None
    due_in = retry_in(run, retval) if isinstance(retval, Retry) else None
    change = claim_changes.after(run, run.claim, state, retval, due_in)
    try:
        mark(run, CompletionState.WAITING, run.delivery.sequence, 0.0, change)
    except StoreError as exc:
        logger.warning(CLAIM_NOT_CHANGED, change.key, exc, change.key)
