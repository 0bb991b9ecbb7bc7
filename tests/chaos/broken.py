"""Locks broken on purpose: what the checker has to catch. The product has no switch for any of it.

Each breakage replaces one part in the worker, or the beat, that starts with it.
"""

from __future__ import annotations

import hashlib
import os
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import psutil

from celery_singleton_lock import runtime
from celery_singleton_lock.beat.election import Election
from celery_singleton_lock.core import locker, observers
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.events import Event, EventName, Events
from celery_singleton_lock.core.heartbeat import Heartbeat
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Lease, Token
from celery_singleton_lock.core.retry_queue import RetryQueue
from celery_singleton_lock.core.store_requests import Acquire, GrantedArguments
from celery_singleton_lock.key_queue.sweep import QueueSweep
from celery_singleton_lock.stores.redis import scripts as redis_scripts
from celery_singleton_lock.stores.redis.leases import RedisLeases
from celery_singleton_lock.stores.redlock.contest import Contest
from celery_singleton_lock.task.cancel_running import CallOrder
from celery_singleton_lock.task.context import Block
from celery_singleton_lock.worker import discarded
from celery_singleton_lock.worker import request as request_module
from celery_singleton_lock.worker.parent_heartbeat import ParentHeartbeat
from celery_singleton_lock.worker.request import SingletonRequestMixin

#: As the release script, but it doesn't look whose the key is.
_DELETE = b"""
for i = 4, #KEYS do redis.call('DEL', KEYS[i]) end
return 'released'
"""


def break_on_purpose(part: str) -> None:
    """Break ``part``; nothing if it is empty.

    If that fails, the process ends: Celery would log the error of a signal's receiver, and the
    campaign would try a whole lock for a broken one.
    """
    if not part:
        return
    try:
        BREAKAGES[part]()
    except Exception:
        traceback.print_exc()
        os._exit(70)


def _replace(owner: Any, name: str, value: Any) -> None:
    """Replace what ``owner`` has under this name: what it hasn't, nothing would ask for."""
    assert hasattr(owner, name), f"{owner} has no {name!r} any more"
    setattr(owner, name, value)


def _without_owner_check() -> None:
    """A release frees the key, also when another holds it by now."""
    _replace_script(redis_scripts.RELEASE, _DELETE)


def _replace_script(script: redis_scripts.Script, source: bytes) -> None:
    script.source = source
    script.sha = hashlib.sha1(source, usedforsecurity=False).hexdigest()
    redis_scripts.Script.known[script.sha] = script


def _without_server_clock() -> None:
    """A fence is the number of the grant, as the server has counted them."""
    for script in (redis_scripts.ACQUIRE, redis_scripts.ACQUIRE_ARGUMENTS):
        _edit(script, b"redis.call('TIME')", b"{0, 0}")


def _without_quarantine() -> None:
    """A node of Redlock votes as soon as it is up, whatever it has forgotten."""
    start = Contest.__init__

    def start_without_quarantine(self: Any, *args: Any) -> None:
        start(self, *args)
        _replace(self, "_quarantine", 0.0)

    _replace(Contest, "__init__", start_without_quarantine)


def _without_renewal() -> None:
    """A lease lasts for its ttl, and that is that: neither its holder renews it nor the parent."""
    _replace(Heartbeat, "_due", lambda self: [])
    _replace(ParentHeartbeat, "_renew", lambda self, late: None)


def _without_local_deadline() -> None:
    """What was granted is trusted until the store says otherwise: silence changes nothing."""
    is_over = property(lambda self: self.released_at is not None or self.loss is not None)
    _replace(Lease, "lost", is_over)
    _replace(Lease, "remaining", lambda self: 0.0 if self.lost else float("inf"))
    _replace(Heartbeat, "_declare_overdue", lambda self: None)


def _without_nonce() -> None:
    """All deliveries of a message look the same, so a duplicate is granted its sibling's lease."""
    _replace(request_module, "mint_nonce", lambda: "0")


def _without_loss_report() -> None:
    """A loss interrupts its body, but no log line and no signal reports it."""
    emit = Events.emit

    def emit_all_but_losses(self: Events, event: Event) -> None:
        if event.name is not EventName.LEASE_LOST:
            emit(self, event)

    _replace(Events, "emit", emit_all_but_losses)


def _without_order() -> None:
    """A call is the newest when it arrives, whenever it was made."""
    register = CallOrder.register

    def register_arrival(self: CallOrder, token: Token, reservation: str = "") -> None:
        if not hasattr(self, "_call"):
            self.called_at = None
        register(self, token, reservation)

    _replace(CallOrder, "register", register_arrival)


def _without_arguments() -> None:
    """A grant returns the newest arguments, and forgets them: a redelivery has the first ones."""
    acquire = RedisLeases.acquire

    def acquire_and_forget(self: RedisLeases, request: Acquire, *, timeout: float) -> Any:
        reply = acquire(self, request, timeout=timeout)
        if isinstance(reply, GrantedArguments) and request.claim is not None:
            self._runner.connections.run([("DEL", request.claim.arguments)], timeout)
        return reply

    _replace(RedisLeases, "acquire", acquire_and_forget)


def _without_observer_thread() -> None:
    """Observers run on the thread that emits the event, so renewals wait for them."""
    _replace(observers, "elsewhere", nullcontext)


def _without_haste() -> None:
    """The end of a connection changes nothing: a loss is found at the next renewal by the clock."""
    _replace(Heartbeat, "hasten", lambda self: None)


def _without_host_identity() -> None:
    """A holder counts as dead if this host has its name and no process with its PID."""
    name = f"{os.uname().nodename:_<14.14}"

    def is_dead(identity: str, pid: int, own: str) -> bool:
        return identity == own and not psutil.pid_exists(pid)

    _replace(runtime, "identity_of_this_process", lambda: name)
    _replace(locker, "is_proven_dead", is_dead)


def _with_wall_clock() -> None:
    """Deadlines are moments of the host's wall clock."""
    _replace(SystemClock, "now", staticmethod(time.time))


def _without_resignation() -> None:
    """A beat leads on, though it can send nothing."""
    _replace(Election, "resign_if_stalled", lambda self, term: None)


def _without_limit() -> None:
    """A key whose bodies may run two at a time has three slots."""
    slots = Keyspace.slots

    def slots_and_another(key: str, limit: int) -> tuple[str, ...]:
        return slots(key, limit + 1 if limit > 1 else limit)

    _replace(Keyspace, "slots", staticmethod(slots_and_another))


def _without_tasks_beside_hold() -> None:
    """A ``hold()`` excludes others of its key, and no task."""
    request: Any = Block._request
    own = lambda self, runtime, key: request(self, runtime, f"{key}-of-hold")  # noqa: E731
    _replace(Block, "_request", own)


def _edit(script: redis_scripts.Script, old: bytes, new: bytes) -> None:
    assert old in script.source, f"{old!r} is no longer in the script"
    script.source = script.source.replace(old, new)
    script.sha = hashlib.sha1(script.source, usedforsecurity=False).hexdigest()
    redis_scripts.Script.known[script.sha] = script


def _without_head_check() -> None:
    """A call whose turn it is not is granted the key if that is free."""
    _edit(redis_scripts.QUEUE_ACQUIRE, b"not has_turn or ", b"")


def _without_rate() -> None:
    """A hundred times as many calls may start at once."""
    for script in redis_scripts.Script.known.copy().values():
        if b"local function rate_left()" in script.source:
            _edit(script, b"local rate_key,", b"burst = burst * 100\nlocal rate_key,")


def _without_pause() -> None:
    """A paused key is granted like any other."""
    for script in redis_scripts.Script.known.copy().values():
        if b"pause = pauses and" in script.source:
            _edit(script, b"pause = pauses and", b"pause = false and")


def _without_message() -> None:
    """A call that joins at a worker gets a place, and its message is not stored."""
    store = b"redis.call('HSET', calls, '+' .. id, ARGV[7])"
    _edit(redis_scripts.QUEUE_JOIN, store, b"")


def _without_looks() -> None:
    """A hint that got lost is lost."""
    _replace(QueueSweep, "start", lambda self: None)


def _absent_means_ended() -> None:
    """A message whose call has no place is dropped as one that has ended."""
    _edit(
        redis_scripts.QUEUE_ACQUIRE,
        b"local age = call and",
        b"if not call then return {'done'} end local age = call and",
    )


def _without_discards() -> None:
    """The claim of a message that a worker discards stays."""
    _replace(discarded, "_discard", lambda app, message, reason: None)
    _replace(SingletonRequestMixin, "_discard", lambda self, reason: None)


def _without_repetition() -> None:
    """What the store does not answer is not sent again."""
    _replace(RetryQueue, "catch_up", lambda self: self._unanswered.clear())


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
    "server-clock": _without_server_clock,
    "quarantine": _without_quarantine,
    "host-identity": _without_host_identity,
    "wall-clock": _with_wall_clock,
    "limit": _without_limit,
    "tasks-beside-hold": _without_tasks_beside_hold,
    "head-check": _without_head_check,
    "rate": _without_rate,
    "pause": _without_pause,
    "message": _without_message,
    "looks": _without_looks,
    "absent": _absent_means_ended,
    "repetition": _without_repetition,
    "discards": _without_discards,
}
