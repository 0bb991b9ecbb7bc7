"""The value and the result of a skipped call. The value is plain data for every serializer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from celery import states
from celery.result import EagerResult, ResultBase

if TYPE_CHECKING:
    from celery_singleton_lock.core.lease import Holder

    _EagerResult = EagerResult[Any]
else:
    # Before Celery 5.7 the class is not generic at runtime.
    _EagerResult = EagerResult

_MARK: Final = "__singleton__"
_SKIPPED: Final = "skipped"


def skipped_value(task: str, key: str, holder: Holder) -> dict[str, Any]:
    """The value of a call of ``task`` that was skipped because ``holder`` has ``key``."""
    return {_MARK: _SKIPPED, "task": task, "key": key, "holder": holder.for_error()}


class SkippedResult(_EagerResult):
    """The result of a call that was not published (``on_duplicate="skip"``): ready, and falsy.

    Args:
        task_id: The id that the message would have had.
        value: The value that ``get()`` returns; see :func:`skipped_value`.
        task: Name of the task.
    """

    def __init__(self, task_id: str, value: Mapping[str, Any], task: str) -> None:
        super().__init__(task_id, value, states.SUCCESS, name=task)
        self._arguments = (task_id, value, task)

    def __bool__(self) -> bool:
        return False

    def __reduce_args__(self) -> tuple[Any, ...]:
        return self._arguments  # for copies and pickles


def is_skipped(result: Any) -> bool:
    """Whether a call was skipped because another call held its key.

    Args:
        result: The value of ``.get()``, or an AsyncResult or EagerResult, which is read without
            waiting: a call that has not ended counts as not skipped.
    """
    if isinstance(result, ResultBase):
        result = result.result if result.ready() else None  # type: ignore[attr-defined]
    return isinstance(result, Mapping) and result.get(_MARK) == _SKIPPED
