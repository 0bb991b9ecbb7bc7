"""What a checker says of a campaign."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    OVERLAP = "two bodies of one key at once"
    UNREPORTED = "a lost lease was not reported"
    REPORTED_LATE = "a loss by a restart of the store was reported late"
    RELEASED = "a lost lease was reported as released"
    FENCE = "a fence that did not rise"
    STALE_WRITE = "a stale write was accepted"
    JOB_LOST = "a job was lost"
    RUN_AGAIN = "a job ran again after its success was recorded, or could have been"
    RATE = "bodies began faster than the rate of their key"
    PAUSED = "a body began while its key was paused"
    ORDER = "an older call began after a newer one"
    NEWEST = "a body ran with older arguments than those of a call that it answered"
    DISCARDED = "a call was answered with a message that a worker had discarded"
    TICK_TWICE = "a scheduled run was sent twice"
    OFF_GRID = "a scheduled run was off its grid"
    NO_TICK = "no scheduled run was sent though a beat could"
    KEY_LEFT = "a key was left in the store"
    NEVER_ENDS = "something never ended"
    BROKEN = "a process ended by itself"


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken promise.

    Attributes:
        kind: Which.
        key: The lock's, where it is known.
        at: When it became visible, CLOCK_MONOTONIC.
        runs: The bodies concerned.
        job: The id of the job that came to nothing; empty: the bodies say which jobs.
        text: What happened, for people.
    """

    kind: Kind
    key: str = ""
    at: float = 0.0
    runs: tuple[str, ...] = ()
    job: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one campaign showed.

    Attributes:
        violations: By time.
        counts: What there was of everything.
        excused: What the lock does not promise, by reason.
    """

    violations: tuple[Violation, ...]
    counts: Mapping[str, int] = field(default_factory=dict)
    excused: Mapping[str, int] = field(default_factory=dict)

    def of(self, kind: Kind) -> list[Violation]:
        """The violations of one kind."""
        return [violation for violation in self.violations if violation.kind is kind]
