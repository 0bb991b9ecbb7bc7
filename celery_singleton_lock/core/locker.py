"""Acquire and release around the store: retries with one token, deadlines, registration.

Promises
    A Lease that is returned was granted to its token, is registered with the keeper, and its
    ``valid_until`` lies before the store's expiry. An acquire whose outcome is unknown is released
    by token on the way out, whatever the exception. A release never raises.

Does not promise
    That a release reaches the store: if it doesn't, the ttl frees the key. One that nobody waits
    for has reached the kernel when the task ends. Should the connection break in that moment, it is
    made again when this process asks the store next, or within a third of the ttl. Only if the
    process dies before, it is left to the worker parent, or the ttl.

Sequence of an acquire::

    read clock -> send -> Granted -> still valid? -> keeper.add -> Lease
                    |        |            +--no--> release by token -> StoreUnavailable
                    |        +-- Refused -> returned as a value
                    +--no answer--> once more, same token --no answer--> release, StoreUnavailable
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.events import Event, EventName, Events
from celery_singleton_lock.core.keeper import Keeper, timeout_for
from celery_singleton_lock.core.lease import (
    Lease,
    Loss,
    LossReason,
    SharedDeadline,
    Token,
    trust_of,
)
from celery_singleton_lock.core.store import (
    Acquire,
    Granted,
    PostingStore,
    Refused,
    Release,
    Released,
    Store,
)
from celery_singleton_lock.errors import StoreError, StoreUnavailable

__all__ = ["Locker"]

# Seconds after an acquire for which its connection counts as one that stands. Idle for longer, it
# may have been cut; and whose body took longer doesn't notice a round trip.
_FRESH: Final = 1.0


class Ledger(Protocol):
    """Where a process writes down what it holds, for whoever survives it."""

    def note(self, keys: Sequence[str], token: str, ttl: float, claim: str) -> None: ...

    def share(self, lease: Lease) -> SharedDeadline | None: ...

    def strike(self, token: str) -> None: ...


class Locker:
    """The one way by which this process takes and gives back leases."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        keeper: Keeper,
        events: Events,
        ledger: Ledger | None = None,
    ) -> None:
        self.store = store
        self.clock = clock
        self._keeper = keeper
        self._events = events
        self._ledger = ledger
        self._posting = store if isinstance(store, PostingStore) else None

    def acquire(
        self,
        call: Acquire,
        *,
        max_hold: float | None = None,
        on_lost: Callable[[Lease], None] = lambda lease: None,
    ) -> Lease | Refused:
        """Ask once; a conflict is a value.

        Args:
            call: What is asked for.
            max_hold: Seconds after which renewal stops.
            on_lost: Called on the keeper's thread if the lease is lost before its release.

        Raises:
            StoreError: The store refuses.
            StoreUnavailable: It doesn't answer; nothing is held.
        """
        lease = None
        self._note(call.slots, call)
        try:
            sent, reply = self._send(call)
            if isinstance(reply, Refused):
                self._strike(call.token)
                return reply
            ttl = call.ttl if reply.ttl is None else min(call.ttl, reply.ttl)
            trusted = self.store.capabilities.trusted
            lease = Lease(
                key=reply.key,
                token=call.token,
                ttl=ttl,
                holder=call.holder,
                valid_until=sent + trust_of(ttl, trusted),
                acquired_at=sent,
                clock=self.clock,
                fence_number=reply.fence,
                max_hold=max_hold,
                claim_key=call.claim.key if call.claim and call.claim.phase else "",
                trusted=trusted,
            )
            if self.clock.now() >= lease.valid_until:
                raise StoreUnavailable(
                    f"the grant of {call.slots[0]!r} arrived after its ttl of {lease.ttl} s"
                )
            if self._ledger is not None:
                if len(call.slots) > 1:
                    self._note((reply.key,), call)
                lease.shared = self._ledger.share(lease)
            self._keeper.add(lease, on_lost)
            if self._events.hears(EventName.ACQUIRED):
                self._tell(EventName.ACQUIRED, lease, fence=reply.fence, ttl=ttl)
        except BaseException:
            # Also a soft time limit or SIGTERM between sending and reading, or while others are
            # told: the grant may stand, and the caller never saw it.
            if lease is not None:
                self._keeper.discard(lease)
            self.forget(call)
            raise
        return lease

    def release(self, lease: Lease, call: Release) -> Released | None:
        """Give back ``lease`` as ``call`` says; None if the store didn't answer. Never raises."""
        if lease.process != os.getpid():
            return None  # a fork of the holder leaves the block: the lease is its parent's
        # First of all: if the store never hears of the release, nobody may go on renewing.
        renewed = self._keeper.discard(lease)
        lease.released = True
        try:
            reply, resent = self._release(call, timeout_for(lease.ttl))
        except StoreError as exc:
            self._tell(EventName.RELEASE_FAILED, lease, error=str(exc), frees_in=lease.ttl)
            return None
        self._strike(lease.token)
        if reply is Released.RELEASED or (resent and reply is Released.NOT_OURS):
            self._tell_released(lease)
            return Released.RELEASED
        if renewed is not None:
            self._tell_lost(lease, reply)
        return reply

    def give_back(self, lease: Lease, call: Release) -> None:
        """As :meth:`release`, where nobody needs the reply: it is waited for only if it has to be.

        RELEASED is told when it is sent; should it be lost, and made again in vain, RELEASE_FAILED
        is told later, on another thread or in another task. The ledger keeps the lease until the
        store has confirmed that it is free: should this process die before, its parent frees it.
        """
        try:
            if self._post(lease, call):
                self._tell_released(lease)
                return
        except BaseException:
            # A soft time limit, or SIGTERM. If it was about to be sent, the keeper will hear of it.
            self._keeper.discard(lease)
            raise
        self.release(lease, call)

    def _post(self, lease: Lease, call: Release) -> bool:
        """Whether the release was sent, and will be heard of."""
        store = self._posting
        age = self.clock.now() - lease.acquired_at
        if store is None or age > _FRESH or lease.lost or lease.process != os.getpid():
            return False
        if not self._keeper.let_go(lease, store.collect):
            return False
        lease.released = True
        heard = partial(self._heard, lease)
        if store.post(call, timeout=timeout_for(lease.ttl), heard=heard):
            self._keeper.sent(lease, store.collect)
            return True
        self._keeper.confirmed(lease)
        return False

    def _heard(self, lease: Lease, error: StoreError | None) -> None:
        self._keeper.confirmed(lease)
        if error is None:
            self._strike(lease.token)
        else:
            self._tell(EventName.RELEASE_FAILED, lease, error=str(error), frees_in=lease.ttl)

    def forget(self, call: Acquire) -> None:
        """Release by token what ``call`` may have been granted; silent if the store is away."""
        try:
            self.store.release(
                Release(keys=call.slots, token=call.token), timeout=timeout_for(call.ttl)
            )
        except StoreError:
            pass  # the ttl frees it, if it was granted at all
        self._strike(call.token)

    def _note(self, keys: Sequence[str], call: Acquire) -> None:
        if self._ledger is not None:
            claim = call.claim.key if call.claim else ""
            self._ledger.note(keys, str(call.token), call.ttl, claim)

    def _strike(self, token: Token) -> None:
        if self._ledger is not None:
            self._ledger.strike(str(token))

    def _send(self, call: Acquire) -> tuple[float, Granted | Refused]:
        timeout = timeout_for(call.ttl)
        sent = self.clock.now()
        try:
            return sent, self.store.acquire(call, timeout=timeout)
        except StoreUnavailable:
            # The second try meets a fresh connection: a restart leaves every idle one broken.
            sent = self.clock.now()
            return sent, self.store.acquire(call, timeout=timeout)

    def _release(self, call: Release, timeout: float) -> tuple[Released, bool]:
        try:
            return self.store.release(call, timeout=timeout), False
        except StoreUnavailable:
            # The first try may have been carried out and its reply lost: then "not ours" is ours.
            return self.store.release(call, timeout=timeout), True

    def _tell_released(self, lease: Lease) -> None:
        if self._events.hears(EventName.RELEASED):
            held = self.clock.now() - lease.acquired_at
            self._tell(EventName.RELEASED, lease, held=round(held, 3))

    def _tell_lost(self, lease: Lease, reply: Released) -> None:
        """Tell of a loss that the release was the first to meet: the body may not have been alone.

        Between two renewals the store was emptied, or an operator freed the key; or this process
        was stopped, and its body went on before the keeper did.
        """
        reason = LossReason.EXPIRED if reply is Released.NOT_OURS else LossReason.REPLACED
        detail = "the store had it no more when its body ended"
        lease.loss = Loss(reason=reason, at=self.clock.now(), detail=detail)
        self._tell(EventName.LOST, lease, reason=str(reason), detail=detail)

    def _tell(self, name: EventName, lease: Lease, **data: object) -> None:
        self._events.emit(
            Event(
                name=name,
                key=lease.key,
                task=lease.holder.task,
                task_id=lease.holder.task_id,
                holder=lease.holder,
                data=data,
            )
        )
