"""The exceptions of the library.

Celery's serializers rebuild an exception from its positional arguments. So every class here takes
positional arguments only and keeps them all in ``args``. (Exceptions with keyword-only constructors
are deserialized as ``UnpickleableExceptionWrapper``.)
"""

from __future__ import annotations

from typing import Any, Final

#: The documentation site, with which texts for users begin their links.
DOCS: Final = "https://celery-singleton-lock.readthedocs.io/en/stable/"


class SingletonLockError(Exception):
    """Base class of all errors that this library raises."""

    def __str__(self) -> str:
        # The first argument is the message; the others are data.
        return str(self.args[0]) if self.args else type(self).__name__


class LockConflict(SingletonLockError):
    """Another task holds the key, and the policy does not allow the call to continue without it.

    Arguments: the message, the key, the holder as a dict (task, task_id, worker).
    """

    def __init__(self, message: str, key: str = "", holder: dict[str, Any] | None = None) -> None:
        super().__init__(message, key, holder or {})
        self.key = key
        self.holder = holder or {}


class DuplicateTask(SingletonLockError):
    """An equal call is queued or running already, so this one was not published.

    Arguments: the message, the id of that call, seconds until its claim expires.
    """

    def __init__(self, message: str, task_id: str = "", remaining: float = 0.0) -> None:
        super().__init__(message, task_id, remaining)
        self.task_id = task_id
        self.remaining = remaining


class QueueFull(SingletonLockError):
    """As many calls are in the queue of a key as may, so this one was not made.

    Arguments: the message, how many calls are in the queue.
    """

    def __init__(self, message: str, depth: int = 0) -> None:
        super().__init__(message, depth)
        self.depth = depth


class LeaseLost(SingletonLockError):
    """The lease ended before the body did; another worker may be running the task.

    Arguments: the message, the key, the reason (a `LossReason`).
    """

    def __init__(self, message: str, key: str = "", reason: str = "") -> None:
        super().__init__(message, key, reason)
        self.key = key
        self.reason = reason


class NoLease(SingletonLockError, LookupError):
    """No lease is held in the context in which ``current_lease()`` was called."""


class FenceUnavailable(SingletonLockError):
    """This lease has no fencing token: its store, or its ``limit`` above 1, can't give one."""


class LockKeyError(SingletonLockError, ValueError):
    """The lock key of a call can't be computed from its arguments."""


class SettingsError(SingletonLockError, ValueError):
    """An app setting (``singleton_lock_*``) or the store's URL is wrong; no worker starts."""


class StoreError(SingletonLockError):
    """The store refused a request (wrong password, read-only, out of memory)."""


class StoreUnavailable(StoreError):
    """The store did not answer in time; the request may or may not have been carried out.

    Attributes:
        was_idle: Whether the request was sent on a connection that had been idle. A NAT, a load
            balancer or a restart of the server may have dropped it; a new connection may work.
        was_sent: Whether the request may have left: a connection was open.
    """

    was_idle = False
    was_sent = True
