"""Clients that wait for one key: processes that take it, work, and give it back, over and over.

Every lock is used as its documentation shows it, blocking, with a client that is kept.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import redis
import redis_lock
from celery import Celery

from celery_singleton_lock import hold
from tests.benchmarks.ours import NAME, TTL

__all__ = ["QUEUERS", "Queuer", "Turn", "crowd"]

# Seconds: no wait may end before the measuring does.
_PATIENCE: Final = 3600
_KEY: Final = "the-one-key"
# Processes that import Celery on a busy machine.
_BOOT: Final = 120

Lock = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Queuer:
    """A lock that can be waited for.

    Attributes:
        connect: From the server's URL to what makes a ``with`` block that waits; in each process.
        commands: Those that its client sends, as ``INFO commandstats`` calls them: that counts
            also what scripts do.
    """

    connect: Callable[[str], Lock]
    commands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One wait and what came of it, on the machine's clock.

    Attributes:
        asked: When it began to wait, in seconds.
        began: When it had the key; None: never, until the measuring ended.
        ended: When it began to give it back, or when the measuring ended.
    """

    asked: float
    began: float | None
    ended: float


def _ours(url: str) -> Lock:
    app = Celery("queue", broker="memory://")
    app.conf.singleton_lock_url = url
    return lambda: hold(_KEY, scope="benchmark", ttl=TTL, wait=_PATIENCE, app=app)


def _redis_py(url: str) -> Lock:
    client = redis.Redis.from_url(url)
    return lambda: client.lock(_KEY, timeout=TTL)


@contextmanager
def _popped(client: redis.Redis) -> Iterator[None]:
    client.blpop([_KEY])
    try:
        yield
    finally:
        client.rpush(_KEY, "it")


def _token(url: str) -> Lock:
    client = redis.Redis.from_url(url)
    client.set("there-is-one", "1", nx=True) and client.rpush(_KEY, "it")
    return lambda: _popped(client)


def _python_redis_lock(url: str) -> Lock:
    client = redis.Redis.from_url(url)
    return lambda: redis_lock.Lock(client, _KEY, expire=TTL)


#: By name.
QUEUERS: Final[dict[str, Queuer]] = {
    NAME: Queuer(_ours, ("evalsha", "eval", "blpop")),
    "redis-py Lock": Queuer(_redis_py, ("set", "evalsha")),
    "a token in a list, BLPOP (no lock, a floor)": Queuer(_token, ("rpush", "blpop")),
    "python-redis-lock": Queuer(_python_redis_lock, ("set", "evalsha", "blpop")),
}


def crowd(
    name: str,
    url: str,
    *,
    count: int,
    seconds: float,
    work: float,
    again: bool,
    begin: Callable[[], None],
) -> list[Turn]:
    """Have ``count`` processes queue for one key.

    Args:
        name: The name of a queuer.
        url: The URL of the server.
        count: How many processes.
        seconds: How long, counted from when all are at it.
        work: Seconds that each holds the key.
        again: Whether a client asks again as soon as it has released it, so that all but one wait
            at any moment; else when all the others have had it, too.
        begin: Called when all are at it, before what counts.

    Returns:
        The turns of all that ended after ``begin``, in the order in which they were had.
    """
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(count + 1), context.SimpleQueue()
    all_had_it = None if again else context.Barrier(count)
    until = context.Value("d", 0.0)
    processes = [
        context.Process(
            target=_queue, args=(name, url, work, ready, all_had_it, until, results), daemon=True
        )
        for _ in range(count)
    ]
    for process in processes:
        process.start()
    ready.wait(_BOOT)
    begin()
    began = time.monotonic()
    until.value = began + seconds
    ready.wait(_BOOT)
    turns = [turn for _ in processes for turn in results.get()]
    for process in processes:
        process.terminate()
        process.join()
    return sorted(turns, key=lambda turn: (turn.began is None, turn.began or turn.asked))


def _queue(
    name: str, url: str, work: float, ready: Any, all_had_it: Any, until: Any, results: Any
) -> None:
    lock = QUEUERS[name].connect(url)
    turns: list[Turn] = []
    asked = [0.0]

    def run() -> None:
        while time.monotonic() < until.value:
            if all_had_it is not None:
                all_had_it.wait()
            asked[0] = time.monotonic()
            with lock():
                began = time.monotonic()
                time.sleep(work)
                ended = time.monotonic()
            turns.append(Turn(asked[0], began, ended))
            asked[0] = 0.0

    with lock():
        pass  # connected, and every script is known
    ready.wait(_BOOT)
    ready.wait(_BOOT)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    # A client that never gets the key has waited all the same: its wait must be counted.
    thread.join(max(0.0, until.value - time.monotonic()))
    last = asked[0]
    if last:
        turns.append(Turn(last, None, until.value))
    results.put(turns)
    time.sleep(_PATIENCE)  # until all have reported: a release now would not be counted
