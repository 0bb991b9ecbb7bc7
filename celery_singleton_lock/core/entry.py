"""A lease in the heartbeat's hands: when it has its next turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from celery_singleton_lock.core.lease import Lease, trust_of
from celery_singleton_lock.core.pace import interval_of, retry_pause

__all__ = ["Entry", "note_renewed"]

_NEVER: Final = float("inf")


class Entry:
    """One lease that is renewed; times in seconds, on its clock.

    A process may have thousands, and a sweep looks at each several times: so what it looks at is
    written down, and not computed.

    Args:
        lease: Which.
        on_lost: Who hears of its loss.
        early: By what share of an interval its first renewal comes early.

    Attributes:
        interval: From one renewal to the next.
        ends: When renewal stops.
        due: When it is to be renewed.
        turn: When the heartbeat has to look at it: then, or at the deadline if that comes first.
            Never later than the deadline, which others (the worker parent) only ever put off.
        failures: How many renewals in a row weren't answered.
        error: What became of the last of these.
    """

    __slots__ = ("due", "ends", "error", "failures", "interval", "lease", "on_lost", "turn")

    def __init__(self, lease: Lease, on_lost: Callable[[Lease], None], early: float) -> None:
        self.lease = lease
        self.on_lost = on_lost
        self.interval = interval_of(lease.ttl, lease.trusted)
        hold_until = lease.hold_until
        self.ends = _NEVER if hold_until is None else hold_until
        self.failures = 0
        self.error = ""
        begin = lease.acquired_at
        self.plan(begin + self.interval * (1 - early), begin)

    def plan(self, due: float, now: float) -> None:
        """Renew it at ``due``."""
        self.due = due
        deadline = self.lease.deadline
        self.turn = due if due < deadline and now < self.ends else deadline

    def postpone(self, error: str, now: float) -> None:
        """A renewal met ``error``: ask the store again after a pause."""
        self.failures += 1
        self.error = error
        lease = self.lease
        self.plan(now + retry_pause(lease.ttl, lease.deadline - now), now)


def note_renewed(entries: Iterable[Entry], sent: float, now: float) -> None:
    """A request that was sent at ``sent`` renewed them, but for what is lost by ``now``.

    Leases of one ttl get the same two numbers as objects too: thousands of others would not fit
    into the processor's cache, nor need be made.
    """
    ttl = trusted = due = until = 0.0
    for entry in entries:
        lease = entry.lease
        if now >= lease.valid_until and now >= lease.deadline:
            continue  # for good, whatever the store says
        if lease.ttl != ttl or lease.trusted != trusted:
            ttl, trusted = lease.ttl, lease.trusted
            due, until = sent + entry.interval, sent + trust_of(ttl, trusted)
        lease.renewed(until)
        entry.failures = 0
        if now < due < until:
            entry.due = entry.turn = due  # as plan() would, but for a call
        else:
            entry.plan(due, now)
