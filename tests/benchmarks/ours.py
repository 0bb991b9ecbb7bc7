"""Our lock, as a task uses it: the locker of an app's runtime, with all that hangs on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from typing import Any, Final

from celery import Celery

from tests.benchmarks.before import PACKAGE
from tests.benchmarks.contest import Contender, Role

__all__ = ["TTL", "ours"]

#: Seconds: of every contender's locks.
TTL: Final = 30

_NAME: Final = "celery-singleton-lock"
_BEFORE: Final = f"{_NAME}, the earlier revision"


@contextmanager
def ours(url: str) -> Iterator[list[Contender]]:
    """On the store that ``url`` names, as at a task's end.

    Where that differs: also as on leaving a ``hold()``, which waits for the reply to its release.
    And an earlier revision, where one can be imported (`tests.benchmarks.before`).
    """
    with ExitStack() as stack:
        contenders = stack.enter_context(_locker("celery_singleton_lock", url, _NAME, Role.OURS))
        if find_spec(PACKAGE) is not None:
            contenders += stack.enter_context(_locker(PACKAGE, url, _BEFORE, Role.INFORMATION))
        yield contenders


@contextmanager
def _locker(package: str, url: str, label: str, role: Role) -> Iterator[list[Contender]]:
    lease, store = import_module(f"{package}.core.lease"), import_module(f"{package}.core.store")
    app = Celery("benchmark", broker="memory://")
    app.conf.singleton_lock_url = url
    runtime = import_module(f"{package}.runtime").Runtime(app)
    numbers = count()

    def acquire(name: str) -> Any:
        number = next(numbers)
        task_id = f"7c1f8f6e-0d0b-4b6c-9a52-{number:012x}"
        request = store.Acquire(
            slots=(runtime.keyspace.lock("benchmark.task", name),),
            token=lease.Token(task_id, 0, 0, f"{number:x}"),
            holder=lease.Holder(
                task="benchmark.task",
                task_id=task_id,
                worker=runtime.worker,
                pid=os.getpid(),
                since=runtime.clock.wall(),
            ),
            ttl=TTL,
        )
        granted = runtime.locker.acquire(request)
        assert isinstance(granted, lease.Lease), granted
        return granted

    def give_back(held: Any) -> None:
        runtime.locker.give_back(held, store.Release(keys=(held.key,), token=held.token))

    def release(held: Any) -> None:
        runtime.locker.release(held, store.Release(keys=(held.key,), token=held.token))

    contenders = [Contender(label, role, acquire, give_back)]
    if role is Role.OURS and runtime.store.async_releases is not None:
        waiting = f"{label}, waiting for the release"
        contenders.append(Contender(waiting, Role.INFORMATION, acquire, release))
    try:
        yield contenders
    finally:
        runtime.close()
