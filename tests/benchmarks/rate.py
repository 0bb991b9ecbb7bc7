"""`python -m tests.benchmarks rate`: what a check of a rate costs, and when calls start.

The check: an acquire and a release with and without a rate, Python ``limits``, and
celery-heimdall's rate. The starts: calls of keys with a rate, published at once, for real workers;
the same by the recipe that is written by hand; and plain countdowns.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, Final

import redis
from celery import Celery
from celery_heimdall import HeimdallTask
from celery_heimdall.task import rate_limited_countdown

from celery_singleton_lock.core.lease import Holder, Token
from celery_singleton_lock.core.rate import Rate
from celery_singleton_lock.core.store_requests import Acquire, Granted, Release, rated
from example_project.private_server import PrivateServer, find_binary
from tests.benchmarks.contest import Contender, Result, Role
from tests.benchmarks.contest import run as measured
from tests.benchmarks.machine import conditions, seeded
from tests.benchmarks.publication import publish
from tests.benchmarks.real_workers import Running, running
from tests.benchmarks.samples import in_micros, spread
from tests.costs.instructions import least
from tests.costs.site import open_site

__all__ = ["Starts", "add_options", "benchmark", "starts_of"]

_PACKAGES: Final = ("celery-singleton-lock", "celery", "redis", "limits", "celery-heimdall")
_APP: Final = "tests.benchmarks.rate_app"
_TTL: Final = 30.0
# Enough that none of the checks ever refuses.
_UNUSED: Final = 1_000_000
_WORKERS, _PROCESSES = 3, 2
_PATIENCE: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Starts:
    """When the calls of some keys started; seconds.

    Attributes:
        early: How many started too soon after the one before, for an even rate.
        overtaken: How many started before an older call of their key.
        pace: Starts a second and key, the median of the keys.
        late: From the time at which each call was due to its start.
    """

    early: int
    overtaken: int
    pace: float
    late: Sequence[float]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of this benchmark."""
    parser.add_argument("--rounds", type=int, default=40, help="blocks of each check")
    parser.add_argument("--block", type=float, default=0.05, help="seconds of a block, about")
    parser.add_argument("--keys", type=int, default=50, help="of the calls that start at a rate")
    parser.add_argument("--calls", type=int, default=100, help="of each key")
    parser.add_argument("--rate", type=int, default=5, help="starts a second and key")
    parser.add_argument("--seed", type=int, help="of the order; printed")
    parser.add_argument("--only", choices=["check", "starts"], help="one of the two")
    parser.add_argument("--save", action="store_true", help="write docs/dev/benchmarks.md")


def benchmark(options: argparse.Namespace) -> None:
    """Run it; the tables go to standard output, and with ``--save`` into the docs."""
    seed, tables = seeded(options.seed), []
    how = f"{options.rounds} rounds of the checks; {options.keys} keys with {options.calls} calls "
    about = conditions(_PACKAGES, f"{how}each, {options.rate}/s; seed {seed}")
    if options.only != "starts":
        tables.append(_checks(options.rounds, options.block, random.Random(seed)))
    if options.only != "check":
        tables.append(_starts(options.keys, options.calls, options.rate))
    text = "\n".join(tables)
    print(f"\n{text}")
    if options.save:
        publish("rate", f"{text}\n{about}\n")


# --- the check -----------------------------------------------------------------------------------


def _checks(rounds: int, block: float, order: random.Random) -> str:
    with PrivateServer(binary=find_binary()) as server, _contenders(server.url()) as contenders:
        counts = {one.name: least(partial(one.cycle, 0)).total for one in contenders}
        result: Result = measured(contenders, rounds=rounds, block=block, order=order)
    rows = ["| what | p50 [p25 .. p75], µs | instructions |", "|---|---:|---:|"]
    for name in counts:
        seconds = spread([one for its in result.seconds[name] for one in its])
        label = f"**{name}**" if result.roles[name] is Role.OURS else name
        rows.append(f"| {label} | {in_micros(seconds)} | {counts[name]:,} |")
    return "\n".join(rows) + "\n"


@contextmanager
def _contenders(url: str) -> Iterator[list[Contender]]:
    import limits  # only `make bench` installs it

    storage, item = limits.storage.RedisStorage(url), limits.parse(f"{_UNUSED}/minute")
    strategies = {
        "fixed window": limits.strategies.FixedWindowRateLimiter(storage),
        "sliding window counter": limits.strategies.SlidingWindowCounterRateLimiter(storage),
        "moving window": limits.strategies.MovingWindowRateLimiter(storage),
    }
    app = Celery("heimdall", broker="memory://", backend=url, set_as_current=False)

    @app.task(base=HeimdallTask, heimdall={"times": _UNUSED, "per": 60})
    def task(key: str) -> None: ...

    client: Any = redis.Redis.from_url(url)
    with open_site(url) as site:
        keyspace, store, numbers = site.runtime.keyspace, site.runtime.store, count()
        holder, rate = Holder(task="t", task_id="x", worker="w"), Rate(10_000, burst=_UNUSED)

        def lock(name: str, rate: Rate | None) -> Release:
            number = next(numbers)
            token = Token(f"id-{number}", 0, 0, f"{number:x}")
            slots = (keyspace.lock("rate", name),)
            request = Acquire(slots=slots, token=token, holder=holder, ttl=_TTL)
            reply = store.leases.acquire(
                request if rate is None else rated(request, rate), timeout=5.0
            )
            assert isinstance(reply, Granted), reply
            return Release(keys=slots, token=token)

        def release(request: Release) -> None:
            store.leases.release(request, timeout=5.0)

        def check(name: str, hit: Callable[[str], object]) -> Contender:
            return Contender(name, Role.PEER, hit, lambda _: None)

        yield [
            Contender("lock", Role.OURS, lambda name: lock(name, None), release),
            Contender("lock with a rate", Role.OURS, lambda name: lock(name, rate), release),
            *(
                check(f"`limits`, {name}", partial(strategy.hit, item, name))
                for name, strategy in strategies.items()
            ),
            check(
                "celery-heimdall", lambda key: rate_limited_countdown(task, f"h:{key}", (key,), {})
            ),
            check("PING (the floor of a request)", lambda key: client.ping()),
        ]


# --- the starts ----------------------------------------------------------------------------------


def starts_of(began: dict[str, list[tuple[int, float]]], rate: float) -> Starts:
    """When the calls of some keys started.

    Args:
        began: For each key, the number of each call in the order of calling, and its start.
        rate: Starts a second and key.
    """
    early = overtaken = 0
    paces, late = [], []
    for calls in began.values():
        calls.sort(key=lambda call: call[1])
        first, last = calls[0][1], calls[-1][1]
        paces.append((len(calls) - 1) / (last - first))
        # Two starts may be a bit nearer to each other than their times: one was later than the
        # other.
        early += sum(two[1] - one[1] < 0.8 / rate for one, two in pairwise(calls))
        overtaken += sum(two[0] < one[0] for one, two in pairwise(calls))
        # A start is due an interval after the one before: what was late is not made up for.
        late += [two[1] - one[1] - 1 / rate for one, two in pairwise(calls)]
    return Starts(early=early, overtaken=overtaken, pace=median(paces), late=sorted(late))


def _starts(keys: int, calls: int, rate: int) -> str:
    rows = [
        "| | too early | before an older call | messages per call | starts a second and key "
        "| late p50, ms | p99, ms |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    with running(_APP, _workers, RATE=str(rate)) as run:
        app, marks = run.app, run.marks
        for kind in ("ours", "by hand"):
            os.truncate(marks, 0)
            before = _received(run)
            _publish(app, kind, keys, calls)
            began = _wait_for(marks, kind.replace(" ", "-"), keys * calls)
            found = starts_of(began, rate)
            messages = (_received(run) - before) / (keys * calls)
            cells = [found.early, found.overtaken, f"{messages:.2f}", f"{found.pace:.2f}"]
            late = _late(found.late) if kind == "ours" else ["", ""]
            rows.append(f"| {kind} | {' | '.join(map(str, [*cells, *late]))} |")
            print(rows[-1], flush=True)
        os.truncate(marks, 0)
        now = time.time() + 2
        for number, key in _order(keys, calls):
            due = now + number / rate + key / keys / rate
            arguments, left = (str(key), number, due), due - time.time()
            app.tasks["countdown"].apply_async(arguments, queue="countdown", countdown=left)
        _wait_for(marks, "countdown", keys * calls)
        lines = [line.split() for line in marks.read_text().splitlines()]
        late = _late(sorted(float(line[4]) - float(line[3]) for line in lines))
        rows.append(f"| plain countdowns at the same rate | | | | | {' | '.join(late)} |")
    return "\n".join(rows) + "\n"


def _late(seconds: Sequence[float]) -> list[str]:
    p99 = seconds[min(len(seconds) - 1, round(0.99 * len(seconds)))]
    return [f"{1e3 * median(seconds):.1f}", f"{1e3 * p99:.1f}"]


def _order(keys: int, calls: int) -> Iterator[tuple[int, int]]:
    return ((number, key) for number in range(calls) for key in range(keys))


def _publish(app: Any, kind: str, keys: int, calls: int) -> None:
    for number, key in _order(keys, calls):
        app.tasks[kind].apply_async((str(key), number), queue=kind)


def _wait_for(marks: Path, kind: str, total: int) -> dict[str, list[tuple[int, float]]]:
    """The starts of each key, when all calls have started."""
    last, deadline = -1, time.monotonic() + _PATIENCE
    while True:
        lines = [line.split() for line in marks.read_text().splitlines()]
        lines = [line for line in lines if line[0] == kind]
        if len(lines) >= total:
            break
        if len(lines) > last:
            last, deadline = len(lines), time.monotonic() + _PATIENCE
        assert time.monotonic() < deadline, f"{kind}: {len(lines)} of {total} have started"
        time.sleep(1)
    began: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for _, key, number, _, at in lines:
        began[key].append((int(number), float(at)))
    assert max(Counter((line[1], line[2]) for line in lines).values()) == 1, "a call ran twice"
    return began


def _workers(module: ModuleType) -> list[tuple[int, list[str]]]:
    return [(_PROCESSES, list(module.KINDS))] * _WORKERS


def _received(run: Running) -> int:
    """How many messages the workers have received."""
    return sum("] received" in line for worker in run.workers for line in worker.lines)
