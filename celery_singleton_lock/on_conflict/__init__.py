"""The rules of ``on_conflict``: a file for each, and a line in `_RULES`."""

from __future__ import annotations

from typing import Final

from .cancel_running import CancelRunning
from .queue import Queue
from .raising import Raise
from .retry import Retry
from .revoke import Revoke
from .rule import ACTIONS, OnConflict
from .skip import Skip
from .wait import Wait

_RULES: Final = (Skip, Revoke, Retry, Wait, Raise, CancelRunning, Queue)

for _rule in _RULES:
    ACTIONS[_rule.action] = _rule
    setattr(OnConflict, _rule.action, _rule)
    # Users write OnConflict.retry(...), and read that in a repr; pickle finds it there, too.
    _rule.__module__ = __name__
    _rule.__name__, _rule.__qualname__ = _rule.action, f"OnConflict.{_rule.action}"

__all__ = [
    "ACTIONS",
    "CancelRunning",
    "OnConflict",
    "Queue",
    "Raise",
    "Retry",
    "Revoke",
    "Skip",
    "Wait",
]
