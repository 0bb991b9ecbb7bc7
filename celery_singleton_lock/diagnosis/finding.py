"""One thing that the doctor has found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Finding", "Severity"]


class Severity(StrEnum):
    OK = "ok"
    NOTE = "note"  # so by choice, or unknown; nothing to do
    WARNING = "warning"  # works today, and will hurt
    ERROR = "error"  # doesn't work, or two bodies can run at once


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, with its values, and what to do about it.

    Attributes:
        severity: How bad it is.
        subject: What was looked at, in a word or two.
        text: What was found.
        cure: What to do; empty where nothing is to be done.
    """

    severity: Severity
    subject: str
    text: str
    cure: str = ""
