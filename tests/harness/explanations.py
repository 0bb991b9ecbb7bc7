"""What `explain` says of a task, once the task has the fate that a test has staged."""

from __future__ import annotations

from typing import Any

from celery import Celery

from celery_singleton_lock import inspection
from celery_singleton_lock.inspection import Explanation, Fate
from tests.harness.deliveries import wait_until


def explained(app: Celery, result: Any, fate: Fate, *, timeout: float = 1.0) -> Explanation:
    """The explanation of ``result`` (or of a task's id), once the task has this fate.

    Of a message that was requeued, the key is known once a worker has it again.

    Args:
        app: The app of the task.
        result: The result of the call, or the id.
        fate: The one to wait for.
        timeout: Seconds to wait for the replies of workers, each time.
    """
    found: list[Explanation] = []

    def has_fate() -> bool:
        found[:] = [inspection.explain(app, getattr(result, "id", result), timeout=timeout)]
        return found[0].fate is fate and (fate is not Fate.REQUEUED or found[0].key is not None)

    try:
        wait_until(has_fate, f"the fate is {fate}", timeout=30)
    except AssertionError as error:
        raise AssertionError(f"{error}: {found}") from None
    return found[0]


def text(found: Explanation) -> str:
    """All its sentences."""
    return "\n".join(found.sentences)
