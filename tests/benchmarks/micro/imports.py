"""What importing the package costs, in fresh interpreters, over what Celery's own import costs.

Processor time, because an interpreter waits for the disk and the machine's other work; and the
middle of differences, each of two interpreters that follow each other. All modules are compiled
before, as pip compiles what it installs: each interpreter may compile an editable copy again.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from tempfile import TemporaryDirectory
from typing import Final

from tests.benchmarks.micro.finding import Finding

__all__ = ["imports"]

# Both packages import what a name stands for when asked for it. So the bare imports say what they
# cost a program that uses none; an app with one task, ready to be called, what it costs to use it.
_APP: Final = """from celery import Celery
app = Celery("costs", broker="memory://")
{}
def f(x): pass
app.finalize()"""
_OURS: Final = "from celery_singleton_lock import singleton_task\n@singleton_task(app=app)"
_PAIRS: Final = {
    "`import celery_singleton_lock`, over `import celery`": (
        "import celery",
        "import celery; import celery_singleton_lock",
    ),
    "an app with one singleton task, over one with a task": (
        _APP.format("@app.task"),
        _APP.format(_OURS),
    ),
}
_TIMED: Final = "import time; t = time.process_time()\n{}\nprint(time.process_time() - t)"
_GOAL: Final = 30


def imports(rounds: int, order: random.Random) -> list[Finding]:
    """Milliseconds of processor time, each the difference of the two interpreters of a round."""
    over: dict[str, list[float]] = {what: [] for what in _PAIRS}
    with TemporaryDirectory() as compiled:
        for program in (one for pair in _PAIRS.values() for one in pair):
            _milliseconds(program, compiled)
        for _ in range(rounds):
            for what, pair in order.sample(list(_PAIRS.items()), len(_PAIRS)):
                programs = order.sample(pair, 2)
                times = {program: _milliseconds(program, compiled) for program in programs}
                theirs, ours = pair
                over[what].append(times[ours] - times[theirs])
    return [Finding.of(what, times, "ms", _GOAL, 1) for what, times in over.items()]


def _milliseconds(program: str, compiled: str) -> float:
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": compiled}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    ran = subprocess.run(
        [sys.executable, "-c", _TIMED.format(program)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(ran.stdout) * 1000
