"""``on_conflict="raise"``: the call fails with LockConflict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .rule import Conflict, Decision, OnConflict, Outcome


@dataclass(frozen=True, slots=True)
class Raise(OnConflict):
    """Fail the call with LockConflict."""

    action: ClassVar = "raise"

    @property
    def raises(self) -> bool:
        return True

    def decide(self, conflict: Conflict) -> Decision:
        reason = 'on_conflict="raise" doesn\'t wait'
        return Decision(Outcome.RAISE, reason)
