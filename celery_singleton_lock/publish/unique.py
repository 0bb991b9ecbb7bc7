"""The claim at publish time: admit a message, or answer a duplicate.

Promises
    Of equal calls, one is queued at a time (``until_start``), or queued or running
    (``until_done``): one round trip more for each call. A publish that fails frees its claim. A
    silent store never stops a call for longer than a second: it goes out without a claim, for the
    lock holds anyway. No call is answered with one that is known to have ended: a duplicate costs
    another round trip, to the result backend: at most 1 s if a Redis backend does not answer.

Does not promise
    To notice a message that vanished (a purged queue, a broker that lost it): ``unique_for`` bounds
    that. A crash between claim and publish is such a vanished message.

Where a swallowed message would hang others that wait for it (chains, groups, chords, links), the
duplicate is published and resolved when it runs; unless that call itself says ``on_duplicate``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from celery import Celery, states
from celery.backends.rpc import RPCBackend
from celery.result import AsyncResult
from celery.utils.time import maybe_iso8601

from celery_singleton_lock.celery_compat import limit_backend_timeouts, result_meta
from celery_singleton_lock.core.events import Event, EventName
from celery_singleton_lock.core.lease import Holder, Phase, Record, Token
from celery_singleton_lock.core.store import Admit
from celery_singleton_lock.errors import DuplicateTask, StoreError, StoreUnavailable
from celery_singleton_lock.policy import OnDuplicate, Policy, Unique
from celery_singleton_lock.publish.claim import CARRIED, CONTINUED, Carried, Claim
from celery_singleton_lock.publish.skipped import SkippedResult, skipped_value
from celery_singleton_lock.runtime import Runtime

__all__ = [
    "RPC_CURE",
    "Publication",
    "carry_claim",
    "continues",
    "is_canvas",
    "is_chords_body",
    "publish",
    "sends_results_to_first_caller",
]

logger = logging.getLogger("celery_singleton_lock")

# Seconds for one answer. A server restart leaves every idle connection broken, which shows at once:
# then a second try meets a fresh one. If the server does not answer in time, this module does not
# try again, because a web request is waiting. The store itself does, on a new connection, if the
# request went over an idle one, which may have been dropped.
_TIMEOUT: Final = 0.4
_SHOWS_AT_ONCE: Final = 0.1
# What Celery's canvas gives to the messages that somebody waits for.
_CANVAS_OPTIONS: Final = frozenset(
    ("chain", "chord", "group_id", "root_id", "parent_id", "link", "link_error")
)
# Publishes the bodies of chords, where the result backend can't count their members.
_CHORD_UNLOCK: Final = "celery.chord_unlock"
# A result older than its claim by more than the clocks may differ is that of an earlier call with
# the same, explicit task id.
_CLOCKS_DIFFER_BY: Final = 60.0
# A process that could not free so many claims has a store that is away for long.
_MAX_ORPHANS: Final = 1000


@dataclass(slots=True, kw_only=True, eq=False)
class Publication:
    """A message about to be published with a claim. Not changed once it is made, but its header is.

    Attributes:
        app: The publisher's.
        task: Name of the task.
        task_id: The message's.
        key: The lock key that the call will need.
        policy: The task's, with this call's options on top.
        header: Ours in the message; what becomes of the claim is written into it.
        options: Celery's, of which ``countdown``, ``eta`` and those of its canvas matter.
        expires: Celery's, of the call or the task.
        swallows_in_canvas: Whether the call says that a duplicate is not published even so.
    """

    app: Celery
    task: str
    task_id: str
    key: str
    policy: Policy
    header: dict[str, Any]
    options: Mapping[str, Any]
    expires: Any = None
    swallows_in_canvas: bool = False

    @property
    def in_canvas(self) -> bool:
        """Whether something may wait for this very message."""
        return is_canvas(self.options) or is_chords_body(self.app.current_worker_task, self.task_id)


def is_canvas(options: Mapping[str, Any]) -> bool:
    """Whether Celery's canvas publishes this: a member of a group, chord or chain, or a link."""
    return any(options[name] for name in _CANVAS_OPTIONS.intersection(options))


def is_chords_body(running: Any, task_id: str) -> bool:
    """Whether ``running`` publishes its chord's body, whose options tell it since Celery 5.7."""
    if running is None:
        return False
    chord = running.request.chord
    options = chord.get("options") if isinstance(chord, Mapping) else None
    published_id = options.get("task_id") if isinstance(options, Mapping) else None
    return running.name == _CHORD_UNLOCK or published_id == task_id


def continues(running: Any, task_id: str) -> bool:
    """Whether the message ``task_id`` goes on with the ``running`` task: a retry or replace."""
    return running is not None and str(running.request.id) == task_id


def carry_claim(
    app: Celery, request: Any, header: dict[str, Any], task: str, key: str, policy: Policy
) -> None:
    """Give the message that goes on with ``request`` its claim; started work asks nobody."""
    carried = request.__dict__.get(CARRIED)
    if isinstance(carried, Carried) and (carried.task, carried.lock_key) == (task, key):
        claim: Claim | None = carried.claim  # under the name that its publisher gave it
    else:
        claim = _claim(Runtime.of(app), task, key, policy)
    if claim is not None:
        header["claim"] = claim.to_header()
        request.__dict__[CONTINUED] = claim.key


def publish(
    publication: Publication, runtime: Runtime, send: Callable[[], AsyncResult[Any]]
) -> AsyncResult[Any]:
    """Claim and ``send``, or answer with the call that has the claim.

    Args:
        publication: What is to be published.
        runtime: Of its app.
        send: Publishes it.

    Raises:
        DuplicateTask: ``on_duplicate`` is ``"raise"``.
        StoreUnavailable: The store is silent, and ``on_duplicate`` is ``"raise"``.
        Exception: What ``send`` raises; the claim is free then.
    """
    claim = _claim(runtime, publication.task, publication.key, publication.policy)
    if claim is None:
        return send()
    publication.header["claim"] = claim.to_header()
    token = Token(publication.task_id, 0, 0, "-", publication.header["call"])
    try:
        existing = _admit(publication, runtime, claim, token)
    except StoreError as exc:
        if publication.policy.on_duplicate is OnDuplicate.RAISE:
            _free(runtime, claim, token)  # it may stand all the same: the reply was lost
            raise
        logger.warning(
            "singleton: %s[%s] is published without a claim, for %s; an equal call may be queued "
            "beside it",
            publication.task,
            publication.task_id,
            exc,
        )
        return send()
    except BaseException:
        # A soft time limit or the like between send and read: the claim may stand, for a message
        # that nobody will publish.
        _free(runtime, claim, token)
        raise
    if existing is not None:
        if _stands_for(existing, claim) and (
            not publication.in_canvas or publication.swallows_in_canvas
        ):
            return _answer(publication, runtime, existing)
        publication.header["claim"]["duplicate"] = True
        return send()
    try:
        return send()
    except BaseException:
        _free(runtime, claim, token)
        raise


def _claim(runtime: Runtime, task: str, key: str, policy: Policy) -> Claim | None:
    if policy.unique is None:
        return None
    return Claim(
        key=runtime.keyspace.claim(task, key),
        unique=policy.unique,
        unique_for=policy.unique_for,
    )


def _admit(publication: Publication, runtime: Runtime, claim: Claim, token: Token) -> Record | None:
    app = publication.app
    options, expires = publication.options, publication.expires
    # Celery chooses between the two so.
    start = options.get("countdown") or options.get("eta")
    delay = _seconds_until(start, app) if start else 0.0
    expires_in = None if expires is None else _seconds_until(expires, app)
    wall = runtime.clock.wall()
    call = Admit(
        key=claim.key,
        token=token,
        holder=Holder(
            task=publication.task,
            task_id=publication.task_id,
            worker=runtime.worker,
            pid=os.getpid(),
            since=wall,
            expires=0.0 if expires_in is None else wall + expires_in,
        ),
        ttl=claim.admitted_for(delay, expires_in),
        instead_of=runtime.orphans.get(claim.key, ""),
        tells_ttl=publication.policy.on_duplicate is OnDuplicate.RAISE,
    )
    existing = _ask(runtime, call)
    runtime.orphans.pop(claim.key, None)
    if existing is None or not _gives_way(publication, runtime, existing, call.holder):
        return existing
    return _ask(runtime, replace(call, instead_of=existing.token))


def _gives_way(
    publication: Publication, runtime: Runtime, existing: Record, caller: Holder
) -> bool:
    """Whether the call that has the claim can't be counted on to do the work of another.

    Where it may expire and that one may not; where it is the running task that publishes its own
    successor; where it has ended, and its worker could not free the claim: killed after it stored
    the result, or the store was away.
    """
    # Two that expire are of one sort: with expires=60 at the task, each is the later one.
    if existing.phase is Phase.QUEUED and existing.holder.expires and not caller.expires:
        return True
    running: Any = publication.app.current_worker_task
    if running is not None and str(running.request.id) == _task_id(existing):
        return True
    return _has_ended(publication.app, runtime, existing)


def _stands_for(existing: Record, claim: Claim) -> bool:
    """Whether the call that has the claim does the work of the one that asks for it.

    Where the two were made with different terms, it may be running already, and this one is to be
    followed by a run.
    """
    return claim.unique is not Unique.UNTIL_START or existing.phase is not Phase.RUNNING


def _ask(runtime: Runtime, call: Admit) -> Record | None:
    asked_at = runtime.clock.now()
    try:
        return runtime.store.admit(call, timeout=_TIMEOUT)
    except StoreUnavailable:
        if runtime.clock.now() - asked_at > _SHOWS_AT_ONCE:
            raise
        return runtime.store.admit(call, timeout=_TIMEOUT)


def _seconds_until(when: Any, app: Celery) -> float:
    """Seconds from now to ``when``: seconds, a datetime or one as text; 0 if it is none."""
    try:
        moment = maybe_iso8601(when) if isinstance(when, str) else when
        if not isinstance(moment, datetime):
            return max(0.0, float(moment or 0))
        now: datetime = app.now()
        if moment.tzinfo is None:
            now = now.replace(tzinfo=None)
        return max(0.0, (moment - now).total_seconds())
    except (TypeError, ValueError):
        return 0.0  # Celery will say what is wrong with it


def _has_ended(app: Celery, runtime: Runtime, existing: Record) -> bool:
    """Whether the task of a claim is known to have ended: then nobody will free its claim."""
    if isinstance(app.backend, RPCBackend):
        return False  # asking for a result takes it away from whoever waits for it
    try:
        if runtime.quick_backend is None:
            runtime.quick_backend = limit_backend_timeouts(app, _TIMEOUT)
        meta = result_meta(runtime.quick_backend or app.backend, _task_id(existing))
        if meta.get("status") not in states.READY_STATES:
            return False
        done = meta.get("date_done")
        done = maybe_iso8601(done) if isinstance(done, str) else done
        if not isinstance(done, datetime):
            return True
        if done.tzinfo is None:
            done = done.replace(tzinfo=UTC)
        return bool(done.timestamp() > existing.holder.since - _CLOCKS_DIFFER_BY)
    except Exception:
        return False  # no result backend, or a silent one: then the claim counts


def _task_id(existing: Record) -> str:
    return Token.task_id_of(existing.token)


def _answer(publication: Publication, runtime: Runtime, existing: Record) -> AsyncResult[Any]:
    task_id = _task_id(existing)
    on_duplicate = publication.policy.on_duplicate
    runtime.events.emit(
        Event(
            name=EventName.DUPLICATE,
            key=existing.key,
            task=publication.task,
            task_id=publication.task_id,
            holder=existing.holder,
            data={"outcome": str(on_duplicate), "phase": str(existing.phase)},
        )
    )
    if on_duplicate is OnDuplicate.SKIP:
        value = skipped_value(publication.task, publication.key, existing.holder)
        return SkippedResult(publication.task_id, value, publication.task)
    if on_duplicate is OnDuplicate.RAISE:
        age = max(0.0, runtime.clock.wall() - existing.holder.since)
        raise DuplicateTask(
            f"{publication.task} is not published: {task_id} is {existing.phase} with the same "
            f"key, since {age:.1f} s. Wait for that one, or set another on_duplicate. Its claim "
            f"ends when it does, at the latest in {existing.ttl:.0f} s if nothing is heard of it",
            task_id,
            existing.ttl,
        )
    _warn_of_rpc(publication, task_id)
    return publication.app.AsyncResult(task_id, task_name=publication.task)


def sends_results_to_first_caller(
    app: Celery, task: Any, policy: Policy, options: Mapping[str, Any]
) -> bool:
    """Whether a duplicate's caller gets a result that only the first caller's thread can read.

    The ``rpc://`` backend sends a result to a queue of the thread that published the message.
    """
    ignored = options.get("ignore_result", getattr(task, "ignore_result", False))
    return (
        policy.unique is not None
        and policy.on_duplicate is OnDuplicate.RETURN_EXISTING
        and isinstance(app.backend, RPCBackend)
        and not ignored
    )


def _warn_of_rpc(publication: Publication, task_id: str) -> None:
    """Warn, once per process and task, about a result that this caller may never receive."""
    app, name = publication.app, publication.task
    if name in _warned or not sends_results_to_first_caller(
        app, app.tasks.get(name), publication.policy, publication.options
    ):
        return
    _warned.add(name)
    logger.warning(
        "singleton: a call of %s returns the result of %s, but rpc:// delivers a result only to "
        "the process and thread that published the message: anywhere else .get() waits for ever. "
        "%s",
        name,
        task_id,
        RPC_CURE,
    )


#: What to do about results that only the first caller receives.
RPC_CURE: Final = (
    'Use a result backend that all processes share, such as redis://, or on_duplicate="skip" or '
    '"raise"; where no caller reads the result, ignore_result=True.'
)
# Names of the tasks that this process has warned about.
_warned: Final[set[str]] = set()


def _free(runtime: Runtime, claim: Claim, token: Token) -> None:
    try:
        runtime.store.settle_claim(token, claim.freed(), timeout=_TIMEOUT)
    except StoreError as exc:
        # Whoever tries again, here, must not be told of a call that never was.
        if len(runtime.orphans) < _MAX_ORPHANS:
            runtime.orphans[claim.key] = token.task
        logger.warning(
            "singleton: %s stays claimed for at most %g s, though its message was not published: "
            "%s",
            claim.key,
            claim.unique_for,
            exc,
        )
