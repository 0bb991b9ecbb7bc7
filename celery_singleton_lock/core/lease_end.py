"""The report of the end of a lease: one event, from the first that learns of the end.

A release without a reply is repeated by `core.locker`, and then by `core.retry_queue`.

Overview
    Several threads and processes may learn that a lease has ended. What they know decides the
    event::

        learned by                   from                                        event
        ---------------------------  ------------------------------------------  --------------
        the heartbeat                "not yours", or the deadline has passed     lease_lost
        a release (this module)      "ours"                                      released
                                     "not ours", to the only try                 lease_lost
                                     "not ours", and an earlier try got no
                                     reply: the trace of the key shows
                                       that the earlier try was carried out      released
                                       that the lease was lost before it         lease_lost
                                       neither                                   release_failed
                                     the store refuses it, or does not answer
                                     while the lease could exist                 release_failed
        the worker's parent          "ours", or renewal had not ended            freed
        (`worker.dead_child`)        "not ours", and renewal had ended           released
        another process of the host  "ours": its holder is proven dead           freed

    There are five verbs for the end of a lease, here and in the rest of the package::

        verb     who                                 what
        -------  ----------------------------------  -----------------------------------------------
        release  the holder                          sends the release, by its token; the key is
                                                     free, reserved or in cooldown
        undo     a client without a reply to its     releases by the token what the store may have
                 acquire                             granted; no run has begun
        free     somebody else: an operator, the     releases by the token of the holder, which is
                 worker's parent, another process    proven dead or was chosen by a person
        lose     the heartbeat, or a release that    the store does not have the lease any more, or
                 did not find it                     its deadline has passed; nothing is sent
        abandon  a holder whose release was          sends nothing more: the ttl frees the key
                 interrupted

Guarantees
    One event for each grant. In the holder's process, the first report sets `Lease.reported`.
    Between a pool child and its parent, the lease note decides (`SharedDeadline.conclude`).

Non-guarantees
    An event for a lease whose whole worker was killed: its ttl frees the key, and no process learns
    of it.
"""

from __future__ import annotations

from typing import Final

from ..errors import StoreError
from .clock import Clock
from .events import EventName, Events
from .heartbeat import NOTES_TIMEOUT, Heartbeat, release_notes_on, timeout_for
from .lease import Lease, Loss, LossReason, reason_of_loss
from .store import Store
from .store_requests import Release, ReleaseReply, Trace

# Seconds. The heartbeat's thread may send this request too, and renewals wait for the reply then.
_TRACE_TIMEOUT: Final = NOTES_TIMEOUT
_UNKNOWN: Final = (
    "the release got no reply, and the store no longer had the lease when the release was sent "
    "again: the first try released it, or it had been lost before; the store does not say which"
)
_EXPIRED: Final = "no try of the release was confirmed before the ttl had freed the key"


class LeaseEnds:
    """Reports the ends of the leases that this process releases.

    Args:
        store: The store, which is asked how a lease ended that a release did not find.
        clock: The clock of the leases.
        events: Emits the reports.
        heartbeat: Reports losses, here and between two renewals.
    """

    def __init__(self, store: Store, clock: Clock, events: Events, heartbeat: Heartbeat) -> None:
        self._store, self._clock = store, clock
        self._events, self._heartbeat = events, heartbeat

    def report(self, lease: Lease, request: Release, reply: ReleaseReply, resent: bool) -> None:
        """Report ``lease`` as released or lost; not if its end was reported before.

        Args:
            lease: The lease that has ended.
            request: The release of the lease.
            reply: The store's reply to the last try.
            resent: Whether an earlier try without a reply may have been carried out.
        """
        if lease.reported:
            return
        if reply is ReleaseReply.OURS:
            self.released(lease)
            return
        trace = self._trace(lease)
        reason, detail = reason_of_loss(lease, trace.record is not None, self._note_on(lease))
        if resent and reason is not LossReason.OPERATOR:
            elapsed = self._clock.now() - (lease.released_at or 0.0)
            lost = was_lost(lease, request, trace, elapsed)
            if lost is None:
                self.failed(lease, _EXPIRED if elapsed >= lease.ttl else _UNKNOWN, frees_in=0.0)
                return
            if not lost:
                self.released(lease)
                return
        # Another body may have run at the same time: the store was emptied or an operator freed the
        # key between two renewals, or this process was stopped and its body resumed before the
        # heartbeat.
        lease.reported = True
        lease.loss = Loss(reason=reason, at=self._clock.now(), detail=detail)
        self._heartbeat.report_loss(lease, lease.loss, "task-ended")

    def released(self, lease: Lease) -> None:
        """Report that the store has released ``lease``; not if its end was reported before."""
        if lease.reported:
            return
        lease.reported = True
        if self._events.observes(EventName.RELEASED):
            held = (lease.released_at or self._clock.now()) - lease.acquired_at
            self._events.emit_for(lease, EventName.RELEASED, held=round(held, 3))

    def failed(self, lease: Lease, error: str, *, frees_in: float) -> None:
        """Report that the release of ``lease`` has failed; not if its end was reported before.

        Args:
            lease: The lease.
            error: Why.
            frees_in: Seconds until the ttl frees the key; 0: the key is free.
        """
        if not lease.reported:
            lease.reported = True
            self._events.emit_for(lease, EventName.RELEASE_FAILED, error=error, frees_in=frees_in)

    def _note_on(self, lease: Lease) -> str | None:
        return release_notes_on(self._store, [lease], min(timeout_for(lease.ttl), NOTES_TIMEOUT))[0]

    def _trace(self, lease: Lease) -> Trace:
        try:
            timeout = min(timeout_for(lease.ttl), _TRACE_TIMEOUT)
            return self._store.leases.trace(lease.key, timeout=timeout)
        except StoreError:
            return Trace(record=None)


def was_lost(lease: Lease, request: Release, trace: Trace, elapsed: float) -> bool | None:
    """Whether a lease that a release sent twice did not find was lost before the first try.

    Args:
        lease: The lease.
        request: The release of the lease.
        trace: The content of the store now.
        elapsed: Seconds between the sending of the first try and the arrival of ``trace``.

    Returns:
        None if both are possible: the first try was carried out and its reply lost, or the key was
        deleted by other means.
    """
    record = trace.record
    if record is not None and (
        record.token == str(request.next_token) or record.token.endswith(f"|{request.token.nonce}")
    ):
        return False  # the first try changed the key: reserved, cooling, or kept for a waiter
    if trace.fence is None:
        return None
    if lease.fence_number is not None and trace.fence < lease.fence_number:
        return True  # the store has lost the grant itself
    if record is not None and record.fence is not None:
        # The store's clock. If it was set back, the grant may lie in its future and proves nothing.
        granted = record.fence / 1e6
        if granted < trace.now - elapsed:
            return True
    return None
