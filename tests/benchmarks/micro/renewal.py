"""Many leases of one process: a sweep, the server meanwhile, memory, and the body beside it."""

from __future__ import annotations

import gc
import os
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, Final

import redis

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.events import Events
from celery_singleton_lock.core.heartbeat import Heartbeat
from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.lease import Holder, Lease, Token
from celery_singleton_lock.core.locker import Locker
from celery_singleton_lock.core.store import Acquire, Store
from celery_singleton_lock.stores import open_store
from example_project.private_server import PrivateServer, find_binary
from tests.benchmarks.micro.finding import Finding
from tests.benchmarks.micro.processor import processor_time
from tests.benchmarks.samples import spread

__all__ = ["renewal"]

#: Seconds.
_TTL: Final = 600.0
# Seconds; of the leases beside a body: with a sweep every two seconds, a loop of four has two.
_SHORT_TTL: Final = 6.0
_DEFAULT_TTL: Final = 60.0
_MANY: Final = 10_000
_LOOP: Final = 0.001


class _Ahead(SystemClock):
    """A clock that can be moved on."""

    seconds = 0.0

    def now(self) -> float:
        return super().now() + self.seconds


def renewal(counts: list[int], sweeps: int, body_seconds: float) -> list[Finding]:
    """Measure all of it.

    Args:
        counts: How many leases, from few to many.
        sweeps: For each number.
        body_seconds: The duration of a body's loop; ``sweeps`` with renewals, as many without.
    """
    found: list[Finding] = []
    with PrivateServer(binary=find_binary()) as server:
        store = open_store(server.url(), clock=SystemClock())
        client = redis.Redis.from_url(server.url())
        try:
            for number in counts:
                client.flushall()
                found += _sweeps(store, client, number, sweeps)
            client.flushall()
            found += _body(store, counts[-1], sweeps, body_seconds)
        finally:
            store.close()
    return found


def _sweeps(store: Store, client: Any, number: int, sweeps: int) -> list[Finding]:
    is_goal = number == _MANY
    empty = _used(client)
    clock = _Ahead()
    tracemalloc.start()
    before = _traced()
    heartbeat, leases = _held(store, clock, number, _TTL, thread=False)
    traced = _traced() - before
    tracemalloc.stop()
    stored = _used(client) - empty
    # The first teaches the server its script; what it takes is no sweep's.
    measured = [_sweep(heartbeat, clock, client) for _ in range(sweeps + 1)][1:]
    times, scripts, servers, clients, stalls = zip(*measured, strict=True)
    assert not any(lease.lost for lease in leases)
    found = [
        Finding(f"a sweep over {number:,} leases", spread(times), "ms", 25 if is_goal else None),
        Finding(
            f"its longest command, at the server ({number:,})",
            spread(stalls),
            "ms",
            0.5 if is_goal else None,
        ),
    ]
    if is_goal:
        longer = [max(*both) for both in zip(servers, clients, strict=True)]
        found += [
            Finding("of it, the server's scripts, by its own count", spread(scripts), "ms"),
            Finding("the server's processor time: these, and reading", spread(servers), "ms"),
            Finding("the client's processor time, beside the server's", spread(clients), "ms"),
            Finding(
                "the sweep, over the longer of these two",
                spread([whole / one for whole, one in zip(times, longer, strict=True)]),
                "times",
            ),
        ]
    if number > 1:
        found += [
            Finding(
                f"bytes per lease in the process ({number:,})",
                spread([traced / number]),
                "bytes",
                2048 if is_goal else None,
                0,
            ),
            Finding(
                f"bytes per lease in Redis ({number:,})",
                spread([stored / number]),
                "bytes",
                300 if is_goal else None,
                0,
            ),
        ]
    return found


def _sweep(heartbeat: Heartbeat, clock: _Ahead, client: Any) -> tuple[float, ...]:
    """Milliseconds: of a sweep, and of it those of the server's scripts, of the server's processor,
    of the client's, and of the longest command.
    """
    # Longer than any jitter, and shorter than what would lose a lease.
    clock.seconds += _TTL / 3
    client.config_set("slowlog-log-slower-than", 0)
    client.config_resetstat()
    client.slowlog_reset()
    server = processor_time(client)
    begin, mine = time.perf_counter(), time.thread_time()
    heartbeat.sweep()
    seconds, mine = time.perf_counter() - begin, time.thread_time() - mine
    server = processor_time(client) - server
    client.config_set("slowlog-log-slower-than", -1)
    scripts = client.info("commandstats").get("cmdstat_evalsha", {"usec": 0})["usec"] / 1000
    entries = client.slowlog_get(1000)
    longest = max(entry["duration"] for entry in entries) / 1000
    return seconds * 1000, scripts, server * 1000, mine * 1000, longest


def _body(store: Store, number: int, rounds: int, seconds: float) -> list[Finding]:
    """How much slower a loop of Python runs while all leases are renewed."""
    slower = []
    for _ in range(rounds):
        with _renewed(store, number):
            beside = _mean_lap(seconds)
        slower.append((beside / _mean_lap(seconds) - 1) * 100)
    at_default = [one * _SHORT_TTL / _DEFAULT_TTL for one in slower]
    what = f"a 1 ms loop is slower by, beside {number:,} leases with a ttl of"
    return [
        Finding(f"{what} {_SHORT_TTL:g} s", spread(slower), "%"),
        Finding(f"{what} {_DEFAULT_TTL:g} s (computed)", spread(at_default), "%", 2),
    ]


@contextmanager
def _renewed(store: Store, number: int) -> Iterator[None]:
    heartbeat, leases = _held(store, SystemClock(), number, _SHORT_TTL, thread=True)
    try:
        yield
        assert not any(lease.lost for lease in leases), (
            "leases were lost: the figures are worthless"
        )
    finally:
        for lease in leases:
            heartbeat.stop(lease)
        heartbeat.close()


def _mean_lap(seconds: float) -> float:
    """Seconds of a lap that takes a millisecond of Python when nothing else runs."""
    laps, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        _spin(_spins())
        laps += 1
    return (time.perf_counter() - begin) / laps


_CALIBRATED: list[int] = []


def _spins() -> int:
    if not _CALIBRATED:
        times = []
        for _ in range(50):
            begin = time.perf_counter()
            _spin(1000)
            times.append(time.perf_counter() - begin)
        _CALIBRATED.append(max(1, round(1000 * _LOOP / median(times))))
    return _CALIBRATED[0]


def _spin(times: int) -> int:
    number = 0
    for one in range(times):
        number += one
    return number


def _held(
    store: Store, clock: SystemClock, number: int, ttl: float, *, thread: bool
) -> tuple[Heartbeat, list[Lease]]:
    heartbeat = Heartbeat(store, clock, Events())
    # Without its thread, a sweep is called by the code that times one.
    heartbeat._running = not thread
    locker, keyspace, leases = Locker(store, clock, heartbeat, Events()), Keyspace(), []
    for one in range(number):
        task_id = f"7c1f8f6e-0d0b-4b6c-9a52-{one:012x}"
        lease = locker.acquire(
            Acquire(
                slots=(keyspace.lock("benchmark.task", f"{one:032x}"),),
                token=Token(task_id, 0, 0, f"{one:016x}"),
                holder=Holder(
                    task="benchmark.task",
                    task_id=task_id,
                    worker="worker1@example",
                    pid=os.getpid(),
                    since=clock.wall(),
                ),
                ttl=ttl,
            )
        )
        assert isinstance(lease, Lease)
        leases.append(lease)
    return heartbeat, leases


def _traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def _used(client: Any) -> int:
    used: int = client.info("memory")["used_memory"]
    return used
