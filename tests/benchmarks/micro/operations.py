"""Single operations, as multiples of a raw pair that is timed in the same rounds."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any, Final

import redis
from celery import Celery

from celery_singleton_lock import singleton_task
from celery_singleton_lock.core.lease import Holder, Token
from celery_singleton_lock.core.store import Acquire, ClaimRequest, Refused
from celery_singleton_lock.runtime import Runtime
from example_project.private_server import PrivateServer, find_binary
from tests.benchmarks import peers
from tests.benchmarks.contest import Contender, Role, run
from tests.benchmarks.micro.finding import Finding
from tests.benchmarks.ours import TTL, ours
from tests.benchmarks.samples import each_over

__all__ = ["operations"]

_GOALS: Final = {"acquire + release, as at a task's end": 0.85}
_ADMIT_TIMEOUT: Final = 1.0


def operations(rounds: int, block: float, order: random.Random) -> list[Finding]:
    """Time them all.

    Args:
        rounds: The number of rounds, each of blocks in shuffled order.
        block: Seconds of a block.
        order: Shuffles.
    """
    with PrivateServer(binary=find_binary()) as server, ours(server.url()) as mine:
        at_the_end, *waiting = mine
        raw = peers.raw_pair(redis.Redis.from_url(server.url()))
        runtime, tasks = _app(server.url())
        contenders = [
            raw,
            replace(at_the_end, name="acquire + release, as at a task's end"),
            *(replace(one, name="acquire + release, waited for") for one in waiting),
            _only("a refused acquire, as of a skip", _refused(runtime)),
            _only("a claim, as of publishing", _claimed(runtime)),
            _only("key of all arguments", _key(tasks["all"])),
            _only("key by template", _key(tasks["template"])),
        ]
        try:
            result = run(contenders, {server.port}, rounds=rounds, block=block, order=order)
        finally:
            runtime.close()
    return [
        Finding.of(name, ratios, "raw pairs", _GOALS.get(name))
        for name, ratios in each_over(result.seconds, raw.name).items()
        if name != raw.name
    ]


def _app(url: str) -> tuple[Runtime, dict[str, Any]]:
    app = Celery("benchmark", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_url = url

    @singleton_task(app=app, name="all")
    def all_arguments(account: int, currency: str = "EUR") -> None: ...

    @singleton_task(app=app, name="template", key="account:{account}")
    def template(account: int, currency: str = "EUR") -> None: ...

    return Runtime.of(app), {name: app.tasks[name] for name in ("all", "template")}


def _only(name: str, operation: Callable[[str], Any]) -> Contender:
    return Contender(name, Role.INFORMATION, operation, lambda _: None)


def _key(task: Any) -> Callable[[str], Any]:
    numbers = count()
    return lambda _: task.singleton_key_maker.key_suffix([next(numbers)], {"currency": "EUR"})


def _refused(runtime: Runtime) -> Callable[[str], Any]:
    def request(task_id: str) -> Acquire:
        return Acquire(
            slots=(runtime.keyspace.lock("benchmark.task", "held"),),
            token=Token(task_id, 0, 0, "n"),
            holder=_holder(runtime, task_id),
            ttl=TTL,
        )

    runtime.locker.acquire(request("holder"))
    numbers = count()

    def refused(_: str) -> None:
        assert isinstance(runtime.locker.acquire(request(f"other-{next(numbers)}")), Refused)

    return refused


def _claimed(runtime: Runtime) -> Callable[[str], Any]:
    numbers = count()

    def claimed(_: str) -> None:
        task_id = f"claimed-{next(numbers)}"
        key = runtime.keyspace.claim("task", runtime.keyspace.lock("benchmark.task", task_id))
        request = ClaimRequest(
            key=key,
            token=Token(task_id, 0, 0, "-"),
            holder=_holder(runtime, task_id),
            ttl=TTL,
            instead_of="",
        )
        assert runtime.store.take_claim(request, timeout=_ADMIT_TIMEOUT) is None

    return claimed


def _holder(runtime: Runtime, task_id: str) -> Holder:
    return Holder(
        task="benchmark.task",
        task_id=task_id,
        worker=runtime.worker,
        pid=os.getpid(),
        since=runtime.clock.wall(),
    )
