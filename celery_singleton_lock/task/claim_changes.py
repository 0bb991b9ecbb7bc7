"""The claim of a running message (``unique``): its change at each step of the run.

Wherever there is a lease, the claim changes with it in one request. `message.claim` has the terms
of a claim and its state model.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from celery import states
from celery.exceptions import Reject

from ..celery_compat import acks_failures, dead_letters, is_revoked_here
from ..core.heartbeat import MAX_TIMEOUT
from ..core.lease import Phase
from ..core.store import Store
from ..core.store_requests import CLAIM_NOT_CHANGED, Acquire, ClaimChange
from ..errors import StoreError
from ..message.claim import Claim
from ..message.request_data import RequestData
from ..message.times import seconds_until
from ..option_values import Unique
from ..run_feature import Run

logger = logging.getLogger("celery_singleton_lock")


def taken_by_run(run: Run) -> Claim | None:
    """The claim that a run takes with its lease because its message has none; None: it takes none.

    Call this when the run has its key.
    """
    task, policy = run.task, run.policy
    if policy.unique is not Unique.UNTIL_DONE:
        return None
    if run.eager and not task.app.conf.task_always_eager:
        return None  # task.apply() next to real messages, whose claims it must not change
    claim = Claim.of(policy, run.runtime.keyspace.claim(task.name, run.key))
    # An eager call may be a member of a canvas, which Celery runs without `apply_async`.
    return replace(claim, duplicate=run.eager)


def prepare(run: Run, claim: Claim, request: Acquire) -> None:
    """Complete the first request for the lease."""
    request.claim = claim.granted(run.policy.ttl)
    request.refused_if_claimed = claim.refused_if_claimed and not run.delivery.started


def freed(run: Run, *, ended: bool = False) -> ClaimChange | None:
    """The claim is freed; with ``ended``, the message never comes back. None: there is no claim."""
    if run.claim is None:
        return None
    return run.claim.freed(_message_that_ends(run, run.claim) if ended else "")


def arguments_deleted(run: Run) -> ClaimChange | None:
    """The newest arguments of a message that has ended are deleted; None: it has none."""
    has_arguments = run.claim is not None and _message_that_ends(run, run.claim)
    return freed(run, ended=True) if has_arguments else None


def queued(run: Run, claim: Claim, delay: float) -> ClaimChange:
    """The change when a copy of the message is published, to run after ``delay`` seconds or later.

    If the message expires before, a worker will discard the copy. Then the claim is freed.
    """
    if _has_expired_in(run, run.request.expires, delay):
        return claim.freed()
    return claim.queued(delay)


def after(
    run: Run, claim: Claim, state: str | None, retval: Any, retry_in: float | None
) -> ClaimChange:
    """The change when the task has ended; the arguments are those of `Claim.after`."""
    request = run.request
    # Celery acknowledges the message of a greenlet that `revoke(terminate=True)` ended.
    comes_back = run.acks_late and not (state is None and is_revoked_here(request.id))
    signature = getattr(retval, "sig", None)
    expires = None if signature is None else signature.options.get("expires")
    if retry_in is not None and _has_expired_in(run, expires, retry_in):
        retry_in = None  # a worker will discard the retry
    return claim.after(
        state,
        retval,
        comes_back=comes_back,
        retry_in=retry_in,
        replaced=RequestData.of(request).continued == claim.key,
        message="" if _is_rejected(run.task, state, retval) else _message_that_ends(run, claim),
    )


def change(run: Run, change: ClaimChange, *, ttl: float | None = None) -> None:
    """Change the claim of a run without a lease.

    Args:
        run: The run.
        change: The change.
        ttl: Seconds for which it is repeated without a reply; None: as long as the claim may exist.
    """
    token = run.delivery.token

    def send(store: Store) -> None:
        store.claims.change(token, change, timeout=MAX_TIMEOUT)

    def give_up(why: object) -> None:
        logger.warning(CLAIM_NOT_CHANGED, change.key, why, change.key)

    if ttl is None:
        ttl = change.ttl or (run.claim.unique_for if run.claim else run.policy.ttl)
    run.runtime.locker.retry_queue.ask(send, ttl, give_up)


def free_if_queued(run: Run) -> None:
    """Free the claim of a copy of a message that has already ended.

    The task that published the copy ran twice. The claim of a later attempt is not changed.
    """
    if run.claim is None:
        return
    try:
        record = run.runtime.store.leases.inspect(run.claim.key)
    except StoreError:
        return
    if record is not None and record.phase is Phase.QUEUED:
        # Once: later, a later attempt may have queued the claim again.
        change(run, run.claim.freed(), ttl=0.0)


def _has_expired_in(run: Run, expires: Any, seconds: float) -> bool:
    """Whether a message with Celery's ``expires`` is discarded if it arrives in ``seconds``."""
    if not expires:
        return False
    left = seconds_until(expires, run.task.app)
    return left is not None and left < seconds


def _message_that_ends(run: Run, claim: Claim) -> str:
    """The name of the message, if the store has newest arguments to delete; else empty."""
    return run.delivery.token.call_id if claim.may_have_arguments(run.policy) else ""


def _is_rejected(task: Any, state: str | None, retval: Any) -> bool:
    """Whether Celery rejects the message, so that the broker may dead-letter it.

    A person may send it to its queue again. It has to run with the newest arguments then.
    """
    failed = state == states.FAILURE and not acks_failures(task)
    return (failed or isinstance(retval, Reject)) and dead_letters(task)
