"""Bodies of a key that began faster than its rate lets them: pure functions.

A start is counted when its lease is granted: after a body has asked for it, and before it begins.
Times are read so that the bodies come out slower rather than faster. Nothing is promised across a
loss of the store, which is where the starts are counted, or a step of its clock, by which they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tests.chaos.bodies import RATES, Body, by_key
from tests.chaos.history import span
from tests.chaos.verdict import Kind, Violation
from tests.harness.journal import Record, events

_LOST = "starts of a key with a rate across a loss of the store, or a step of its clock"
#: Seconds after a step of the clock at whose end it was set back.
_SETTLES = 2.0


def too_fast(
    records: Sequence[Record], found: Iterable[Body], excused: Counter[str]
) -> list[Violation]:
    """For each body at most one span of time that ends with it, in which too many began."""
    breaks = [span(loss) for loss in events(records, "loss")]
    for fault in events(records, "fault"):
        if fault.data["name"] == "clock-step":
            breaks.append((fault.at, fault.data["end"] + _SETTLES))
    violations = []
    rated = [body for body in found if body.task.rpartition(".")[2] in RATES]
    for key, of_key in by_key(rated).items():
        rate = RATES[of_key[0].task.rpartition(".")[2]]
        for last, body in enumerate(of_key):  # by begin
            for first in range(last - rate.burst, -1, -1):
                count, lasts = last - first + 1, body.begin - of_key[first].asked
                if count <= rate.burst + lasts / rate.interval:
                    continue
                if any(at <= body.begin and until >= of_key[first].asked for at, until in breaks):
                    excused[_LOST] += 1
                    break
                text = f"{count} bodies of {key!r} began in {lasts:.3f} s, with the rate {rate}"
                runs = tuple(one.run for one in of_key[first : last + 1])
                violations.append(
                    Violation(kind=Kind.RATE, key=key, at=body.begin, runs=runs, text=text)
                )
                break
    return violations
