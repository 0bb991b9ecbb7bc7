"""An executor: threads that run blocking functions for callers that must not wait for them.

For coroutines of asyncio the executor of the event loop is not used: the app's own functions may
occupy it, and the loop resolves host names in it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

R = TypeVar("R")


class Executor:
    """At most ``most`` threads, each started when it is first needed.

    The interpreter waits at its exit until they have run all that was submitted.
    """

    def __init__(self, most: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(most, f"singleton-{name}")

    def submit(self, function: Callable[..., R], *args: Any) -> Future[R]:
        """Call ``function`` on a thread, in a copy of the caller's context."""
        return self._executor.submit(copy_context().run, function, *args)

    async def run(self, function: Callable[..., R], *args: Any) -> R:
        """The result of ``function``; it runs to its end even if the caller is cancelled."""
        return await asyncio.wrap_future(self.submit(function, *args))

    def ensure(self, function: Callable[[], None]) -> Future[None]:
        """As :meth:`submit`; where no thread can be started, on this one. May call it twice."""
        try:
            return self.submit(function)
        except RuntimeError:  # the interpreter exits, or the process has too many threads
            function()
            done: Future[None] = Future()
            done.set_result(None)
            return done

    def close(self) -> None:
        """End the threads when they have run all that was submitted."""
        self._executor.shutdown(wait=False)


def running_task(what: str) -> asyncio.Task[Any]:
    """The running task of asyncio.

    Raises:
        RuntimeError: There is none: ``what`` was awaited by another library, or by none.
    """
    task = None
    with suppress(RuntimeError):
        task = asyncio.current_task()
    if task is None:
        raise RuntimeError(
            f"{what} needs a running task of asyncio, and there is none here. Other event loops "
            "(trio, curio) are not supported: there, call the blocking form on a thread."
        )
    return task


def within(seconds: float, ask: Callable[[], R]) -> R:
    """The result of ``ask``, which a thread calls.

    Brokers and result backends have no common option that bounds the time for which their clients
    connect and wait: a stopped broker was waited for for more than 30 s. The thread is left behind,
    and ends with the process.

    Raises:
        TimeoutError: There is none after ``seconds``.
        Exception: An exception of ``ask``.
    """
    found: SimpleQueue[tuple[R | None, Exception | None]] = SimpleQueue()

    def run() -> None:
        try:
            found.put((ask(), None))
        except Exception as exc:
            found.put((None, exc))

    threading.Thread(target=run, name="singleton-request", daemon=True).start()
    try:
        result, error = found.get(timeout=seconds)
    except Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return cast(R, result)
