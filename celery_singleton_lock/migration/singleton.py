"""celery-singleton's ``Singleton`` under a lease."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from hashlib import md5
from typing import Any, Final

from celery import Celery
from redis import Redis

from ..errors import SettingsError
from .bridge import A_DAY, Bridge, Terms, client_of

_BACKEND: Final = "celery_singleton.backends.redis.RedisBackend"


class DuplicateTaskError(Exception):
    """An equal call is queued or running. Like celery-singleton's, it has ``task_id``."""

    def __init__(self, message: str, task_id: str = "") -> None:
        super().__init__(message, task_id)
        self.task_id = task_id

    def __str__(self) -> str:
        return str(self.args[0])


class Singleton(Bridge):
    """The compatibility class for celery-singleton's ``Singleton``.

    Write ``@app.task(base=Singleton, unique_on=["user_id"], lock_expiry=60)``.

    Attributes:
        unique_on: The arguments that make calls equal. By default all.
        raise_on_duplicate: Whether a duplicate raises an error. By default the setting decides.
        lock_expiry: In how many seconds a claim expires. By default ``singleton_lock_expiry``.
            Without either, celery-singleton's key never expires, and this library's claim expires
            after a day.
    """

    abstract = True
    unique_on: str | Sequence[str] | None = None
    raise_on_duplicate: bool | None = None
    lock_expiry: float | None = None

    @classmethod
    def lock_options(cls) -> dict[str, Any]:
        names = [cls.unique_on] if isinstance(cls.unique_on, str) else cls.unique_on
        return {"key": tuple(names) if names else None}

    def claim_options(self) -> dict[str, Any]:
        return {"unique": "until_done", "unique_for": self._expiry or A_DAY}

    def terms(self, options: dict[str, Any]) -> Terms:
        return Terms(timeout=self._expiry, answer=lambda found: self.on_duplicate(found.task_id))

    def on_duplicate(self, existing_task_id: str) -> Any:
        """Return what the caller of a duplicate gets. You can override it."""
        raises = self.raise_on_duplicate
        if raises is None:
            raises = self.app.conf.get("singleton_raise_on_duplicate")
        if raises:
            what = f"Attempted to queue a duplicate of task ID {existing_task_id}"
            raise DuplicateTaskError(what, existing_task_id)
        return self.AsyncResult(existing_task_id)

    def generate_lock(self, task_name: str, task_args: Any = None, task_kwargs: Any = None) -> str:
        """Return the name of celery-singleton's key for a call."""
        args, kwargs = task_args or [], task_kwargs or {}
        if names := self.lock_options()["key"]:
            call = inspect.signature(self.run).bind(*args, **kwargs).arguments
            args, kwargs = [], {name: call[name] for name in names}
        text = task_name + json.dumps(args, sort_keys=True) + json.dumps(kwargs, sort_keys=True)
        return _prefix(self.app) + md5(text.encode(), usedforsecurity=False).hexdigest()

    def release_lock(self, task_args: Any = None, task_kwargs: Any = None) -> None:
        """Delete celery-singleton's key for a call, whoever claimed it."""
        self.old_client().delete(self.old_key(task_args, task_kwargs))

    def old_key(self, args: Any, kwargs: Any) -> str:
        return self.generate_lock(str(self.name), args, kwargs)

    def old_client(self) -> Redis:
        return _client(self.app)

    @property
    def _expiry(self) -> float | None:
        given = self.lock_expiry
        return self.app.conf.get("singleton_lock_expiry") if given is None else given


def clear_locks(app: Celery) -> None:
    """Delete all of celery-singleton's keys, even those of calls that are queued or running."""
    client = _client(app)
    for key in client.scan_iter(match=f"{_prefix(app)}*"):
        client.delete(key)


def _prefix(app: Celery) -> str:
    return str(app.conf.get("singleton_key_prefix", "SINGLETONLOCK_"))


def _client(app: Celery) -> Redis:
    conf = app.conf
    backend = conf.get("singleton_backend_class", _BACKEND)
    if backend != _BACKEND and getattr(backend, "__qualname__", "") != "RedisBackend":
        raise SettingsError(
            f"singleton_backend_class={backend!r}: a Singleton of celery_singleton_lock.migration "
            "takes celery-singleton's RedisBackend only. Make the task a @singleton_task"
        )
    url = conf.get("singleton_backend_url")
    if url is None:
        result = conf.get("result_backend")
        url = result if result and result.startswith("redis://") else conf.get("broker_url")
    options: dict[str, Any] = conf.get("singleton_backend_kwargs", {})
    return client_of(url, "singleton_backend_url, result_backend or broker_url", **options)
