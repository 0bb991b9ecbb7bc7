"""What must not depend on how much there is: keys in the store, tasks in the app; and `ls`."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from typing import Any, Final

import redis
from celery import Celery
from celery.app.trace import build_tracer

from celery_singleton_lock import singleton_task
from celery_singleton_lock.delivery import NONCE_KEY
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.testing.server import PrivateServer, find_binary
from tests.benchmarks.contest import Contender, Role, run
from tests.benchmarks.micro.finding import Finding
from tests.benchmarks.ours import ours
from tests.benchmarks.samples import ratios, spread
from tests.harness.processes import ROOT

__all__ = ["growth"]

_TASKS: Final = (1, 200)
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


def growth(keys: list[int], rounds: int, block: float, order: random.Random) -> list[Finding]:
    """Measure it, in servers with so many ``keys``, from few to many."""
    with ExitStack() as stack:
        servers = {
            number: stack.enter_context(PrivateServer(binary=find_binary())) for number in keys
        }
        for number, server in servers.items():
            _fill(server.url(), number)
        found = _by_keys(servers, rounds, block, order)
        found += _by_tasks(servers[keys[0]].url(), rounds, block, order)
        found += _listing(servers[keys[-1]].url(), keys[-1])
    return found


def _fill(url: str, number: int) -> None:
    client = redis.Redis.from_url(url, socket_timeout=None)
    for first in range(0, number, _FILLED_AT_ONCE):
        client.eval(_FILL, 0, first, min(first + _FILLED_AT_ONCE, number) - 1, _VALUE)


def _by_keys(
    servers: dict[int, PrivateServer], rounds: int, block: float, order: random.Random
) -> list[Finding]:
    with ExitStack() as stack:
        contenders = []
        for number, server in servers.items():
            one = stack.enter_context(ours(server.url()))
            contenders.append(Contender(f"{number:,}", Role.OURS, one.acquire, one.release))
        ports = {server.port for server in servers.values()}
        result = run(contenders, ports, rounds=rounds, block=block, order=order)
    few = contenders[0].name
    return [
        Finding(f"acquire + release with {name} keys held, over {few}", ratio, "times", 1.05)
        for name, ratio in ratios(result.seconds, few).items()
        if name != few
    ]


def _by_tasks(url: str, rounds: int, block: float, order: random.Random) -> list[Finding]:
    apps = [_app(url, number) for number in _TASKS]
    contenders = [
        Contender(str(number), Role.OURS, _run_of(app), lambda _: None)
        for number, app in zip(_TASKS, apps, strict=True)
    ]
    try:
        result = run(contenders, (), rounds=rounds, block=block, order=order)
    finally:
        for app in apps:
            Runtime.of(app).close()
    one, many = (contender.name for contender in contenders)
    ratio = ratios(result.seconds, one)[many]
    return [Finding(f"a task in an app with {many} tasks, over {one}", ratio, "times", 1.05)]


def _app(url: str, number: int) -> Celery:
    app = Celery("benchmark", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_url = url
    for one in range(number):
        singleton_task(app=app, name=f"task{one}", ignore_result=True)(_no_op)
    app.finalize()
    return app


def _no_op(number: int) -> None: ...


def _run_of(app: Celery) -> Callable[[str], Any]:
    """Run one task of ``app`` after the other as a worker does, without its broker."""
    tracers = [
        build_tracer(name, task, app=app, eager=False)
        for name, task in app.tasks.items()
        if name.startswith("task")
    ]
    numbers = count()

    def once(_: str) -> None:
        number = next(numbers)
        task_id = f"7c1f8f6e-0d0b-4b6c-9a52-{number:012x}"
        request = {
            "id": task_id,
            "retries": 0,
            "delivery_info": {"redelivered": False},
            "hostname": "worker1@example",
            "is_eager": False,
            NONCE_KEY: f"{number:x}",
        }
        tracers[number % len(tracers)](task_id, [number], {}, request)

    return once


def _listing(url: str, keys: int) -> list[Finding]:
    """`celery singleton ls`, whole, and what the server's other clients notice of it."""
    stop, waits = threading.Event(), [0.0]
    thread = threading.Thread(target=_ping, args=(url, stop, waits))
    client = redis.Redis.from_url(url)
    client.config_set("slowlog-max-len", 100_000)
    client.config_set("slowlog-log-slower-than", _SLOW)
    client.slowlog_reset()
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
    durations = [entry["duration"] for entry in client.slowlog_get(100_000)]
    slowest = max([*durations, _SLOW]) / 1000
    return [
        Finding(f"`celery singleton ls --json` with {keys:,} keys", spread([seconds]), "s"),
        Finding("its longest command, at the server", spread([slowest]), "ms", 5),
        Finding("longest wait of another client for a PING meanwhile", spread([max(waits)]), "ms"),
    ]


def _ping(url: str, stop: threading.Event, waits: list[float]) -> None:
    client = redis.Redis.from_url(url)
    while not stop.wait(0.001):
        begin = time.perf_counter()
        client.ping()
        waits.append((time.perf_counter() - begin) * 1000)
