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
    """False runs the task without a lock, as a plain Celery task. Default: True."""
    key: KeySpec
    """What must not run twice at the same time. Default: all arguments."""
    scope: str | None
    """Namespace of the key; tasks may share it. Default: the task's name."""
    limit: int
    """How many calls of a key may run at the same time. Default: 1."""
    rate: Rate | str | float | None
    """How many calls of a key may start in a time, such as "10/m". Default: no limit."""
    max_hold: float | timedelta | None
    """The longest a run may hold its key, in seconds. Default: hard time limit + ttl."""
    min_hold: float | timedelta
    """How long a key stays taken from the start of a run, in seconds. Default: 0."""
    needs_fence: bool
    """Refuse to start a worker whose store has no fencing tokens. Default: False."""
    hold_on_retry: bool
    """Keep the key reserved until the task's next retry. Default: True."""
    on_lost: Literal["retry", "fail", "continue"] | None
    """What a run does when its lock is lost. Default: "retry" if acks_late, else "fail"."""
    on_store_error: Literal["retry", "raise", "run"]
    """What a call does when the store can't be reached. Default: "retry"."""


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
