"""Releases that were sent, and whose replies nobody waited for.

Promises
    The caller learns once how each of them ended. A release without a reply is sent again, and this
    time the reply is waited for. After an error reply or a broken connection the next operation of
    the store does that, whatever it is; `collect`, called by the heartbeat's thread, does it for
    all.

Does not promise
    Anything beyond the life of this process: what it sent before it ended is in the kernel's hands,
    which delivers it as long as the connection lives.

States of one::

    sent --its reply is read, before that of the connection's next command--> ended
      |  +--an error reply, or the connection is closed--> lost --made again--> ended
      +--collect(): nothing has come----------------------------^

"Not ours" as the reply to the first try means that the lease was lost before. As the reply to a
later try it may mean that the first one released it: `heard` gets whether an earlier try had no
reply.

To make a release again is harmless: it compares a token that was minted for one delivery and is
never acquired with again, and the script leaves alone what the first one left behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from celery_singleton_lock.core.lease import Kind, Record
from celery_singleton_lock.core.store import Relation, Release
from celery_singleton_lock.errors import StoreError, StoreUnavailable

__all__ = ["PendingRelease", "PendingReleases"]

# The second try meets a fresh connection: a server restart leaves every idle one broken.
_TRIES: Final = 2
# Of those confirmed last: who was overtaken by an acquire was so within a moment.
_REMEMBERED: Final = 64


class PendingRelease:
    """One that was sent.

    Args:
        call: What was asked for.
        timeout: Seconds to wait for each reply, should it be made again.
        heard: See `Store.post`.

    Attributes:
        reply: The reply to the first try, until it is passed to the caller.
        unheard: Whether a try without a reply may have been carried out.
    """

    __slots__ = ("_all", "call", "heard", "reply", "timeout", "unheard")

    def __init__(
        self,
        call: Release,
        timeout: float,
        heard: Callable[[Relation | StoreError, bool], None],
        others: PendingReleases,
    ) -> None:
        self.call = call
        self.timeout = timeout
        self.heard = heard
        self.reply: Relation | None = None
        self.unheard = False
        self._all = others

    def hear(self, reply: Any) -> None:
        """Take its reply, or an error reply, which means that it was not carried out."""
        if reply == b"released":
            self._all.end(self, Relation.OURS)
            return
        if not isinstance(reply, Exception):
            self.reply = Relation(reply.decode())
        # A loss is reported after the operation whose connection read this reply: the report sends
        # a request of its own.
        self._all.lost.append(self)

    def lose(self) -> None:
        """No reply will come."""
        self.unheard = True
        self._all.lost.append(self)


class PendingReleases:
    """Those of one store in one process.

    Each step is one of the interpreter's: bodies, the heartbeat and an exception thrown into any of
    them may come in between.

    Args:
        release: Makes one in the waiting way, within seconds per reply.
    """

    def __init__(self, release: Callable[[Release, float], Relation]) -> None:
        self._release = release
        self._open: set[PendingRelease] = set()
        self._confirmed: deque[PendingRelease] = deque()
        # The latest one on each key, of those that are open or remembered.
        self._latest: dict[str, PendingRelease] = {}
        #: To be made again; not empty is all that the hot path asks.
        self.lost: deque[PendingRelease] = deque()

    def begin(
        self,
        call: Release,
        timeout: float,
        heard: Callable[[Relation | StoreError, bool], None],
    ) -> PendingRelease:
        """Before it is sent: whatever strikes from now on, `collect` finds it."""
        posted = PendingRelease(call, timeout, heard, self)
        self._open.add(posted)
        self._latest.update(dict.fromkeys(_keys_of(call), posted))
        return posted

    def withdraw(self, posted: PendingRelease) -> None:
        """It could not be sent, and its caller makes it in another way."""
        self._open.discard(posted)
        self._forget(posted)

    def end(self, posted: PendingRelease, outcome: Relation | StoreError) -> None:
        """The store has replied, or can't be asked."""
        try:
            self._open.remove(posted)
        except KeyError:
            return  # made again meanwhile
        self._confirmed.append(posted)
        if len(self._confirmed) > _REMEMBERED:
            self._forget(self._confirmed.popleft())
        # With it goes the lease: a release that is remembered keeps alive what it compares.
        heard, posted.heard = posted.heard, _heard_already
        heard(outcome, posted.unheard)

    def open(self) -> list[PendingRelease]:
        """Those of which nothing was heard."""
        return list(self._open)

    def lose_all(self) -> None:
        """No reply will come to those that are open."""
        for posted in self.open():
            if posted not in self.lost:
                posted.lose()

    def repeat(self, longest: float = float("inf")) -> None:
        """Make again what is lost; no reply is waited for longer than ``longest`` seconds."""
        error: StoreUnavailable | None = None
        while self.lost:
            try:
                posted = self.lost.popleft()
            except IndexError:
                return  # another thread was faster
            if posted not in self._open:
                continue
            if posted.reply is not None:
                self.end(posted, posted.reply)
            elif error is None:
                try:
                    error = self._again(posted, min(posted.timeout, longest))
                except BaseException:
                    posted.lose()  # a soft time limit, or SIGTERM: the next call makes it again
                    raise
            else:
                self.end(posted, error)  # a store that is silent is so to all of them

    def overtaken(self, record: Record | None) -> PendingRelease | None:
        """The release after which ``record`` could not have been found.

        Commands on one connection keep their order. But who releases and who asks next may use
        different ones: there are some per timeout, and one for each thread that is at it.
        """
        posted = self._latest.get(record.key) if record is not None else None
        if record is None or posted is None:
            return None
        call, claim = posted.call, posted.call.claim
        if record.kind is Kind.LEASE:
            return posted if record.token == str(call.token) else None
        frees = claim is not None and claim.phase is None and claim.key == record.key
        same = (record.kind, record.token) == (Kind.CLAIM, call.token.task)
        return posted if frees and same else None

    def under_way(self, keys: Sequence[str]) -> list[PendingRelease]:
        """The latest on each of ``keys``, if nothing was heard of it."""
        latest = [self._latest.get(key) for key in keys]
        return [posted for posted in latest if posted is not None and posted in self._open]

    def make_again(self, posted: PendingRelease) -> None:
        """Now, in the waiting way, whatever is known of it.

        Raises:
            StoreError: The store refuses, or doesn't answer.
        """
        try:
            reply = self._release(posted.call, posted.timeout)
        except StoreUnavailable:
            posted.unheard = True
            raise
        if reply is Relation.OURS:
            self.end(posted, Relation.OURS)

    def _forget(self, posted: PendingRelease) -> None:
        for key in _keys_of(posted.call):
            if self._latest.get(key) is posted:
                self._latest.pop(key, None)

    def _again(self, posted: PendingRelease, timeout: float) -> StoreUnavailable | None:
        for tries_left in reversed(range(_TRIES)):
            try:
                reply = self._release(posted.call, timeout)
            except StoreUnavailable as exc:
                posted.unheard = True
                if not tries_left:
                    self.end(posted, exc)
                    return exc
            except StoreError as exc:
                self.end(posted, exc)
                return None
            else:
                self.end(posted, reply)
                return None
        raise AssertionError("unreachable")


def _heard_already(outcome: Relation | StoreError, unheard: bool) -> None:
    """In the place of who was told."""


def _keys_of(call: Release) -> tuple[str, ...]:
    return call.keys if call.claim is None else (*call.keys, call.claim.key)
