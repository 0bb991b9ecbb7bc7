"""In a process of its own: one call of each contender in a round, in a new order each time.

A call is measured as a web request makes it, after others have filled the caches with their code.
What it sent stays in a queue without a consumer, and is thrown away between rounds.

Run as a module; the environment is that of the worker's benchmark, and the arguments are the number
of rounds, of rounds with a stopwatch around each part, and a seed. It prints JSON.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any, Final

import redis

from celery_singleton_lock.core.lease import Holder, Token
from celery_singleton_lock.core.store import ClaimRequest
from celery_singleton_lock.runtime import Runtime
from tests.benchmarks.publishing import parts
from tests.benchmarks.publishing.contenders import CONTENDERS, OURS, PLAIN
from tests.benchmarks.worker.parts import Stopwatch
from tests.benchmarks.worker.whole_app import app
from tests.benchmarks.worker.wiring import LOCK_URL, TTL
from tests.costs.instructions import Instructions, least

__all__: list[str] = []

_QUEUE: Final = "published"
_WARM_UP: Final = 50
# Rounds after which what was published is thrown away, and garbage is collected.
_LOT: Final = 20
_TIMEOUT: Final = 0.4

_numbers = count(1)
_Call = Callable[[int], object]


def _published(name: str) -> _Call:
    task = app.tasks[name]
    return lambda number: task.apply_async((number, 0.0), queue=_QUEUE)


def _behind(ask: _Call) -> _Call:
    """A plain call, and before it a question to the locks' server."""
    plain = _published("plain")

    def both(number: int) -> None:
        ask(number)
        plain(number)

    return both


def _set_by_redis_py() -> _Call:
    client = redis.Redis.from_url(LOCK_URL)
    token = "7c1f8f6e-0d0b-4b6c-9a52-000000000000"
    return lambda number: client.set(f"bare:{number}", token, nx=True, px=TTL * 1000)


def _asked_by_ours(wants_ttl: bool) -> _Call:
    """Our claim, by the store alone: what is left of it where key, owner and terms are known."""
    store: Any = Runtime.of(app).store
    holder = Holder(task="bare", worker="host.example", pid=4321, since=1.79e9 + 0.123456)

    def ask(number: int) -> None:
        token = Token(f"7c1f8f6e-0d0b-4b6c-9a52-{number:012x}", 0, 0, "-", "0123abcd")
        key = f"csl:{{celery:0}}:claim|bare|bare:{number:032x}"
        call = ClaimRequest(key=key, token=token, holder=holder, ttl=TTL, wants_ttl=wants_ttl)
        assert store._admit(call, _TIMEOUT) is None

    return ask


def _calls() -> dict[str, _Call]:
    special = {
        "set": _behind(_set_by_redis_py()),
        "command": _behind(_asked_by_ours(wants_ttl=False)),
        "script": _behind(_asked_by_ours(wants_ttl=True)),
    }
    return {name: special.get(one.task) or _published(one.task) for name, one in CONTENDERS.items()}


def _rounds(calls: dict[str, _Call], number: int, order: random.Random) -> list[dict[str, float]]:
    """Seconds of each call, round by round."""
    broker = redis.Redis.from_url(app.conf.broker_url)
    names, found = list(calls), []
    gc.disable()
    for one in range(number):
        if one % _LOT == 0:
            broker.delete(_QUEUE)
            gc.collect()
        order.shuffle(names)
        seconds = {}
        for name in names:
            call, argument = calls[name], next(_numbers)
            begin = time.perf_counter()
            call(argument)
            seconds[name] = time.perf_counter() - begin
        found.append(seconds)
    gc.enable()
    return found


def _parts(calls: dict[str, _Call], number: int, order: random.Random) -> list[dict[str, float]]:
    """Seconds of a call of ours by part, round by round, in turns with all others."""
    watch = Stopwatch()
    parts.install(watch)
    spent = []

    def watched(argument: int) -> None:
        watch.spent.clear()
        ours(argument)
        spent.append(dict(watch.spent))

    ours = calls[OURS]
    _rounds({**calls, OURS: watched}, number, order)
    return spent


def _instructions(calls: dict[str, _Call]) -> dict[str, int]:
    """What each call adds to a plain one in the interpreter, clients' own included."""

    def counted(name: str) -> Instructions:
        return least(lambda: calls[name](next(_numbers)), left_out=())

    plain = counted(PLAIN)
    return {name: counted(name).beyond(plain).total for name in calls if name != PLAIN}


def _main(rounds: int, profiled: int, seed: int) -> None:
    order, calls = random.Random(seed), _calls()
    _rounds(calls, _WARM_UP, order)
    locks = redis.Redis.from_url(LOCK_URL)
    locks.config_resetstat()
    seconds = _rounds(calls, rounds, order)
    stats: Any = locks.info("commandstats")
    at_server = {name: float(stats[f"cmdstat_{name}"]["usec_per_call"]) for name in ("evalsha",)}
    locks.config_resetstat()
    bare = {name: calls[name] for name in (PLAIN, OURS)}
    _rounds(bare, _LOT, order)
    stats = locks.info("commandstats")
    at_server["set"] = float(stats["cmdstat_set"]["usec_per_call"])
    result = {"rounds": seconds, "server": at_server, "instructions": _instructions(calls)}
    print(json.dumps({**result, "parts": _parts(calls, profiled, order)}))


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
