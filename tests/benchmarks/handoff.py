"""`python -m tests.benchmarks handoff`: from a release to the next start, with 16 that wait."""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Final

import redis

from example_project.private_server import PrivateServer, find_binary
from tests.benchmarks.machine import conditions, seeded
from tests.benchmarks.publication import publish
from tests.benchmarks.queuers import QUEUERS, Turn, crowd

__all__ = ["Handoff", "add_options", "as_table", "benchmark", "summary"]

_PACKAGES: Final = ("celery-singleton-lock", "redis", "python-redis-lock")
_MILLI: Final = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """What a crowd at one key came to; seconds.

    Attributes:
        turns: How many had the key.
        p50: From the moment of a release to the next start, of the clients that waited then.
        p99: The same.
        wait: The median wait for the key.
        longest: The longest wait; of a client that never got it, until the measuring ended.
        overtaken: The share of turns of clients that asked after the release before, though
            others had waited.
        commands: That the clients sent, per turn.
    """

    turns: int
    p50: float
    p99: float
    wait: float
    longest: float
    overtaken: float
    commands: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of this benchmark."""
    parser.add_argument("--rounds", type=int, default=3, help="crowds of each lock")
    parser.add_argument("--seconds", type=float, default=8.0, help="that a crowd queues for")
    parser.add_argument("--work", type=float, default=0.01, help="seconds that each has the key")
    parser.add_argument("--waiters", type=int, default=16, help="that wait at any moment")
    parser.add_argument("--seed", type=int, help="of the order of the crowds; printed")
    parser.add_argument(
        "--only", action="append", choices=list(QUEUERS), metavar="LOCK", help="may be repeated"
    )
    parser.add_argument(
        "--save", action="store_true", help="write the table into docs/dev/benchmarks.md"
    )


def benchmark(options: argparse.Namespace) -> None:
    """Run it; the table goes to standard output, and with ``--save`` into the docs."""
    seed = seeded(options.seed)
    how = (
        f"{options.waiters} waiters, {options.work * _MILLI:g} ms of work each; "
        f"{options.rounds} crowds of {options.seconds:g} s for each lock, seed {seed}"
    )
    about = conditions(_PACKAGES, how)
    crowds = [(name, again) for again in (True, False) for name in options.only or QUEUERS]
    found: dict[str, list[Handoff]] = {_title(*one): [] for one in crowds}
    order = random.Random(seed)
    for _ in range(options.rounds):
        for name, again in order.sample(crowds, len(crowds)):
            found[_title(name, again)].append(_measure(name, options, again=again))
            print(f"{_title(name, again)}: {found[_title(name, again)][-1]}", flush=True)
    table = as_table(found)
    print(f"\n{table}")
    if options.save:
        data = {name: [asdict(one) for one in results] for name, results in found.items()}
        publish("handoff", f"{table}\n{about}\n", data, [])


def summary(turns: Sequence[Turn], commands: int) -> Handoff:
    """What these turns come to, which are in the order in which they were had."""
    had = [turn for turn in turns if turn.began is not None]
    pairs = [(one, two) for one, two in pairwise(had) if two.began is not None]
    gaps = sorted(two.began - one.ended for one, two in pairs if two.asked < one.ended)
    late = [two for one, two in pairs if one.ended <= two.asked]
    overtaken = [
        two for two in late if any(turn.asked < two.asked for turn in had if turn.began > two.began)
    ]
    waits = [(turn.ended if turn.began is None else turn.began) - turn.asked for turn in turns]
    return Handoff(
        turns=len(had),
        p50=median(gaps),
        p99=gaps[min(len(gaps) - 1, round(0.99 * len(gaps)))],
        wait=median(waits),
        longest=max(waits),
        overtaken=len(overtaken) / len(had),
        commands=commands / len(had),
    )


def as_table(found: Mapping[str, Sequence[Handoff]]) -> str:
    """Markdown: a row per lock; of its crowds the median, and the worst of the longest wait.

    Args:
        found: The results, by the crowd's name.
    """
    rows = [
        "| crowd, lock | release to next start p50, ms | p99, ms | wait p50, ms "
        "| longest wait, times the median | overtaking | commands per turn | turns |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, results in found.items():
        worst = max(one.longest / one.wait for one in results)
        cells = [
            f"{median(one.p50 for one in results) * _MILLI:.1f}",
            f"{median(one.p99 for one in results) * _MILLI:.1f}",
            f"{median(one.wait for one in results) * _MILLI:.0f}",
            f"{worst:.1f}",
            f"{median(one.overtaken for one in results):.0%}",
            f"{median(one.commands for one in results):.1f}",
            str(sum(one.turns for one in results)),
        ]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _title(name: str, again: bool) -> str:
    return f"{'asks again at once' if again else 'each in its turn'}: {name}"


def _measure(name: str, options: argparse.Namespace, *, again: bool) -> Handoff:
    with (
        PrivateServer(binary=find_binary()) as server,
        redis.Redis.from_url(server.url()) as client,
    ):
        turns = crowd(
            name,
            server.url(),
            count=options.waiters + 1,
            seconds=options.seconds,
            work=options.work,
            again=again,
            begin=client.config_resetstat,
        )
        stats = client.info("commandstats")
    sent = sum(stats.get(f"cmdstat_{word}", {}).get("calls", 0) for word in QUEUERS[name].commands)
    return summary(turns, sent)
