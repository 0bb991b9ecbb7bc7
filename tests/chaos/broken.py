"""Locks broken on purpose: what the checker has to catch. The product has no switch for any of it.

Each breakage replaces one part in the worker, or the beat, that starts with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from celery_singleton_lock.beat.election import Election
from celery_singleton_lock.core.events import Event, EventName, Events
from celery_singleton_lock.core.heartbeat import Heartbeat
from celery_singleton_lock.core.lease import Lease, Token
from celery_singleton_lock.core.observers import ObserverThread
from celery_singleton_lock.core.store import Acquire, GrantedArguments
from celery_singleton_lock.stores.redis import scripts as redis_scripts
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.task.cancel_running import CallOrder
from celery_singleton_lock.worker import request as request_module
from celery_singleton_lock.worker.parent_heartbeat import ParentHeartbeat

#: As the release script, but it doesn't look whose the key is.
_DELETE = b"""
for i = 4, #KEYS do redis.call('DEL', KEYS[i]) end
return 'released'
"""


def break_on_purpose(part: str) -> None:
    """Break ``part``; nothing if it is empty.

    Raises:
        KeyError: There is no such breakage.
    """
    if part:
        BREAKAGES[part]()


def _without_owner_check() -> None:
    """A release frees the key, also when another holds it by now."""
    script = redis_scripts.RELEASE
    script.source = _DELETE
    script.sha = hashlib.sha1(_DELETE, usedforsecurity=False).hexdigest()
    redis_scripts.Script.known[script.sha] = script


def _without_renewal() -> None:
    """A lease lasts for its ttl, and that is that: neither its holder renews it nor the parent."""
    Heartbeat._due = lambda self: []  # type: ignore[method-assign]
    ParentHeartbeat._renew = lambda self, late: None  # type: ignore[method-assign]


def _without_local_deadline() -> None:
    """What was granted is trusted until the store says otherwise: silence changes nothing."""
    lease: Any = Lease
    lease.lost = property(lambda self: self.released_at is not None or self.loss is not None)
    lease.remaining = lambda self: 0.0 if self.lost else float("inf")
    Heartbeat._declare_overdue = lambda self: None  # type: ignore[method-assign]


def _without_nonce() -> None:
    """All deliveries of a message look the same, so a twin is granted its sibling's lease."""
    module: Any = request_module
    module.mint_nonce = lambda: "0"


def _without_loss_report() -> None:
    """A loss interrupts its body, but no log line and no signal reports it."""
    emit = Events.emit

    def emit_all_but_losses(self: Events, event: Event) -> None:
        if event.name is not EventName.LEASE_LOST:
            emit(self, event)

    Events.emit = emit_all_but_losses  # type: ignore[method-assign]


def _without_order() -> None:
    """A call is the newest when it arrives, whenever it was made."""
    note = CallOrder.note

    def note_arrival(self: CallOrder, token: Token, reservation: str = "") -> None:
        if not hasattr(self, "_call"):
            self.called_at = None
        note(self, token, reservation)

    CallOrder.note = note_arrival  # type: ignore[method-assign]


def _without_arguments() -> None:
    """A grant returns the newest arguments, and forgets them: a redelivery has the first ones."""
    acquire = RedisStore.acquire

    def acquire_and_forget(self: RedisStore, request: Acquire, *, timeout: float) -> Any:
        reply = acquire(self, request, timeout=timeout)
        if isinstance(reply, GrantedArguments) and request.claim is not None:
            self._connections.run([("DEL", request.claim.arguments)], timeout)
        return reply

    RedisStore.acquire = acquire_and_forget  # type: ignore[method-assign]


def _without_observer_thread() -> None:
    """Observers run on the thread that emits the event, so renewals wait for them."""
    thread: Any = ObserverThread
    thread.elsewhere = lambda self: nullcontext()


def _without_haste() -> None:
    """The end of a connection changes nothing: a loss is found at the next renewal by the clock."""
    Heartbeat.hasten = lambda self: None  # type: ignore[method-assign]


def _without_resignation() -> None:
    """A beat leads on, though it can send nothing."""
    Election.resign_if_stalled = lambda self, term: None  # type: ignore[method-assign]


BREAKAGES: dict[str, Callable[[], None]] = {
    "owner-check": _without_owner_check,
    "renewal": _without_renewal,
    "local-deadline": _without_local_deadline,
    "nonce": _without_nonce,
    "loss-report": _without_loss_report,
    "order": _without_order,
    "arguments": _without_arguments,
    "observer-thread": _without_observer_thread,
    "haste": _without_haste,
    "resignation": _without_resignation,
}
