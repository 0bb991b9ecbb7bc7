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
from celery_singleton_lock.delivery import NONCE_KEY
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.testing.server import PrivateServer, find_binary
from tests.benchmarks.contest import Contender, Role, run
from tests.benchmarks.micro.finding import Finding
from tests.benchmarks.micro.listing import fill
from tests.benchmarks.ours import ours
from tests.benchmarks.samples import ratios

__all__ = ["growth"]

_TASKS: Final = (1, 200)


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
