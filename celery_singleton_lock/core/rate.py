"""The rate of a key: how many of its calls may start in a period.

The algorithm is GCRA, the generic cell rate algorithm (ITU-T I.371; Brandur Leach, "Rate limiting,
cells, and GCRA", 2015). The store keeps one time for each key: when its next call would start if
all starts were evenly spaced. A call may start if that is less than ``burst`` intervals ahead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

from ..option_values import require, whole

_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TEXT: Final = re.compile(r"(\d+(?:\.\d+)?)(?:/([smhd]))?")
_MOST_BURST: Final = 1_000_000
# Seconds between two starts. Below, a call takes longer than its interval in any case.
_LEAST_INTERVAL: Final = 1e-4
_LONGEST_INTERVAL: Final = 30 * 86400.0
_ADVICE: Final = 'give starts per time, such as "10/m" ("/s", "/m", "/h", "/d"), or a number per s'


@dataclass(frozen=True, slots=True, init=False)
class Rate:
    """How many calls of a key may start in a period: the option ``rate``.

    Within any time span, at most rate x span + ``burst`` calls start: with ``"10/m"``, 11 in a
    minute. A plain string, such as ``rate="10/m"``, is the same rate with its calls spaced evenly.

    Example::

        @singleton_task(key="partner:{partner}", rate=Rate("100/m", burst=20), on_conflict="queue")
        def push(partner: str, order_id: int) -> None: ...

    Args:
        starts: How many calls start in a period, written as in Celery (``"5/s"``, ``"10/m"``,
            ``"100/h"``) or per day (``"1000/d"``). A number is per second.
        burst: How many calls may start at once after the key was idle.

    Raises:
        TypeError, ValueError: An argument is wrong.
    """

    starts: str = field(compare=False)
    burst: int
    interval: float = field(init=False)

    def __init__(self, starts: str | float, burst: int = 1) -> None:
        is_text = isinstance(starts, str)
        is_number = isinstance(starts, (int, float)) and not isinstance(starts, bool)
        require(is_text or is_number, "rate", starts, _ADVICE, TypeError)
        # A float in decimals: its repr may have an exponent.
        text = starts if isinstance(starts, str) else f"{Decimal(repr(starts)):f}/s"
        found = _TEXT.fullmatch(text)
        require(found and float(found[1]), "rate", starts, _ADVICE)
        assert found is not None
        interval = _SECONDS[found[2] or "s"] / float(found[1])
        fits = _LEAST_INTERVAL <= interval <= _LONGEST_INTERVAL
        require(fits, "rate", starts, "from one start in 30 days to 10000 in a second")
        object.__setattr__(self, "starts", text)
        object.__setattr__(self, "burst", whole("Rate(burst)", burst, 1, _MOST_BURST))
        object.__setattr__(self, "interval", interval)

    @classmethod
    def of(cls, name: str, value: Any) -> Rate:
        """The rate that ``value`` is or names; ``name``: of the option, for errors."""
        return value if isinstance(value, Rate) else cls(value)

    def __str__(self) -> str:
        return self.starts if self.burst == 1 else f"{self.starts}, burst={self.burst}"

    def __repr__(self) -> str:
        end = "" if self.burst == 1 else f", burst={self.burst}"
        return f"Rate({self.starts!r}{end})"
