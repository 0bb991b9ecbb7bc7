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
    An order of calls from hosts whose clocks differ by more than the time between the calls. A
    message without this library's header (``send_task`` by name) has the time of its arrival.
    An end of a body that swallows the interruption, or of a holder without this option. The newer
    call waits for it until its timeout.
"""

from __future__ import annotations

from collections.abc import Callable

from ..core.heartbeat import timeout_for
from ..core.lease import Kind, Lease, Token
from ..core.store import HANDOFF_TASK, Call, Refused
from ..publish.header import Delivery
from ..runtime import Runtime


class CallOrder:
    """The place of one delivery's call among the calls for its key.

    Attributes:
        called_at: Time of the call in seconds since the epoch.
        newer: A newer call, which takes the place of this one; None: none is known.
    """

    newer: Call | None = None

    def __init__(self, runtime: Runtime, key: str, delivery: Delivery, ttl: float) -> None:
        self._runtime, self._key, self._timeout = runtime, key, timeout_for(ttl)
        # A publisher whose clock is ahead must not cancel calls that are made after this one.
        now = runtime.clock.wall()
        self.called_at = min(delivery.called_at or now, now)

    def note(self, token: Token) -> None:
        """Note this call as the newest, or find the newer one.

        Raises:
            StoreError: The store refuses, or does not answer.
        """
        self._call = Call(task=token.task, called_at=self.called_at)
        runtime, ttl = self._runtime, self._runtime.settings.marker_ttl
        self._compare(
            runtime.store.note_call(self._key, self._call, ttl=ttl, timeout=self._timeout)
        )

    def watch(self, lease: Lease, within: float, interrupt: Callable[[], None]) -> None:
        """Look for a newer call every ``within`` seconds while the lease is renewed.

        Args:
            lease: The lease.
            within: Seconds.
            interrupt: Called once, on the heartbeat's thread, if there is a newer call.
        """

        def on_newest(newest: Call) -> None:
            if self.newer is None and self._compare(newest):
                interrupt()

        self._runtime.locker.heartbeat.watch(lease, within, on_newest)

    def _compare(self, newest: Call) -> bool:
        if newest.is_newer_than(self._call):
            self.newer = newest
        return self.newer is not None


def is_retrys(refused: Refused) -> bool:
    """Whether the key is reserved for the retry of another call, so that noting a call frees it."""
    record = refused.record
    return (
        record is not None
        and record.kind is Kind.RESERVED
        and not record.token.startswith(f"{HANDOFF_TASK}|")
    )
