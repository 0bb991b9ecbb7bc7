"""What is known of a run: at one moment while it goes on, and when it is over."""

from dataclasses import dataclass

from example_project.journal import Entry
from example_project.live import HeldLease


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run at one moment, for the screen."""

    locked: bool
    now: float  # seconds since the first call
    zero: float  # the same instant as CLOCK_MONOTONIC seconds
    phase: str
    entries: list[Entry]
    leases: list[HeldLease]
    alive: dict[str, bool]
    leader: str  # the beat that leads, or "" where none does
    leads_for: float  # seconds that remain of its lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run that is over."""

    locked: bool
    zero: float  # CLOCK_MONOTONIC seconds of the first call
    seconds: float
    entries: list[Entry]
    late_write: str  # "refused", "accepted", or why there was none
    money_missing: int  # cents
