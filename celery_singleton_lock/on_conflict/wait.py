"""``on_conflict="wait"``: the call waits at its worker."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

from ..option_values import seconds
from .rule import Conflict, Decision, OnConflict, Outcome


@dataclass(frozen=True, slots=True, init=False)
class Wait(OnConflict):
    """Block the worker process or thread until the key is free.

    Args:
        timeout: How long to wait, in seconds. Then the call fails with LockConflict.
    """

    action: ClassVar = "wait"
    #: Why the call waits, for the log.
    reason: ClassVar = "conflict"

    timeout: float

    def __init__(self, timeout: float | timedelta = 5) -> None:
        self._set(timeout=seconds("OnConflict.wait(timeout)", timeout))

    @property
    def raises(self) -> bool:
        return True

    def decide(self, conflict: Conflict) -> Decision:
        if conflict.waited + conflict.due_in < self.timeout:
            return Decision(Outcome.WAIT, self.reason)
        verb = "would not be" if conflict.due_in else "was not"
        reason = f"waiting for {self.timeout:g} s {verb} enough"
        return Decision(Outcome.RAISE, reason)
