"""What must not depend on how much there is: keys in the store, tasks in the app."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from typing import Any, Final

from celery import Celery
from celery.app.trace import build_tracer

from celery_singleton_lock import singleton_task
from celery_singleton_lock.message.header import NONCE_KEY
from celery_singleton_lock.runtime import Runtime
from example_project.private_server import PrivateServer, find_binary
from tests.benchmarks.contest import Contender, Role, run
from tests.benchmarks.micro.finding import Finding
from tests.benchmarks.micro.listing import fill
from tests.benchmarks.ours import ours
from tests.benchmarks.samples import each_over

__all__ = ["growth"]

_TASKS: Final = 200
# Rounds of tasks, for each that was asked for: what is looked for is smaller than their noise.
_TIMES: Final = 4


def growth(keys: list[int], rounds: int, block: float, order: random.Random) -> list[Finding]:
    """Measure it, in servers with so many ``keys``, from few to many."""
    with ExitStack() as stack:
        servers = {
            number: stack.enter_context(PrivateServer(binary=find_binary())) for number in keys
        }
        for number, server in servers.items():
            fill(server.url(), number)
        found = _by_keys(servers, rounds, block, order)
        found += _by_tasks(servers[keys[0]].url(), rounds, block, order)
    return found


def _by_keys(
    servers: dict[int, PrivateServer], rounds: int, block: float, order: random.Random
) -> list[Finding]:
    with ExitStack() as stack:
        contenders = []
        for number, server in servers.items():
            one = stack.enter_context(ours(server.url()))
            contenders.append(replace(one[0], name=f"{number:,}"))
        ports = {server.port for server in servers.values()}
        result = run(contenders, ports, rounds=rounds, block=block, order=order)
    few = contenders[0].name
    return [
        Finding.of(f"acquire + release with {name} keys held, over {few}", ratios, "times", 1.05)
        for name, ratios in each_over(result.seconds, few).items()
        if name != few
    ]


def _by_tasks(url: str, rounds: int, block: float, order: random.Random) -> list[Finding]:
    few, many = _app(url, 1), _app(url, _TASKS)
    ways = {
        "one": _run_of(few, "task", 1),
        "one of many": _run_of(many, "task", 1),
        "many": _run_of(many, "task", _TASKS),
        "Celery's one": _run_of(few, "plain", 1),
        "Celery's many": _run_of(many, "plain", _TASKS),
    }
    contenders = [Contender(name, Role.OURS, way, lambda _: None) for name, way in ways.items()]
    try:
        result = run(contenders, (), rounds=_TIMES * rounds, block=block, order=order)
    finally:
        for app in (few, many):
            Runtime.of(app).close()
    over = each_over(result.seconds, "one")
    celerys = each_over(result.seconds, "Celery's one")["Celery's many"]
    same = f"the same task in an app with {_TASKS} tasks, over 1 (instructions: exactly as many)"
    return [
        Finding.of(f"a task in an app with {_TASKS} tasks, over 1", over["many"], "times", 1.05),
        Finding.of(same, over["one of many"], "times", 1.05),
        Finding.of(f"Celery's own, of {_TASKS} plain tasks, over 1", celerys, "times"),
    ]


def _app(url: str, number: int) -> Celery:
    app = Celery("benchmark", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_url = url
    for one in range(number):
        singleton_task(app=app, name=f"task{one}", ignore_result=True, shared=False)(_no_op)
        app.task(name=f"plain{one}", ignore_result=True, shared=False)(_no_op)
    app.finalize()
    return app


def _no_op(number: int) -> None: ...


def _run_of(app: Celery, kind: str, number: int) -> Callable[[str], Any]:
    """Run so many tasks of ``app``, one after the other, as a worker does, without its broker."""
    names = [f"{kind}{one}" for one in range(number)]
    tracers = [build_tracer(name, app.tasks[name], app=app, eager=False) for name in names]
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
