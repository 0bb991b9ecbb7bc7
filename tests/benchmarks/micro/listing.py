"""`celery singleton ls` where there is a lot to list, and what other clients notice of it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from typing import Any, Final

import redis

from example_project.private_server import PrivateServer, find_binary
from tests.benchmarks.micro.finding import Finding
from tests.benchmarks.micro.processor import processor_time
from tests.benchmarks.samples import spread
from tests.harness.processes import ROOT

__all__ = ["fill", "listing"]

_FILL: Final = """\
for i = tonumber(ARGV[1]), tonumber(ARGV[2]) do
  redis.call('SET', string.format('csl:{celery:0}:filler:%032x', i), ARGV[3], 'PX', 3600000)
end
"""
_FILLED_AT_ONCE: Final = 10_000
# A lease as the store holds one.
_VALUE: Final = (
    "l 7c1f8f6e-0d0b-4b6c-9a52-000000000000|0.0|0123456789abcdef 1790000000000000 "
    '{"task":"benchmark.task","worker":"worker1@example","pid":4711,"since":1790000000.123}'
)

_LS: Final = ("-A", "tests.benchmarks.worker.own_app", "singleton", "ls", "--json")
# Microseconds: faster commands of the server are not looked at.
_SLOW: Final = 100


def listing(keys: int) -> list[Finding]:
    """List so many, whole, into nowhere."""
    with PrivateServer(binary=find_binary()) as server:
        fill(server.url(), keys)
        return _listing(server.url(), keys)


def fill(url: str, number: int) -> None:
    """Put ``number`` leases into the store, for an hour."""
    client = redis.Redis.from_url(url, socket_timeout=None)
    for first in range(0, number, _FILLED_AT_ONCE):
        client.eval(_FILL, 0, first, min(first + _FILLED_AT_ONCE, number) - 1, _VALUE)


def _listing(url: str, keys: int) -> list[Finding]:
    """`celery singleton ls`, whole, and what the server's other clients notice of it."""
    stop, waits = threading.Event(), [0.0]
    thread = threading.Thread(target=_ping, args=(url, stop, waits))
    client = redis.Redis.from_url(url)
    client.config_set("slowlog-max-len", 100_000)
    client.config_set("slowlog-log-slower-than", _SLOW)
    client.slowlog_reset()
    client.config_resetstat()
    server = processor_time(client)
    thread.start()
    environment = {**os.environ, "BROKER_URL": url, "LOCK_URL": url}
    begin = time.perf_counter()
    try:
        subprocess.run(
            [sys.executable, "-m", "celery", *_LS],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        seconds = time.perf_counter() - begin
    finally:
        stop.set()
        thread.join()
    server = processor_time(client) - server
    durations = [entry["duration"] for entry in client.slowlog_get(100_000)]
    slowest = max([*durations, _SLOW]) / 1000
    # What one key's ttl takes beyond a microsecond is not work: the server did not run.
    idle = max([_SLOW, *_of(client, b"PTTL")]) / 1000
    at_most = client.info("latencystats")["latency_percentiles_usec_scan"]
    scans = client.info("commandstats")["cmdstat_scan"]
    return [
        Finding(f"`celery singleton ls --json` with {keys:,} keys", spread([seconds]), "s"),
        # The largest process that this one has started and seen the end of.
        Finding("its memory", spread([_largest_child()]), "MiB", digits=0),
        Finding("its longest command, at the server", spread([slowest]), "ms", 5),
        Finding(
            f"99.9 % of its {scans['calls']:,} SCANs, its largest commands, take at most",
            spread([at_most["p99.9"] / 1000]),
            "ms",
        ),
        Finding(
            "its longest PTTL, which takes a microsecond where the server isn't interrupted",
            spread([idle]),
            "ms",
        ),
        Finding("the server's processor time, per key", spread([server / keys * 1e6]), "µs"),
        Finding("longest wait of another client for a PING meanwhile", spread([max(waits)]), "ms"),
    ]


def _of(client: Any, command: bytes) -> list[int]:
    """Microseconds of each that was slow."""
    return [
        entry["duration"]
        for entry in client.slowlog_get(100_000)
        if entry["command"].startswith(command)
    ]


def _ping(url: str, stop: threading.Event, waits: list[float]) -> None:
    client = redis.Redis.from_url(url)
    while not stop.wait(0.001):
        begin = time.perf_counter()
        client.ping()
        waits.append((time.perf_counter() - begin) * 1000)


def _largest_child() -> float:
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
