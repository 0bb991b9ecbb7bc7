"""The value a skipped call returns: plain data, so that every serialiser carries it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from celery.result import ResultBase

from celery_singleton_lock.core.lease import Holder

__all__ = ["is_skipped", "skipped_value"]

_MARK: Final = "__singleton__"
_SKIPPED: Final = "skipped"


def skipped_value(task: str, key: str, holder: Holder) -> dict[str, Any]:
    """What a call of ``task`` returns that was skipped because ``holder`` has ``key``."""
    return {
        _MARK: _SKIPPED,
        "task": task,
        "key": key,
        "holder": holder.for_error(),
    }


def is_skipped(result: Any) -> bool:
    """Whether a call was skipped because another one held its key.

    Args:
        result: What ``.get()`` returned, or an AsyncResult or EagerResult (read without waiting: a
            call that hasn't ended was not skipped yet).
    """
    if isinstance(result, ResultBase):
        result = result.result if result.ready() else None  # type: ignore[attr-defined]
    return isinstance(result, Mapping) and result.get(_MARK) == _SKIPPED
