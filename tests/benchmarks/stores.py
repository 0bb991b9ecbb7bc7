"""`python -m tests.benchmarks stores`: acquire + release on every store, beside the peers."""

from __future__ import annotations

import argparse
import random
from contextlib import nullcontext
from typing import Final

from tests.benchmarks.before import exported
from tests.benchmarks.contest import Result, run
from tests.benchmarks.lanes import LANES
from tests.benchmarks.machine import conditions, seeded
from tests.benchmarks.publication import publish
from tests.benchmarks.report import as_data, as_table, behind

__all__ = ["add_options", "benchmark"]

_PACKAGES: Final = (
    *("celery-singleton-lock", "redis", "python-redis-lock", "pottery", "redlock-py"),
    *("etcd3gw", "kazoo"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of this benchmark."""
    parser.add_argument("--rounds", type=int, default=40, help="blocks of each contender")
    parser.add_argument("--block", type=float, default=0.1, help="seconds of a block, about")
    parser.add_argument("--before", metavar="REVISION", help="an earlier one, run beside this one")
    parser.add_argument("--seed", type=int, help="of the order of the blocks; printed")
    parser.add_argument(
        "--only", action="append", choices=list(LANES), metavar="STORE", help="may be repeated"
    )
    parser.add_argument(
        "--save", action="store_true", help="write the table into docs/dev/benchmarks.md"
    )


def benchmark(options: argparse.Namespace) -> None:
    """Run it; the table goes to standard output, and with ``--save`` into the docs."""
    seed = seeded(options.seed)
    how = f"{options.rounds} rounds of about {options.block:g} s for each, seed {seed}"
    about = conditions(_PACKAGES, how, options.before)
    results: dict[str, Result] = {}
    order = random.Random(seed)
    with exported(options.before) if options.before else nullcontext():
        for store in options.only or LANES:
            with LANES[store]() as lane:
                results[store] = run(
                    lane.contenders,
                    lane.servers,
                    rounds=options.rounds,
                    block=options.block,
                    order=order,
                )
            print(f"\n{as_table({store: results[store]})}", flush=True)
    for line in behind(results) or ["ahead of every peer"]:
        print(line)
    if options.save:
        publish("stores", f"{as_table(results)}\n{about}\n", as_data(results), [])
