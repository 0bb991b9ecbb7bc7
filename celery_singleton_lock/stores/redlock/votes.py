"""What the answers of single nodes mean together: pure functions, each with its reason.

Two rules are behind all of them. Any two majorities have a node in common: so what a majority was
told, some node of every later majority knows. And what one node knows of a task's own attempts
(done, superseded, a later one, a twin) was written by whoever had the right to write it, so one
node that knows is enough; while that another task has the key on one node means nothing by itself:
it may be a vote that is about to be given back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from celery_singleton_lock.core.lease import Record
from celery_singleton_lock.core.store import (
    Authorization,
    Granted,
    Refused,
    Relation,
    Released,
    Renewal,
)
from celery_singleton_lock.stores.redlock.fanout import PENDING, Poll

__all__ = [
    "acquired",
    "admitted",
    "authorized",
    "claimant",
    "contended",
    "contested",
    "granted",
    "grants",
    "last_run",
    "name",
    "released",
    "renewed",
    "standing",
    "suspect",
]

# In this order: what drops a message for good reason comes before what has it wait.
_KNOWLEDGE: Final = (Relation.DONE, Relation.SUPERSEDED, Relation.LATER, Relation.TWIN)


def grants(poll: Poll[Granted | Refused], voters: Sequence[bool]) -> Counter[str]:
    """How many votes each slot has, of the nodes that have one."""
    return Counter(
        answer.key
        for answer, votes in zip(poll.answers, voters, strict=True)
        if isinstance(answer, Granted) and votes
    )


def granted(poll: Poll[Granted | Refused], slot: str) -> bool:
    """Whether any node has granted ``slot``."""
    return any(isinstance(answer, Granted) and answer.key == slot for answer in poll.answers)


def acquired(
    poll: Poll[Granted | Refused], slots: Sequence[str], voters: Sequence[bool]
) -> Granted | Refused | None:
    """Granted by a majority, on one slot; refused for good; or None: open, or a split vote.

    DONE, SUPERSEDED, LATER, TWIN
        Of any one node: it knows. A twin's vote may be on its way back; the price is that the
        message comes again a moment later, and is never lost.
    EARLIER
        The task's own earlier attempt has votes, and no majority can be got: put back shortly.
        Before OTHER, for a message that OTHER ends must not end by its own predecessor.
    OTHER
        Only where one and the same other has a majority. Else nobody may have the key: several
        contenders hold votes that they will give back.
    """
    refused_all = [answer for answer in poll.heard if isinstance(answer, Refused)]
    for relation in _KNOWLEDGE:
        for refused in refused_all:
            if refused.relation is relation:
                return _without_fence(refused)
    tally = grants(poll, voters)
    slot, most = (tally.most_common(1) or [("", 0)])[0]
    if most >= poll.majority:
        return Granted(key=slot, fence=None)
    may_come = sum(a is PENDING and votes for a, votes in zip(poll.answers, voters, strict=True))
    if most + may_come >= poll.majority:
        return None
    for refused in refused_all:
        if refused.relation is Relation.EARLIER:
            return _without_fence(refused)
    refused_by, count = _most_named(refused_all)
    # A refusal names who has the first slot only: the others may be free in a moment.
    return refused_by if count >= poll.majority and len(slots) == 1 else None


def contended(poll: Poll[Granted | Refused]) -> bool:
    """Whether another task refuses, and not all nodes say the same: some votes may be passing."""
    refused = [answer for answer in poll.heard if isinstance(answer, Refused)]
    if any(answer.relation is not Relation.OTHER for answer in refused):
        return False
    return len(refused) < poll.count or len({name(answer) for answer in refused}) > 1


def suspect(poll: Poll[Granted | Refused], voters: Sequence[bool]) -> Refused | None:
    """The one who may have a majority, counting every node of which nobody knows."""
    refused, count = _most_named([a for a in poll.heard if isinstance(a, Refused)])
    voteless = sum(isinstance(answer, Granted) for answer in poll.heard) - sum(
        grants(poll, voters).values()
    )
    return refused if count and count + poll.silent + voteless >= poll.majority else None


def renewed(replies: Sequence[Renewal], nodes: int) -> Renewal:
    """Renewed where a majority has it still.

    DYING of any one node: the worker parent wrote it. Lost as soon as no majority can have it: what
    single nodes have lost is never written back. SILENT: the silent ones decide.
    """
    if Renewal.DYING in replies:
        return Renewal.DYING
    majority = nodes // 2 + 1
    have = replies.count(Renewal.RENEWED)
    if have >= majority:
        return Renewal.RENEWED
    if len(replies) - have <= nodes - majority:
        return Renewal.SILENT
    return Renewal.REPLACED if Renewal.REPLACED in replies else Renewal.GONE


def released(poll: Poll[Released]) -> Released | None:
    """RELEASED where a majority had it until now; None: the silent nodes decide.

    A majority first: a twin that meets the holder has a vote or none for a moment, and the holder
    is still the one whose result counts. Without a majority, what one node knows of a twin counts.
    """
    have = poll.heard.count(Released.RELEASED)
    if have >= poll.majority:
        return Released.RELEASED
    if len(poll.heard) - have <= len(poll.answers) - poll.majority:
        return None
    for reply in (Released.DONE, Released.TWIN):
        if reply in poll.heard:
            return reply
    return Released.NOT_OURS


def admitted(poll: Poll[Record | None]) -> bool:
    """Whether a majority has the claim for this message."""
    return sum(answer is None for answer in poll.answers) >= poll.majority


def claimant(poll: Poll[Record | None], *, suspected: bool = False) -> Record | None:
    """The message that has the claim on a majority; or (``suspected``) may have one."""
    record, count = _most_held(poll)
    if suspected and record is not None:
        count += poll.silent
    return record if count >= poll.majority else None


def contested(poll: Poll[Record | None]) -> bool:
    """Whether not all nodes name the same message: some votes may be passing."""
    return len({record.token if record else "" for record in poll.heard}) > 1


def standing(poll: Poll[Record | None]) -> Record | None:
    """The record of what has a majority, or may have one as far as the silent nodes are concerned.

    Seconds left are those after which no majority has it any more.
    """
    record, count = _most_held(poll)
    if record is None or count + poll.silent < poll.majority:
        return None
    left = sorted((r.ttl for r in poll.heard if r and r.token == record.token), reverse=True)
    return replace(record, ttl=left[min(poll.majority, len(left)) - 1])


def authorized(poll: Poll[Authorization]) -> Authorization | None:
    """AUTHORIZED or DEPOSED where that is decided; None: open, or nodes have other last runs."""
    if poll.heard.count(Authorization.AUTHORIZED) >= poll.majority:
        return Authorization.AUTHORIZED
    if poll.heard.count(Authorization.DEPOSED) > len(poll.answers) - poll.majority:
        return Authorization.DEPOSED
    return None


def last_run(texts: Sequence[str | None], majority: int) -> str | None:
    """The last run that counts, of those that single nodes have.

    What was permitted is on a majority when it is; so an older one is never on a majority after
    that, and some node of every majority has the newest. One that no majority has may never have
    been permitted: believed all the same, for a run that is left out is better than one sent twice.
    """
    counts = Counter(text for text in texts if text is not None)
    if not counts:
        return None
    [(most, count)] = counts.most_common(1)
    return most if count >= majority else max(counts, key=lambda text: (_time_of(text), text))


def _time_of(text: str) -> float:
    """When a run was: its text begins with that; what doesn't is older than all."""
    try:
        at = float(text.partition(" ")[0])
    except ValueError:
        return -math.inf
    return -math.inf if math.isnan(at) else at


def _most_held(poll: Poll[Record | None]) -> tuple[Record | None, int]:
    """What most nodes have, as most of these have it (their phases may differ for a moment)."""
    records = [record for record in poll.heard if record is not None]
    if not records:
        return None, 0
    [(token, count)] = Counter(record.token for record in records).most_common(1)
    same = [record for record in records if record.token == token]
    [(look, _)] = Counter((record.kind, record.phase) for record in same).most_common(1)
    chosen = next(record for record in same if (record.kind, record.phase) == look)
    return replace(chosen, fence=None), count


def _most_named(refusals: Sequence[Refused]) -> tuple[Refused | None, int]:
    """By whom most nodes refuse, and how many."""
    if not refusals:
        return None, 0
    names = Counter(name(refused) for refused in refusals)
    [(most, count)] = names.most_common(1)
    chosen = next(refused for refused in refusals if name(refused) == most)
    return _without_fence(chosen), count


def name(refused: Refused) -> str:
    """Of who has the key."""
    # What can't be read is somebody's too.
    return refused.record.token if refused.record else ""


def _without_fence(refused: Refused) -> Refused:
    """As the node said it, but for its own counter, which is no fencing token."""
    if refused.record is None:
        return refused
    return replace(refused, record=replace(refused.record, fence=None))
