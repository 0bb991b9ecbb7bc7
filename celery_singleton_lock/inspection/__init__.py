"""See who holds a key and why a task did not run, and free keys, as `celery singleton` does.

Each function takes the Celery app and uses the app's store. The objects that you get are frozen.
"""

from __future__ import annotations

from ..key_queue.cancel import cancel
from ..key_queue.inspection import (
    CallInQueue,
    calls_in_queue,
    find_call,
    find_calls,
    find_queue,
)
from ..typed_keys import AmbiguousKey, can_be_a_key
from .explain import Explanation, Fate, explain
from .keys import (
    Filter,
    HeldKey,
    SortBy,
    find_key,
    find_task,
    held_keys,
    release,
)
from .pauses import Paused, pause, pauses, resume

__all__ = [
    "AmbiguousKey",
    "CallInQueue",
    "Explanation",
    "Fate",
    "Filter",
    "HeldKey",
    "Paused",
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
    "held_keys",
    "pause",
    "pauses",
    "release",
    "resume",
]
