"""The value of a call that was skipped, and what tells it from a result of the task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeGuard, overload

from celery.result import AsyncResult, EagerResult, ResultBase

if TYPE_CHECKING:
    from ..core.lease import Holder

    _EagerResult = EagerResult[Any]
else:
    # Before Celery 5.7 the class is not generic at runtime.
    _EagerResult = EagerResult


_MARK: Final = "__singleton__"
_SKIPPED: Final = "skipped"


def skipped_value(
    task: str,
    key: str,
    holder: Holder,
    phase: str | None = None,
    retry_after: float | None = None,
) -> dict[str, Any]:
    """The value of a call of ``task`` that was skipped because ``holder`` has ``key``.

    With ``phase``, the holder is the message that has the claim: the call is a duplicate of it.
    With ``retry_after``, nobody refused the call, but the rate of the key, for so many seconds.
    """
    value: dict[str, Any] = {_MARK: _SKIPPED, "task": task, "key": key}
    if retry_after is not None:
        return {**value, "holder": {}, "retry_after": round(retry_after, 3)}
    value["holder"] = holder.for_error()
    return value if phase is None else {**value, "phase": phase}


class SkippedResult(_EagerResult):
    """The result of a call that was not published (``on_duplicate="skip"``): ready, and falsy."""

    def __bool__(self) -> bool:
        return False

    def __reduce_args__(self) -> tuple[Any, ...]:
        # For copies and pickles. Before Celery 5.7 they lose the name of the task.
        return self.id, self.result, self.state, self.traceback, self.name


@overload
def is_skipped(result: ResultBase) -> bool: ...


@overload
def is_skipped(result: object) -> TypeGuard[Mapping[str, Any]]: ...


def is_skipped(result: Any) -> bool:
    """Return whether a call was skipped.

    Its key was held, its rate was used up, or it was a duplicate (``on_duplicate="skip"``).

    Args:
        result: The value of ``.get()``, or a result that is ready, such as that of an eager call.

    Raises:
        TypeError: The call hasn't ended yet, or ``result`` is that of a group. Use the values of
            ``.get()`` then.
    """
    if isinstance(result, ResultBase):
        if not isinstance(result, AsyncResult):
            raise TypeError(
                f"is_skipped({result!r}): a group has a value for each call. Write "
                "[is_skipped(value) for value in results.get(timeout=10)]"
            )
        if not result.ready():
            raise TypeError(
                f"is_skipped({result!r}): this call has not ended, so it is not known yet whether "
                "it is skipped. Write is_skipped(result.get(timeout=10)). (A call that is not "
                'published, by on_duplicate="skip", is known at once: its result is false, as in '
                "`if not result:`.)"
            )
        result = result.result
    return isinstance(result, Mapping) and result.get(_MARK) == _SKIPPED
