"""A distributed lock for Celery tasks: one run per key at a time, across workers and hosts.

Runs don't overlap even after a crash.

For maintainers, ``docs/dev/architecture.md`` says where each change is made.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core.key import PER_TASK
    from .core.lease import Lease
    from .core.rate import Rate
    from .errors import (
        DuplicateTask,
        FenceUnavailable,
        LeaseLost,
        LockConflict,
        LockKeyError,
        NoLease,
        QueueFull,
        SettingsError,
        SingletonLockError,
        StoreError,
        StoreUnavailable,
    )
    from .inspection.pauses import pause, resume
    from .message.skipped import is_skipped
    from .on_conflict import OnConflict
    from .policy import CallOptions
    from .publish.by_name import aclaim_and_send, claim_and_send
    from .task.base import SingletonTask
    from .task.context import current_lease
    from .task.decorator import singleton_task
    from .task.hold import hold
    from .task.option_types import CeleryOptions, LockOptions, TaskOptions

__version__ = "1.0.0rc1"

__all__ = ["PER_TASK", "CallOptions", "OnConflict", "Rate", "SingletonTask", "singleton_task"]
__all__ += ["CeleryOptions", "LockOptions", "TaskOptions"]
__all__ += ["Lease", "aclaim_and_send", "claim_and_send", "current_lease", "hold", "is_skipped"]
__all__ += ["pause", "resume"]
__all__ += ["DuplicateTask", "FenceUnavailable", "LeaseLost", "LockConflict", "LockKeyError"]
__all__ += ["NoLease", "QueueFull", "SettingsError", "SingletonLockError", "StoreError"]
__all__ += ["StoreUnavailable"]

# These names are imported on first access, as Celery's own names are. The command `celery` imports
# every package that adds a command, and a worker without singleton tasks must not pay for this one.
# No name may equal the name of its own module: importing the module elsewhere would replace it.
_LATER = {
    **dict.fromkeys(__all__, "errors"),
    **dict.fromkeys(("aclaim_and_send", "claim_and_send"), "publish.by_name"),
    "PER_TASK": "core.key",
    "CallOptions": "policy",
    "Lease": "core.lease",
    "OnConflict": "on_conflict",
    "Rate": "core.rate",
    "SingletonTask": "task.base",
    "current_lease": "task.context",
    "hold": "task.hold",
    **dict.fromkeys(("pause", "resume"), "inspection.pauses"),
    **dict.fromkeys(("CeleryOptions", "LockOptions", "TaskOptions"), "task.option_types"),
    "is_skipped": "message.skipped",
    "singleton_task": "task.decorator",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
        globals()[name] = value  # __getattr__ is not called again
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
