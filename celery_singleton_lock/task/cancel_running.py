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
from dataclasses import replace
from typing import Any, NoReturn

from ..core.events import EventName
from ..core.heartbeat import timeout_for
from ..core.lease import Kind, Lease, Token
from ..core.store_requests import NewestCall, Refused, Relation
from ..on_conflict import CancelRunning
from ..run_feature import Feature, Run
from ..runtime import Runtime
from .interrupt import is_loss


class CallOrder:
    """The place of one delivery's call among the calls for its key.

    Attributes:
        called_at: Time of the call in seconds since the epoch; None: unknown before it is noted.
        newer: A newer call, which takes the place of this one; None: none is known.
    """

    newer: NewestCall | None = None

    def __init__(self, runtime: Runtime, key: str, called_at: float | None, ttl: float) -> None:
        self._runtime, self._key, self._timeout = runtime, key, timeout_for(ttl)
        self.called_at = called_at

    def register(self, token: Token, reservation: str = "") -> None:
        """Register this call as the newest, or find the newer one.

        Args:
            token: The token of the delivery.
            reservation: See :meth:`reservation`. The newest call deletes it.

        Raises:
            StoreError: The store refuses, or does not answer.
        """
        call = NewestCall(call_id=token.call_id, called_at=self.called_at)
        newest_calls = self._runtime.store.newest_calls
        options = {"ttl": self._runtime.settings.completion_ttl, "timeout": self._timeout}
        newest = call
        if newest_calls is not None:  # else a worker refuses the option
            newest = newest_calls.register(self._key, call, **options, reservation=reservation)
        if newest.call_id != token.call_id:
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
        rule = task.singleton_policy().on_conflict
        return record.token if isinstance(rule, CancelRunning) else ""

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

        def on_newest(newest: NewestCall) -> None:
            if self.newer is None and newest.is_newer_than(self._call):
                self.newer = newest
                interrupt()

        self._runtime.locker.heartbeat.watch(lease, within, on_newest)


class CancelRunningFeature(Feature):
    """The order of calls, at the points of a run."""

    def __init__(self, run: Run, rule: CancelRunning) -> None:
        super().__init__(run)
        self._within = rule.within
        self._order = CallOrder(run.runtime, run.key, run.delivery.called_at, run.policy.ttl)
        self._is_cancelled = False
        self._deleted = ""  # the reservation that the last refusal named

    @classmethod
    def of(cls, run: Run) -> CancelRunningFeature | None:
        """The order of the calls for the run's key; None: the policy has none."""
        rule = run.policy.on_conflict
        return cls(run, rule) if isinstance(rule, CancelRunning) else None

    def granted(self, lease: Lease) -> None:
        """Note the call, and look for newer ones while the body runs."""
        run, order = self.run, self._order
        order.register(run.delivery.token)
        if order.newer is not None:
            self._end(lease)
        # A retry that the body publishes keeps the time of the call.
        run.delivery = replace(run.delivery, called_at=order.called_at)
        run.rewrite_header()
        order.watch(lease, self._within, self._cancel)

    def refused(self, refused: Refused) -> bool:
        """Note the call, which waits for the holder; delete the reservation of an older call."""
        record = refused.record
        if refused.relation is not Relation.OTHER or (record and record.kind is Kind.CLAIM):
            return False  # a claim refuses it, and no call holds the key
        order = self._order
        reservation = order.reservation(refused)
        order.register(self.run.delivery.token, reservation)
        if order.newer is not None:
            self.run.stop_waiting()  # before the next release may hand over
            self._end(None)
        # The store has deleted the reservation, so the key may be free. A reservation that is found
        # again is waited for, like any other holder.
        asks_again = reservation not in ("", self._deleted)
        self._deleted = reservation
        return asks_again

    def ended(self, lease: Lease, error: BaseException | None) -> None:
        """End REVOKED, also if the body has swallowed the interruption."""
        if not self._is_cancelled:
            return
        if error is None or isinstance(error, Exception) or is_loss(error, interrupted=True):
            self._end(lease, began=True)

    def _cancel(self) -> None:
        """Interrupt the body. Called on the heartbeat's thread."""
        self._is_cancelled = True
        # The key is for the newer call.
        self.keeps_key_for_retry = False
        self.run.interrupt()

    def _end(self, lease: Lease | None, *, began: bool = False) -> NoReturn:
        """End REVOKED because of a newer call, and release the ``lease`` for it."""
        order = self._order
        by, later = order.newer and order.newer.task_id, order.made_later()
        self.run.revoke(f"cancelled by the newer call {by}, made {later:.3f} s later")
        self.run.emit(EventName.CANCELLED, by=by, started=began, later=later)
        self.run.end_for_good(lease, began=began)
