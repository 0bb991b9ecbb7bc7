"""What importing the package costs, in fresh interpreters, over what Celery's own import costs."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Final

from tests.benchmarks.micro.finding import Finding
from tests.benchmarks.samples import spread

__all__ = ["imports"]

# Celery's package imports nothing until something of it is used; an app with a task uses this.
_CELERY: Final = "from celery import Celery, Task, signals; from celery.app.task import Context"
_APP: Final = f"{_CELERY}; import redis, celery.worker.request, celery.backends.redis"
_OURS: Final = "from celery_singleton_lock import singleton_task"
_PROGRAMS: Final = {
    "celery": "import celery",
    "celery, ours": f"import celery; {_OURS}",
    "app": _APP,
    "app, ours": f"{_APP}; {_OURS}",
}
_TIMED: Final = "import time; t = time.perf_counter(); {}; print(time.perf_counter() - t)"


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
        Finding("import, over a bare `import celery`", over["celery"], "ms", 30, 0),
        Finding("import, over what a worker on Redis imports", over["app"], "ms", None, 0),
    ]


def _milliseconds(program: str) -> float:
    ran = subprocess.run(
        [sys.executable, "-c", _TIMED.format(program)], capture_output=True, text=True, check=True
    )
    return float(ran.stdout) * 1000
