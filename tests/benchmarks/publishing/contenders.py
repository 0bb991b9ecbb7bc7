"""Whose calls are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tests.benchmarks.contest import Role

__all__ = ["CONTENDERS", "OURS", "PEERS", "PLAIN", "Contender"]


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to publish.

    Attributes:
        role: What it is compared for.
        task: The name of its task, or of what is asked before a plain one is published.
        does: What its claim is.
    """

    role: Role
    task: str
    does: str = ""


PLAIN: Final = "Celery alone"
OURS: Final = 'celery-singleton-lock, unique="until_done"'
#: Whose claims ours is to cost less than.
PEERS: Final = ("celery-once", "celery-singleton")

CONTENDERS: Final = {
    PLAIN: Contender(Role.FLOOR, "plain"),
    "and SET NX PX by redis-py": Contender(Role.FLOOR, "set", "a name and a time"),
    "and our command, on our connection": Contender(
        Role.FLOOR, "command", "ours, known before: packed, sent, answered"
    ),
    "and our script, on our connection": Contender(
        Role.FLOOR, "script", "the same, by EVALSHA: where the command isn't enough"
    ),
    "celery-once": Contender(Role.PEER, "once", "a random name and a time"),
    "celery-singleton": Contender(Role.PEER, "singleton", "the task id and a time"),
    "celery-heimdall": Contender(Role.PEER, "heimdall", "a name and a time, asked for twice"),
    "celery-singleton-lock, no claim": Contender(Role.INFORMATION, "locked", "our header alone"),
    'celery-singleton-lock, unique="until_start"': Contender(
        Role.OURS, "claimed_until_start", "whose it is, since when, and what it is doing"
    ),
    OURS: Contender(Role.OURS, "claimed_until_done", "the same, renewed by the run"),
}
