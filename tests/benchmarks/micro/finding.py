"""One thing that was measured, beside what we want."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tests.benchmarks.samples import Spread, spread
from tests.benchmarks.worker.estimate import estimate

__all__ = ["Finding", "as_table"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A row of the table.

    Attributes:
        what: Was measured.
        value: The measured value.
        unit: The unit of the value.
        most: Its goal, an upper bound, in the same unit; None where there is no goal.
        digits: Behind the point.
        middle: Between what the middle lies, in 95 of 100 cases, where that is known: more rounds
            make it narrower, and not what is between the quarters of them.
    """

    what: str
    value: Spread
    unit: str
    most: float | None = None
    digits: int = 2
    middle: Spread | None = None

    @classmethod
    def of(
        cls,
        what: str,
        numbers: Sequence[float],
        unit: str,
        most: float | None = None,
        digits: int = 2,
    ) -> Finding:
        """What was measured of ``what``, round by round."""
        return cls(what, spread(numbers), unit, most, digits, estimate([numbers], median))

    @property
    def verdict(self) -> str:
        """How it stands with the goal; open: the interval has both answers in it."""
        if self.most is None:
            return ""
        known, digits = self.middle or self.value, self.digits
        if known.high <= self.most:
            return f"at most {self.most:g}: reached"
        if known.low > self.most:
            return f"at most {self.most:g}: **missed**"
        within = f"{known.low:.{digits}f} .. {known.high:.{digits}f}"
        return f"at most {self.most:g}: open, within {within}"


def as_table(findings: Sequence[Finding]) -> str:
    """Markdown."""
    rows = ["| what | p50 [p25 .. p75] | wanted |", "|---|---:|---|"]
    for one in findings:
        value, digits = one.value, one.digits
        text = f"{value.middle:.{digits}f}"
        if value.low != value.high:
            text += f" [{value.low:.{digits}f} .. {value.high:.{digits}f}]"
        rows.append(f"| {one.what} | {text} {one.unit} | {one.verdict} |")
    return "\n".join(rows) + "\n"
