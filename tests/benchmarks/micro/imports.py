"""What importing the package costs, in fresh interpreters, over what Celery's own import costs."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Final

from tests.benchmarks.micro.finding import Finding
from tests.benchmarks.samples import spread

__all__ = ["imports"]

# Both packages import what a name stands for when asked for it. So the bare imports say what they
# cost who uses nothing of them; an app with one task, ready to be called, what it costs to use it.
_APP: Final = """from celery import Celery
app = Celery("costs", broker="memory://")
{}
def f(x): pass
app.finalize()"""
_PROGRAMS: Final = {
    "celery": "import celery",
    "celery, ours": "import celery; import celery_singleton_lock",
    "app": _APP.format("@app.task"),
    "app, ours": _APP.format(
        "from celery_singleton_lock import singleton_task\n@singleton_task(app=app)"
    ),
}
_TIMED: Final = "import time; t = time.perf_counter()\n{}\nprint(time.perf_counter() - t)"


def imports(rounds: int, order: random.Random) -> list[Finding]:
    """Milliseconds, each the difference of two interpreters of a round."""
    times: dict[str, list[float]] = {name: [] for name in _PROGRAMS}
    for _ in range(rounds):
        names = list(_PROGRAMS)
        order.shuffle(names)
        for name in names:
            times[name].append(_milliseconds(_PROGRAMS[name]))
    over = {
        base: spread(
            [mine - its for mine, its in zip(times[f"{base}, ours"], times[base], strict=True)]
        )
        for base in ("celery", "app")
    }
    return [
        Finding(
            "`import celery_singleton_lock`, over `import celery`", over["celery"], "ms", 30, 0
        ),
        Finding("an app with one singleton task, over one with a task", over["app"], "ms", 30, 0),
    ]


def _milliseconds(program: str) -> float:
    ran = subprocess.run(
        [sys.executable, "-c", _TIMED.format(program)], capture_output=True, text=True, check=True
    )
    return float(ran.stdout) * 1000
