"""Pure functions from the outcome of a task to the release of its key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from celery import states
from celery.exceptions import Reject

from celery_singleton_lock.celery_compat import acks_failures
from celery_singleton_lock.core.lease import Kind, Lease
from celery_singleton_lock.core.store import ClaimChange, MarkerState, Release


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


def release_of(
    lease: Lease,
    claim: ClaimChange | None = None,
    *,
    min_hold: float = 0.0,
    marker: MarkerState | None = None,
    marker_ttl: float = 0.0,
) -> Release:
    """Free the key, or let it cool down until ``min_hold`` seconds after its acquisition."""
    cooling = max(0.0, min_hold - (lease.clock.now() - lease.acquired_at)) if min_hold else 0.0
    return Release(
        keys=(lease.key,),
        token=lease.token,
        become=Kind.COOLING if cooling else None,
        become_ttl=cooling,
        marker=marker,
        marker_ttl=marker_ttl,
        claim=claim,
    )


def reserve(call: Release, countdown: float, ttl: float) -> Release:
    """Reserve the key for the next attempt: its countdown, and ``ttl`` seconds in the queue."""
    return replace(
        call,
        become=Kind.RESERVED,
        become_ttl=max(countdown + ttl, call.become_ttl),
        next_token=call.token.next_attempt(),
    )
