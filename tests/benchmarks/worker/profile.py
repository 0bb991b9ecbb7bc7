"""Where ours goes: its parts, timed in a worker of their own beside the race, as a table."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any, Final

import redis

from tests.benchmarks.samples import Spread, spread
from tests.benchmarks.worker.contenders import BY_NAME, CELERY, OURS
from tests.benchmarks.worker.estimate import after_own_kind
from tests.benchmarks.worker.parts import CELERYS, SENDING, WAITING
from tests.benchmarks.worker.race import runs, warm_up
from tests.benchmarks.worker.stage import Stage

__all__ = ["Profile", "as_data", "as_table", "profile"]

_MICROSECONDS: Final = 1e6
_RUN: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The profile of a no-op of ours after another of its kind, in a solo worker; seconds.

    Attributes:
        parts: By part, one number per task.
        overhead: What a task took more than Celery alone, stopwatches and all, per block.
        server: What one of its two scripts takes of the server's time, by the server's own count.
    """

    parts: dict[str, list[float]]
    overhead: list[float]
    server: float


def profile(stage: Stage, blocks: int, order: random.Random) -> Profile:
    """Run so many blocks."""
    spent: list[dict[str, float]] = []
    overhead: list[float] = []
    client = redis.Redis.from_url(stage.locks.url())
    with stage.worker("solo", parts=True):
        warm_up(stage, "solo")
        client.config_resetstat()
        for _ in range(blocks):
            field = runs([OURS, CELERY], _RUN, order)
            seen = stage.block([BY_NAME[name] for name in field], 0.0)
            tasks = after_own_kind(field, seen.seconds)
            overhead.append(tasks[OURS] - tasks[CELERY])
            for number, name in enumerate(field):
                if name == OURS and number and field[number - 1] == OURS:
                    spent.append(seen.parts[number])
        server = _seconds_of_a_script(client)
    names = sorted({part for one in spent for part in one} - {CELERYS})
    parts = {part: [one.get(part, 0.0) for one in spent] for part in names}
    return Profile(parts=parts, overhead=overhead, server=server)


def as_table(found: Profile, raced: Spread) -> str:
    """Markdown, the most first.

    Args:
        found: What was measured.
        raced: Seconds that a task of ours took more than Celery alone in the race.
    """
    parts = {part: spread(seconds) for part, seconds in found.parts.items()}
    total = sum(one.middle for one in parts.values())
    rows = ["| part of a no-op of ours | µs [p25 .. p75] | of the parts |", "|---|---:|---:|"]
    for part in sorted(parts, key=lambda part: -parts[part].middle):
        rows.append(f"| {part} | {_micros(parts[part])} | {parts[part].middle / total:.0%} |")
    # Which of the two has the server's time is the kernel's to choose: whom it wakes, and when.
    away = sum(one.middle for part, one in parts.items() if part.endswith((SENDING, WAITING)))
    rows += [
        f"| **all parts** | {total * _MICROSECONDS:.1f} | 100% |",
        f"| all but sending and waiting | {(total - away) * _MICROSECONDS:.1f} "
        f"| {1 - away / total:.0%} |",
        f"| more than Celery alone, with the stopwatches | {_micros(spread(found.overhead))} | |",
        f"| more than Celery alone, in the race above | {_micros(raced)} | |",
        f"| a script at the server, by its own count | {found.server * _MICROSECONDS:.1f} | |",
    ]
    return "\n".join(rows) + "\n"


def as_data(found: Profile) -> dict[str, Any]:
    """Plain data, in seconds."""
    return {
        "parts": {part: asdict(spread(seconds)) for part, seconds in found.parts.items()},
        "over_celery_with_stopwatches": asdict(spread(found.overhead)),
        "script_at_the_server": found.server,
    }


def _seconds_of_a_script(client: Any) -> float:
    counted = client.info("commandstats")["cmdstat_evalsha"]
    return float(counted["usec_per_call"]) / _MICROSECONDS


def _micros(seconds: Spread) -> str:
    low, middle, high = (
        getattr(seconds, name) * _MICROSECONDS for name in ("low", "middle", "high")
    )
    return f"{middle:.1f} [{low:.1f} .. {high:.1f}]"
