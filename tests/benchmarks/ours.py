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

from celery_singleton_lock.core.lease import Holder, Token
from celery_singleton_lock.core.store import Acquire, Release
from celery_singleton_lock.stores.redis import scripts
from celery_singleton_lock.stores.redis.store import RedisStore
from tests.benchmarks.before import PACKAGE
from tests.benchmarks.contest import Contender, Role

__all__ = ["NAME", "TTL", "ours", "store_alone", "through_redis_py"]

#: Seconds: of every contender's locks.
TTL: Final = 30

_TIMEOUT: Final = 2.0

NAME: Final = "celery-singleton-lock"
_BEFORE: Final = f"{NAME}, the earlier revision"


@contextmanager
def ours(url: str) -> Iterator[list[Contender]]:
    """On the store that ``url`` names, as at a task's end.

    Where that differs: also as on leaving a ``hold()``, which waits for the reply to its release.
    And an earlier revision, where one can be imported (`tests.benchmarks.before`).
    """
    with ExitStack() as stack:
        contenders = stack.enter_context(_locker("celery_singleton_lock", url, NAME, Role.OURS))
        if find_spec(PACKAGE) is not None:
            contenders += stack.enter_context(_locker(PACKAGE, url, _BEFORE, Role.INFORMATION))
        yield contenders


def store_alone(url: str) -> Contender:
    """Our scripts on our connection: no run, no heartbeat, no events, and no loss is noticed."""
    store = RedisStore(url)

    def acquire(name: str) -> Acquire:
        request = _request(name)
        store.acquire(request, timeout=_TIMEOUT)
        return request

    def release(held: Acquire) -> None:
        request = Release(keys=held.slots, token=held.token)
        sent = store.release_async(request, timeout=_TIMEOUT, on_reply=lambda *_: None)
        if not sent:  # the first of a connection
            store.release(request, timeout=_TIMEOUT)

    return Contender("our store", Role.FLOOR, acquire, release)


def through_redis_py(client: Any) -> Contender:
    """The same scripts through redis-py's client, which waits for the reply to each."""
    for script in (scripts.ACQUIRE, scripts.RELEASE):
        client.script_load(script.source)

    def acquire(name: str) -> Acquire:
        request = _request(name)
        client.execute_command(*scripts.acquire_command(request, "0"))
        return request

    def release(held: Acquire) -> None:
        request = Release(keys=held.slots, token=held.token)
        client.execute_command(*scripts.release_command(request))

    return Contender("our scripts through redis-py", Role.FLOOR, acquire, release)


def _request(name: str) -> Acquire:
    task_id = f"7c1f8f6e-0d0b-4b6c-9a52-{abs(hash(name)) % 10**12:012}"
    return Acquire(
        slots=(f"csl:{{benchmark:0}}:{name}",),
        token=Token(task_id, 0, 0, "0123456789abcdef", "89abcdef"),
        holder=Holder(task="benchmark", task_id=task_id, worker="w", pid=1, since=1.8e9),
        ttl=TTL,
    )


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
        granted = runtime.locker.acquire(
            store.Acquire(
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
        )
        assert isinstance(granted, lease.Lease), granted
        return granted

    def give_back(held: Any) -> None:
        runtime.locker.give_back(held, store.Release(keys=(held.key,), token=held.token))

    def release(held: Any) -> None:
        runtime.locker.release(held, store.Release(keys=(held.key,), token=held.token))

    contenders = [Contender(label, role, acquire, give_back)]
    # An earlier revision may not have this capability's name.
    if role is Role.OURS and runtime.store.capabilities.releases_async:
        waiting = f"{label}, waiting for the release"
        contenders.append(Contender(waiting, Role.INFORMATION, acquire, release))
    try:
        yield contenders
    finally:
        runtime.close()
