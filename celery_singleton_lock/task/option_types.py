"""The decorator's options, for type checkers and editors. No module imports this one at runtime.

``tests/typing/test_options.py`` compares the names and values with those that are checked at
runtime (:class:`~celery_singleton_lock.policy.Policy`) and with the options of Celery's Task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, TypedDict

from ..core.key import KeySpec
from ..core.rate import Rate
from ..policy import CallOptions


class LockOptions(CallOptions, total=False):
    """The options of a task's lock, for type checkers.

    Write ``@singleton_task(**LockOptions(...))``, or
    ``@app.task(base=SingletonTask, singleton=LockOptions(...))``: then a type checker names the
    option that is wrong.
    """

    enabled: bool
    """False runs the task without a lock, as a plain Celery task (default True)."""
    key: KeySpec
    """What must not run twice at once, such as "account:{id}" (default all arguments)."""
    scope: str | None
    """Namespace of the key, which tasks may share (default the task's name)."""
    limit: int
    """How many calls of a key may run at the same time (default 1)."""
    rate: Rate | str | float | None
    """How many calls of a key may start in a period, such as "10/m" (default no limit)."""
    max_hold: float | timedelta | None
    """How long the lock is renewed, in seconds (default hard time limit + ttl, or none)."""
    min_hold: float | timedelta
    """How long a key stays taken from the start of a run, in seconds (default 0)."""
    needs_fence: bool
    """Refuse to start a worker whose store has no fencing tokens (default False)."""
    hold_on_retry: bool
    """Keep the key reserved until the task's next retry (default True)."""
    on_lost: Literal["retry", "fail", "continue"] | None
    """If the lock is lost, "retry" (default if acks_late), "fail" (else) or "continue"."""
    on_store_error: Literal["retry", "raise", "run"]
    """If the store is unreachable, "retry" (default), "raise" or "run"."""


class CeleryOptions(TypedDict, total=False):
    """Celery's own options of a task, except ``app`` and ``bind``."""

    name: str
    base: type[Any] | None
    typing: bool
    shared: bool
    lazy: bool
    filter: Callable[..., Any]
    Request: str | type[Any]
    Strategy: str

    acks_late: bool
    acks_on_failure: bool
    acks_on_failure_or_timeout: bool
    acks_on_timeout: bool
    reject_on_worker_lost: bool
    retry_on_worker_lost: bool

    autoretry_for: Sequence[type[BaseException]]
    dont_autoretry_for: Sequence[type[BaseException]]
    retry_kwargs: Mapping[str, Any]
    retry_backoff: bool | float
    retry_backoff_max: float
    retry_jitter: bool
    max_retries: int | None
    default_retry_delay: float

    soft_time_limit: float | None
    time_limit: float | None
    rate_limit: str | float | None
    expires: float | datetime | None
    priority: int | None

    queue: str
    exchange: str
    exchange_type: str
    routing_key: str
    delivery_mode: int | str

    backend: Any
    serializer: str
    ignore_result: bool
    store_eager_result: bool
    store_errors_even_if_ignored: bool
    resultrepr_maxsize: int
    send_events: bool
    throws: tuple[type[BaseException], ...]
    track_started: bool
    trail: bool

    pydantic: bool
    pydantic_context: Mapping[str, Any] | None
    pydantic_dump_kwargs: Mapping[str, Any] | None
    pydantic_strict: bool

    after_return: Callable[..., Any]
    before_start: Callable[..., Any]
    on_failure: Callable[..., Any]
    on_replace: Callable[..., Any]
    on_retry: Callable[..., Any]
    on_success: Callable[..., Any]
    shadow_name: Callable[..., Any]


class TaskOptions(LockOptions, CeleryOptions, total=False):
    """All options of ``@singleton_task``, the lock's and Celery's, except ``app`` and ``bind``.

    Any other keyword becomes an attribute of the task. To have it checked, declare it in a class
    of your own and pass that as ``base``.
    """
