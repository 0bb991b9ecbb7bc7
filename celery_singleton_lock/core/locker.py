"""Acquire and release around the store: retries with one token, deadlines, registration.

Overview
    The locker notes each lease for the worker's parent, acquires it, and registers it with the
    heartbeat. A release ends the renewal first. It waits for the reply, or leaves the reply to a
    later request of the process (`AsyncReleases`). A release without a reply, or that the
    store refuses, is passed to the `RetryQueue`, which repeats it. `lease_end` reports what the
    reply says about the lease.

Guarantees
    A lease that is returned was granted to its token, is registered with the heartbeat, and its
    ``valid_until`` lies before the store's expiry. An acquire whose outcome is unknown is released
    by token, whatever the exception. A release never raises. It is repeated until the store carries
    it out, while this process lives and the lease or the completion record that it writes could
    exist in the store. A refused client looks once whether the holder's process is proven dead
    (`process`); then it frees that lease and asks again.

Non-guarantees
    A process may end before the store answers its release: then the worker's parent or the ttl
    frees the key. When the task ends, the kernel has accepted an asynchronous release, but the
    store may not have received it. If its connection breaks then, the release is resent with the
    next request of the process, or within a third of the ttl.

State model::

    read clock -> send -> Granted -> still valid? -> heartbeat.add -> Lease
                    |        |            +--no--> release by token -> StoreUnavailable
                    |        +-- Refused -> returned as a value
                    +--no reply--> once more, same token --no reply--> release, StoreUnavailable

Failure handling
    The store may evict leases (`runtime`): the guard refuses each acquire, and nothing is sent.
    A request without a reply is sent twice: the second try uses a new connection. A release is then
    repeated by the queue, and the lease note stays, so that the worker's parent releases the lease
    if this process dies.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

from ..errors import StoreError, StoreUnavailable
from . import native_threads, observers
from .call_queue import CallQueue, Hint
from .clock import Clock
from .events import Event, EventName, Events
from .heartbeat import MAX_TIMEOUT, Heartbeat, LossHandler, timeout_for
from .keyspace import Keyspace
from .lease import Holder, Kind, Lease, Phase, Record, SharedDeadline, Token, trust_of
from .lease_end import LeaseEnds
from .process import is_proven_dead, processes
from .retry_queue import RetryQueue
from .store import Store
from .store_requests import (
    Acquire,
    Granted,
    GrantedArguments,
    GrantedInTurn,
    QueuedRelease,
    Refused,
    Relation,
    Release,
    ReleaseReply,
)

# Seconds after an acquire within which a release may be asynchronous. A connection that was idle
# for longer may be broken, and next to a longer body a round trip does not matter.
_FRESH: Final = 1.0
_FOREVER: Final = float("inf")
_ACQUIRED, _RELEASED = EventName.ACQUIRED, EventName.RELEASED
# Seconds after an asynchronous release within which its event follows, also if the process makes no
# further request.
_REPORTED_WITHIN: Final = 1.0
# Seconds for which the release of an acquire without a reply is repeated for a call of a queue.
_UNDO_FOR: Final = 600.0


class LeaseNotes(Protocol):
    """The object in which a process notes its leases for the worker's parent."""

    def note(self, keys: Sequence[str], token: str, ttl: float, claim: str) -> None: ...

    def share(self, lease: Lease) -> SharedDeadline | None: ...

    def erase(self, token: str) -> None: ...

    def freeing(self, token: str) -> None: ...


class Locker:
    """Acquires and releases the leases of this process."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        heartbeat: Heartbeat,
        events: Events,
        lease_notes: LeaseNotes | None = None,
    ) -> None:
        self.store = store
        self.clock = clock
        self.heartbeat = heartbeat
        self._events = events
        self._ends = LeaseEnds(store, clock, events, heartbeat)
        self._outages = heartbeat.outages
        self._down = self._outages.since
        self._lease_notes = lease_notes
        self._trusted = store.capabilities.trusted
        #: Repeats what the store has not answered.
        self.retry_queue = RetryQueue(store, clock)
        #: Called before each acquire; raises StoreError while this process must take no lease.
        self.guard: Callable[[], None] | None = None
        # The heartbeat's native thread can't read a reply from a greenlet's connection.
        self._async_releases = None if native_threads.is_patched() else store.async_releases

    def acquire(
        self,
        request: Acquire,
        *,
        max_hold: float | None = None,
        on_lost: LossHandler = lambda lease: None,
        since: float | None = None,
    ) -> Lease | Refused:
        """Acquire once; a conflict is a value.

        Args:
            request: The request.
            max_hold: Seconds after which renewal stops.
            on_lost: Called on the heartbeat's thread if the lease is lost before its release;
                see `LossHandler`.
            since: The time at which the client first asked, on the locker's clock; None: now.

        Raises:
            StoreError: The store refuses.
            StoreUnavailable: The store doesn't answer; nothing is held.
        """
        if self.guard is not None:
            self.guard()
        self._note(request.slots, request)
        try:
            timeout = timeout_for(request.ttl)
            began = sent = self.clock.now()
            try:
                reply = self.store.leases.acquire(request, timeout=timeout)
            except StoreUnavailable as first:
                # The second try uses a new connection: a restart of the server breaks all idle
                # connections.
                sent = self.clock.now()
                try:
                    reply = self.store.leases.acquire(request, timeout=timeout)
                except StoreUnavailable as second:
                    second.was_sent |= first.was_sent
                    raise
            if self._down:
                self._outages.end(request.slots[0])
            if isinstance(reply, Refused) and (dead := leases_of_the_dead(request.holder, reply)):
                self._free(dead, request, timeout)
                sent = self.clock.now()
                reply = self.store.leases.acquire(request, timeout=timeout)
            if isinstance(reply, Refused):
                self._erase_note(request.token)
                return reply
            lease = self._granted(request, reply, sent, max_hold)
            self.heartbeat.add(lease, on_lost)
            if self._events.observes(_ACQUIRED):
                waited = round(self.clock.now() - (since or began), 3)
                data = {"fence": reply.fence, "ttl": lease.ttl, "waited": waited}
                self._events.emit_for(lease, EventName.ACQUIRED, **data)
        except BaseException as exc:
            # The exception may be a soft time limit or SIGTERM, between sending and reading or
            # while sinks run. The store may have granted the lease, but the caller never got it.
            if isinstance(exc, StoreError):
                self._outages.begin(request.slots[0])
            self.undo(request)
            raise
        return lease

    def _granted(
        self, request: Acquire, grant: Granted, sent: float, max_hold: float | None
    ) -> Lease:
        """The lease of a ``grant`` to a request that was ``sent`` at that time.

        Raises:
            StoreUnavailable: The reply has come too late.
        """
        ttl = request.ttl if grant.ttl is None else min(request.ttl, grant.ttl)
        lease = Lease(
            key=grant.key,
            token=request.token,
            ttl=ttl,
            holder=request.holder,
            valid_until=sent + trust_of(ttl, self._trusted),
            acquired_at=sent,
            clock=self.clock,
            fence_number=grant.fence,
            hold_until=_FOREVER if max_hold is None else sent + max_hold,
            claim_key=request.claim.key if request.claim and request.claim.phase else "",
            process=processes[os.getpid()],
        )
        if type(grant) is not Granted:
            if isinstance(grant, GrantedArguments):
                lease.arguments = grant.arguments
            elif isinstance(grant, GrantedInTurn):
                lease.following = grant.following
        if self.clock.now() >= lease.valid_until:
            raise StoreUnavailable(
                f"the grant of {request.slots[0]!r} arrived after its ttl of {lease.ttl} s"
            )
        if len(request.slots) > 1:
            self._note((grant.key,), request)
        if self._lease_notes is not None:
            lease.shared = self._lease_notes.share(lease)
        return lease

    def release(
        self,
        lease: Lease,
        request: Release,
        publish: Callable[[CallQueue, Hint], object] | None = None,
    ) -> ReleaseReply | None:
        """Release ``lease`` by ``request``. Never raises.

        Args:
            lease: The lease.
            request: The release.
            publish: Publishes the call that follows in the queue of the key; None: a sweep does.

        Returns:
            None if the store refused, or didn't answer: the release is repeated.
        """
        if lease.process is not processes[os.getpid()]:
            return None  # a forked child leaves the block; its parent holds the lease
        # Renewal ends first: if the release never reaches the store, the ttl frees the key.
        self.heartbeat.stop(lease)
        # A soft time limit, or SIGTERM, may have interrupted an earlier call of this method.
        interrupted = lease.released_at is not None
        if not interrupted:
            lease.released_at = self.clock.now()
        timeout, resent = timeout_for(lease.ttl), False
        try:
            try:
                reply = _send(self.store, request, timeout, publish)
            except StoreUnavailable as exc:
                # If the first try was sent, it may have been carried out and its reply lost. Then
                # "not ours" is the reply to the second try although the lease was released.
                resent = exc.was_sent
                reply = _send(self.store, request, timeout, publish)
        except StoreError as exc:
            self._repeat(lease, request, exc, resent or interrupted)
            return None
        # The note is erased last: if this process is killed in between, its parent reports the end.
        try:  # a sink may be interrupted by a soft time limit or SIGTERM
            self._ends.report(lease, request, reply, resent or interrupted)
        finally:
            self._erase_note(lease.token)
        return reply

    def give_back(self, lease: Lease, request: Release) -> None:
        """As :meth:`release`, for a caller that needs no reply; usually does not wait for it.

        The reply, and with it a loss, is read later, on another thread or in another task. Only
        the reply shows that the lease was still held, so RELEASED follows it, within a second. If
        the log or a receiver of signals uses RELEASED, this waits for the reply: they expect the
        event in the context of its task. The lease note stays until the store has confirmed the
        release: if this process dies before that, its parent frees the lease.
        """
        heartbeat, watched = self.heartbeat, self._events.observes(_RELEASED)
        try:
            now = self.clock.now()
            if (
                (releases := self._async_releases) is not None
                and now - lease.acquired_at <= _FRESH
                and now < lease.valid_until
                and lease.process is processes[os.getpid()]
                and not (watched and self._events.reaches_sinks(_RELEASED))
                and heartbeat.let_go(lease)
            ):
                lease.released_at = now
                reply = partial(self._on_reply, lease, request)
                timeout = timeout_for(lease.ttl)
                if releases.send(request, timeout=timeout, on_reply=reply):
                    heartbeat.sent(lease)
                    if watched:
                        heartbeat.report_by(lease, now + _REPORTED_WITHIN)
                    return
                heartbeat.confirmed(lease)
                lease.released_at = None  # nothing has left this process
        except BaseException:
            # The exception is a soft time limit or SIGTERM. If the release was about to be sent,
            # the heartbeat drains it.
            heartbeat.stop(lease)
            raise
        self.release(lease, request)

    def _on_reply(
        self, lease: Lease, request: Release, outcome: ReleaseReply | StoreError, resent: bool
    ) -> None:
        """Report the end of ``lease``, often on the thread of another body.

        That body may be waiting for its own grant, whose ttl runs.
        """
        self.heartbeat.confirmed(lease)
        watched = self._events.observes(_RELEASED)
        if outcome is ReleaseReply.OURS and not (watched and self._events.reaches_sinks(_RELEASED)):
            try:
                if watched:
                    self._ends.released(lease)
                lease.reported = True
            finally:
                self._erase_note(lease.token)
            return
        with observers.elsewhere():
            if isinstance(outcome, StoreError):
                self._repeat(lease, request, outcome, resent)
                return
            try:
                self._ends.report(lease, request, outcome, resent)
            finally:
                self._erase_note(lease.token)

    def _repeat(self, lease: Lease, request: Release, error: StoreError, resent: bool) -> None:
        """Let the queue repeat a release that the store did not carry out.

        Args:
            lease: The lease.
            request: The release.
            error: The error of the last try.
            resent: Whether a try before the last one may have been carried out.
        """

        def give_up(why: object) -> None:
            left = (lease.released_at or 0.0) + lease.ttl - self.clock.now()
            self._ends.failed(lease, str(why), frees_in=round(max(0.0, left), 3))

        def again(store: Store) -> None:
            nonlocal resent
            passed = self.clock.now() - (lease.released_at or 0.0)
            try:
                reply = _send(store, _sent_later(request, passed), timeout_for(lease.ttl))
            except StoreUnavailable as exc:
                resent |= exc.was_sent
                raise
            self._outages.end(lease.key)
            try:
                # A lease that has expired since its body ended was not lost.
                self._ends.report(lease, request, reply, resent or passed >= lease.ttl)
            finally:
                self._erase_note(lease.token)

        resent |= isinstance(error, StoreUnavailable) and error.was_sent
        # The key, or the completion record that the release writes, could exist for so long.
        longest = max(lease.ttl, request.completion_ttl if request.completion else 0.0)
        if refusal := self.retry_queue.put(again, longest, give_up, error=error):
            give_up(refusal)
            return
        holder = lease.holder
        task, task_id = holder.task, holder.task_id
        self._outages.report(
            error, "released-later", key=lease.key, task=task, task_id=task_id, holder=holder
        )

    def abandon(self, lease: Lease) -> None:
        """Leave ``lease`` to its ttl, because its release was interrupted."""
        self.heartbeat.stop(lease)
        self._ends.failed(lease, "the release was interrupted", frees_in=lease.ttl)

    def undo(self, request: Acquire) -> None:
        """Release the lease that ``request`` may have been granted; never raises a StoreError.

        Without a reply, the release is repeated for as long as the lease could exist; for a call of
        a queue longer: it counts as begun until the release arrives, and would be taken for lost.

        If the grant set the claim to running, it is queued again: the body has not begun, and the
        caller that was interrupted decides what happens to the claim next.
        """
        claim = request.claim
        queued = replace(claim, phase=Phase.QUEUED) if claim and claim.phase else None
        release = request.undo(queued)
        # An exception may have come between the grant's event and the assignment by the caller.
        lease = self.heartbeat.find(request.token)
        if lease is not None:
            self.release(lease, release)
            return

        ends_at = self.clock.now() + request.ttl

        def send(store: Store) -> None:
            if self.clock.now() >= ends_at:
                self._erase_note(request.token)  # a process has few notes, and the lease has ended
            _send(store, release, timeout_for(request.ttl))
            self._erase_note(request.token)

        if self.retry_queue.is_crowded:
            # While the store is away, each new try of a message comes here. The releases of bodies,
            # of which there are few, must find room in the queue.
            with suppress(StoreError):
                send(self.store)
        else:
            seconds = max(request.ttl, _UNDO_FOR) if request.queued else request.ttl
            self.retry_queue.ask(send, seconds, lambda why: self._erase_note(request.token))

    def _free(self, dead: Sequence[Record], request: Acquire, timeout: float) -> None:
        """Free the leases of dead processes, which refuse ``request``; they may be gone already.

        They are released by key and token, as the worker's parent does for a dead child: the
        client that has waited longest is woken.
        """
        for record in dead:
            try:
                token = Token.parse(record.token)
            except ValueError:
                continue  # not written by this library
            if self._lease_notes is not None:
                # Before the release: if it frees the lease, the worker's parent finds the note.
                self._lease_notes.freeing(record.token)
            release = Release(keys=(record.key,), token=token)
            if self.store.leases.release(release, timeout=timeout) is ReleaseReply.OURS:
                notice_free(self.store, record.key)
                self._report_freed(request.holder, record, token)

    def _report_freed(self, own: Holder, record: Record, token: Token) -> None:
        reason, dead = "its process no longer exists on this host", record.holder
        self._events.emit(
            Event(
                name=EventName.FREED,
                key=record.key,
                task=dead.task,
                task_id=dead.task_id,
                lease=token.nonce,
                holder=dead,
                data={"reason": reason, "by": str(own)},
            )
        )

    def _note(self, keys: Sequence[str], request: Acquire) -> None:
        """Note that ``request`` may have a lease on one of ``keys``, for the worker's parent."""
        if self._lease_notes is not None:
            claim = request.claim.key if request.claim else ""
            self._lease_notes.note(keys, request.token.text, request.ttl, claim)

    def _erase_note(self, token: Token) -> None:
        if self._lease_notes is not None:
            self._lease_notes.erase(token.text)


def _send(
    store: Store,
    request: Release,
    timeout: float,
    publish: Callable[[CallQueue, Hint], object] | None = None,
) -> ReleaseReply:
    """Send a release, and publish the call that follows in the queue of the key.

    Without ``publish`` the key is due for a sweep at once, and a worker publishes the call: the
    broker may let a publisher wait, and other requests wait for the thread that repeats releases.
    """
    if not isinstance(request, QueuedRelease) or (queue := store.call_queue) is None:
        return store.leases.release(request, timeout=timeout)
    reply, following = queue.release(request, timeout=timeout)
    if following is None:
        pass
    elif publish is not None:
        publish(queue, following)
    else:
        queue.defer(following.key, seconds=0.0, timeout=MAX_TIMEOUT, unpublished=following)
    return reply


def _sent_later(request: Release, seconds: float) -> Release:
    """``request``, as it is sent by the queue so many ``seconds`` after the end of the lease.

    A key in cooldown, or a reservation, still expires when it would have.
    """
    left = max(request.become_ttl - seconds, 0.0)
    return replace(request, become=request.become if left else None, become_ttl=left)


def notice_free(store: Store, key: str) -> None:
    """Have the queue of ``key`` looked at, whose holder was released by another client.

    Its next call would be due at the end of the lease. A login without the rights for queues leaves
    it at that.
    """
    if (queue := store.call_queue) is not None:
        with suppress(StoreError):
            queue.defer(Keyspace.lock_of(key), seconds=0.0, timeout=MAX_TIMEOUT)


def leases_of_the_dead(own: Holder, refused: Refused) -> Sequence[Record]:
    """The leases among the records of ``refused`` whose processes are proven dead.

    Other records (a reservation, a cooling key, a claim) do not depend on a process. A refusal by
    a later attempt stands, because freeing its key would let a stale attempt run.

    Args:
        own: The description of the refused client.
        refused: The refusal.
    """
    if refused.relation is Relation.LATER or not own.process:
        return ()
    return [
        record
        for record in (refused.record, *refused.others)
        if record is not None
        and record.kind is Kind.LEASE
        and record.holder.process
        and is_proven_dead(record.holder.process, record.holder.pid, own.process)
    ]
