"""Tools for your own tests, which need no server.

The pytest plugin of this package has the fixture ``singleton_store``, a :class:`SingletonStore`.
"""

from __future__ import annotations

from .manual_clock import ManualClock
from .singleton_store import SingletonStore, hold_claim, hold_lock, is_skipped, lose_lease

__all__ = ["ManualClock", "SingletonStore", "hold_claim", "hold_lock", "is_skipped", "lose_lease"]
