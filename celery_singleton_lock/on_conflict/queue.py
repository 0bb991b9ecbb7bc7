"""``on_conflict="queue"``: the call takes its place in the queue of its key (`key_queue`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from ..option_values import whole
from .rule import Conflict, Decision, OnConflict, Outcome

if TYPE_CHECKING:
    from ..policy import Policy

_MOST_WAITING: Final = 10_000_000
_MOST_CRASHES: Final = 1_000_000
_NO_PLACE: Final = "an eager call takes no place in its queue"
_NO_WAIT: Final = 'on_conflict="queue" doesn\'t wait for the end of a period'


@dataclass(frozen=True, slots=True, init=False)
class Queue(OnConflict):
    """Run the calls of a key in order, ``limit`` at a time. Waiting calls need no worker.

    Args:
        max_waiting: How many calls of a key may be in its queue, including those that run. One more
            raises QueueFull.
        max_crashes: How often the process may die while it runs the call. Then the call fails with
            WorkerLostError, and the next one runs. None sets no limit.
    """

    action: ClassVar = "queue"
    has_feature: ClassVar = True

    max_waiting: int
    max_crashes: int | None

    def __init__(self, max_waiting: int = 10_000, max_crashes: int | None = 20) -> None:
        most = whole("OnConflict.queue(max_waiting)", max_waiting, 1, _MOST_WAITING)
        if max_crashes is not None:
            whole("OnConflict.queue(max_crashes)", max_crashes, 1, _MOST_CRASHES)
        self._set(max_waiting=most, max_crashes=max_crashes)

    @classmethod
    def in_force(cls, rule: OnConflict) -> Queue:
        """``rule``, or the defaults for a call that has its place since before the rule changed."""
        return rule if isinstance(rule, Queue) else cls()

    def decide(self, conflict: Conflict) -> Decision:
        # The store gives all others a place.
        reason = _NO_PLACE if conflict.no_requeue else _NO_WAIT
        return Decision(Outcome.RAISE, reason)

    def check(self, policy: Policy) -> None:
        # debounce sets on_duplicate.
        newest = (
            'on_duplicate="replace"' if policy.debounce is None else f"debounce={policy.debounce:g}"
        )
        contradictions = {
            f"limit={policy.limit} and min_hold={policy.min_hold:g}": (
                policy.limit > 1 and policy.min_hold > 0,
                "each run would keep one of several places; use limit=1, or a rate",
            ),
            'on_store_error="run"': (
                policy.on_store_error == "run",
                'the order is in the store; use on_store_error="retry" or "raise"',
            ),
            'on_lost="continue"': (
                policy.on_lost == "continue",
                'the next call would begin next to this run; use on_lost="retry" or "fail"',
            ),
            "hold_on_retry=False": (
                not policy.hold_on_retry,
                "a call stays in the queue until it has ended, and so while it retries",
            ),
            newest: (
                policy.on_duplicate == "replace",
                "the message of a call that waits is in the store, with the arguments of that call",
            ),
        }
        for option, (is_wrong, why) in contradictions.items():
            if is_wrong:
                raise ValueError(f'on_conflict="queue" with {option}: {why}')
