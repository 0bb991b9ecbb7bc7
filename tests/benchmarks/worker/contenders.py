"""The contenders at the worker, and their tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tests.benchmarks.contest import Role

__all__ = [
    *("CELERY", "CONTENDERS", "OURS", "RAW_PAIR"),
    *("SKIP", "Contender", "contenders_of"),
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

    @property
    def has_receivers(self) -> bool:
        """Whether what this package connects to Celery's signals is called for it."""
        return self.role in (Role.OURS, Role.INFORMATION)


CELERY: Final = Contender("Celery alone", Role.FLOOR, "plain")
RAW_PAIR: Final = Contender("SET NX PX + EVALSHA in the body", Role.FLOOR, "raw_pair")
OURS: Final = Contender("celery-singleton-lock", Role.OURS, "locked")
SKIP: Final = Contender("celery-singleton-lock, skipped", Role.OURS, "locked", alike=True)

CONTENDERS: Final = (
    CELERY,
    RAW_PAIR,
    Contender("redis-py Lock in the body", Role.PEER, "redis_py_lock"),
    Contender("celery-once", Role.PEER, "once"),
    Contender("celery-singleton", Role.PEER, "singleton"),
    OURS,
    Contender('celery-singleton-lock, unique="until_done"', Role.OURS, "claimed"),
    SKIP,
    Contender("a plain task next to singleton tasks", Role.INFORMATION, "beside"),
)


def contenders_of(seconds: float) -> list[Contender]:
    """The contenders where bodies take ``seconds``: what is skipped has no body to compare."""
    return [one for one in CONTENDERS if not (seconds and one.alike)]
