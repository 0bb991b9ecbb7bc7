"""One thing that the doctor has found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

__all__ = ["Finding", "Severity", "by_name"]

T = TypeVar("T")


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


def by_name(
    patients: Iterable[tuple[str, T]], examine: Callable[[T], Iterable[Finding]]
) -> Iterator[Finding]:
    """What ``examine`` finds at each; of findings that are alike, one that names all of them."""
    names: dict[Finding, list[str]] = {}
    for name, patient in patients:
        for finding in examine(patient):
            names.setdefault(finding, []).append(name)
    for finding, where in names.items():
        yield replace(finding, text=f"{', '.join(where)}: {finding.text}")
