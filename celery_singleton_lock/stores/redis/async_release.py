"""Asynchronous releases of one Redis store: sent without waiting for the reply.

Overview
    A release is sent on an idle connection. Its reply is read before the reply to that connection's
    next command. ``drain``, called by the heartbeat's thread, reads the replies for which no next
    command comes.

Guarantees
    ``on_reply`` is called once for each release, unless the process ends first. A release without a
    reply is resent, and its reply is then waited for: by the next operation of the store, or by
    ``drain``.

Non-guarantees
    Nothing beyond the life of this process. What it sent before it ended is in the kernel's hands,
    which delivers it as long as the connection lives.

State model::

    pending --its reply is read-----------------------------------> ended
      |  +--error reply, "not ours", or connection closed--> lost --> ended (resent, if no reply)
      +--drain(): no reply has come-------------------------^

Failure handling
    "Not ours" in reply to the first try means that the lease was lost before. In reply to a later
    try it may mean that the first try released it: ``on_reply`` gets whether an earlier try had no
    reply. Resending is harmless: the script compares a token that belongs to one delivery and is
    never acquired with again, and leaves alone what the first try left behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from celery_singleton_lock.core.lease import Kind, Record
from celery_singleton_lock.core.store import OnReply, Relation, Release
from celery_singleton_lock.errors import StoreError, StoreUnavailable

# The second try uses a new connection: a server restart leaves every idle one broken.
_TRIES: Final = 2
# Ended releases that are remembered: a release supersedes an acquire within a moment, or never.
_REMEMBERED: Final = 64


class PendingRelease:
    """One release that was sent.

    Args:
        request: The release.
        timeout: Seconds to wait for each reply if it is resent.
        on_reply: See `Store.release_async`.
        others: The releases of the same store.

    Attributes:
        reply: The reply to the first try, until it is passed to the caller.
        unanswered: Whether a try without a reply may have been carried out.
    """

    __slots__ = ("_others", "on_reply", "reply", "request", "timeout", "unanswered")

    def __init__(
        self, request: Release, timeout: float, on_reply: OnReply, others: PendingReleases
    ) -> None:
        self.request = request
        self.timeout = timeout
        self.on_reply = on_reply
        self.reply: Relation | None = None
        self.unanswered = False
        self._others = others

    def acknowledge(self, reply: Any) -> None:
        """Take the reply. An error reply means that the release was not carried out."""
        if reply == b"released":
            self._others.end(self, Relation.OURS)
            return
        if not isinstance(reply, Exception):
            self.reply = Relation(reply.decode())
        # A loss is reported after the operation whose connection read this reply: the report sends
        # a request of its own.
        self._others.lost.append(self)

    def lose(self) -> None:
        """No reply will come."""
        self.unanswered = True
        self._others.lost.append(self)


class PendingReleases:
    """The asynchronous releases of one store in one process.

    Each step is one step of the interpreter: bodies, the heartbeat and an exception thrown into
    either may come between any two.

    Args:
        release: Sends a release and waits for the reply, within seconds.
    """

    def __init__(self, release: Callable[[Release, float], Relation]) -> None:
        self._release = release
        self._open: set[PendingRelease] = set()
        self._ended: deque[PendingRelease] = deque()
        # The latest on each key, of those that are open or remembered.
        self._latest: dict[str, PendingRelease] = {}
        #: Those to end by the next operation. Hot paths check only whether it is empty.
        self.lost: deque[PendingRelease] = deque()

    def begin(self, request: Release, timeout: float, on_reply: OnReply) -> PendingRelease:
        """Note a release before it is sent, so that ``drain`` finds it after any interruption."""
        pending = PendingRelease(request, timeout, on_reply, self)
        self._open.add(pending)
        for key in _keys_of(request):
            self._latest[key] = pending
        return pending

    def withdraw(self, pending: PendingRelease) -> None:
        """Forget a release that could not be sent; the caller releases in another way."""
        self._open.discard(pending)
        self._forget(pending)

    def end(self, pending: PendingRelease, outcome: Relation | StoreError) -> None:
        """Call ``on_reply`` with the outcome, unless the release has ended already."""
        try:
            self._open.remove(pending)
        except KeyError:
            return  # resent meanwhile
        self._ended.append(pending)
        if len(self._ended) > _REMEMBERED:
            self._forget(self._ended.popleft())
        # Drops the reference to the lease: a remembered release keeps only what it compares.
        on_reply, pending.on_reply = pending.on_reply, _ignore
        on_reply(outcome, pending.unanswered)

    def open(self) -> list[PendingRelease]:
        """The releases without an outcome."""
        return list(self._open)

    def lose_all(self) -> None:
        """No reply will come to the releases that are open."""
        for pending in self.open():
            if pending not in self.lost:
                pending.lose()

    def resend_lost(self, longest: float = float("inf")) -> None:
        """End the lost releases; each reply is waited for, at most ``longest`` seconds."""
        error: StoreUnavailable | None = None
        while self.lost:
            try:
                pending = self.lost.popleft()
            except IndexError:
                return  # another thread was faster
            if pending not in self._open:
                continue
            if pending.reply is not None:
                self.end(pending, pending.reply)
            elif error is not None:
                self.end(pending, error)  # a store that did not answer one does not answer others
            else:
                try:
                    error = self._retry(pending, min(pending.timeout, longest))
                except BaseException:
                    pending.lose()  # a soft time limit, or SIGTERM: the next operation resends it
                    raise

    def superseding(self, record: Record | None) -> PendingRelease | None:
        """The release that must have removed ``record``; so it has not arrived yet.

        Commands on one connection keep their order, but a release and the next acquire may use
        different connections: there are some per timeout, and one for each thread that needs one.
        """
        pending = self._latest.get(record.key) if record is not None else None
        if record is None or pending is None:
            return None
        request, claim = pending.request, pending.request.claim
        if record.kind is Kind.LEASE:
            return pending if record.token == str(request.token) else None
        frees = claim is not None and claim.phase is None and claim.key == record.key
        same = (record.kind, record.token) == (Kind.CLAIM, request.token.task)
        return pending if frees and same else None

    def open_on(self, keys: Sequence[str]) -> list[PendingRelease]:
        """The latest release on each of ``keys``, if it has no outcome."""
        latest = [self._latest.get(key) for key in keys]
        return [pending for pending in latest if pending is not None and pending in self._open]

    def resend(self, pending: PendingRelease) -> None:
        """Send it again now and wait for the reply, whether or not it has ended.

        Raises:
            StoreError: The store refuses it, or doesn't answer.
        """
        try:
            reply = self._release(pending.request, pending.timeout)
        except StoreUnavailable:
            pending.unanswered = True
            raise
        if reply is Relation.OURS:
            self.end(pending, Relation.OURS)

    def _forget(self, pending: PendingRelease) -> None:
        for key in _keys_of(pending.request):
            if self._latest.get(key) is pending:
                self._latest.pop(key, None)

    def _retry(self, pending: PendingRelease, timeout: float) -> StoreUnavailable | None:
        error: StoreUnavailable | None = None
        for _ in range(_TRIES):
            try:
                outcome: Relation | StoreError = self._release(pending.request, timeout)
            except StoreUnavailable as exc:
                pending.unanswered = True
                error = exc
                continue
            except StoreError as exc:
                outcome = exc
            self.end(pending, outcome)
            return None
        assert error is not None, "each try failed"
        self.end(pending, error)
        return error


def _ignore(outcome: Relation | StoreError, unanswered: bool) -> None:
    """Takes the place of an ``on_reply`` that was called."""


def _keys_of(request: Release) -> tuple[str, ...]:
    return request.keys if request.claim is None else (*request.keys, request.claim.key)
