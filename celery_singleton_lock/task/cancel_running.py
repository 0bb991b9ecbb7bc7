"""``on_conflict="cancel_running"``: of the calls for one key, the newest runs.

Overview
    The store keeps the newest call of each key, by the time at which it was published. Each
    delivery of such a task notes its call after its acquire, granted or refused. The holder looks
    for a newer call from its heartbeat. A call that finds a newer one ends REVOKED: a running body
    is interrupted first, a waiting call stops waiting, a retry or a redelivery does not run.

Guarantees
    Exclusion rests on the lease alone: the newer call waits until the lease is released.
    An older call does not begin while the newer one is noted, whatever became of the newer one: so
    a call that was cancelled does not run again after its worker was killed.

Non-guarantees
    An order of calls if the clocks of their hosts, or that of the store, differ by more than the
    time between the calls. A message without this library's header (``send_task`` by name) has the
    time of its arrival.
    An end of a body that swallows the interruption, or of a holder without this option. The newer
    call waits for it until its timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.heartbeat import timeout_for
from ..core.lease import Kind, Lease, Token
from ..core.store import Call, Refused
from ..policy import ConflictAction
from ..runtime import Runtime


class CallOrder:
    """The place of one delivery's call among the calls for its key.

    Attributes:
        called_at: Time of the call in seconds since the epoch; None: unknown before it is noted.
        newer: A newer call, which takes the place of this one; None: none is known.
    """

    newer: Call | None = None

    def __init__(self, runtime: Runtime, key: str, called_at: float | None, ttl: float) -> None:
        self._runtime, self._key, self._timeout = runtime, key, timeout_for(ttl)
        self.called_at = called_at

    def note(self, token: Token, reservation: str = "") -> None:
        """Note this call as the newest, or find the newer one.

        Args:
            token: The token of the delivery.
            reservation: See :meth:`reservation`. The newest call deletes it.

        Raises:
            StoreError: The store refuses, or does not answer.
        """
        call = Call(task=token.task, called_at=self.called_at)
        store, ttl = self._runtime.store, self._runtime.settings.marker_ttl
        options = {"ttl": ttl, "timeout": self._timeout}
        newest = store.note_call(self._key, call, **options, reservation=reservation)
        if newest.task != token.task:
            self.newer = newest
            return
        self._call, self.called_at = newest, newest.called_at

    def reservation(self, refused: Refused) -> str:
        """The token that reserves the key for the retry of an older call; empty: there is none.

        The retry of a task without this option keeps its key: it would not find the newer call.
        """
        record = refused.record
        if record is None or record.kind is not Kind.RESERVED:
            return ""
        task: Any = self._runtime.app.tasks.get(record.holder.task)
        if not hasattr(task, "singleton_policy"):
            return ""
        action = task.singleton_policy().on_conflict.action
        return record.token if action is ConflictAction.CANCEL_RUNNING else ""

    def made_later(self) -> float:
        """Seconds by which the newer call was made later; 0.0 if that is unknown."""
        newer = self.newer and self.newer.called_at
        return round(newer - self.called_at, 3) if newer and self.called_at else 0.0

    def watch(self, lease: Lease, within: float, interrupt: Callable[[], None]) -> None:
        """Look for a newer call every ``within`` seconds while the lease is renewed.

        Args:
            lease: The lease.
            within: Seconds.
            interrupt: Called once, on the heartbeat's thread, if there is a newer call.
        """

        def on_newest(newest: Call) -> None:
            if self.newer is None and newest.is_newer_than(self._call):
                self.newer = newest
                interrupt()

        self._runtime.locker.heartbeat.watch(lease, within, on_newest)
