"""Who holds what, and why a task did not run: `celery singleton ls`, `watch`, `explain` and others.

The values are frozen. Each function takes the Celery app, and reads the app's store.
"""

from __future__ import annotations

from ..core.lease import OperatorRelease
from .explain import Explanation, Fate, explain
from .keys import (
    Filter,
    HeldKey,
    SortBy,
    find_key,
    find_task,
    held_keys,
    overdue,
    release,
    unique_for_by_task,
    with_calls,
)
from .names import AmbiguousKey, can_be_a_key, forms_of
from .queues import CallInQueue, calls_in_queue, cancel, find_call, find_calls, find_queue

__all__ = [
    "AmbiguousKey",
    "CallInQueue",
    "Explanation",
    "Fate",
    "Filter",
    "HeldKey",
    "OperatorRelease",
    "SortBy",
    "calls_in_queue",
    "can_be_a_key",
    "cancel",
    "explain",
    "find_call",
    "find_calls",
    "find_key",
    "find_queue",
    "find_task",
    "forms_of",
    "held_keys",
    "overdue",
    "release",
    "unique_for_by_task",
    "with_calls",
]
