"""One thing that was measured, beside what we want."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.benchmarks.samples import Spread

__all__ = ["Finding", "as_table"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A row of the table.

    Attributes:
        what: Was measured.
        value: Of it.
        unit: Of the value.
        most: What it shall be at most, in the same unit; None where there is no goal.
        digits: Behind the point.
    """

    what: str
    value: Spread
    unit: str
    most: float | None = None
    digits: int = 2

    @property
    def reached(self) -> bool | None:
        """Whether the goal is; None where there is none."""
        return None if self.most is None else self.value.middle <= self.most


def as_table(findings: Sequence[Finding]) -> str:
    """Markdown."""
    rows = ["| what | p50 [p25 .. p75] | wanted |", "|---|---:|---|"]
    words = {True: "reached", False: "**missed**"}
    for one in findings:
        value, digits = one.value, one.digits
        text = f"{value.middle:.{digits}f}"
        if value.low != value.high:
            text += f" [{value.low:.{digits}f} .. {value.high:.{digits}f}]"
        goal = ""
        if one.most is not None and one.reached is not None:
            goal = f"at most {one.most:g}: {words[one.reached]}"
        rows.append(f"| {one.what} | {text} {one.unit} | {goal} |")
    return "\n".join(rows) + "\n"
