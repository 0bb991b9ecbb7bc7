"""Taking a lease, or a claim, by majority: vote, give back, wait, vote again.

Sequence of an acquire::

    t0 -> send to all --majority--> in time? -> settle the claim on all -> Granted
           |   |   |                  +-- no --> give back on all -> StoreUnavailable
           |   |   +-- one other has a majority, or a node knows (done, twin ...)
           |   |                    -> give back on all -> Refused
           |   +-- no majority answers -> give back on all -> StoreUnavailable
           +-- split vote -> give back on all -> wait for a random time -> t0 again, until
                 the timeout is over: Refused if somebody may have a majority, else StoreUnavailable

Who has no vote
    A server that was started less than the quarantine ago: it may have had, and lost, a lease that
    stands elsewhere.
    A node that was sent a release of this very token in the last minute, and has not confirmed it:
    the release may arrive behind the grant, and undo it unnoticed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from celery_singleton_lock.core import native
from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.lease import Record, Token, drift
from celery_singleton_lock.core.store import (
    Acquire,
    Admit,
    ClaimChange,
    Granted,
    Refused,
    Relation,
    Release,
    Released,
)
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.stores.redis.exchange import Exchange
from celery_singleton_lock.stores.redlock import votes
from celery_singleton_lock.stores.redlock.fanout import Poll, Quorum

__all__ = ["Candidate"]

# What those who granted have to take it back; their replies decide nothing.
_GIVE_BACK_TIMEOUT: Final = 0.25
# The pause after a split vote is random between zero and this, doubled each time: with two
# contenders half of the pauses are further apart than an attempt takes; with many, most soon are.
_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 0.25
# Votes that stay split for longer may be split by holders, and not by contenders.
_ATTEMPTS: Final = 3
# No packet is on its way for longer.
_LONGEST_DELAY: Final = 60.0
# Not the global generator: whoever seeds that one alike in all processes has them split for ever.
_RANDOM: Final = random.SystemRandom()

_Exchanges = tuple[Exchange | None, ...]


class Candidate:
    """Takes leases and claims.

    Args:
        quorum: The nodes.
        clock: Of attempts and pauses.
        quarantine: Seconds that a server has no vote after its start; None: the ttl asked for.
    """

    def __init__(self, quorum: Quorum, clock: Clock, quarantine: float | None) -> None:
        self._quorum = quorum
        self._clock = clock
        self._quarantine = quarantine
        # Releases that some nodes have not answered, oldest first; and the same of each token, for
        # every acquire asks for its own, and a silent node leaves thousands.
        self._unconfirmed: deque[tuple[float, Token, _Exchanges]] = deque()
        self._of_token: dict[Token, list[_Exchanges]] = {}
        # Of both: a release that a list has lost could undo the next grant unnoticed.
        self._guard = native.allocate_lock()

    def acquire(self, call: Acquire, timeout: float) -> Granted | Refused:
        """As :meth:`Store.acquire`; takes ``timeout`` seconds at most, and the last give-back."""
        deadline = self._clock.now() + timeout
        named = ""
        for attempt, pause in enumerate(_pauses()):
            asked_at = self._clock.now()
            # The claim is settled when the vote is: a minority's grant must not free it.
            vote = replace(
                call, slots=_rotated(call.slots, attempt), frees_claim=False, keeps_claim=True
            )
            poll, verdict = self._vote(vote, asked_at, deadline - asked_at)
            if isinstance(verdict, Granted):
                return self._keep(call, verdict, poll, asked_at, timeout)
            over = self._clock.now() + pause >= deadline
            if isinstance(verdict, Refused) and votes.contended(poll):
                # Its votes may be of two attempts, the first given back while we asked.
                named, before = votes.name(verdict), named
                verdict = verdict if named == before else None
            if verdict is None and poll.has_majority and (over or attempt >= _ATTEMPTS):
                verdict = votes.suspect(poll, self._voters(call, poll, asked_at))
                if verdict is None and len(call.slots) > 1:
                    verdict = self._all_taken(call)
            self._give_back(call, poll, verdict)
            if verdict is not None:
                return verdict
            poll.check()
            if over:
                break
            self._clock.sleep(pause)
        raise StoreUnavailable(
            f"the votes for {call.slots[0]!r} are split: contenders came at once {attempt + 1} "
            "times, and none has a majority. Nobody is known to hold it; try again"
        )

    def admit(self, call: Admit, timeout: float) -> Record | None:
        """As :meth:`Store.admit`.

        At the end of the timeout whoever may have a majority is believed to be published. What is
        given back may have been the message's own from before (it is published again): it had no
        majority then, and a claim without one keeps nobody away.
        """
        deadline = self._clock.now() + timeout
        named = ""
        for pause in _pauses():
            poll = self._quorum.ask(
                lambda store: store.admit(call, timeout=timeout),
                timeout=deadline - self._clock.now(),
                enough=lambda poll: votes.admitted(poll) or votes.claimant(poll),
                task=call.token.task,
            )
            if votes.admitted(poll):
                return None
            over = self._clock.now() + pause >= deadline
            existing = votes.claimant(poll, suspected=over and poll.has_majority)
            if existing is not None and not over and votes.contested(poll):
                named, before = existing.token, named
                existing = existing if named == before else None
            self._withdraw(call, poll)
            if existing is not None:
                return existing
            poll.check()
            if over:
                break
            self._clock.sleep(pause)
        raise StoreUnavailable(f"the votes for {call.key!r} are split; try again")

    def release(self, call: Release, timeout: float, enough: int | None = None) -> Poll[Released]:
        """Release on all nodes.

        Args:
            call: What is released.
            timeout: Seconds.
            enough: How many replies are waited for; None: as many as decide.
        """
        poll = self._quorum.ask(
            lambda store: store.release(call, timeout=timeout),
            timeout=timeout,
            enough=lambda poll: votes.released(poll) if enough is None else poll.count >= enough,
            task=call.token.task,
        )
        if poll.silent:
            with self._guard:
                self._of_token.setdefault(call.token, []).append(poll.exchanges)
                self._unconfirmed.append((self._clock.now(), call.token, poll.exchanges))
        return poll

    def _vote(
        self, vote: Acquire, asked_at: float, timeout: float
    ) -> tuple[Poll[Granted | Refused], Granted | Refused | None]:
        def verdict(poll: Poll[Granted | Refused]) -> Granted | Refused | None:
            return votes.acquired(poll, vote.slots, self._voters(vote, poll, asked_at))

        poll = self._quorum.ask(
            lambda store: store.acquire(vote, timeout=timeout),
            timeout=timeout,
            enough=verdict,
            task=vote.token.task,
        )
        return poll, verdict(poll)

    def _all_taken(self, call: Acquire) -> Refused | None:
        """Somebody else's record, if others have a majority on every slot.

        Nobody hears so from a vote: a node that has a slot free grants it, though it is taken on
        all others, and one that refuses names only who has the first slot.
        """
        record = None
        for slot in call.slots:
            record = self._standing(slot, call.token)
            if record is None or record.token == str(call.token):
                return None
        return Refused(relation=Relation.OTHER, record=record)

    def _standing(self, key: str, token: Token) -> Record | None:
        poll = self._quorum.ask(
            lambda store: store.inspect(key),
            timeout=_GIVE_BACK_TIMEOUT,
            enough=lambda poll: False,
            task=token.task,
        )
        return votes.standing(poll)

    def _voters(
        self, call: Acquire, poll: Poll[Granted | Refused], asked_at: float
    ) -> tuple[bool, ...]:
        """Which nodes have a vote."""
        young = call.ttl if self._quarantine is None else self._quarantine
        barred = self._barred(call.token)
        return tuple(
            index not in barred and (not young or started is None or started <= asked_at - young)
            for index, started in enumerate(poll.started)
        )

    def _barred(self, token: Token) -> set[int]:
        """The nodes that have not confirmed a release of ``token``."""
        with self._guard:
            self._forget_confirmed()
            released = list(self._of_token.get(token, ()))
        return {
            index
            for exchanges in released
            for index, exchange in enumerate(exchanges)
            if not _is_confirmed(exchange)
        }

    def _forget_confirmed(self) -> None:
        """Forget the oldest of what need not be known any more."""
        oldest = self._clock.now() - _LONGEST_DELAY
        while self._unconfirmed:
            since, token, exchanges = self._unconfirmed[0]
            if since >= oldest and not all(map(_is_confirmed, exchanges)):
                return
            self._unconfirmed.popleft()
            of_token = self._of_token[token]
            of_token.remove(exchanges)
            if not of_token:
                del self._of_token[token]

    def _keep(
        self,
        call: Acquire,
        granted: Granted,
        poll: Poll[Granted | Refused],
        asked_at: float,
        timeout: float,
    ) -> Granted:
        """Finish what a majority has granted."""
        unused = tuple(slot for slot in call.slots if slot != granted.key)
        if unused and (poll.silent or any(votes.granted(poll, slot) for slot in unused)):
            self.release(Release(keys=unused, token=call.token), _GIVE_BACK_TIMEOUT, 0)
        problem = ""
        if call.claim is not None:
            # Its own token is granted again; on all nodes, so that a majority settles the claim.
            again = replace(call, slots=(granted.key,), yields=False, frees_claim=False)
            if not isinstance(self._vote(again, asked_at, timeout)[1], Granted):
                problem = "the claim of its message could not be settled"
        took = self._clock.now() - asked_at
        if took >= call.ttl - drift(call.ttl):
            problem = f"the votes took {took:.3f} s, and its ttl is {call.ttl} s"
        if problem:
            self.release(Release(keys=call.slots, token=call.token), _GIVE_BACK_TIMEOUT, 0)
            raise StoreUnavailable(f"the grant of {granted.key!r} was given back: {problem}")
        return granted

    def _give_back(
        self, call: Acquire, poll: Poll[Granted | Refused], verdict: Granted | Refused | None
    ) -> None:
        """Release by token on all nodes, and free the claim where the refusal ends the message."""
        claim = None
        ends = isinstance(verdict, Refused) and verdict.relation is Relation.OTHER
        if ends and call.claim is not None and call.frees_claim:
            claim = ClaimChange(key=call.claim.key, phase=None)
        given = sum(isinstance(answer, Granted) for answer in poll.answers)
        if claim is None and not given and not poll.silent:
            return  # all have refused: there is nothing to give back
        if any(isinstance(a, Refused) and _is_own(a, call.token) for a in poll.answers):
            return  # the worker parent has made a dying key of it, which ends by the parent's word
        release = Release(keys=call.slots, token=call.token, claim=claim)
        self.release(release, _GIVE_BACK_TIMEOUT, max(given, poll.majority if claim else 0))

    def _withdraw(self, call: Admit, poll: Poll[Record | None]) -> None:
        """Give a claim back on all nodes."""
        given = sum(answer is None for answer in poll.answers)
        if not given and not poll.silent:
            return
        change = ClaimChange(key=call.key, phase=None)
        self._quorum.ask(
            lambda store: store.settle_claim(call.token, change, timeout=_GIVE_BACK_TIMEOUT),
            timeout=_GIVE_BACK_TIMEOUT,
            enough=lambda poll: poll.count >= given,
            task=call.token.task,
        )


def _is_confirmed(exchange: Exchange | None) -> bool:
    # On one link it is confirmed before the next grant is heard. None: nothing was sent.
    return exchange is None or exchange.confirmed


def _pauses() -> Iterator[float]:
    """Random seconds between attempts, without end."""
    longest = _FIRST_PAUSE
    while True:
        yield _RANDOM.uniform(0, longest)
        longest = min(2 * longest, _LONGEST_PAUSE)


def _rotated(slots: tuple[str, ...], attempt: int) -> tuple[str, ...]:
    """Another slot first at each attempt: where one has its votes split, the next may be free."""
    start = attempt % len(slots)
    return slots[start:] + slots[:start]


def _is_own(refused: Refused, token: Token) -> bool:
    return refused.record is not None and refused.record.token == str(token)
