"""``on_conflict="retry"``: the call is requeued until it runs, after delays of `core.backoff`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import ClassVar

from ..option_values import seconds
from .rule import Conflict, Decision, OnConflict, Outcome


@dataclass(frozen=True, slots=True, init=False)
class Retry(OnConflict):
    """Requeue the call until it runs, with growing delays and jitter.

    Args:
        delay: The longest first delay, in seconds. The shortest is half of it.
        max_delay: The longest delay between two tries, in seconds.
        max_wait: How long to try, in seconds from the first conflict. Then the call fails with
            LockConflict. By default it's tried until it runs.
    """

    action: ClassVar = "retry"

    delay: float
    max_delay: float
    max_wait: float | None

    def __init__(
        self,
        delay: float | timedelta = 1,
        max_delay: float | timedelta = 60,
        max_wait: float | timedelta | None = None,
    ) -> None:
        where = "OnConflict.retry"
        first, longest = (
            seconds(f"{where}(delay)", delay),
            seconds(f"{where}(max_delay)", max_delay),
        )
        if not (first and longest):
            raise ValueError(
                f"{where}(delay={first:g}, max_delay={longest:g}): give more than 0 seconds, or "
                "the message goes round as fast as the broker can"
            )
        if longest < first:
            raise ValueError(f"{where}: max_delay={longest} is shorter than delay={first}")
        most = None if max_wait is None else seconds(f"{where}(max_wait)", max_wait)
        self._set(delay=first, max_delay=longest, max_wait=most)

    @property
    def raises(self) -> bool:
        return self.max_wait is not None

    def decide(self, conflict: Conflict) -> Decision:
        delivery, wall = conflict.delivery, conflict.wall
        if conflict.no_requeue is not None:
            return Decision(Outcome.RAISE, conflict.no_requeue)
        # Other software or a wrong clock wrote a first conflict in the future. Without this limit,
        # the message would wait endlessly.
        since = wall if delivery.since is None else min(delivery.since, wall)
        left = self.max_delay if self.max_wait is None else since + self.max_wait - wall
        if left <= 0:
            return Decision(Outcome.RAISE, f"max_wait of {self.max_wait:g} s is over")
        pace = (self.delay, min(self.max_delay, left))
        copy = replace(delivery, since=since, last=wall)
        return Decision(Outcome.REQUEUED, "conflict", copy, pace, queues_claim=True)
