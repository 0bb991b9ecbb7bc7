"""Our lock, as a task uses it: the locker of an app's runtime, with all that hangs on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Final

from celery import Celery

from celery_singleton_lock.core.lease import Holder, Lease, Token
from celery_singleton_lock.core.store import Acquire, PostingStore, Release
from celery_singleton_lock.runtime import Runtime
from tests.benchmarks.contest import Contender, Role

__all__ = ["NAME", "TTL", "ours"]

#: Seconds: of every contender's locks.
TTL: Final = 30

NAME: Final = "celery-singleton-lock"


@contextmanager
def ours(url: str) -> Iterator[list[Contender]]:
    """On the store that ``url`` names: as at a task's end; and where that is another thing, as on
    leaving a ``hold()``, which waits for the reply to its release.
    """
    app = Celery("benchmark", broker="memory://")
    app.conf.singleton_lock_url = url
    runtime = Runtime(app)
    numbers = count()

    def acquire(name: str) -> Lease:
        number = next(numbers)
        task_id = f"7c1f8f6e-0d0b-4b6c-9a52-{number:012x}"
        lease = runtime.locker.acquire(
            Acquire(
                slots=(runtime.keyspace.lock("benchmark.task", name),),
                token=Token(task_id, 0, 0, f"{number:x}"),
                holder=Holder(
                    task="benchmark.task",
                    task_id=task_id,
                    worker=runtime.worker,
                    pid=os.getpid(),
                    since=runtime.clock.wall(),
                ),
                ttl=TTL,
            )
        )
        assert isinstance(lease, Lease), lease
        return lease

    def give_back(lease: Lease) -> None:
        runtime.locker.give_back(lease, Release(keys=(lease.key,), token=lease.token))

    def release(lease: Lease) -> None:
        runtime.locker.release(lease, Release(keys=(lease.key,), token=lease.token))

    contenders = [Contender(NAME, Role.OURS, acquire, give_back)]
    if isinstance(runtime.store, PostingStore):
        waiting = f"{NAME}, waiting for the release"
        contenders.append(Contender(waiting, Role.INFORMATION, acquire, release))
    try:
        yield contenders
    finally:
        runtime.close()
