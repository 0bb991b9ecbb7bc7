"""``on_conflict="revoke"``: the call doesn't run, and its state is REVOKED."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .rule import Conflict, Decision, OnConflict, Outcome


@dataclass(frozen=True, slots=True)
class Revoke(OnConflict):
    """Revoke the call."""

    action: ClassVar = "revoke"
    never_runs: ClassVar = True
    revokes: ClassVar = True

    def decide(self, conflict: Conflict) -> Decision:
        return Decision(Outcome.REVOKE, "conflict")
