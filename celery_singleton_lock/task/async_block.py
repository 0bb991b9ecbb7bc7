"""The block of ``async with hold(...)``: the steps of a `Block` for a task of asyncio.

Overview
    Requests to the store run on the threads of the runtime, one request per thread. A client that
    waits for another holder uses no thread: the event loop watches the connection through which the
    store wakes it, or sleeps until the next try. A lost lease cancels the task of the block, in the
    same way as ``asyncio.timeout``.

Guarantees
    The event loop never waits for the store. A loss cancels the task only while it is inside the
    block, and surfaces as LeaseLost, also if the body did not observe it. A cancellation by others
    stays a CancelledError, unless the body caught it. However the block ends, also if it is never
    left, the lease is released; however an acquire ends, no lease and no place in the wait queue
    remain. The end of a lease is a loss for the blocks that have re-entered it and are not left.

Non-guarantees
    Code that does not await, and functions that the block runs on threads, are not interrupted.
    A cancelled acquire does not wait for the store: a lease that the store grants meanwhile is
    released when the reply has arrived. A cancellation ends the waiting for the release, not the
    release; that of a lost lease is not waited for.

State model::

    acquiring --granted--> inside --end of the body--> releasing --> (end)
        |                    +--lost: task.cancel()--> interrupted --end of the body--> LeaseLost
        +--cancelled, or closed--> (end); once the reply arrives: leave the queue, release
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final
from weakref import WeakMethod, WeakValueDictionary

from celery import Celery

from ..core.executor import running_task
from ..core.heartbeat import LossHandler
from ..core.lease import Lease, Token
from ..core.process import this_process
from ..core.store_requests import Refused
from ..core.waiter import Waiter
from ..errors import LeaseLost
from ..runtime import Runtime
from .context import Block, Steps, Wait

#: The blocks that own a lease, by its token.
_hosts: Final[WeakValueDictionary[Token, AsyncBlock]] = WeakValueDictionary()


class AsyncBlock:
    """One block of ``async with hold(...)``.

    Args:
        block: The steps of the block, which run on threads.
        app: The app whose store is used.

    Raises:
        RuntimeError: There is no running task of asyncio, or ``block`` has begun before.
    """

    __slots__ = (
        *("__weakref__", "_app", "_block", "_cancelling", "_guests", "_host", "_inside"),
        *("_interrupted", "_loop", "_request", "_task", "_threads"),
    )

    def __init__(self, block: Block, app: Celery) -> None:
        self._task = running_task(f"async with hold({block.key!r})")
        block.begin()
        self._loop = self._task.get_loop()
        self._threads = Runtime.of(app).commands
        self._block, self._app = block, app
        # The number of cancellations that were requested before the block, as in asyncio.timeout.
        self._cancelling = self._task.cancelling()
        self._inside = self._interrupted = False
        self._request: Future[Any] | None = None  # the last one that was sent while acquiring
        # The blocks of other tasks that have re-entered the lease: a dictionary, because each of
        # its changes is one step of the interpreter. And the block whose lease this one re-entered.
        self._guests: dict[AsyncBlock, None] = {}
        self._host: AsyncBlock | None = None

    async def enter(self) -> Lease:
        """Acquire the lease."""
        steps = self._block.acquire(self._app, _weak(self._on_lost))
        try:
            while (wait := await self._run(_step, steps)) is not None:
                await self._wait(*wait)
        except BaseException:
            self._undo(steps)
            raise
        lease = self._block.enter()
        self._inside = True
        self._join(lease)
        if lease.lost:  # before the event loop resumed this task
            await self.exit(None)
        return lease

    async def exit(self, error: BaseException | None) -> None:
        """Release the lease.

        Args:
            error: The exception that ended the body.

        Raises:
            LeaseLost: The lease was lost inside the block, and only that has cancelled the task.
        """
        self._inside = False  # from here on a loss cancels nothing
        loss = self._leave()
        if self._block.lease.process is not this_process():
            return  # a forked child, which has neither the lease nor the threads
        release = self._threads.ensure(self._block.release)
        release.add_done_callback(lambda release: self._end_guests())
        if isinstance(error, GeneratorExit):
            return  # the coroutine is being closed, and must not await
        if loss is None:
            await asyncio.shield(asyncio.wrap_future(release))
            return
        if self._interrupted:
            self._task.uncancel()  # the body has observed it: it awaited when the loop cancelled it
        by_others = self._task.cancelling() > self._cancelling
        is_cancellation = isinstance(error, asyncio.CancelledError) and not by_others
        if is_cancellation or isinstance(error, (Exception, type(None))):
            raise loss from error

    def _join(self, lease: Lease) -> None:
        """Make this block a guest of the block of another task that has the lease."""
        if self._block.owns:
            _hosts[lease.token] = self
            return
        host = _hosts.get(lease.token)
        if host is not None and host._task is not self._task:
            host._guests[self] = None  # before lease.lost is read: see _end_guests()
            self._host = host

    def _leave(self) -> LeaseLost | None:
        """The error for a loss that this block has to raise."""
        if self._host is not None:
            self._host._guests.pop(self, None)
        # The lease of a block of the same task has its own report, unless that block ended first.
        outlived = self._block.lease.released_at is not None
        loss = self._block.loss() if self._block.owns or self._host or outlived else None
        self._block.leave()
        return loss

    # --- acquiring -------------------------------------------------------------------------------

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function``, which sends one request, on a thread."""
        self._request = request = self._threads.submit(function, *args)
        return await asyncio.wrap_future(request)

    async def _wait(self, waiter: Waiter, refused: Refused, longest: float) -> None:
        """As `Waiter.wait`, without a thread while nothing happens."""
        clock = waiter.clock
        until = clock.now() + waiter.pause(refused, longest)
        while waiter.queues(refused) and not waiter.woken:
            if not await _is_readable(waiter.fileno(), until - clock.now()):
                return
            await self._run(waiter.look, 0.0)
        if not waiter.woken:
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

    def _on_lost(self, lease: Lease) -> str:
        """Called on the heartbeat's thread."""
        with suppress(RuntimeError):  # the loop is closed, and runs no body
            self._loop.call_soon_threadsafe(self._interrupt)
        self._end_guests()
        return "interrupted"

    def _end_guests(self) -> None:
        """Interrupt the guests, after the lease has ended."""
        for guest in list(self._guests):
            guest._on_lost(self._block.lease)

    def _interrupt(self) -> None:
        if self._inside and not self._interrupted:  # a guest: by the loss, and by its host's exit
            self._interrupted = True
            self._task.cancel()


def _step(steps: Steps) -> Wait | None:
    """The next wait, after the client has joined the queue; None: the lease is acquired."""
    wait = next(steps, None)
    if wait is not None:
        waiter, refused, _ = wait
        if waiter.queues(refused):
            waiter.look(0.0)
    return wait


def _weak(on_lost: LossHandler) -> LossHandler:
    """``on_lost`` for the heartbeat, which must not keep an abandoned block, or its task, alive."""
    method = WeakMethod(on_lost)

    def call(lease: Lease) -> str | None:
        return alive(lease) if (alive := method()) is not None else None

    return call


async def _is_readable(descriptor: int | None, seconds: float) -> bool:
    """Wait at most ``seconds`` until ``descriptor``, if there is one, has data."""
    arrived = asyncio.Event()
    loop = asyncio.get_running_loop()
    if descriptor is not None:
        loop.add_reader(descriptor, arrived.set)
    try:
        async with asyncio.timeout(seconds):
            return await arrived.wait()
    except TimeoutError:
        return False
    finally:
        if descriptor is not None:
            loop.remove_reader(descriptor)
