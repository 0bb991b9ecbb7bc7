"""`python -m tests.benchmarks micro`: the parts of a lock, one by one."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Final

from tests.benchmarks.machine import conditions, seeded
from tests.benchmarks.micro.finding import Finding, as_table
from tests.benchmarks.micro.growth import growth
from tests.benchmarks.micro.imports import imports
from tests.benchmarks.micro.listing import listing
from tests.benchmarks.micro.operations import operations
from tests.benchmarks.micro.renewal import renewal
from tests.benchmarks.plots import Bar, Chart
from tests.benchmarks.publication import publish

__all__ = ["add_options", "benchmark"]

_PACKAGES: Final = ("celery-singleton-lock", "celery", "redis")
_PARTS: Final = ("operations", "renewal", "imports", "growth", "listing")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of this benchmark."""
    parser.add_argument("--only", action="append", choices=_PARTS, help="may be repeated")
    parser.add_argument("--rounds", type=int, default=20, help="of each measurement")
    parser.add_argument("--block", type=float, default=0.05, help="seconds of a block, about")
    parser.add_argument(
        "--leases", type=int, action="append", help="renewed at once; may be repeated, few first"
    )
    parser.add_argument(
        "--keys", type=int, action="append", help="in the store; may be repeated, few first"
    )
    parser.add_argument("--body-seconds", type=float, default=4.0, help="of the loop in a body")
    parser.add_argument("--seed", type=int, help="of the order of the blocks; printed")
    parser.add_argument("--save", action="store_true", help="write docs/dev/benchmarks.md")


def benchmark(options: argparse.Namespace) -> None:
    """Run it; the tables go to standard output, and with ``--save`` into the docs."""
    seed = seeded(options.seed)
    order = random.Random(seed)
    how = f"{options.rounds} rounds, seed {seed}"
    about = conditions(_PACKAGES, how)
    leases = options.leases or [1, 100, 1000, 10_000]
    keys = options.keys or [1, 1000, 1_000_000]
    rounds, block = options.rounds, options.block
    parts: dict[str, Callable[[], list[Finding]]] = {
        "operations": lambda: operations(rounds, block, order),
        "renewal": lambda: renewal(leases, max(1, rounds // 4), options.body_seconds),
        "imports": lambda: imports(rounds, order),
        "growth": lambda: growth(keys, rounds, block, order),
        "listing": lambda: listing(keys[-1]),
    }
    found: dict[str, list[Finding]] = {}
    for name in options.only or _PARTS:
        found[name] = parts[name]()
        print(f"\n{as_table(found[name])}", flush=True)
    if options.save:
        text = as_table([one for findings in found.values() for one in findings])
        publish("micro", f"{text}\n{about}\n", _as_data(found), _charts(found))


def _as_data(found: dict[str, list[Finding]]) -> dict[str, object]:
    return {name: [asdict(one) for one in findings] for name, findings in found.items()}


def _charts(found: dict[str, list[Finding]]) -> list[Chart]:
    if "operations" not in found:
        return []
    return [
        Chart(
            name="operations",
            title="Single operations",
            unit="times a raw pair, SET NX PX + EVALSHA; less is better",
            bars=[Bar(one.what, one.value, True) for one in found["operations"]],
        )
    ]
