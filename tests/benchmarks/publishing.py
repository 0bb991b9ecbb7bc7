"""`python -m tests.benchmarks publishing`: what a claim adds to a call, beside the peers.

A call is measured as a web request makes it, after others have filled the caches with their code:
one call of each contender in a round, in a new order each time. What it sent stays in a queue
without a consumer, and is thrown away between rounds. Each start is a fresh process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from itertools import count
from statistics import median
from typing import Any, Final

import redis

from example_project.private_server import PrivateServer, find_binary
from tests.benchmarks.machine import conditions, seeded
from tests.benchmarks.plots import Bar, Chart
from tests.benchmarks.publication import publish
from tests.benchmarks.samples import Spread, estimate, in_micros
from tests.benchmarks.worker.stage import APP
from tests.harness.processes import ROOT

__all__ = ["CONTENDERS", "PEER", "PLAIN", "add_options", "as_table", "benchmark"]

PLAIN: Final = "Celery alone"
PEER: Final = "celery-singleton"
_SET: Final = "Celery alone, and SET NX PX by redis-py (no lock)"
#: Their tasks.
CONTENDERS: Final = {
    PLAIN: "plain",
    _SET: "plain",
    "celery-once": "once",
    PEER: "singleton",
    "celery-singleton-lock, no claim": "locked",
    '**celery-singleton-lock, unique="until_done"**': "claimed",
}

_PACKAGES: Final = (
    *("celery-singleton-lock", "celery", "kombu", "redis", "celery-once", "celery-singleton"),
)
_QUEUE: Final = "published"
_WARM_UP: Final = 50
# Rounds after which what was published is thrown away, and garbage is collected.
_LOT: Final = 20
# Seconds of each call, by contender, round by round.
_Rounds = Sequence[Mapping[str, float]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of this benchmark."""
    parser.add_argument("--starts", type=int, default=4, help="of the process that publishes")
    parser.add_argument("--rounds", type=int, default=800, help="of each start: a call of each")
    parser.add_argument("--seed", type=int, help="of the order of the calls; printed")
    parser.add_argument("--save", action="store_true", help="write docs/dev/benchmarks.md")


def benchmark(options: argparse.Namespace) -> None:
    """Run it; the table goes to standard output, and with ``--save`` into the docs."""
    seed = seeded(options.seed)
    how = f"{options.rounds} rounds of each of {options.starts} processes, seed {seed}"
    about = conditions(_PACKAGES, how)
    starts = [_start(options.rounds, seed + number) for number in range(options.starts)]
    table = as_table(starts)
    print(f"\n{table}")
    if options.save:
        publish("publishing", f"{table}\n{about}\n", _chart(starts))


def as_table(starts: Sequence[_Rounds]) -> str:
    """Markdown: the least first."""
    plain = estimate(starts, lambda rounds: median(one[PLAIN] for one in rounds))
    rows = [
        f"**A call**, after others: Celery alone takes {in_micros(plain)} µs",
        "",
        f"| publishing | more than Celery alone, µs | times {PEER}'s |",
        "|---|---:|---:|",
    ]
    for name, ratio in _ratios(starts).items():
        rows.append(f"| {name} | {in_micros(estimate(starts, _over(name)))} | {ratio} |")
    return "\n".join(rows) + "\n"


def _over(name: str) -> Callable[[_Rounds], float]:
    """How much more it is than a plain call, taken within each round."""
    return lambda rounds: median(one[name] - one[PLAIN] for one in rounds)


def _ratios(starts: Sequence[_Rounds]) -> dict[str, Spread]:
    """The same as a multiple of a peer's, the least first."""
    other = _over(PEER)

    def ratio(name: str) -> Spread:
        one = _over(name)
        return estimate(starts, lambda rounds: one(rounds) / other(rounds))

    found = {name: ratio(name) for name in starts[0][0].keys() - {PLAIN}}
    return dict(sorted(found.items(), key=lambda item: item[1].middle))


def _chart(starts: Sequence[_Rounds]) -> Chart:
    return Chart(
        name="publishing",
        title="What a claim adds to publishing a task",
        unit=f"times what {PEER} adds; less is better",
        bars=[
            Bar(name.strip("*"), ratio, name.startswith("**"))
            for name, ratio in _ratios(starts).items()
        ],
    )


def _start(rounds: int, seed: int) -> _Rounds:
    """In a fresh interpreter, and with fresh servers."""
    with ExitStack() as stack:
        broker, locks = (
            stack.enter_context(PrivateServer(binary=find_binary())).url() for _ in range(2)
        )
        ran = subprocess.run(
            [sys.executable, "-m", __name__, str(rounds), str(seed)],
            cwd=ROOT,
            env={**os.environ, "BROKER_URL": broker, "LOCK_URL": locks},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found: _Rounds = json.loads(ran.stdout)
    return found


def _measure(rounds: int, seed: int) -> None:
    """In that interpreter: print what `_start` returns."""
    tasks, order, numbers = import_module(APP).app.tasks, random.Random(seed), count(1)
    broker, locks = (redis.Redis.from_url(os.environ[name]) for name in ("BROKER_URL", "LOCK_URL"))
    names, found = list(CONTENDERS), []

    def call(name: str) -> float:
        number = next(numbers)
        begin = time.perf_counter()
        if name == _SET:
            locks.set(f"bare:{number}", "7c1f8f6e-0d0b-4b6c-9a52-000000000000", nx=True, ex=3600)
        tasks[CONTENDERS[name]].apply_async((number, 0.0), queue=_QUEUE)
        return time.perf_counter() - begin

    gc.disable()
    for one in range(_WARM_UP + rounds):
        if one % _LOT == 0:
            broker.delete(_QUEUE)
            gc.collect()
        order.shuffle(names)
        found.append({name: call(name) for name in names})
    print(json.dumps(found[_WARM_UP:]))


if __name__ == "__main__":
    arguments: Any = map(int, sys.argv[1:])
    _measure(*arguments)
