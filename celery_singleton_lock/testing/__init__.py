"""Tools for users' own tests: an in-memory store with a manual clock, and staged conflicts.

The pytest plugin of this package provides the fixture ``singleton_store``.
"""

from __future__ import annotations

from .stage import ManualClock, SingletonStore, hold_claim, hold_lock, is_skipped, lose_lease

__all__ = ["ManualClock", "SingletonStore", "hold_claim", "hold_lock", "is_skipped", "lose_lease"]
