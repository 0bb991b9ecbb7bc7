"""The exceptions that the library raises. Each is picklable, and keeps its data in ``args``."""

# Celery's serializers rebuild an exception from its positional arguments. So every class here takes
# positional arguments only and keeps them all in ``args``. (Exceptions with keyword-only
# constructors are deserialized as ``UnpickleableExceptionWrapper``.)

from __future__ import annotations

from typing import Any, Final

#: The documentation site, with which texts for users begin their links.
DOCS: Final = "https://celery-singleton-lock.readthedocs.io/en/stable/"


class SingletonLockError(Exception):
    """The base class of all errors that this library raises."""

    def __str__(self) -> str:
        # The first argument is the message; the others are data.
        return str(self.args[0]) if self.args else type(self).__name__


class LockConflict(SingletonLockError):
    """The call couldn't get its key: another call holds it, it's paused, or its rate is used up.

    ``hold()`` raises this too.

    Attributes:
        key: The full key.
        holder: Who holds it: a dict with ``task``, ``task_id`` and ``worker``.
        retry_after: Seconds until the pause ends or the rate lets a call start. None otherwise, or
            if the pause has no end.
    """

    def __init__(
        self,
        message: str,
        key: str = "",
        holder: dict[str, Any] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, key, holder or {}, retry_after)
        self.key = key
        self.holder = holder or {}
        self.retry_after = retry_after


class DuplicateTask(SingletonLockError):
    """An equal call is queued or running, so this one wasn't sent (``on_duplicate="raise"``).

    Attributes:
        task_id: The id of the equal call.
        remaining: The seconds until its claim expires.
    """

    def __init__(self, message: str, task_id: str = "", remaining: float = 0.0) -> None:
        super().__init__(message, task_id, remaining)
        self.task_id = task_id
        self.remaining = remaining


class QueueFull(SingletonLockError):
    """The queue of the key is full (``max_waiting``), so this call wasn't made.

    Attributes:
        depth: The number of calls in the queue.
    """

    def __init__(self, message: str, depth: int = 0) -> None:
        super().__init__(message, depth)
        self.depth = depth


class LeaseLost(SingletonLockError):
    """The lease was lost while the task or block ran. Another worker may be running the task.

    Attributes:
        key: The full key.
        reason: Why the lease was lost, as in the event ``lease-lost``.
    """

    def __init__(self, message: str, key: str = "", reason: str = "") -> None:
        super().__init__(message, key, reason)
        self.key = key
        self.reason = reason


class NoLease(SingletonLockError, LookupError):
    """The code that called ``current_lease()`` holds no lease."""


class FenceUnavailable(SingletonLockError):
    """The lease has no fencing token, because of its store or a ``limit`` above 1."""


class LockKeyError(SingletonLockError, ValueError):
    """No key can be made of the call's arguments, or ``hold()`` got a key that no task can have."""


class SettingsError(SingletonLockError, ValueError):
    """A setting (``singleton_lock_...``) or the store's URL is wrong.

    It's also raised if the store lacks a feature that you use.
    """


class StoreError(SingletonLockError):
    """The store refused a request: a wrong password, a read-only server, no memory left."""


class StoreUnavailable(StoreError):
    """The store can't be reached or has timed out. It may have carried out the request.

    Attributes:
        was_idle: Whether the connection had been idle. A NAT, a load balancer or a restart of the
            server may have dropped it, and a new connection may work.
        was_sent: Whether the request may have been sent. If not, it wasn't carried out.
    """

    was_idle = False
    was_sent = True
