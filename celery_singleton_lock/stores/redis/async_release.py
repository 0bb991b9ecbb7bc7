"""Asynchronous releases of one Redis store: sent without waiting for the reply.

Overview
    A release is sent on an idle connection. Its reply is read before the reply to that connection's
    next command. ``drain``, called by the heartbeat's thread, reads the replies on connections that
    are not used again.

Guarantees
    ``on_reply`` is called once for each release, unless the process ends first. A release without a
    reply is resent, and its reply is then waited for: by the next operation of the store, or by
    ``drain``. If there is none either, or a refusal, ``on_reply`` gets the error, and the caller
    repeats the release. An acquire that finds the lease before may do so too; then ``on_reply`` is
    called again, with the reply.

Non-guarantees
    Nothing beyond the life of this process. After its end, the kernel delivers the data that the
    process sent, as long as the connection lives.

State model::

    pending --its reply is read-----------------------------------> ended
      |  +--error reply, "not ours", or connection closed--> lost --> ended (resent, if no reply)
      +--drain(): no reply has come-------------------------^

Failure handling
    "Not ours" in reply to the first try means that the lease was lost before. In reply to a later
    try it may mean that the first try released it: ``on_reply`` gets whether an earlier try had no
    reply. Resending is harmless. The script compares the token, which belongs to one delivery and
    is never used for another acquire, and does not change a key that the first try has changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ...core.keyspace import Keyspace
from ...core.lease import Kind, Record
from ...core.store import AsyncReleases, OnReply
from ...core.store_requests import Release, ReleaseReply
from ...errors import StoreError, StoreUnavailable
from .scripts import release_command

if TYPE_CHECKING:
    from .runner import ScriptRunner

# The second try uses a new connection: a restart of the server breaks all idle connections.
_TRIES: Final = 2
# The number of ended releases that are remembered. An acquire can overtake a release only within a
# moment after it.
_REMEMBERED: Final = 64


@dataclass(slots=True, eq=False)
class PendingRelease:
    """One release that was sent.

    Attributes:
        request: The release.
        timeout: Seconds to wait for each reply if it is resent.
        on_reply: See `AsyncReleases.send`.
        others: The releases of the same store.
        keys: The keys of the lease, and that of the claim.
        reply: The reply to the first try, until it is passed to the caller.
        unanswered: Whether a try without a reply may have been carried out.
    """

    request: Release
    timeout: float
    on_reply: OnReply
    others: PendingReleases
    keys: Sequence[str]
    reply: ReleaseReply | None = None
    unanswered: bool = False

    def acknowledge(self, reply: Any) -> None:
        """Take the reply. An error reply means that the release was not carried out."""
        if reply == b"released":
            self.others.end(self, ReleaseReply.OURS)
            return
        if not isinstance(reply, Exception):
            self.reply = ReleaseReply(reply.decode())
        # A loss is reported after the operation whose connection read this reply, because the
        # report sends another request.
        self.others.lost.append(self)

    def lose(self) -> None:
        """Note that no reply will arrive."""
        self.unanswered = True
        self.others.lost.append(self)


class PendingReleases:
    """The asynchronous releases of one store in one process.

    Each change is one step of the interpreter: other bodies, the heartbeat, or an exception thrown
    into a thread may come between any two steps.

    Args:
        release: Sends a release and waits for its reply, for the given number of seconds.
    """

    def __init__(self, release: Callable[[Release, float], ReleaseReply]) -> None:
        self._release = release
        self._open: set[PendingRelease] = set()
        self._ended: deque[PendingRelease] = deque()
        # The latest release on each key, of the releases that are open or remembered.
        self._latest: dict[str, PendingRelease] = {}
        #: The releases that the next operation ends. Hot paths check only whether this is empty.
        self.lost: deque[PendingRelease] = deque()

    def begin(self, request: Release, timeout: float, on_reply: OnReply) -> PendingRelease:
        """Note a release before it is sent, so that ``drain`` finds it after any interruption."""
        claim = request.claim
        keys = request.keys if claim is None else (*request.keys, claim.key)
        pending = PendingRelease(request, timeout, on_reply, self, keys)
        self._open.add(pending)
        for key in pending.keys:
            self._latest[key] = pending
        return pending

    def withdraw(self, pending: PendingRelease) -> None:
        """Forget a release that could not be sent; the caller releases in another way."""
        self._open.discard(pending)
        self._forget(pending)

    def end(self, pending: PendingRelease, outcome: ReleaseReply | StoreError) -> None:
        """Call ``on_reply`` with the outcome, unless the release has ended already."""
        try:
            self._open.remove(pending)
        except KeyError:
            return  # resent and ended meanwhile
        self._ended.append(pending)
        if len(self._ended) > _REMEMBERED:
            self._forget(self._ended.popleft())
        on_reply = pending.on_reply
        if not isinstance(outcome, StoreError):  # else an acquire may get the reply: see resend()
            # Drop the reference to the lease. A remembered release keeps only what it compares.
            pending.on_reply = _ignore
        on_reply(outcome, pending.unanswered)

    def open(self) -> list[PendingRelease]:
        """The releases without an outcome."""
        return list(self._open)

    def resend_all(self, longest: float) -> None:
        """End the open releases, to which no reply will arrive; see `resend_lost`."""
        for pending in self.open():
            if pending not in self.lost:
                pending.lose()
        self.resend_lost(longest)

    def resend_lost(self, longest: float = float("inf")) -> None:
        """End the lost releases; wait at most ``longest`` seconds for each reply."""
        error: StoreUnavailable | None = None
        while self.lost:
            try:
                pending = self.lost.popleft()
            except IndexError:
                return  # another thread took the last one
            if pending not in self._open:
                continue
            if pending.reply is not None:
                self.end(pending, pending.reply)
            elif error is not None:
                # Not resent: the store did not answer the one before.
                self.end(pending, error)
            else:
                try:
                    error = self._retry(pending, min(pending.timeout, longest))
                except BaseException:
                    pending.lose()  # a soft time limit or SIGTERM: the next operation resends it
                    raise

    def superseding(self, record: Record | None) -> list[PendingRelease]:
        """The release that should have removed ``record``, but has not arrived at the server yet.

        Commands on one connection keep their order. A release and the next acquire may use
        different connections, because connections are pooled by timeout and used by one thread at a
        time.
        """
        if record is None or (pending := self._latest.get(record.key)) is None:
            return []
        token, claim = pending.request.token, pending.request.claim
        if record.kind is Kind.LEASE:
            removes = record.token == str(token)
        else:
            frees = claim is not None and claim.phase is None and claim.key == record.key
            removes = frees and record.kind is Kind.CLAIM and record.token == token.call_id
        return [pending] if removes else []

    def open_on(self, keys: Sequence[str]) -> list[PendingRelease]:
        """The latest release on each of ``keys``, if it has no outcome."""
        latest = [self._latest.get(key) for key in keys]
        return [pending for pending in latest if pending is not None and pending in self._open]

    def resend(self, pending: PendingRelease) -> None:
        """Send a release again and wait for the reply, whether or not the release has ended.

        Raises:
            StoreError: The store refuses the release, or doesn't answer.
        """
        try:
            reply = self._release(pending.request, pending.timeout)
        except StoreUnavailable as exc:
            pending.unanswered |= exc.was_sent
            raise
        if reply is not ReleaseReply.OURS:
            return
        if pending in self._open:
            self.end(pending, ReleaseReply.OURS)
        else:
            pending.on_reply(ReleaseReply.OURS, True)  # it had ended with an error

    def _forget(self, pending: PendingRelease) -> None:
        for key in pending.keys:
            if self._latest.get(key) is pending:
                self._latest.pop(key, None)

    def _retry(self, pending: PendingRelease, timeout: float) -> StoreUnavailable | None:
        outcome: ReleaseReply | StoreError
        for _ in range(_TRIES):
            try:
                outcome = self._release(pending.request, timeout)
                break
            except StoreUnavailable as exc:
                pending.unanswered |= exc.was_sent
                outcome = exc
            except StoreError as exc:
                outcome = exc
                break
        self.end(pending, outcome)
        return outcome if isinstance(outcome, StoreUnavailable) else None


def _ignore(outcome: ReleaseReply | StoreError, unanswered: bool) -> None:
    """Replaces an ``on_reply`` that has been called."""


class RedisAsyncReleases(AsyncReleases):
    """See `AsyncReleases`."""

    def __init__(self, runner: ScriptRunner) -> None:
        self._runner, self._pending = runner, runner.pending

    def send(self, request: Release, *, timeout: float, on_reply: OnReply) -> bool:
        if Keyspace.shard(request.keys[0]) not in self._runner.loaded:
            return False  # the reply that the script is unknown would be read too late
        pending = self._pending.begin(request, timeout, on_reply)
        command = release_command(request)
        if self._runner.connections.send_async(command, timeout, pending):
            return True
        self._pending.withdraw(pending)
        return False

    def drain(self, *, timeout: float) -> None:
        self._runner.drain(timeout)
