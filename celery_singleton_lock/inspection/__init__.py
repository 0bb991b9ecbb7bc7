"""Who holds what, and why a task did not run: `celery singleton ls`, `watch`, `explain` and others.

The values are frozen. Each function takes the Celery app, and reads the app's store.
"""

from __future__ import annotations

from ..core.lease import OperatorRelease
from .explain import Explanation, Fate, explain
from .keys import (
    AmbiguousKey,
    Filter,
    HeldKey,
    SortBy,
    find_key,
    find_task,
    held_keys,
    overdue,
    release,
    unique_for_by_task,
)
from .names import can_be_a_key, forms_of

__all__ = [
    "AmbiguousKey",
    "Explanation",
    "Fate",
    "Filter",
    "HeldKey",
    "OperatorRelease",
    "SortBy",
    "can_be_a_key",
    "explain",
    "find_key",
    "find_task",
    "forms_of",
    "held_keys",
    "overdue",
    "release",
    "unique_for_by_task",
]
