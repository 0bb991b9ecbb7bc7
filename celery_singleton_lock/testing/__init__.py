"""Tools for users' own tests: an in-memory store with a manual clock, and staged conflicts.

The pytest plugin of this package provides the fixture ``singleton_store``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .stage import ManualClock, SingletonStore, hold_lock, is_skipped, lose_lease

__all__ = ["ManualClock", "SingletonStore", "hold_lock", "is_skipped", "lose_lease"]

if not TYPE_CHECKING:
    # pytest imports this package with its plugin in every project that has it installed. So Celery
    # and the modules of the lock are imported on first access.
    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.stage"), name)
