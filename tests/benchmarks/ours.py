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

from celery_singleton_lock.core import lease as leases
from celery_singleton_lock.core import store as stores
from celery_singleton_lock.core.store import Acquire, Granted, Release
from celery_singleton_lock.stores.redis import scripts
from celery_singleton_lock.stores.redis.store import RedisStore
from tests.benchmarks.before import PACKAGE
from tests.benchmarks.contest import Contender, Role

__all__ = ["NAME", "TTL", "ours", "store_alone", "through_redis_py"]

#: Seconds: of every contender's locks.
TTL: Final = 30

_TIMEOUT: Final = 2.0
# Before a name: the key, as `Keyspace` makes it.
_SLOT: Final = "csl:{benchmark:0}:benchmark.task:"

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
    store, numbers = RedisStore(url), count()

    def acquire(name: str) -> Acquire:
        request = _request(leases, stores, _SLOT + name, next(numbers))
        assert isinstance(store.acquire(request, timeout=_TIMEOUT), Granted)
        return request

    def release(held: Acquire) -> None:
        request = Release(keys=held.slots, token=held.token)
        sent = store.release_async(request, timeout=_TIMEOUT, on_reply=lambda *_: None)
        if not sent:  # the first of a connection
            store.release(request, timeout=_TIMEOUT)

    return Contender("our scripts on our connection", Role.FLOOR, acquire, release)


def through_redis_py(client: Any) -> Contender:
    """The same scripts through redis-py's client, which waits for the reply to each."""
    numbers = count()
    for script in (scripts.ACQUIRE, scripts.RELEASE):
        client.script_load(script.source)

    def acquire(name: str) -> Acquire:
        request = _request(leases, stores, _SLOT + name, next(numbers))
        # A grant is a fence; a refusal would be a list.
        assert isinstance(client.execute_command(*scripts.acquire_command(request, "0")), bytes)
        return request

    def release(held: Acquire) -> None:
        request = Release(keys=held.slots, token=held.token)
        assert client.execute_command(*scripts.release_command(request)) == b"released"

    return Contender("our scripts through redis-py", Role.FLOOR, acquire, release)


def _request(
    lease: Any, store: Any, slot: str, number: int, *, worker: str = "w@host", since: float = 1.8e9
) -> Any:
    """A request for ``slot``, made of the modules ``lease`` and ``store`` of some revision."""
    task_id = f"7c1f8f6e-0d0b-4b6c-9a52-{number:012x}"
    return store.Acquire(
        slots=(slot,),
        token=lease.Token(task_id, 0, 0, f"{number:x}"),
        holder=lease.Holder(
            task="benchmark.task", task_id=task_id, worker=worker, pid=os.getpid(), since=since
        ),
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
        slot, since = runtime.keyspace.lock("benchmark.task", name), runtime.clock.wall()
        request = _request(lease, store, slot, next(numbers), worker=runtime.worker, since=since)
        granted = runtime.locker.acquire(request)
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
