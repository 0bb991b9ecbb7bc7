"""The decorator's options, for type checkers and editors. No module imports this one at runtime.

``tests/typing/test_options.py`` compares the names and values with those that are checked at
runtime (:class:`~celery_singleton_lock.policy.Policy`) and with the options of Celery's Task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, TypedDict

from ..core.key import KeySpec
from ..policy import CallOptions


class LockOptions(CallOptions, total=False):
    """The options of a task's lock: ``@app.task(base=SingletonTask, singleton=LockOptions(...))``.

    Written like that, or as ``@singleton_task(**LockOptions(...))``, a type checker checks each
    option by itself.
    """

    enabled: bool
    """Whether the task has a lock; False runs it as a plain task; True by default."""
    key: KeySpec
    """What must not run twice at once; by default all arguments."""
    scope: str | None
    """The namespace of the key, which tasks may share; by default the task's name."""
    limit: int
    """The number of bodies that may run at a time for one key; 1 by default."""
    max_hold: float | timedelta | None
    """Seconds after which a body loses its key; by default its hard time limit and ttl."""
    min_hold: float | timedelta
    """Seconds for which the key stays taken, even if the body ends sooner; 0 by default."""
    needs_fence: bool
    """Whether a worker without fencing tokens refuses to start; False by default."""
    hold_on_retry: bool
    """Whether the key stays reserved until the task's retry; True by default."""
    on_lost: Literal["retry", "fail", "continue"] | None
    """What follows a lost lease; "retry" for acks_late tasks, "fail" for others."""
    on_store_error: Literal["retry", "raise", "run"]
    """What a call does while the store does not answer; "retry" by default."""


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
    """The options of ``@singleton_task`` except ``app`` and ``bind``: the lock's and Celery's.

    As with Celery's decorator, any other keyword becomes an attribute of the task. To have such
    an attribute checked, declare it in a class of your own and give that as ``base``.
    """
