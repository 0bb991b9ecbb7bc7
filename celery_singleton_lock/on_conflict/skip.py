"""``on_conflict="skip"``: the call doesn't run; its result says who held the key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .rule import Conflict, Decision, OnConflict, Outcome


@dataclass(frozen=True, slots=True)
class Skip(OnConflict):
    """Skip the call."""

    action: ClassVar = "skip"
    never_runs: ClassVar = True

    def decide(self, conflict: Conflict) -> Decision:
        return Decision(Outcome.SKIP, "conflict")
