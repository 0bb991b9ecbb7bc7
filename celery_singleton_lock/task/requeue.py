"""Requeue the message of a run: publish a copy, and say so in its completion record.

`message.copy` makes the copy, and has its guarantees.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NoReturn

from celery.exceptions import Ignore, SoftTimeLimitExceeded
from kombu.exceptions import EncodeError

from ..core.backoff import AGAIN, Pace, backoff
from ..core.events import EventName
from ..core.heartbeat import MAX_TIMEOUT
from ..core.store_requests import ClaimChange, CompletionState, Mark
from ..errors import SingletonLockError, StoreError
from ..message.claim import Claim
from ..message.copy import FOR_ANOTHER_WORKER, publish_copy, why_not
from ..message.header import VERSION, Delivery
from . import claim_changes
from .run_state import FINISHED

if TYPE_CHECKING:
    from .run import TaskRun

logger = logging.getLogger("celery_singleton_lock")

# Exceptions that publishing raises for a message that can't be copied, because its headers are
# wrong. (One that is also an OSError comes from the network, such as a certificate that can't be
# verified.) Clients may also raise them once, from a connection that broke during the call. The
# next try uses another connection.
_UNSENDABLE: Final = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
_TRIES_OF_THE_UNSENDABLE: Final = 3


def requeue(
    run: TaskRun,
    delivery: Delivery,
    pace: Pace,
    reason: str,
    claim: Claim | None,
    *,
    retain: bool = True,
    exact: bool = False,
) -> None:
    """Publish the message again, then give this delivery up: raise Ignore.

    Args:
        run: The run.
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
        for feature in run.features:
            feature.requeue(copy)
    while True:
        try:
            delay = pace[0] if exact else backoff(*pace, delivery.tries)
            delay = _publish_copy(run, copy, delay, claim)
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
                *(run.task.name, run.request.id),
                exc_info=True,
            )
        else:
            run.emit(EventName.REQUEUED, delay=delay, reason=reason, sequence=copy.sequence)
            raise Ignore
        if not retain:
            return
        run.runtime.clock.sleep(backoff(*AGAIN, tries))
        tries += 1


def refuse_newer(run: TaskRun, header: Mapping[str, Any]) -> NoReturn:
    """Requeue a message with the header of a newer version, unread, for a worker that reads it.

    Raises:
        Ignore: The message was requeued.
        SingletonLockError: It can't be requeued.
    """
    run.state = FINISHED
    text = (
        f"{run.task.name}[{run.request.id}] was sent by a newer version of "
        f"celery-singleton-lock: its message has version {header['version']}, and this worker "
        f"reads messages up to version {VERSION}. Upgrade this worker"
    )
    if (reason := why_not(run.task, run.request)) is not None:
        raise SingletonLockError(f"{text}. The message is not requeued: {reason}")
    logger.error("singleton: %s. The message is requeued for a worker that can read it", text)
    requeue(run, run.delivery, FOR_ANOTHER_WORKER, "newer message", None)
    raise AssertionError("a requeue without an end")


def mark(
    run: TaskRun,
    state: CompletionState,
    sequence: int,
    delay: float,
    claim: ClaimChange | None,
) -> None:
    """Raise the completion record of this attempt.

    Raises:
        StoreError: The store did not answer.
    """
    run.runtime.store.leases.mark(_mark_of(run, state, sequence, delay, claim), timeout=MAX_TIMEOUT)


def mark_done(run: TaskRun, claim: ClaimChange | None) -> None:
    """Mark this attempt as done; repeated until the store answers."""
    runtime, key, task, task_id = run.runtime, run.key, run.task.name, str(run.request.id)
    done = _mark_of(run, CompletionState.DONE, run.delivery.sequence, 0.0, claim)

    def report(why: object, action: str = "not-recorded") -> None:
        runtime.outages.report(why, action, key=key, task=task, task_id=task_id, repeats=True)

    error = runtime.locker.retry_queue.ask(
        lambda store: store.leases.mark(done, timeout=MAX_TIMEOUT), done.ttl, report
    )
    if error is not None:
        report(error, "recorded-later")


def _publish_copy(run: TaskRun, copy: Delivery, delay: float, claim: Claim | None) -> float:
    """Publish and mark a copy; return the seconds until it arrives."""
    longest = run.runtime.settings.longest_countdown
    delay = delay if longest is None else min(delay, longest)
    delay = publish_copy(run.task, run.request, copy.header(), delay)
    if copy.newer is not None:
        return round(delay, 3)  # its sequence can't be read, so the copy has the same
    try:
        queued = claim_changes.queued(run, claim, delay) if claim else None
        mark(run, CompletionState.WAITING, copy.sequence, delay, queued)
    except StoreError:
        pass  # without the record, a redelivery of this message would be a second copy
    return round(delay, 3)


def _mark_of(
    run: TaskRun, state: CompletionState, sequence: int, delay: float, claim: ClaimChange | None
) -> Mark:
    token, ttl = run.delivery.token, run.runtime.settings.completion_ttl + delay
    return Mark(key=run.key, token=token, state=state, ttl=ttl, sequence=sequence, claim=claim)
