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

from ..core.heartbeat import timeout_for
from ..core.lease import Kind, Lease, Token
from ..core.store import HANDOFF_TASK, Call, Refused
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

    def note(self, token: Token) -> None:
        """Note this call as the newest, or find the newer one.

        Raises:
            StoreError: The store refuses, or does not answer.
        """
        call = Call(task=token.task, called_at=self.called_at)
        store, ttl = self._runtime.store, self._runtime.settings.marker_ttl
        newest = store.note_call(self._key, call, ttl=ttl, timeout=self._timeout)
        if newest.task != token.task:
            self.newer = newest
            return
        self._call, self.called_at = newest, newest.called_at

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


def is_retrys(refused: Refused) -> bool:
    """Whether the key is reserved for the retry of another call, so that noting a call frees it."""
    record = refused.record
    return (
        record is not None
        and record.kind is Kind.RESERVED
        and not record.token.startswith(f"{HANDOFF_TASK}|")
    )
