"""Why a task ran, did not run, or has not run yet: its fate, in sentences.

The rules are in `_RULES`. The first one that applies decides. Each is a function of the `Facts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from shlex import quote
from typing import Any, Final

from celery import Celery, states

from ..core.keyspace import Keyspace
from ..core.store_requests import CompletionState
from ..errors import LeaseLost, LockConflict
from ..key_queue.inspection import CallInQueue
from ..key_queue.results import TAKEN_OUT
from ..message.skipped import is_skipped
from .facts import Facts, gather
from .keys import HeldKey
from .overdue import overdue
from .pauses import Paused

_MINUTE: Final = 60.0
_HOUR: Final = 3600.0
_PLACES: Final = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
# What an unknown call may be, if the broker could not be searched.
_IN_BROKER: Final = (
    "It may wait in a queue of the broker, which could not be searched.",
    "With acks_late the message of a killed worker comes back, from Redis visibility_timeout after "
    "its delivery.",
)
# What else it may be, each with where to look.
_UNSEEN: Final = (
    "It may have run, or have been skipped: its result has expired, or was not stored "
    "(ignore_result). For a skip its worker's log has a line 'singleton conflict' with this id, at "
    "INFO.",
    "It may be a duplicate that was not published: its caller's log has a line 'singleton "
    "duplicate' with this id.",
    "Its worker may have been killed as a whole. Without acks_late its message was acknowledged "
    "before it began, so nothing is left of it when its lease has expired.",
    "It may belong to another app, broker or singleton_lock_prefix.",
)


class Fate(StrEnum):
    """What became of a task, or where it is now."""

    #: It ran to its end.
    RAN = "ran"
    #: It raised an exception, or its process died.
    FAILED = "failed"
    #: It holds its lock.
    RUNNING = "running"
    #: Another call held the key.
    SKIPPED = "skipped"
    #: An equal call had the claim.
    DUPLICATE = "duplicate"
    #: It failed with ``LockConflict``.
    REFUSED = "refused"
    #: It was revoked by a caller, by its ``expires``, or by its ``on_conflict``.
    REVOKED = "revoked"
    #: A newer call replaced it.
    CANCELLED = "cancelled"
    #: Its lock ended before the task did.
    LOST_LEASE = "lost its lease"
    #: An attempt has ended, and another one will follow.
    RETRYING = "retrying"
    #: It couldn't start yet, and its message was sent again for later.
    REQUEUED = "requeued"
    #: It waits for the key, in a process of a worker or in the queue of the key.
    WAITING = "waiting"
    #: A worker has its message, and no process has begun with it.
    RECEIVED = "received"
    #: Its message was sent, and no worker that answered has it.
    QUEUED = "queued"
    #: The worker that took its message has died, or doesn't answer.
    LEFT = "left by its worker"
    #: A process has begun with it, and it holds no lock.
    STARTED = "started"
    #: Nothing is known of it.
    UNKNOWN = "unknown"


# The fates of a call that a pause may keep from beginning.
_NOT_BEGUN: Final = (Fate.RETRYING, Fate.REQUEUED, Fate.WAITING, Fate.RECEIVED, Fate.QUEUED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What became of a task.

    Attributes:
        task_id: The task's id.
        fate: What became of it, as one of the values of ``Fate``.
        sentences: What is known about it, and what you can do, for people.
        state: Celery's state of the result.
        key: The key that the task held or wants. None if unknown.
        holder: Who has, or had, that key instead: ``task``, ``task_id`` and ``worker``. Empty if
            it's the task itself, or unknown.
    """

    task_id: str
    fate: Fate
    sentences: tuple[str, ...]
    state: str
    key: str | None = None
    holder: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class _Verdict:
    fate: Fate
    sentences: list[str]
    key: str | None = None
    holder: Mapping[str, Any] | None = None
    #: The lease of another call that keeps the key now.
    held: HeldKey | None = None
    #: Whether the rate of the key has refused the call, or lets it wait.
    by_rate: bool = False


def explain(app: Celery, task_id: str, *, timeout: float = 1.0) -> Explanation:
    """Find out what became of a task, as ``celery singleton explain`` does.

    Args:
        app: The app. It must have the task, because the key is computed with it.
        task_id: The task's id.
        timeout: How long to wait for the workers' replies, in seconds. Workers are asked only if
            there is no final result. The holder's worker gets at least two seconds.

    Raises:
        StoreError: The store refused the request, or can't be reached.
    """
    app.loader.import_default_modules()
    facts = gather(app, task_id, timeout=timeout)
    verdict = next(verdict for rule in _RULES if (verdict := rule(facts)))
    return Explanation(
        task_id=task_id,
        fate=verdict.fate,
        sentences=(
            *verdict.sentences,
            *_remarks(facts, verdict.fate),
            *_remedy(facts, verdict),
        ),
        state=facts.result.state,
        key=verdict.key,
        holder=verdict.holder,
    )


#: What a refusal by the rate of the key says (`core.store_requests.Refused.explain`).
_BY_RATE: Final = " lets its next call start in "

# --- rules ----------------------------------------------------------------------------------------


def _skipped(facts: Facts) -> _Verdict | None:
    value = facts.result.value
    if facts.result.state != states.SUCCESS or not is_skipped(value):
        return None
    holder, key, phase = value.get("holder"), str(value.get("key")), value.get("phase")
    holder = holder if isinstance(holder, Mapping) else {}
    at = _at(facts.result.done_at)
    if phase is not None:
        text = (
            f"It is a duplicate of {_name(holder)}: that message, published by "
            f"{holder.get('worker')}, had the claim on {key} ({phase}). It was skipped{at}."
        )
        return _Verdict(Fate.DUPLICATE, [text], key, holder)
    if "retry_after" in value:
        text = (
            f"It was skipped{at}, because the rate of {key} let no call start for another "
            f"{value['retry_after']} s."
        )
        return _Verdict(Fate.SKIPPED, [text], key, by_rate=True)
    text = f"It was skipped{at}, because {_name(holder)} on {holder.get('worker')} held {key}."
    held = _held_by(facts, holder, key)
    return _Verdict(Fate.SKIPPED, [text, _then(facts, holder, held)], key, holder, held)


def _ran(facts: Facts) -> _Verdict | None:
    if facts.result.state != states.SUCCESS:
        return None
    return _Verdict(Fate.RAN, [f"It ran, and ended{_at(facts.result.done_at)}."], _own_key(facts))


def _revoked(facts: Facts) -> _Verdict | None:
    if facts.result.state != states.REVOKED:
        return None
    at, reason = _at(facts.result.done_at), str(facts.result.value)
    if reason.startswith("cancelled by the newer call"):
        return _Verdict(
            Fate.CANCELLED, [f"It was {reason}.", f"REVOKED was stored{at}."], _own_key(facts)
        )
    if " is held by " in reason:
        key, _, holder = reason.partition(" is held by ")
        text = f'It was revoked{at} by on_conflict="revoke", because {holder} held {key}.'
        return _Verdict(Fate.REVOKED, [text], key)
    if _BY_RATE in reason:
        text = f'It was revoked{at} by on_conflict="revoke": {reason}.'
        return _Verdict(Fate.REVOKED, [text], by_rate=True)
    if reason.startswith(TAKEN_OUT):
        text = f"It never began: it was {reason}."
        return _Verdict(Fate.REVOKED, [text, f"REVOKED was stored{at}."], _own_key(facts))
    whats = {
        "terminated": f"revoke(terminate=True) ended it{at}.",
        "expired": f"It was discarded{at}, because its `expires` had passed before it ran.",
    }
    text = whats.get(reason, f"A caller revoked it before it ran. REVOKED was stored{at}.")
    return _Verdict(Fate.REVOKED, [text])


def _failed(facts: Facts) -> _Verdict | None:
    if facts.result.state != states.FAILURE:
        return None
    error, at = facts.result.value, _at(facts.result.done_at)
    if isinstance(error, LockConflict):
        text = f"It did not run, and failed{at}: {error}"
        if not error.holder:  # the key was paused, or its rate let no call start
            by_rate = _BY_RATE in str(error)
            return _Verdict(Fate.REFUSED, [text], error.key, by_rate=by_rate)
        held = _held_by(facts, error.holder, error.key)
        sentences = [text, _then(facts, error.holder, held)]
        return _Verdict(Fate.REFUSED, sentences, error.key, error.holder, held)
    if isinstance(error, LeaseLost):
        text = f"It began, lost its lease, and failed{at}: {error}"
        return _Verdict(Fate.LOST_LEASE, [text], error.args[1] if error.args[1:] else None)
    return _Verdict(Fate.FAILED, [f"It failed{at}: {error!r}."], _own_key(facts))


def _running(facts: Facts) -> _Verdict | None:
    lease = facts.lease
    if lease is None or lease.state not in ("running", "being killed"):
        return None
    if lease.is_dead:
        return _left_key(facts, lease)
    age, ago = _ago(facts.now, lease.since), facts.renewed_ago(lease)
    where = f"on {lease.worker} (pid {lease.pid}), and holds {lease.key}."
    renewed = "" if ago is None else f"was acquired or renewed {ago:.1f} s ago, and "
    sentences = [
        f"It runs now{age}, {where}",
        f"Its lease {renewed}expires in {lease.ttl:.1f} s unless it is renewed.",
    ]
    if doubt := _doubt(facts, lease):
        sentences[0] = f"It has run{age}, {where} {doubt}."
        if facts.overdue(lease) and ago is not None:
            died, free = facts.now - timedelta(seconds=ago), timedelta(seconds=lease.ttl)
            sentences.append(
                f"If so, it died after {_text(died)}, and the key is free{_at(facts.now + free)}."
            )
        sentences += _of_dead_worker(facts)
    if lease.state == "being killed":
        sentences = [f"Its process {lease.pid} on {lease.worker} is being killed."]
    return _Verdict(Fate.RUNNING, sentences, lease.key)


def _left_key(facts: Facts, lease: HeldKey) -> _Verdict:
    """Its process is proven dead, and left the lease."""
    text = (
        f"It began{_at(lease.since)}, on {lease.worker} (pid {lease.pid}). {_doubt(facts, lease)}, "
        f"but its lease still holds {lease.key}."
    )
    free = (
        f"The key is free when the lease expires, in {lease.ttl:.0f} s, or as soon as another call "
        'tries to take it on this host. (A call in the queue of the key, on_conflict="queue", '
        "doesn't try.)"
    )
    if facts.message is not None:
        message = [f"{facts.message.worker} has its message."]
    else:
        message = _whereabouts(facts) or _of_dead_worker(facts)
    if not message:
        message = [_COMES_BACK]
    return _Verdict(Fate.LEFT, [text, free, *message], lease.key)


def _waiting(facts: Facts) -> _Verdict | None:
    message = facts.message
    if message is None or message.state != "active":
        return None
    where = f"on {message.worker} (pid {message.pid})"
    holder = _holder_of(facts, message.key)
    if facts.released is not None:
        # Also if another call has the key now: this one does not wait for it.
        text = f"It runs{_ago(facts.now, message.since)}, {where}, without its lease."
        why = (
            "Its process notices that at its next renewal, and interrupts it, unless the task has "
            'on_lost="continue".'
        )
        now = [f"Now {_has(facts, holder)}."] if holder else []
        return _Verdict(Fate.STARTED, [text, why, *now], message.key, _row(holder), holder)
    if message.key is None or holder is None:
        text = (
            f"A process of a worker has begun with it{_ago(facts.now, message.since)}, {where}, "
            "but it holds no lease."
        )
        why = (
            f"{message.key} is free: it is about to acquire it, or the store did not answer."
            if message.key
            else "It takes no lock, or this app can't compute its key."
        )
        return _Verdict(Fate.STARTED, [text, why], message.key)
    rivals = [
        one.task_id
        for one in facts.active
        if one.key == message.key and one.task_id != holder.task_id
    ]
    place = rivals.index(facts.task_id) if facts.task_id in rivals else 0
    text = (
        f"It waits for its key as {_ordinal(place)} of {max(len(rivals), 1)}, "
        f"{where}{_ago(facts.now, message.since)}: {_has(facts, holder)}."
    )
    note = "The place counts tasks in workers that answered, by the time at which they began."
    return _Verdict(Fate.WAITING, [text, note], message.key, _row(holder), holder)


def _in_queue(facts: Facts) -> _Verdict | None:
    """It has a place in the queue of its key. More is known of a retry."""
    place = facts.place
    if place is None or facts.result.state == states.RETRY:
        return None
    if place.state == "leaving":
        text = f"It is taken out of the queue of {place.key}, and never begins. Its result follows."
        return _Verdict(Fate.REVOKED, [text], place.key)
    if place.has_begun:
        return _left_place(place)
    holder = facts.others.get(place.key)
    # A call behind others is published if the limit of the key lets them run at the same time.
    waits = holder is not None if place.position == 1 else place.state != "published"
    if waits or facts.pauses_of(place.key):
        return _behind(facts, place, holder)
    return _next_in_queue(facts, place)


def _left_place(place: CallInQueue) -> _Verdict:
    """It has begun by the message in the queue, and its lease is gone."""
    text = (
        f"It has begun, but its lease on {place.key} has ended: its worker died, or lost the store."
    )
    why = (
        "A worker that checks the queue of the key publishes it again, or stores its failure if "
        "its message was acknowledged early."
    )
    if place.state == "published":
        why = f"Its message was published again ({place.copies} times in all)."
    return _Verdict(Fate.STARTED, [text, why], place.key)


def _behind(facts: Facts, place: CallInQueue, holder: HeldKey | None) -> _Verdict:
    """It waits for ``holder``, or for the calls before it."""
    since, before, first = _ago(facts.now, place.since), facts.before, facts.first
    sentences = [f"It waits in the queue of {place.key}, as {_ordinal(place.position - 1)}{since}."]
    if holder is not None:
        sentences.append(f"Now {_has(facts, holder)}.")
    if before is not None and (holder is None or before.state != "running"):
        sentences.append(f"Before it is {_call(before)} ({before.state}).")
    by_rate = holder is None and first is not None and first.starts_in > 0
    if by_rate and first is not None:
        which = "that" if first == before else f"the first of them, {_call(first)},"
        sentences.append(f"The rate of the key lets {which} start in {first.starts_in:.1f} s.")
    return _Verdict(Fate.WAITING, sentences, place.key, _row(holder), holder, by_rate)


def _next_in_queue(facts: Facts, place: CallInQueue) -> _Verdict:
    """It may run, and no call that has not begun is before it."""
    text = f"It is the next call of {place.key}, which it joined{_ago(facts.now, place.since)}."
    if place.starts_in > 0:
        why = f"The rate of its key lets it start in {place.starts_in:.1f} s."
        return _Verdict(Fate.WAITING, [text, why], place.key, by_rate=True)
    if place.state == "waiting":
        why = "Its message is published within seconds, by a worker that checks its queue."
        return _Verdict(Fate.QUEUED, [text, why], place.key)
    times = "once" if place.copies == 1 else f"{place.copies} times"
    why = (
        f"Its message was published {times}, with the routing key {place.routing_key!r}, and no "
        "process has begun with it."
    )
    found = _whereabouts(facts)
    if not found and facts.workers and place.routing_key not in facts.served:
        found = [_unserved(facts, place.routing_key)]
    elif not found:
        found = ["All processes are busy, or no worker consumes that queue."]
    return _Verdict(Fate.QUEUED, [text, why, *found], place.key)


def _requeue(facts: Facts) -> _Verdict | None:
    if not facts.requeues:
        return None
    key = (facts.message and facts.message.key) or _own_key(facts)
    times = "once" if facts.requeues == 1 else f"{facts.requeues} times"
    again = _at(facts.message.eta) if facts.message else ""
    text = f"It was requeued {times} (in this attempt) and will be tried again{again}."
    holder = _holder_of(facts, key)
    if holder is not None:
        why = f"Now {_has(facts, holder)}."
    elif key is not None:
        why = f"{key} is free now."
    else:
        why = (
            "Its key is only in its message, and no worker that answered has that: it is on its "
            "way, or the broker delays it."
        )
    return _Verdict(Fate.REQUEUED, [text, why], key, _row(holder), holder)


def _retrying(facts: Facts) -> _Verdict | None:
    lease, result = facts.lease, facts.result
    is_reserved = lease is not None and lease.state == "reserved for a retry"
    if not is_reserved and result.state != states.RETRY:
        return None
    error = f": {result.value!r}" if result.state == states.RETRY and result.value else ""
    if not is_reserved and facts.place is None and facts.message is None:
        text = f"An attempt has ended, and its state is RETRY{error}. But no key is reserved for it"
        where = (
            "no worker that answered has its message, and it is in no queue of a key. It may wait "
            "in the queue of the broker, which is not searched. Otherwise the retry is lost: send "
            "the call again."
        )
        return _Verdict(Fate.UNKNOWN, [f"{text}, {where}"], _own_key(facts))
    sentences = [f"An attempt has ended, and it will be retried{error}."]
    if is_reserved and lease:
        sentences.append(f"{lease.key} is reserved for it, for {lease.ttl:.1f} s at most.")
    return _Verdict(Fate.RETRYING, sentences, _own_key(facts))


def _received(facts: Facts) -> _Verdict | None:
    message = facts.message
    if message is None:
        return None
    text = f"{message.worker} has received it, but no process has begun with it."
    if message.eta is not None:
        why = f"It is due{_at(message.eta)} (a countdown or an eta)."
    else:
        why = "All processes are busy, or it has a countdown or an eta."
    holder = _holder_of(facts, message.key)
    sentences = [text, why, *([f"Now {_has(facts, holder)}."] if holder else [])]
    return _Verdict(Fate.RECEIVED, sentences, message.key, _row(holder), holder)


def _done(facts: Facts) -> _Verdict | None:
    """The body has ended, though no result says so: ``ignore_result``."""
    is_done = any(m.state is not CompletionState.WAITING for m in facts.completions)
    lease = facts.lease
    if lease is not None and lease.state == "cooldown":
        text = f"It ran: {lease.key} stays in cooldown after it, for {lease.ttl:.1f} s (min_hold)."
        return _Verdict(Fate.RAN, [text, "Its result is not stored."], lease.key)
    if not is_done:
        return None
    text = "Its completion record says that it is done. Its result is not stored, or has expired."
    return _Verdict(Fate.RAN, [text], _own_key(facts))


def _to_be_revoked(facts: Facts) -> _Verdict | None:
    if not facts.is_revoked:
        return None
    text = "It was revoked. A worker will discard it when it arrives, and only then write REVOKED."
    return _Verdict(Fate.REVOKED, [text], _own_key(facts))


def _left(facts: Facts) -> _Verdict | None:
    """A worker has taken its message, and no worker that answered has it."""
    if facts.broker is None or facts.broker.taken_at is None:
        return None
    return _Verdict(Fate.LEFT, _of_dead_worker(facts), _own_key(facts))


def _in_broker(facts: Facts) -> _Verdict | None:
    if facts.broker is None or not facts.broker.queue:
        return None
    claim = facts.claim
    text = ""
    if claim is not None:
        text = (
            f"It was published{_at(claim.since)}, by {claim.worker} (pid {claim.pid}), and "
            f"has the claim {claim.key} ({claim.phase})."
        )
    sentences = [*([text] if text else []), *_whereabouts(facts)]
    return _Verdict(Fate.QUEUED, sentences, _own_key(facts))


def _started(facts: Facts) -> _Verdict | None:
    if facts.result.state != states.STARTED:
        return None
    text = (
        "The result backend says STARTED, but it holds no lease, and no worker that answered works "
        "on it: its worker died, or it takes no lock."
    )
    return _Verdict(Fate.STARTED, [text])


def _queued(facts: Facts) -> _Verdict | None:
    claim = facts.claim
    if claim is None:
        return None
    text = (
        f"It was published{_at(claim.since)}, by {claim.worker} (pid {claim.pid}), and "
        f"has the claim {claim.key} ({claim.phase})."
    )
    if claim.phase == "running":
        why = "It has begun, and holds no lease: its worker died, or its lease was lost."
        back = _of_dead_worker(facts) or [_COMES_BACK]
        return _Verdict(Fate.STARTED, [text, why, *back], claim.key)
    if claim.phase == "retrying":
        why = "An attempt has ended, and it will be retried."
        return _Verdict(Fate.RETRYING, [text, why], claim.key)
    why = (
        f"No worker that answered has it: {_or_in_queue(facts)}its message is gone (a purged "
        f"queue). Its claim ends in {claim.ttl:.0f} s at the latest."
    )
    if late := overdue(claim, facts.unique_for, facts.now):
        why += (
            f" It is overdue by {late:.0f} s, and equal calls are answered with it. If its "
            f"queue was purged: celery -A ... singleton release '{claim.key}'"
        )
    return _Verdict(Fate.QUEUED, [text, why], claim.key)


def _unknown(facts: Facts) -> _Verdict:
    found = [
        f"Nothing is known of {facts.task_id}.",
        "The result backend has nothing of it."
        if not facts.result.problem
        else f"Its result is unknown, because {facts.result.problem}.",
        "The store has no lease, claim or completion record of it.",
        f"None of the {len(facts.workers)} worker(s) that answered has its message."
        if facts.workers
        else f"{_no_worker(facts)}.",
    ]
    if facts.broker is not None and facts.broker.is_complete:
        found.append("The broker has no message of it, waiting or taken by a worker.")
    else:
        found += _IN_BROKER
    return _Verdict(Fate.UNKNOWN, [*found, *_UNSEEN])


_RULES: Final[tuple[Callable[[Facts], _Verdict | None], ...]] = (
    _skipped,
    _ran,
    _revoked,
    _failed,
    _running,
    _waiting,
    _to_be_revoked,
    _in_queue,
    _requeue,
    _retrying,
    _received,
    _done,
    _left,
    _in_broker,
    _started,
    _queued,
    _unknown,
)


def _remarks(facts: Facts, fate: Fate) -> Iterator[str]:
    """What is worth knowing about any fate."""
    by = facts.released
    if by is not None:
        at = datetime.fromtimestamp(by.at, UTC)
        yield f"An operator released its key{_at(at)}: {by}."
    if fate in (Fate.RUNNING, Fate.RECEIVED, Fate.RETRYING, Fate.WAITING) and facts.requeues:
        yield f"It was requeued {facts.requeues} time(s) before (in this attempt)."
    is_located = facts.broker is not None and (facts.broker.queue or facts.broker.is_complete)
    may_be_in_one = fate in (Fate.REQUEUED, Fate.QUEUED, Fate.RETRYING, Fate.STARTED)
    if may_be_in_one and not facts.workers and not is_located:
        yield f"{_no_worker(facts)}, so its message may be in one."
    if facts.place is not None and fate in (Fate.RETRYING, Fate.REQUEUED, Fate.RECEIVED):
        place = _ordinal(facts.place.position - 1)
        yield f"It stays in the queue of {facts.place.key}, as {place}."
    if facts.result.problem and fate is not Fate.UNKNOWN:
        yield f"Its result is unknown, because {facts.result.problem}."
    for pause in _pauses_of(facts, fate):
        yield f"{str(pause)[:1].upper()}{str(pause)[1:]}."


def _pauses_of(facts: Facts, fate: Fate) -> list[Paused]:
    """The pauses that keep the call from beginning."""
    if fate not in _NOT_BEGUN:
        return []
    keys = [one.key for one in (facts.place, facts.message, facts.lease) if one is not None]
    keys += [_lock_of(facts.claim.key)] if facts.claim is not None else []
    return next(filter(None, map(facts.pauses_of, keys)), [])


def _lock_of(claim: str) -> str:
    """The lock key of the key of a claim."""
    shard, _, name = claim.partition("}:")
    return f"{shard}}}:{name.split('|', 2)[-1]}"


# --- remedies -------------------------------------------------------------------------------------

_AGAIN: Final = "send it again if it must run"
_COMES_BACK: Final = "With acks_late, its message comes back when the broker delivers it again."
_REMEDIES: Final[Mapping[Fate, str]] = {
    Fate.SKIPPED: 'nothing, if that call did its work; on_conflict="retry" or "queue" runs each',
    Fate.DUPLICATE: "nothing, that call does its work; apply_async(singleton=False) has no claim",
    Fate.REFUSED: f'{_AGAIN}; on_conflict="retry" or "queue" runs each call',
    Fate.REVOKED: _AGAIN,
    Fate.CANCELLED: "nothing, the newer call does its work",
    Fate.LOST_LEASE: f"{_AGAIN}; look for the reason above in the troubleshooting page",
    Fate.FAILED: (
        f"look for its traceback in its worker's log, then {_AGAIN}; for a killed process: "
        "acks_late=True, reject_on_worker_lost=True"
    ),
    Fate.RUNNING: "nothing, it is at work",
    Fate.RETRYING: "nothing, a worker that consumes its queue runs it",
    Fate.REQUEUED: "nothing, a worker that consumes its queue runs it when the key is free",
    Fate.WAITING: "nothing, it runs in its turn; if the holder hangs, restart the holder's worker",
    Fate.RECEIVED: "nothing, if it is due later; else start more processes or workers",
    Fate.QUEUED: "start more workers if it takes too long",
    Fate.LEFT: (
        "nothing, if you can wait, and keep a worker on its queue; don't send it again, or it runs "
        "twice. A shorter visibility_timeout shortens the wait for the next time"
    ),
    Fate.STARTED: "look for its id in its worker's log",
    Fate.UNKNOWN: (
        f"look for its id in the logs of the workers and of its caller, then {_AGAIN}. A call "
        "that a kill must not lose needs acks_late=True, reject_on_worker_lost=True"
    ),
}


def _remedy(facts: Facts, verdict: _Verdict) -> Iterator[str]:
    """What to do. Nothing has to be said of a call that ran."""
    found = (
        _against_flow_control(facts, verdict)
        or _against_dead_holder(facts, verdict)
        or _against_fate(facts, verdict.fate)
    )
    if found:
        yield f"To do: {found}."


def _against_flow_control(facts: Facts, verdict: _Verdict) -> str:
    """What to do about a pause or a rate; empty: neither keeps the call."""
    if found := _pauses_of(facts, verdict.fate):
        return _resume(found)
    if not verdict.by_rate:
        return ""
    if verdict.fate is Fate.WAITING:
        return "nothing, it runs in its turn"
    return f'{_AGAIN}; on_conflict="queue" runs each call'


def _against_dead_holder(facts: Facts, verdict: _Verdict) -> str:
    """What to do about a holder that is dead, or may be; empty: none is."""
    fate, lease, held = verdict.fate, facts.lease, verdict.held
    if fate is Fate.LEFT and lease is not None and lease.is_dead:
        return _of_left_key(facts, lease)
    if fate is Fate.RUNNING and lease is not None and facts.may_be_dead(lease):
        return _check_and_release(lease)
    if held is None or not facts.may_be_dead(held):
        return ""
    again = f". Then {_AGAIN}" if fate in (Fate.SKIPPED, Fate.REFUSED) else ""
    return _check_and_release(held) + again


def _against_fate(facts: Facts, fate: Fate) -> str:
    """What to do about the fate itself; empty: nothing has to be said."""
    queue = _unserved_queue(facts)
    # A call in the queue of its key is published again, or fails, without a new call.
    is_alone = facts.message is None and facts.place is None
    if fate is Fate.STARTED and facts.claim is not None and is_alone:
        does_not_come_back = facts.broker is not None and facts.broker.is_complete
        again = _AGAIN if does_not_come_back else f"without acks_late, {_AGAIN}"
        return f"{again}{_and_claim(facts)}"
    if fate is Fate.STARTED and facts.released is not None:
        return f"nothing; when it has been interrupted, {_AGAIN}"
    if queue and fate in (Fate.QUEUED, Fate.RETRYING, Fate.REQUEUED):
        return f"start a worker that consumes it: celery -A ... worker -Q {quote(queue)}"
    return _REMEDIES.get(fate, "")


def _of_left_key(facts: Facts, lease: HeldKey) -> str:
    broker, message = facts.broker, facts.message
    if message is not None and (message.worker, message.pid) == (lease.worker, lease.pid):
        return (
            "ask again in 5 s. Until then its worker may not have noticed that its process died: "
            "with acks_late and reject_on_worker_lost it runs again, otherwise it fails"
        )
    is_found = message is not None or (broker and (broker.taken_at or broker.queue))
    if is_found or facts.place is not None:  # its queue publishes it again, or stores its failure
        wait = "nothing, if you can wait; don't send it again, or it runs twice"
    elif broker is not None and broker.is_complete:
        wait = _AGAIN
    else:
        wait = f"nothing, if you can wait; without acks_late, {_AGAIN}"
    return f"{wait}. To free the key at once: {_release(lease)}{_and_claim(facts)}"


def _and_claim(facts: Facts) -> str:
    """How to end the claim of a call that has begun; empty: it has none."""
    claim = facts.claim
    if claim is None:
        return ""
    return (
        f". Its claim keeps equal calls from being sent for another {claim.ttl:.0f} s. To end it "
        f"at once: {_release(claim)}"
    )


def _check_and_release(held: HeldKey) -> str:
    """What to do if the process that holds a key is dead, or may be."""
    if held.is_dead:
        return f"free the key of the dead process: {_release(held)}"
    ping = f"`celery -A ... inspect ping -d {quote(held.worker)}`"
    where = f"{ping}, and `ps -p {held.pid}` on that worker's host" if "@" in held.worker else ""
    return (
        f"check {where or f'`ps -p {held.pid}` on {held.worker}'}. If that process is dead, free "
        f"its key: {_release(held)}"
    )


def _resume(found: Sequence[Paused]) -> str:
    """What to do about pauses; the first one ends last."""
    names = [quote(one.key) if one.key else f"--scope {quote(one.scope)}" for one in found]
    commands = " and ".join(f"`celery -A ... singleton resume {name}`" for name in names)
    if found[0].left is None:
        return f"when its calls may run again: {commands}"
    return f"nothing, it runs when the pause ends. To end it now: {commands}"


def _release(held: HeldKey) -> str:
    """The command that frees a key from this holder only."""
    return f"`celery -A ... singleton release {quote(held.key)} --token {quote(held.token)}`"


def _unserved_queue(facts: Facts) -> str:
    """The queue of its message that no worker that answered consumes; empty: none is known."""
    queue = facts.broker.queue if facts.broker else ""
    if not queue and facts.place is not None and facts.place.state == "published":
        queue = facts.place.routing_key
    return queue if queue and queue not in facts.served else ""


def _whereabouts(facts: Facts) -> list[str]:
    """Where the broker has its message, if that is known."""
    broker = facts.broker
    if broker is None or not (broker.queue or broker.taken_at):
        return []
    if not broker.queue:
        return _of_dead_worker(facts)
    queue, length = broker.queue, broker.length
    messages = "the only message" if length == 1 else f"one of {length} messages"
    text = f"It is {messages} in the broker's queue {queue!r}."
    if queue in facts.served:
        return [text, "Workers consume that queue: all their processes are busy."]
    return [text, _unserved(facts, queue)]


def _unserved(facts: Facts, queue: str) -> str:
    if not facts.workers:
        return f"{_no_worker(facts)}, so no worker is known to consume {queue!r}."
    served = ", ".join(map(repr, facts.served)) or "none"
    return f"No worker that answered consumes {queue!r}. The queues that workers consume: {served}."


def _of_dead_worker(facts: Facts) -> list[str]:
    """What becomes of the message of a worker that is probably dead."""
    broker, timeout = facts.broker, facts.visibility_timeout
    if broker is None:
        return []
    if broker.taken_at is None:
        if broker.queue or not broker.is_complete:
            return []
        return ["Its message was acknowledged before it began, so it does not come back."]
    sentences = [
        f"A worker took its message{_at(broker.taken_at)}, and has not acknowledged it. No worker "
        "that answered has it: that worker has died since, or does not answer."
    ]
    if timeout is not None:
        back = broker.taken_at + timedelta(seconds=timeout)
        sentences.append(
            f"The broker delivers it again{_at(back)} (visibility_timeout) or up to two minutes "
            "later, and it runs then."
        )
    return sentences


def _or_in_queue(facts: Facts) -> str:
    """The words for a message that may be in the broker, where that was not searched."""
    is_complete = facts.broker is not None and facts.broker.is_complete
    return "" if is_complete else "it is in the queue, or "


# --- words ----------------------------------------------------------------------------------------


def _no_worker(facts: Facts) -> str:
    if facts.broker_is_silent:
        return "The broker does not answer, so the workers were not asked"
    return "No worker has answered"


def _own_key(facts: Facts) -> str | None:
    if facts.lease is not None:
        return facts.lease.key
    return facts.claim.key if facts.claim else None


def _holder_of(facts: Facts, key: str | None) -> HeldKey | None:
    """The lease on ``key``; for a claim's key, that of its lock."""
    if key is None:
        return None
    if key.partition("}:")[2].startswith("claim|"):
        key = _lock_of(key)
    return facts.others.get(key)


def _row(holder: HeldKey | None) -> Mapping[str, Any] | None:
    if holder is None:
        return None
    return {"task": holder.task, "task_id": holder.task_id, "worker": holder.worker}


def _has(facts: Facts, holder: HeldKey) -> str:
    since = f" since {_text(holder.since)}" if holder.since else ""
    name = f"{holder.task}[{holder.task_id}]" if holder.task else holder.task_id
    what = "holds" if holder.state == "running" else "has"
    state = "" if holder.state == "running" else f" ({holder.state})"
    doubt = f". {text}" if (text := _doubt(facts, holder)) else ""
    return f"{name} on {holder.worker} {what} {holder.key}{since}{state}{doubt}"


def _doubt(facts: Facts, held: HeldKey) -> str:
    """Why the process that holds a lease is dead, or may be; empty: nothing says so."""
    if held.is_dead:
        return "Its process no longer exists on this host"
    found = []
    if late := facts.overdue(held):
        found.append(
            f"The renewal of that lease is overdue by {late:.1f} s: its process may be dead, or "
            "suspended (or its call has set a shorter ttl, and its worker did not answer)"
        )
    if facts.is_unanswered(held):
        found.append(
            f"{held.worker} didn't answer a ping; its process may be dead (a busy worker with the "
            "solo pool doesn't answer either)"
        )
    elif facts.is_of_no_process(held):
        found.append(
            f"{held.worker} answers, but names no process {held.pid}: that worker may have been "
            "restarted, and the process that holds the lease may be dead"
        )
    return ". ".join(found)


def _held_by(facts: Facts, holder: Mapping[str, Any], key: str) -> HeldKey | None:
    """The key that the holder named by a result or an exception still has."""
    for held in facts.others.values():
        if held.task_id == holder.get("task_id") and Keyspace.is_slot_of(key, held.key):
            return held
    return None


def _then(facts: Facts, holder: Mapping[str, Any], held: HeldKey | None) -> str:
    """What became of the holder that a result or an exception names."""
    if held is not None:
        return f"Now {_has(facts, held)}."
    result = facts.holders_result
    if result is not None and result.is_final:
        ended = f"{_name(holder)} ended{_at(result.done_at)} ({result.state})"
    else:
        ended = f"{_name(holder)} doesn't hold the key now"
    return f"{ended}. When it took the key isn't recorded."


def _name(holder: Mapping[str, Any]) -> str:
    task, task_id = holder.get("task"), holder.get("task_id")
    return f"{task}[{task_id}]" if task else str(task_id)


def _call(call: CallInQueue) -> str:
    return f"{call.task}[{call.task_id}]" if call.task else call.task_id


def _at(moment: datetime | None) -> str:
    return f" at {_text(moment)}" if moment else ""


def _ago(now: datetime, since: datetime | None) -> str:
    if since is None:
        return ""
    seconds = max(0.0, (now - since).total_seconds())
    if seconds < 2 * _MINUTE:
        return f" since {_text(since)} ({seconds:.1f} s)"
    if seconds < 2 * _HOUR:
        return f" since {_text(since)} ({seconds / _MINUTE:.0f} min)"
    return f" since {_text(since)} ({seconds / _HOUR:.0f} h)"


def _text(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds")


def _ordinal(place: int) -> str:
    return _PLACES[place] if place < len(_PLACES) else f"{place + 1}th"
