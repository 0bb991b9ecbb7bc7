"""`python -m tests.benchmarks queue`: calls of one key in turn, and others meanwhile.

With ``--limit N``, N of them at a time.
"""

from __future__ import annotations

import argparse
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, Final

from tests.benchmarks.machine import conditions, seeded
from tests.benchmarks.plots import Bar, Chart
from tests.benchmarks.publication import publish
from tests.benchmarks.real_workers import running
from tests.benchmarks.samples import Spread, spread

__all__ = ["Drain", "add_options", "as_table", "benchmark", "drain_of"]

_PACKAGES: Final = ("celery-singleton-lock", "celery", "kombu", "redis")
_APP: Final = "tests.benchmarks.queue_app"
_KINDS: Final = ("plain", "queue", "wait")
_MILLI: Final = 1e3
# Seconds that the first body takes, while the others are published.
_GATE: Final = 2.0
# Seconds between two calls of other keys.
_PROBE_EVERY: Final = 0.05
_PATIENCE: Final = 120.0
# Seconds between two looks at the marks: a look takes time from the workers.
_POLL_EVERY: Final = 0.25


@dataclass(frozen=True, slots=True)
class Mark:
    """One body; seconds of the monotonic clock."""

    key: str
    number: int
    published: float
    began: float
    ended: float

    @classmethod
    def of(cls, line: str) -> Mark:
        key, number, *times = line.split()
        return cls(key, int(number), *map(float, times))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """What the calls of one key came to; seconds.

    Attributes:
        took: From the end of the first bodies, while which all others were published, to the end
            of the last. Nothing else runs.
        p50, p99: From the end of a body to the begin of the next one in its place.
        out_of_order: How many bodies began after one that was called later.
        others: The median, from the publication of a call of another key to its begin, during
            another drain.
        others_alone: The same while no key has a queue.
    """

    took: float
    p50: float
    p99: float
    out_of_order: int
    others: float
    others_alone: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of this benchmark."""
    parser.add_argument("--rounds", type=int, default=5, help="drains of each kind")
    parser.add_argument("--calls", type=int, default=300, help="of one drain")
    parser.add_argument("--limit", type=int, default=1, help="of the key: so many at a time")
    parser.add_argument("--work", type=float, default=0.01, help="seconds of each body")
    parser.add_argument("--seed", type=int, help="of the order of the drains; printed")
    parser.add_argument(
        "--only", action="append", choices=_KINDS, metavar="KIND", help="may be repeated"
    )
    parser.add_argument("--save", action="store_true", help="write docs/dev/benchmarks.md")


def benchmark(options: argparse.Namespace) -> None:
    """Run it; the table goes to standard output, and with ``--save`` into the docs."""
    seed, kinds, limit = seeded(options.seed), options.only or _KINDS, options.limit
    how = (
        f"{options.rounds} drains of each, of {options.calls} calls of one key with bodies of "
        f"{options.work * _MILLI:g} ms, {limit} at a time; seed {seed}"
    )
    about = conditions(_PACKAGES, how)
    order = random.Random(seed)
    found: dict[str, list[Drain]] = {kind: [] for kind in kinds}
    workers = partial(_workers, kinds)
    with running(_APP, workers, LIMIT=str(limit)) as run:
        stage = _Stage(run.app, run.marks, limit)
        for kind in kinds:
            stage.drain(kind, 20, options.work)  # caches and connections
        for _ in range(options.rounds):
            for kind in order.sample(kinds, len(kinds)):
                found[kind].append(stage.drain(kind, options.calls, options.work))
                print(f"{kind}: {found[kind][-1]}", flush=True)
    labels = {
        "plain": f"plain Celery, `-c {limit}`, which excludes by its number of processes (floor)",
        "queue": f'`on_conflict="queue"`, `-c {limit + 3}`',
        "wait": f'`on_conflict="wait"`, `-c {limit + 3}`',
    }
    table = as_table(found, labels)
    print(f"\n{table}")
    if options.save and limit == 1:
        publish("queue", f"{table}\n{about}\n", _chart(found, labels))
    elif options.save:
        publish("limit", f"{table}\n{about}\n")


def drain_of(marks: Sequence[Mark], *, limit: int = 1, **beside: float) -> Drain:
    """What the bodies of one key came to, of which the first ones (``limit``) were the gates.

    Args:
        marks: Their marks.
        limit: So many ran at a time.
        beside: The fields about calls of other keys.
    """
    bodies = sorted(marks, key=lambda mark: mark.began)
    ends = sorted(mark.ended for mark in marks)
    gaps = sorted(two.began - end for end, two in zip(ends, bodies[limit:], strict=False))
    return Drain(
        took=ends[-1] - ends[limit - 1],
        p50=median(gaps),
        p99=gaps[min(len(gaps) - 1, round(0.99 * len(gaps)))],
        out_of_order=sum(two.number < one.number for one, two in pairwise(bodies)),
        **beside,
    )


def as_table(found: Mapping[str, Sequence[Drain]], labels: Mapping[str, str]) -> str:
    """Markdown: a row for each kind, with the median of its drains."""
    rows = [
        "| | drained in, s | of the floor | end to next begin p50, ms | p99, ms | out of order "
        "| a call of another key meanwhile, ms | ... of its time alone |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for kind, drains in found.items():
        ratio = _ratio(found, kind)
        cells = [
            f"{median(one.took for one in drains):.2f}",
            str(ratio or ""),
            f"{median(one.p50 for one in drains) * _MILLI:.1f}",
            f"{median(one.p99 for one in drains) * _MILLI:.1f}",
            f"{median(one.out_of_order for one in drains):.0f}",
            f"{median(one.others for one in drains) * _MILLI:.1f}".replace("nan", ""),
            str(spread([one.others / one.others_alone for one in drains])).partition("nan")[0],
        ]
        rows.append(f"| {labels[kind]} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _ratio(found: Mapping[str, Sequence[Drain]], kind: str) -> Spread | None:
    """How many times as long as the floor's the drains took, round by round."""
    floors = found.get("plain")
    if floors is None:
        return None
    pairs = zip(found[kind], floors, strict=True)
    return spread([one.took / floor.took for one, floor in pairs])


def _chart(found: Mapping[str, Sequence[Drain]], labels: Mapping[str, str]) -> Chart:
    bars = []
    for kind in found:
        ratio = _ratio(found, kind)
        if ratio is not None:
            bars.append(Bar(labels[kind].replace("`", ""), ratio, ours=kind == "queue"))
    title = "Calls of one key, one after another: until the last has ended"
    return Chart("queue", title, "times the floor", bars)


class _Stage:
    """A worker for each kind, and the file in which their bodies leave marks."""

    def __init__(self, app: Any, marks: Path, limit: int) -> None:
        self._app, self._marks, self._limit = app, marks, limit
        self._keys = count()

    def drain(self, kind: str, calls: int, work: float) -> Drain:
        """Two drains of one key: with nothing else, and beside calls of other keys."""
        os.truncate(self._marks, 0)
        marks = self._drained(kind, calls, work)
        if kind == "plain":  # its processes are busy: no call overtakes
            nan = float("nan")
            return drain_of(marks, limit=self._limit, others=nan, others_alone=nan)
        alone = self._others(kind, lambda: time.sleep(40 * _PROBE_EVERY))
        others = self._others(kind, lambda: self._drained(kind, calls, work))
        return drain_of(marks, limit=self._limit, others=others, others_alone=alone)

    def _drained(self, kind: str, calls: int, work: float) -> list[Mark]:
        """Publish calls of one key while its first bodies run; the marks, when all have run."""
        key = f"{kind}-{next(self._keys)}"
        for number in range(self._limit):
            self._call(kind, key, number, _GATE)
        for number in range(self._limit, calls + self._limit):
            self._call(kind, key, number, work)
        deadline = time.monotonic() + _PATIENCE
        while len(marks := self._of(key)) < calls + self._limit:
            assert time.monotonic() < deadline, f"{kind}: {len(marks)} of {calls} have run"
            time.sleep(_POLL_EVERY)
        return marks

    def _others(self, kind: str, meanwhile: Callable[[], object]) -> float:
        """Call other keys while ``meanwhile`` runs; the median until their bodies begin."""
        prefix, over = f"other-{next(self._keys)}", threading.Event()

        def call() -> None:
            for number in count():
                self._call(kind, f"{prefix}-{number}", number, 0.0)
                if over.wait(_PROBE_EVERY):
                    return

        thread = threading.Thread(target=call)
        thread.start()
        meanwhile()
        over.set()
        thread.join()
        found = [mark for mark in self._all() if mark.key.startswith(f"{prefix}-")]
        return median(mark.began - mark.published for mark in found)

    def _call(self, kind: str, key: str, number: int, seconds: float) -> None:
        arguments = (key, number, seconds, time.monotonic())
        self._app.tasks[kind].apply_async(arguments, queue=kind)

    def _of(self, key: str) -> list[Mark]:
        return [mark for mark in self._all() if mark.key == key]

    def _all(self) -> list[Mark]:
        return [Mark.of(line) for line in self._marks.read_text().splitlines()]


def _workers(kinds: Sequence[str], module: ModuleType) -> Iterator[tuple[int, list[str]]]:
    """One for each kind."""
    return ((module.CONCURRENCY[kind], [kind]) for kind in kinds)
