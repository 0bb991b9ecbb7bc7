"""``hold()``: a lease outside of tasks, for a block or a function, with or without asyncio."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import closing
from datetime import timedelta
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, Final, TypeVar, cast

from celery import Celery

from ..celery_compat import real_app
from ..core.lease import Lease
from ..errors import LockKeyError
from ..policy import Policy, merge, seconds
from .context import Block

F = TypeVar("F", bound=Callable[..., Any])
_NOT_BEGUN: Final = (
    "@hold({0!r}) covers a call, but {1!r} returned {2!r}, whose code would run after the release. "
    "Use the block form inside it: with hold(...), or async with hold(...)."
)


class hold:
    """Hold ``key`` in a ``with`` or ``async with`` block, or during each call of a function.

    Excludes, and is excluded by, tasks of the scope. Inside a task or block that holds the same
    key, that lease is re-entered, though not by a forked process.

    A ``with`` block is never interrupted: call ``lease.check()`` before writes that matter. An
    ``async with`` block never blocks the event loop of asyncio. If its lease is lost, its task is
    cancelled, and LeaseLost is raised at the end of the block.

    Args:
        key: The part after the scope: for ``key="account:{account_id}"``, ``"account:42"``.
        scope: The tasks' ``scope``, or a task's name.
        ttl: Seconds for which a dead holder can block other clients; the app's
            ``singleton_lock_ttl`` by default.
        wait: Seconds to wait for another holder.
        app: The app whose store is used; the current app by default.

    Raises:
        LockConflict: Another client holds the key, for the whole of ``wait``.
        LeaseLost: The lease of an ``async with`` block was lost before the end of the block.
        RuntimeError: ``with`` and ``wait`` inside a running event loop; ``async with`` outside a
            task of asyncio; a second block of one object.
        StoreUnavailable: The store doesn't answer; the block has not run.
        TypeError, ValueError: An argument is wrong, or a decorated function returned a generator or
            a coroutine, whose code would run after the release.
    """

    __slots__ = ("_app", "_async_block", "_block")

    def __init__(
        self,
        key: str,
        *,
        scope: str,
        ttl: float | timedelta | None = None,
        wait: float | timedelta = 0,
        app: Celery | None = None,
    ) -> None:
        if not isinstance(key, str) or not key:  # type: ignore[redundant-expr]
            raise LockKeyError(f"hold({key!r}): give a non-empty str")
        given = {"scope": scope} if ttl is None else {"scope": scope, "ttl": ttl}
        policy = merge(Policy(key=key), given, where=f"hold({key!r})")
        self._block = Block(key, scope, None if ttl is None else policy.ttl, seconds("wait", wait))
        self._app = app

    def __enter__(self) -> Lease:
        block = self._block
        if block.longest:
            _refuse_event_loop(block.key)
        block.begin()
        # A wait may be interrupted: the client leaves the queue before the exception is handled.
        with closing(block.acquire(real_app(self._app))) as steps:
            for waiter, refused, left in steps:
                waiter.wait(refused, left)
        return block.enter()

    def __exit__(self, *exc_info: object) -> None:
        block = self._block
        # The release comes first, so that no failure below leaves the lease with the heartbeat.
        try:
            block.release()
        except BaseException:
            # A soft time limit or SIGTERM, perhaps before the heartbeat had discarded the lease.
            block.release()
            raise
        finally:
            block.leave()

    async def __aenter__(self) -> Lease:
        from .async_block import AsyncBlock  # a process without coroutines does not need asyncio

        self._async_block = AsyncBlock(self._block, real_app(self._app))
        return await self._async_block.enter()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> None:
        await self._async_block.exit(error)

    def __call__(self, function: F) -> F:
        """Decorate a function or a coroutine function."""

        async def call_async(*args: Any, **kwargs: Any) -> Any:
            async with self._again():
                return await function(*args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._again():
                result = function(*args, **kwargs)
                if isinstance(result, (Coroutine, Generator, AsyncGenerator)):
                    raise TypeError(_NOT_BEGUN.format(self._block.key, function, result))
                return result

        wrapper = call_async if iscoroutinefunction(function) else call
        return cast(F, wraps(function)(wrapper))

    def _again(self) -> hold:
        block = self._block
        return hold(block.key, scope=block.scope, ttl=block.ttl, wait=block.longest, app=self._app)


def _refuse_event_loop(key: str) -> None:
    """Raise inside a running event loop: waiting would block it, and the holder may need it."""
    # A process that has not imported asyncio runs no loop, and should not pay for the import.
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or asyncio._get_running_loop() is None:
        return
    raise RuntimeError(
        f"with hold({key!r}, wait=...) would block the running event loop, and the holder may need "
        f"that loop to finish. Write async with hold({key!r}, wait=...). If the block is in "
        "a function that is no coroutine, run that in a thread: await asyncio.to_thread(function)."
    )
