"""Drop-in bases for tasks of celery-once, celery-singleton and celery-heimdall.

They take the old package's options, and honour and free its keys while old processes still run.
docs/migration has a page for each package. No other module of this library imports this one.
"""

from __future__ import annotations

from .heimdall import AlreadyQueuedError, HeimdallTask
from .once import AlreadyQueued, QueueOnce
from .singleton import DuplicateTaskError, Singleton, clear_locks

__all__ = ["AlreadyQueued", "QueueOnce"]
__all__ += ["DuplicateTaskError", "Singleton", "clear_locks"]
__all__ += ["AlreadyQueuedError", "HeimdallTask"]
