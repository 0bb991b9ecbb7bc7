"""Decisions from the answers of single nodes: pure functions.

All decisions follow from two rules:

Any two majorities have a node in common. So at least one node of every later majority knows a write
that a majority has acknowledged.

A node that knows something about the task's own attempts (done, superseded, a later attempt, a
duplicate) decides alone, because only a client with the right to do so wrote it. A node where
another task has the key proves nothing: that vote may be about to be given back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Generic, TypeVar

from ...core.lease import LossReason, Record
from ...core.store_requests import (
    RENEWED,
    Authorization,
    Granted,
    Refused,
    Relation,
    ReleaseReply,
    Renewal,
)
from ...errors import StoreError, StoreUnavailable

T = TypeVar("T")

# In order of precedence: reasons to drop a message come before reasons to let it wait.
_RELATIONS: Final = (
    *(Relation.DONE, Relation.SUPERSEDED, Relation.LATER, Relation.DUPLICATE),
    *(Relation.EARLIER, Relation.OTHER),
)


@dataclass(slots=True)
class Poll(Generic[T]):
    """The answers that have arrived so far.

    Attributes:
        nodes: The number of nodes that were asked.
        majority: The number of answers that a decision needs.
        answers: The answers, in the order of arrival.
        errors: The errors of nodes that refused or could not be reached. Their state is unknown.
    """

    nodes: int
    majority: int
    answers: list[T] = field(default_factory=list)
    errors: list[StoreError] = field(default_factory=list)

    def add(self, answer: T | Exception) -> None:
        """Add a node's answer.

        Raises:
            Exception: ``answer`` is an exception other than StoreError.
        """
        if not isinstance(answer, Exception):
            self.answers.append(answer)
        elif isinstance(answer, StoreError):
            self.errors.append(answer)
        else:
            raise answer

    @property
    def pending(self) -> int:
        """The number of nodes that may still answer."""
        return self.nodes - len(self.answers) - len(self.errors)

    @property
    def silent(self) -> int:
        """The number of nodes that have not answered or have answered with an error."""
        return self.nodes - len(self.answers)

    def has_majority(self) -> bool:
        """Whether a majority has answered."""
        return len(self.answers) >= self.majority

    def check(self) -> None:
        """Raise StoreUnavailable or StoreError unless a majority has answered."""
        if not self.has_majority():
            raise self.error()

    def error(self) -> StoreError:
        """The error that explains why there is no decision."""
        reasons = [str(error) for error in self.errors]
        if self.pending:
            reasons.append(f"{self.pending} did not answer in time")
        text = (
            f"{len(self.answers)} of {self.nodes} nodes answered, and a decision takes "
            f"{self.majority}: {'; '.join(reasons)}"
        )
        refusals = sum(not isinstance(error, StoreUnavailable) for error in self.errors)
        # A majority that refuses will refuse the next request too.
        return StoreError(text) if refusals >= self.majority else StoreUnavailable(text)


#: A grant with a ttl of 0 does not count: the node may have forgotten another lease, or may lose
#: this one unnoticed.
Votes = Poll[Granted | Refused]
Verdict = Granted | Refused | None


def acquired(slots: Sequence[str], votes: Votes) -> Verdict:
    """The grant of one slot by a majority, or a final refusal; None: undecided, or a split vote.

    DONE, SUPERSEDED, LATER, DUPLICATE
        One node is enough. A duplicate's vote may be about to be given back. Then the message is
        delivered again a moment later, and is not lost.
    EARLIER
        An earlier attempt of the task has votes, and a majority is impossible. The message is put
        back. This comes before OTHER, because OTHER may end a message, and its own earlier attempt
        must not.
    OTHER
        A majority must name the same other task. Otherwise possibly no task holds the key: several
        contenders have votes that they will give back.
    """
    refusals = _refusals(votes)
    first = min(refusals, key=lambda one: _RELATIONS.index(one.relation), default=None)
    if first is not None and first.relation not in (Relation.EARLIER, Relation.OTHER):
        return first
    granted = [a.key for a in votes.answers if isinstance(a, Granted) and a.ttl is None]
    slot = max(slots, key=granted.count)
    most = granted.count(slot)
    if most >= votes.majority:
        return Granted(key=slot, fence=None)
    if most + votes.pending >= votes.majority:
        return None
    if first is not None and first.relation is Relation.EARLIER:
        return first
    refused_by, count = _most_named(refusals)
    # A refusal returns the holder of the first slot only. Other slots may become free soon.
    return refused_by if count >= votes.majority and len(slots) == 1 else None


def suspect(votes: Votes) -> Refused | None:
    """The refusal by a task that has a majority if all undecided nodes are counted for it."""
    refused, count = _most_named(_refusals(votes))
    in_doubt = votes.silent + sum(isinstance(a, Granted) and a.ttl == 0 for a in votes.answers)
    return refused if count + in_doubt >= votes.majority else None


def standing(votes: Votes) -> Record | None:
    """The record that a majority has, or may have if all silent nodes also have it.

    The record's ttl is the time after which no majority has it any more.
    """
    refused = suspect(votes)
    if refused is None or refused.record is None:
        return None
    records = [answer.record for answer in _refusals(votes) if answer.record]
    same = [record.ttl for record in records if record.token == refused.record.token]
    return replace(refused.record, ttl=sorted(same)[-min(votes.majority, len(same))])


def answer(key: str, record: Record | None) -> Granted | Refused:
    """What a node has at ``key``, as an answer to a client that wants the key."""
    return Granted(key=key, fence=None) if record is None else refusal(Relation.OTHER, record)


def refusal(relation: Relation, record: Record | None, others: tuple[Record, ...] = ()) -> Refused:
    """A refusal without the fence: a single node's counter is not a fencing token."""
    bare = record and replace(record, fence=None)
    return Refused(relation=relation, record=bare, others=others)


def given(votes: Votes, slot: str = "") -> int:
    """The number of nodes that have granted ``slot``; empty: any slot."""
    return sum(isinstance(one, Granted) and slot in ("", one.key) for one in votes.answers)


def without_vote(votes: Votes) -> int:
    """The number of nodes whose grants don't count yet, such as those just started."""
    return sum(isinstance(one, Granted) and one.ttl == 0.0 for one in votes.answers)


def holder(answer: Granted | Refused) -> str:
    """The token of the holder; empty if there is none, or its record cannot be read."""
    return answer.record.token if isinstance(answer, Refused) and answer.record else ""


def holders(votes: Votes) -> set[str]:
    """The tokens of all holders. If they differ, some votes may be given back soon."""
    return set(map(holder, votes.answers))


def renewed(poll: Poll[list[Renewal]], count: int) -> list[Renewal]:
    """The outcome of each of ``count`` renewals."""
    return [_renewed(poll, [replies[i] for replies in poll.answers]) for i in range(count)]


def _renewed(poll: Poll[list[Renewal]], replies: Sequence[Renewal]) -> Renewal:
    """None (renewed) if a majority still has the lease; UNREACHABLE: the silent nodes decide.

    DYING from one node is enough, because the worker parent wrote it. A lease is lost as soon as no
    majority can have it, because a lease that single nodes have lost is never written back.
    """
    if LossReason.DYING in replies:
        return LossReason.DYING
    have = replies.count(RENEWED)
    if have >= poll.majority:
        return RENEWED
    if len(replies) - have <= poll.nodes - poll.majority:
        return LossReason.UNREACHABLE
    return LossReason.REPLACED if LossReason.REPLACED in replies else LossReason.GONE


def released(poll: Poll[ReleaseReply]) -> ReleaseReply | None:
    """OURS if a majority had the lease until now; None: the silent nodes decide.

    The majority takes precedence: a duplicate that contends with the holder may have a vote for a
    moment, but the holder's result counts. Without a majority, one node that knows of a duplicate
    decides.
    """
    had = poll.answers.count(ReleaseReply.OURS)
    if had >= poll.majority:
        return ReleaseReply.OURS
    if len(poll.answers) - had <= poll.nodes - poll.majority:
        return None
    for reply in (ReleaseReply.DONE, ReleaseReply.DUPLICATE):
        if reply in poll.answers:
            return reply
    return ReleaseReply.NOT_OURS


def authorized(poll: Poll[Authorization]) -> Authorization | None:
    """AUTHORIZED or DEPOSED if decided; None: undecided, or the last runs of the nodes differ."""
    if poll.answers.count(Authorization.AUTHORIZED) >= poll.majority:
        return Authorization.AUTHORIZED
    if poll.answers.count(Authorization.DEPOSED) > poll.nodes - poll.majority:
        return Authorization.DEPOSED
    return None


def last_run(texts: Sequence[str | None], majority: int) -> str | None:
    """The last run that counts, from the last runs of single nodes.

    A majority has each run at the moment of its authorization. So no majority has an older run
    after that, and every majority includes a node with the newest run. A run on a minority may
    never have been authorized. It counts nevertheless: a missed run is better than a repeated one.
    """
    runs = [text for text in texts if text is not None]
    if not runs:
        return None
    most = max(runs, key=runs.count)
    if runs.count(most) >= majority:
        return most
    return max(runs, key=lambda text: (_time_of(text), text))


def _time_of(text: str) -> float:
    """The time at the beginning of a run's text; a text without a time counts as the oldest."""
    try:
        at = float(text.partition(" ")[0])
    except ValueError:
        return -math.inf
    return -math.inf if math.isnan(at) else at


def _refusals(votes: Votes) -> list[Refused]:
    return [answer for answer in votes.answers if isinstance(answer, Refused)]


def _most_named(refusals: Sequence[Refused]) -> tuple[Refused | None, int]:
    """A refusal by the holder that most nodes name, and the number of these nodes.

    The nodes' records of it may differ for a moment. The refusal has the most frequent phase.
    """
    names = [*map(holder, refusals)]
    most = max(names, key=names.count, default="")
    same = [refused for refused in refusals if holder(refused) == most]
    looks = [one.record and (one.record.kind, one.record.phase) for one in same]
    chosen = same[looks.index(max(looks, key=looks.count))] if same else None
    return chosen, len(same)
