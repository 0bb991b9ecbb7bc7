"""Who contends at the worker, and by which task of which app."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tests.benchmarks.contest import Role

__all__ = ["CELERY", "CLAIMED", "CONTENDERS", "OURS", "PUBLISHING_PEERS", "SKIP", "Contender"]


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to run a no-op.

    Attributes:
        name: In the table.
        role: What it is compared for.
        app: ``other`` or ``own``: the module is ``<app>_app``.
        task: Its task there.
        alike: Whether all calls have the same arguments, whose lock somebody else holds.
        claims: Whether publishing asks a server, too.
    """

    name: str
    role: Role
    app: str
    task: str
    alike: bool = False
    claims: bool = False


CELERY: Final = "Celery alone"
OURS: Final = "celery-singleton-lock"
CLAIMED: Final = 'celery-singleton-lock, unique="until_start"'
SKIP: Final = "celery-singleton-lock, skipped"
#: Whose publishing ours is compared with.
PUBLISHING_PEERS: Final = ("celery-once", "celery-singleton")

CONTENDERS: Final = (
    Contender(CELERY, Role.FLOOR, "other", "plain"),
    Contender("SET NX PX + EVALSHA in the body", Role.FLOOR, "other", "raw_pair"),
    Contender("redis-py Lock in the body", Role.PEER, "other", "redis_py_lock"),
    Contender("python-redis-lock in the body", Role.PEER, "other", "python_redis_lock"),
    Contender("pottery Redlock in the body", Role.PEER, "other", "pottery"),
    Contender("celery-once", Role.PEER, "other", "once", claims=True),
    Contender("celery-singleton", Role.PEER, "other", "singleton", claims=True),
    Contender("celery-heimdall", Role.PEER, "other", "heimdall", claims=True),
    Contender(OURS, Role.OURS, "own", "locked"),
    Contender(f"{OURS}, key by template", Role.OURS, "own", "locked_by_template"),
    Contender(CLAIMED, Role.OURS, "own", "claimed_until_start", claims=True),
    Contender(f'{OURS}, unique="until_done"', Role.OURS, "own", "claimed_until_done", claims=True),
    Contender(SKIP, Role.OURS, "own", "locked", alike=True),
    Contender("a plain task beside singleton tasks", Role.INFORMATION, "own", "beside"),
)
