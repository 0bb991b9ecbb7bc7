"""Acquisition of leases and claims by majority: vote, give back, pause, vote again.

Sequence of an acquire::

    t0 -> send to all --majority--> in time? -> settle the claim on all -> Granted
           |   |   |                  +-- no --> give back on all -> StoreUnavailable
           |   |   +-- another holder has a majority, or a node knows (done, twin ...)
           |   |                    -> give back on all -> Refused
           |   +-- no majority answers -> give back on all -> StoreUnavailable
           +-- split vote -> give back on all -> random pause -> t0 again, until the timeout:
                 then Refused if another holder may have a majority, else StoreUnavailable
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.lease import Record, drift
from celery_singleton_lock.core.store import (
    Acquire,
    Admit,
    ClaimChange,
    Granted,
    Refused,
    Relation,
    Release,
)
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.stores.redlock import votes
from celery_singleton_lock.stores.redlock.fanout import NODE_TIMEOUT, Fanout
from celery_singleton_lock.stores.redlock.votes import Poll, Votes

# Seconds to wait for the nodes that granted to confirm the give-back. Nothing depends on their
# replies.
_GIVE_BACK_TIMEOUT: Final = 0.25
# The pause after a split vote is random between zero and this, and the maximum doubles each time.
# With two contenders half of the pauses differ by more than an attempt takes; with many
# contenders, most do so soon.
_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 0.25
# A vote that stays split for more attempts may be split by holders, not by contenders.
_ATTEMPTS: Final = 3
# Not the global generator: processes that seed it alike would split their votes endlessly.
_RANDOM: Final = random.SystemRandom()


class Acquirer:
    """Acquires leases and claims.

    Args:
        fanout: The nodes.
        clock: Measures attempts and pauses.
        quarantine: Seconds after its start in which a server has no vote; None: the ttl of the
            requested lease.
    """

    def __init__(self, fanout: Fanout, clock: Clock, quarantine: float | None) -> None:
        self._fanout = fanout
        self._clock = clock
        self._quarantine = quarantine

    def acquire(self, request: Acquire, timeout: float) -> Granted | Refused:
        """As :meth:`Store.acquire`. Takes at most ``timeout`` seconds and one give-back."""
        deadline = self._clock.now() + timeout
        named = ""
        for attempt, pause in enumerate(_pauses()):
            asked_at = self._clock.now()
            # The claim is settled after the vote: a grant by a minority must not free it.
            vote = replace(
                request, slots=_rotated(request.slots, attempt), frees_claim=False, keeps_claim=True
            )
            poll, verdict = self._vote(vote, deadline - asked_at)
            if isinstance(verdict, Granted):
                return self._keep(request, verdict, poll, asked_at, timeout)
            over = self._clock.now() + pause >= deadline
            if isinstance(verdict, Refused) and votes.contended(poll):
                # The other holder's majority may consist of votes of two of its attempts, the first
                # of which was given back meanwhile. Only the same token twice counts.
                named, before = votes.holder(verdict), named
                verdict = verdict if named == before else None
            if verdict is None and poll.has_majority and (over or attempt >= _ATTEMPTS):
                verdict = votes.suspect(poll)
                if verdict is None and len(request.slots) > 1:
                    verdict = self._all_taken(request)
            self._give_back(request, poll, verdict)
            if verdict is not None:
                return verdict
            poll.check()
            if over:
                break
            self._clock.sleep(pause)
        raise StoreUnavailable(
            f"the votes for {request.slots[0]!r} are split: contenders came at once {attempt + 1} "
            "times, and none has a majority. No holder is known; try again"
        )

    def admit(self, request: Admit, timeout: float) -> Record | None:
        """As :meth:`Store.admit`.

        At the end of the timeout, a message that may have a majority counts as published. A
        withdrawal may take back an earlier claim of the same message, which is then published
        again. That claim had no majority, so it refused no other message.
        """
        deadline = self._clock.now() + timeout
        named = ""
        for pause in _pauses():
            poll = self._fanout.ask(
                lambda node: node.store.admit(request, timeout=NODE_TIMEOUT),
                timeout=deadline - self._clock.now(),
                enough=lambda poll: votes.admitted(poll) or votes.claimant(poll),
            )
            if votes.admitted(poll):
                return None
            over = self._clock.now() + pause >= deadline
            existing = votes.claimant(poll, suspected=over and poll.has_majority)
            if existing is not None and not over and votes.contested(poll):
                named, before = existing.token, named
                existing = existing if named == before else None
            self._withdraw(request, poll)
            if existing is not None:
                return existing
            poll.check()
            if over:
                break
            self._clock.sleep(pause)
        raise StoreUnavailable(f"the votes for {request.key!r} are split; try again")

    def release(
        self, request: Release, timeout: float, enough: int | None = None
    ) -> Poll[Relation]:
        """Release on all nodes.

        Args:
            request: The release.
            timeout: Seconds.
            enough: The number of replies to wait for; None: as many as decide.
        """
        return self._fanout.ask(
            lambda node: node.release(request),
            timeout=timeout,
            enough=lambda poll: (
                votes.released(poll) if enough is None else len(poll.answers) >= enough
            ),
            release=request,
        )

    def _vote(self, vote: Acquire, timeout: float) -> tuple[Votes, Granted | Refused | None]:
        min_age = vote.ttl if self._quarantine is None else self._quarantine
        poll = self._fanout.ask(
            lambda node: node.acquire(vote, min_age),
            timeout=timeout,
            enough=lambda poll: votes.acquired(poll, vote.slots),
        )
        return poll, votes.acquired(poll, vote.slots)

    def _all_taken(self, request: Acquire) -> Refused | None:
        """A refusal, if other tokens hold a majority of the nodes for every slot.

        The votes do not show this. A node with a free slot grants it although all other nodes
        refuse that slot, and a node that refuses returns the holder of the first slot only.
        """
        record = None
        for slot in request.slots:
            record = self._standing(slot)
            if record is None or record.token == str(request.token):
                return None
        return Refused(relation=Relation.OTHER, record=record)

    def _standing(self, key: str) -> Record | None:
        poll = self._fanout.ask(
            lambda node: node.store.inspect(key),
            timeout=_GIVE_BACK_TIMEOUT,
            enough=lambda poll: False,
        )
        return votes.standing(poll)

    def _keep(
        self, request: Acquire, granted: Granted, poll: Votes, asked_at: float, timeout: float
    ) -> Granted:
        """Finish an acquire that a majority has granted."""
        unused = tuple(slot for slot in request.slots if slot != granted.key)
        if unused and (poll.silent or any(votes.granted(poll, slot) for slot in unused)):
            self.release(Release(keys=unused, token=request.token), _GIVE_BACK_TIMEOUT, 0)
        problem = ""
        if request.claim is not None:
            # The same token acquires the lease again on all nodes, so that a majority settles the
            # claim.
            again = replace(request, slots=(granted.key,), yields=False, frees_claim=False)
            if not isinstance(self._vote(again, timeout)[1], Granted):
                problem = "the claim of its message could not be settled"
        took = self._clock.now() - asked_at
        if took >= request.ttl - drift(request.ttl):
            problem = f"the votes took {took:.3f} s, and its ttl is {request.ttl} s"
        if problem:
            self.release(Release(keys=request.slots, token=request.token), _GIVE_BACK_TIMEOUT, 0)
            raise StoreUnavailable(f"the grant of {granted.key!r} was given back: {problem}")
        return granted

    def _give_back(self, request: Acquire, poll: Votes, verdict: Granted | Refused | None) -> None:
        """Release by token on all nodes, and free the claim if the refusal ends the message."""
        claim = None
        ends = isinstance(verdict, Refused) and verdict.relation is Relation.OTHER
        if ends and request.claim is not None and request.frees_claim:
            claim = ClaimChange(key=request.claim.key, phase=None)
        given = sum(not isinstance(answer, Refused) for answer in poll.answers)
        if claim is None and not given and not poll.silent:
            return  # all nodes have refused
        if str(request.token) in votes.holders(poll):
            return  # the worker parent has turned the lease into a dying key, which must stay
        release = Release(keys=request.slots, token=request.token, claim=claim)
        self.release(release, _GIVE_BACK_TIMEOUT, max(given, poll.majority if claim else 0))

    def _withdraw(self, request: Admit, poll: Poll[Record | None]) -> None:
        """Give a claim back on all nodes."""
        given = poll.answers.count(None)
        if not given and not poll.silent:
            return
        change = ClaimChange(key=request.key, phase=None)
        self._fanout.ask(
            lambda node: node.store.settle_claim(request.token, change, timeout=NODE_TIMEOUT),
            timeout=_GIVE_BACK_TIMEOUT,
            enough=lambda poll: len(poll.answers) >= given,
        )


def _pauses() -> Iterator[float]:
    """An endless series of random pauses between attempts, in seconds."""
    longest = _FIRST_PAUSE
    while True:
        yield _RANDOM.uniform(0, longest)
        longest = min(2 * longest, _LONGEST_PAUSE)


def _rotated(slots: tuple[str, ...], attempt: int) -> tuple[str, ...]:
    """``slots``, rotated by ``attempt``: the vote may be split on one slot only."""
    start = attempt % len(slots)
    return slots[start:] + slots[:start]
