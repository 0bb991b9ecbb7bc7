"""The block of ``async with hold(...)``: the steps of a `Block` for a task of asyncio.

Overview
    Requests to the store run on the threads of the runtime, one request per thread. A client that
    waits for another holder uses no thread: the event loop watches the connection through which the
    store wakes it, or sleeps until the next try. A lost lease cancels the task of the block, in the
    same way as ``asyncio.timeout``.

Guarantees
    The event loop never waits for the store. A loss cancels the task only while it is inside the
    block, and surfaces as LeaseLost. A cancellation by others stays a CancelledError. However the
    block ends, the lease is released; however an acquire ends, no lease and no place in the wait
    queue remain.

Non-guarantees
    Code that does not await, and functions that the block runs on threads, are not interrupted.
    A cancelled acquire does not wait for the store: a lease that the store grants meanwhile is
    released when the reply has arrived. A second cancellation ends the waiting for the release, not
    the release.

State model::

    acquiring --granted--> inside --end of the body--> releasing --> (end)
        |                    +--lost: task.cancel()--> interrupted --CancelledError--> releasing
        |                                                             --> LeaseLost
        +--cancelled, or closed: the reply is awaited on a thread; leave the queue, release
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from celery import Celery

from ..core.lease import Lease
from ..core.locker import Waiter
from ..core.store import Refused
from ..core.threads import running_task
from ..runtime import Runtime
from .context import Block, Steps


class AsyncBlock:
    """One block of ``async with hold(...)``.

    Args:
        block: The steps of the block, which run on threads.
        app: The app whose store is used.

    Raises:
        RuntimeError: There is no running task of asyncio.
    """

    __slots__ = (
        *("_app", "_block", "_cancelling", "_inside", "_interrupted", "_loop"),
        *("_request", "_task", "_threads"),
    )

    def __init__(self, block: Block, app: Celery) -> None:
        self._task = running_task(f"async with hold({block.key!r})")
        self._loop = self._task.get_loop()
        self._threads = Runtime.of(app).commands
        self._block, self._app = block, app
        # The number of cancellations that were requested before the block, as in asyncio.timeout.
        self._cancelling = self._task.cancelling()
        self._inside = self._interrupted = False
        self._request: Future[Any] | None = None  # the last one that was sent while acquiring

    async def enter(self) -> Lease:
        """Acquire the lease."""
        steps = self._block.acquire(self._app, self._on_lost)
        try:
            while (wait := await self._run(next, steps, None)) is not None:
                await self._wait(*wait)
        except BaseException:
            self._undo(steps)
            raise
        lease = self._block.enter()
        self._inside = True
        try:
            lease.check()  # lost before the event loop resumed this task
        except BaseException as exc:
            await self.exit(exc)
            raise
        return lease

    async def exit(self, error: BaseException | None) -> None:
        """Release the lease, and raise LeaseLost if the block was interrupted.

        Args:
            error: The exception that ended the body.
        """
        self._inside = False  # from here on a loss cancels nothing
        self._block.leave()
        release = self._threads.ensure(self._block.release)
        if isinstance(error, GeneratorExit):
            return  # the coroutine is being closed, and must not await
        if not self._interrupted:
            await asyncio.shield(asyncio.wrap_future(release))
            return
        is_cancelled = self._task.uncancel() > self._cancelling  # by others, too
        await self._finish(release)
        if not is_cancelled and isinstance(error, (Exception, asyncio.CancelledError, type(None))):
            raise self._block.lease.lost_error() from error

    async def _finish(self, release: Future[None]) -> None:
        """Wait for ``release``, after the interruption of the block."""
        while True:
            try:
                await asyncio.shield(asyncio.wrap_future(release))
                return
            except asyncio.CancelledError:
                # Before Python 3.13, uncancel() does not revoke a cancellation that the body has
                # not observed because it did not await again.
                is_ours = self._task.cancelling() <= self._cancelling
                if not is_ours or asyncio.current_task() is not self._task:
                    raise

    # --- acquiring -------------------------------------------------------------------------------

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function``, which sends one request, on a thread."""
        self._request = request = self._threads.submit(function, *args)
        return await asyncio.wrap_future(request)

    async def _wait(self, waiter: Waiter, refused: Refused, longest: float) -> None:
        """As `Waiter.wait`, without a thread while nothing happens."""
        clock = waiter.clock
        until = clock.now() + waiter.pause(refused, longest)
        while waiter.queues(refused):
            await self._run(waiter.look, 0.0)  # joins the queue, and later reads the reply
            left = until - clock.now()
            if waiter.woken or left <= 0:
                return
            await _readable(waiter.fileno(), left)
        await clock.pause(until - clock.now())

    def _undo(self, steps: Steps) -> None:
        """Leave the queue and release the lease, after the reply to the request in flight.

        Does not await: the coroutine may be closed, and the store may not answer for seconds.
        """

        def undo() -> None:
            steps.close()
            self._block.release()

        if self._request is not None:
            self._request.add_done_callback(lambda request: self._threads.ensure(undo))

    # --- the loss --------------------------------------------------------------------------------

    def _on_lost(self, lease: Lease) -> None:
        """Called on the heartbeat's thread."""
        with suppress(RuntimeError):  # the loop is closed, and runs no body
            self._loop.call_soon_threadsafe(self._interrupt)

    def _interrupt(self) -> None:
        if self._inside:
            self._interrupted = True
            self._task.cancel()


async def _readable(descriptor: int | None, seconds: float) -> None:
    """Wait at most ``seconds`` until ``descriptor``, if there is one, has data."""
    arrived = asyncio.Event()
    loop = asyncio.get_running_loop()
    if descriptor is not None:
        loop.add_reader(descriptor, arrived.set)
    try:
        async with asyncio.timeout(seconds):
            await arrived.wait()
    except TimeoutError:
        pass
    finally:
        if descriptor is not None:
            loop.remove_reader(descriptor)
