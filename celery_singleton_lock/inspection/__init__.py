"""See who holds what, and release it: the API of ``celery singleton ls | show | release``.

The values are frozen. Each function takes the Celery app, and reads the app's store.
"""

from __future__ import annotations

from ..core.lease import OperatorRelease
from .keys import (
    AmbiguousKey,
    Filter,
    HeldKey,
    SortBy,
    find_key,
    find_task,
    held_keys,
    release,
)
from .names import can_be_a_key, forms_of

__all__ = [
    "AmbiguousKey",
    "Filter",
    "HeldKey",
    "OperatorRelease",
    "SortBy",
    "can_be_a_key",
    "find_key",
    "find_task",
    "forms_of",
    "held_keys",
    "release",
]
