"""``hold()``: a lease outside of tasks, for a block or a function, with or without asyncio."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, Final, TypeVar, cast

from celery import Celery

from ..celery_compat import real_app
from ..core.lease import Lease
from ..errors import LockKeyError
from ..known_keys import refuse_foreign_key
from ..option_values import seconds
from ..policy import Policy, check_option, merge
from ..runtime import Runtime
from .context import Block

F = TypeVar("F", bound=Callable[..., Any])
_NOT_BEGUN: Final = (
    "@hold({0!r}) covers a call, but {1!r} returned {2!r}, whose code would run after the release. "
    "Use the block form inside it: with hold(...), or async with hold(...)."
)


class hold:
    """Hold a key in a ``with`` or ``async with`` block, or during each call of a function.

    No task and no other block with the same scope and key runs meanwhile. To lock the key of a
    task, write ``task.hold(42)`` with the arguments of a call.

    Example::

        with hold("account:42", scope="billing", wait=5) as lease:
            ...

    A ``with`` block is never interrupted: call ``lease.check()`` before writes that matter. An
    ``async with`` block never blocks the event loop. If its lease is lost, its asyncio task is
    cancelled, and the block raises LeaseLost.

    Blocks can be nested: inside a task or block that holds the same key, the block reuses that
    lease. A forked process doesn't inherit it.

    Args:
        key: The key without the scope: ``"account:42"`` for ``key="account:{account_id}"``.
        scope: The ``scope`` of the tasks, or a task's name.
        ttl: How long a dead process can block the key, in seconds. By default the app's
            ``singleton_lock_ttl``.
        wait: How long to wait for the key, in seconds. By default not at all.
        app: The Celery app whose store is used. By default the current app.

    Raises:
        LockConflict: The key is held or paused, or its rate is used up, and ``wait`` is over.
        LockKeyError: No task of the scope can have this key, or you passed a full key
            (``csl:...``).
        LeaseLost: The lease of an ``async with`` block was lost before the block ended.
        RuntimeError: You used ``with`` and ``wait`` in a running event loop, ``async with``
            outside an asyncio task, or one object for two blocks.
        StoreUnavailable: The store can't be reached; the block hasn't run.
        TypeError, ValueError: An argument is wrong, or a decorated function has returned a
            generator or a coroutine, whose code would run without the lock.
    """

    __slots__ = ("_app", "_async_block", "_block", "_is_of_call")

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
        self._is_of_call = False

    @classmethod
    def _of(cls, block: Block, app: Celery | None, *, is_of_call: bool) -> hold:
        made = cls.__new__(cls)
        made._block, made._app, made._is_of_call = block, app, is_of_call
        return made

    def set(
        self, *, wait: float | timedelta | None = None, ttl: float | timedelta | None = None
    ) -> hold:
        """Return a hold of the same key with other options: ``task.hold(42).set(wait=5)``.

        Args:
            wait: How long to wait for the key, in seconds; unchanged by default.
            ttl: How long a dead process can block the key, in seconds; unchanged by default.
        """
        block = self._block
        longest = block.longest if wait is None else seconds("wait", wait)
        lasts = block.ttl if ttl is None else check_option(Policy, "ttl", ttl)
        copy = Block(block.key, block.scope, lasts, longest)
        return self._of(copy, self._app, is_of_call=self._is_of_call)

    def __enter__(self) -> Lease:
        block = self._block
        if block.longest:
            _refuse_event_loop(block.key)
        app = self._checked_app()
        block.begin()
        # A wait may be interrupted: the client leaves the queue before the exception is handled.
        with closing(block.acquire(app)) as steps:
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

        self._async_block = AsyncBlock(self._block, self._checked_app())
        return await self._async_block.enter()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> None:
        await self._async_block.exit(error)

    def __call__(self, function: F) -> F:
        """Decorate a function or a coroutine function."""

        async def call_async(*args: Any, **kwargs: Any) -> Any:
            async with self.set():
                return await function(*args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.set():
                result = function(*args, **kwargs)
                if isinstance(result, (Coroutine, Generator, AsyncGenerator)):
                    raise TypeError(_NOT_BEGUN.format(self._block.key, function, result))
                return result

        wrapper = call_async if iscoroutinefunction(function) else call
        return cast(F, wraps(function)(wrapper))

    def _checked_app(self) -> Celery:
        """The app whose store is used, after a check of the key."""
        app: Celery = real_app(self._app)
        if not self._is_of_call:
            key, scope = self._block.key, self._block.scope
            runtime = Runtime.of(app, eager=bool(app.conf.task_always_eager))
            refuse_foreign_key(runtime, key, scope, where=f"hold({key!r}, scope={scope!r})")
        return app


def hold_call(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> hold:
    """The `hold` of the key that a call of ``task`` with these arguments has.

    Raises:
        TypeError, LockKeyError: See `SingletonTask.hold`.
    """
    suffix: str | None = task.singleton_key_suffix(args, kwargs)
    if suffix is None:
        raise LockKeyError(
            f"{task.name}: the key function returns None for these arguments, so a call with them "
            "takes no lock, and there is no key to hold"
        )
    block = Block(suffix, task.singleton_scope, task.singleton_policy().ttl, 0.0)
    return hold._of(block, task.app, is_of_call=True)


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
