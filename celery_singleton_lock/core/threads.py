"""Threads that run blocking functions for coroutines of asyncio.

The executor of the event loop is not used: the app's own functions may occupy it, and the loop
resolves host names in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

R = TypeVar("R")


class Threads:
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
