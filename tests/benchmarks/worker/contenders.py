"""The contenders at the worker, and their tasks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from tests.benchmarks.contest import Role

__all__ = [
    *("BEFORE", "BESIDE", "BY_NAME", "CELERY", "CONTENDERS", "OURS", "RAW_PAIR", "SKIP"),
    *("Contender", "contenders_of"),
]


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to run a no-op.

    Attributes:
        name: In the table.
        role: What it is compared for.
        task: The name of its task.
        alike: Whether all calls have the same arguments, whose lock another client holds: no body
            runs.
    """

    name: str
    role: Role
    task: str
    alike: bool = False


CELERY: Final = "Celery alone"
RAW_PAIR: Final = "SET NX PX + EVALSHA in the body"
OURS: Final = "celery-singleton-lock"
SKIP: Final = "celery-singleton-lock, skipped"
BESIDE: Final = "a plain task beside singleton tasks"
BEFORE: Final = "celery-singleton-lock, the earlier revision"

CONTENDERS: Final = (
    Contender(CELERY, Role.FLOOR, "plain"),
    Contender(RAW_PAIR, Role.FLOOR, "raw_pair"),
    Contender("our scripts on our connection, in the body", Role.FLOOR, "store_alone"),
    Contender("our scripts through redis-py, in the body", Role.FLOOR, "through_redis_py"),
    Contender("redis-py Lock in the body", Role.PEER, "redis_py_lock"),
    Contender("python-redis-lock in the body", Role.PEER, "python_redis_lock"),
    Contender("pottery Redlock in the body", Role.PEER, "pottery"),
    Contender("celery-once", Role.PEER, "once"),
    Contender("celery-singleton", Role.PEER, "singleton"),
    Contender("celery-heimdall", Role.PEER, "heimdall"),
    Contender(OURS, Role.OURS, "locked"),
    Contender(f"{OURS}, key by template", Role.OURS, "locked_by_template"),
    Contender(f'{OURS}, unique="until_start"', Role.OURS, "claimed_until_start"),
    Contender(f'{OURS}, unique="until_done"', Role.OURS, "claimed_until_done"),
    Contender(SKIP, Role.OURS, "locked", alike=True),
    Contender(BESIDE, Role.INFORMATION, "beside"),
)
_BEFORE: Final = Contender(BEFORE, Role.INFORMATION, "locked_before")
BY_NAME: Final = {contender.name: contender for contender in (*CONTENDERS, _BEFORE)}


def contenders_of(
    seconds: float, *, before: bool = False, only: Collection[str] = ()
) -> list[Contender]:
    """The contenders where bodies take ``seconds``: what is skipped has no body to compare.

    Args:
        seconds: The duration of a body.
        before: Whether the earlier revision of ours is among them.
        only: Names of those that contend with Celery alone, the raw pair and ours; empty: all.
    """
    field = (*CONTENDERS, _BEFORE) if before else CONTENDERS
    chosen = {CELERY, RAW_PAIR, OURS, BEFORE, *only} if only else set(BY_NAME)
    return [one for one in field if one.name in chosen and not (seconds and one.alike)]
