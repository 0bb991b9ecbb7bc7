"""One request to all nodes, voted on until the votes decide, or given back.

The sequence is in ``store``. ``votes`` has the decisions, and ``fanout`` the threads and queues.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Final, TypeVar

from ...core.clock import Clock
from ...core.clock_drift import drift
from ...core.lease import Record
from ...core.store_requests import (
    Acquire,
    ClaimChange,
    ClaimRequest,
    Granted,
    Refused,
    Relation,
    Release,
    ReleaseReply,
)
from ...errors import StoreUnavailable
from ..redis import scripts
from . import votes
from .fanout import NODE_TIMEOUT, Fanout, Node
from .votes import Poll, Verdict, Votes

T = TypeVar("T")
D = TypeVar("D")

# Seconds to wait for the nodes that granted to confirm the give-back. Nothing depends on their
# replies.
_GIVE_BACK_TIMEOUT: Final = 0.25
# The pause after a split vote is random between zero and this, and the maximum doubles each time.
# With two contenders half of the pauses differ by more than an attempt takes; with many
# contenders, most do so soon.
_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 0.25
# Not the global generator: processes that seed it alike would split their votes endlessly.
_RANDOM: Final = random.SystemRandom()


class Contest:
    """Contends for keys on all nodes.

    Args:
        fanout: The nodes.
        clock: The clock of the deadlines.
        quarantine: Seconds after its start in which a server has no vote; None: the ttl of the
            requested lease.
    """

    def __init__(self, fanout: Fanout, clock: Clock, quarantine: float | None) -> None:
        self.fanout = fanout
        self._clock, self._quarantine = clock, quarantine

    def ask_majority(
        self,
        operation: Callable[[Node], T],
        timeout: float = NODE_TIMEOUT,
        decide: Callable[[Poll[T]], object] = lambda poll: None,
    ) -> Poll[T]:
        """The answers that arrive until they decide or the timeout ends.

        Raises:
            StoreUnavailable, StoreError: A majority did not answer.
        """
        poll, _ = self.fanout.ask(operation, timeout, decide)
        poll.check()
        return poll

    def texts(self, keys: Sequence[str], timeout: float) -> list[str | None]:
        """For each key, the text that counts among a majority's."""
        poll = self.ask_majority(lambda node: node.store.runner.texts(keys, NODE_TIMEOUT), timeout)
        return [votes.last_run(texts, poll.majority) for texts in zip(*poll.answers, strict=True)]

    def inspect(self, key: str, timeout: float) -> Votes:
        return self.fanout.ask(
            lambda node: votes.answer(key, node.store.leases.inspect(key)),
            timeout,
            lambda poll: None,
        )[0]

    def contend(
        self,
        request: Acquire | ClaimRequest,
        slots: tuple[str, ...],
        timeout: float,
        attempts: float,
    ) -> tuple[Votes, Granted | Refused, float]:
        """Vote, give back, pause and vote again until the votes decide.

        Args:
            request: The request.
            slots: The keys to choose from.
            timeout: Seconds.
            attempts: The number of split votes after which a task that may have a majority refuses;
                at the end of the timeout, it refuses in any case.

        Returns:
            The last votes, the decision, and the time at which the last attempt began.
        """
        deadline = self._clock.now() + timeout
        named = ""
        longest_pause = _FIRST_PAUSE
        for attempt in count():
            asked_at = self._clock.now()
            start = attempt % len(slots)  # the vote may be split on one slot only
            poll, verdict = self._vote(request, slots[start:] + slots[:start], deadline - asked_at)
            if isinstance(verdict, Granted):
                return poll, verdict, asked_at
            pause = _RANDOM.uniform(0, longest_pause)
            longest_pause = min(2 * longest_pause, _LONGEST_PAUSE)
            over = self._clock.now() + pause >= deadline
            differ = len(votes.holders(poll)) > 1
            if verdict and verdict.relation is Relation.OTHER and differ and not over:
                # The other holder's majority may be votes of two of its attempts, and it has given
                # the first ones back meanwhile. Only the same token twice counts.
                named, before = votes.holder(verdict), named
                verdict = verdict if named == before else None
            if verdict is None and poll.has_majority() and (over or attempt >= attempts):
                verdict = votes.suspect(poll) or self._all_taken(slots, str(request.token))
            self._give_back(request, poll, verdict)
            if verdict is not None:
                return poll, verdict, asked_at
            poll.check()
            if over:
                break
            self._clock.sleep(pause)
        if young := votes.without_vote(poll):
            raise StoreUnavailable(
                f"the votes for {slots[0]!r} have no majority: {young} node(s) have no vote yet, "
                "because they have been up for less than the lease's ttl (or `quarantine` of the "
                "URL). Try again later"
            )
        raise StoreUnavailable(
            f"the votes for {slots[0]!r} are split: contenders came at once {attempt + 1} times, "
            "and none has a majority. No holder is known; try again"
        )

    def _vote(
        self, request: Acquire | ClaimRequest, slots: tuple[str, ...], timeout: float
    ) -> tuple[Votes, Verdict]:
        if isinstance(request, ClaimRequest):
            claim = request
            return self.fanout.ask(
                lambda node: node.take_claim(claim), timeout, partial(votes.acquired, slots)
            )
        if request.claim is not None or slots != request.slots:
            # The claim is changed after the vote: a grant by a minority must not free it.
            request = replace(request, slots=slots, frees_claim=False, keeps_claim=True)
        return self._acquire(request, timeout)

    def _acquire(self, request: Acquire, timeout: float) -> tuple[Votes, Verdict]:
        min_age = request.ttl if self._quarantine is None else self._quarantine
        command = scripts.acquire_command(request, fence_base="0")
        packed = scripts.pack(command)
        return self.fanout.ask(
            lambda node: node.acquire(request, command, packed, min_age),
            timeout,
            partial(votes.acquired, request.slots),
        )

    def _all_taken(self, slots: tuple[str, ...], token: str) -> Refused | None:
        """A refusal, if other tokens hold each of several slots on a majority of the nodes.

        The votes do not show this. A node with a free slot grants it although all other nodes
        refuse that slot, and a node that refuses returns the holder of the first slot only.
        """
        records: list[Record] = []
        for slot in slots if len(slots) > 1 else ():
            record = votes.standing(self.inspect(slot, _GIVE_BACK_TIMEOUT))
            if record is None or record.token == token:
                return None
            records.append(record)
        if not records:
            return None
        return Refused(relation=Relation.OTHER, record=records[-1], others=tuple(records[:-1]))

    def keep(
        self, request: Acquire, granted: Granted, poll: Votes, asked_at: float, timeout: float
    ) -> None:
        """Finish an acquire that a majority has granted."""
        unused = tuple(slot for slot in request.slots if slot != granted.key)
        if unused and (poll.silent or votes.given(poll) > votes.given(poll, granted.key)):
            self._undo(Release(keys=unused, token=request.token), 0)
        problem = ""
        if request.claim is not None:
            # The same token acquires the lease again on all nodes, so that a majority changes the
            # claim.
            again = replace(
                request, slots=(granted.key,), refused_if_claimed=False, frees_claim=False
            )
            if not isinstance(self._acquire(again, timeout)[1], Granted):
                problem = "the claim of its message could not be updated"
        took = self._clock.now() - asked_at
        if took >= request.ttl - drift(request.ttl):
            problem = f"the votes took {took:.3f} s, and its ttl is {request.ttl} s"
        if problem:
            self._undo(Release(keys=request.slots, token=request.token), 0)
            raise StoreUnavailable(f"the grant of {granted.key!r} was given back: {problem}")

    def _give_back(
        self, request: Acquire | ClaimRequest, poll: Votes, verdict: Refused | None
    ) -> None:
        """Give all votes back, and free the claim of an acquire whose refusal ends the message."""
        given = votes.given(poll)
        if isinstance(request, ClaimRequest):
            if given or poll.silent:
                self._withdraw(request, given)
            return
        claim = None
        ends = verdict is not None and verdict.relation is Relation.OTHER
        if ends and request.claim is not None and request.frees_claim:
            claim = ClaimChange(key=request.claim.key, phase=None)
        # If the token is a holder, the worker parent has turned the lease into a dying key, which
        # must stay.
        if (claim or given or poll.silent) and str(request.token) not in votes.holders(poll):
            release = Release(keys=request.slots, token=request.token, claim=claim)
            self._undo(release, max(given, poll.majority if claim else 0))

    def _withdraw(self, request: ClaimRequest, replies: int) -> None:
        change = ClaimChange(key=request.key, phase=None)
        self.fanout.ask(
            lambda node: node.store.claims.change(request.token, change, timeout=NODE_TIMEOUT),
            _GIVE_BACK_TIMEOUT,
            lambda poll: len(poll.answers) >= replies,
        )

    def _undo(self, request: Release, replies: int) -> None:
        """Release on all nodes, and wait a moment until so many ``replies`` have arrived."""
        self.release(request, _GIVE_BACK_TIMEOUT, lambda poll: len(poll.answers) >= replies)

    def release(
        self, request: Release, timeout: float, decide: Callable[[Poll[ReleaseReply]], D]
    ) -> tuple[Poll[ReleaseReply], D]:
        command = scripts.release_command(request)
        packed = scripts.pack(command)
        return self.fanout.ask(lambda node: node.release(command, packed), timeout, decide, request)
