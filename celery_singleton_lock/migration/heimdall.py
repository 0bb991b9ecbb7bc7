"""celery-heimdall's ``HeimdallTask`` under a lease, for tasks with ``unique``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from hashlib import md5
from typing import Any, Final

from celery.utils import uuid
from kombu import serialization
from redis import Redis

from ..errors import SettingsError
from ..message.header import is_named
from .bridge import Bridge, Existing, Terms, claim, client_of, refuse_unknown

logger = logging.getLogger("celery_singleton_lock")

_RATE: Final = (
    'a rate limit moves without this class: write @singleton_task(rate=Rate("10/m", burst=10), '
    'on_conflict="queue") for "times": 10, "per": 60'
)
_UNIQUE: Final = (
    *("key", "lock_prefix", "unique", "unique_lock_blocking", "unique_lock_timeout"),
    *("unique_raises", "unique_timeout", "unique_wait_for_expiry"),
)
_RATES: Final = ("per", "rate_limit", "rate_limit_prefix", "times")
_OPTIONS: Final = dict.fromkeys(_UNIQUE, "") | dict.fromkeys(_RATES, _RATE)
# celery-heimdall's defaults of options that may also be settings, with the prefix heimdall_.
_DEFAULTS: Final[dict[str, Any]] = {
    "lock_prefix": "h-lock:",
    "unique_lock_blocking": True,
    "unique_lock_timeout": 1,
    "unique_raises": False,
    "unique_timeout": 3600,
}


class AlreadyQueuedError(Exception):
    """An equal call is queued or running. It has the attributes of celery-heimdall's error."""

    def __init__(self, expires_in: float | None = None, likely_culprit: str | None = None) -> None:
        super().__init__(expires_in, likely_culprit)
        self.expires_in = expires_in
        self.likely_culprit = likely_culprit


class HeimdallTask(Bridge):
    """The compatibility class for celery-heimdall's ``HeimdallTask``.

    Write ``@app.task(base=HeimdallTask, heimdall={"unique": True, "unique_timeout": 60})``.

    Attributes:
        heimdall: celery-heimdall's options; ``unique`` must be among them.
    """

    abstract = True
    heimdall: Mapping[str, Any] = {}

    @classmethod
    def lock_options(cls) -> dict[str, Any]:
        where, given = f"{cls.name}: heimdall", cls.heimdall
        refuse_unknown(given, _OPTIONS, where)
        if "unique" not in given:
            raise TypeError(f"{where}={dict(given)!r} has no 'unique': such a task needs no lock")
        if "key" not in given:
            return {"key": None}
        # celery-heimdall's own keys have no name of a task in them.
        scope = given.get("lock_prefix", _DEFAULTS["lock_prefix"])
        return {"scope": scope, "key": lambda *args, **kwargs: _own_key(given, args, kwargs)}

    def claim_options(self) -> dict[str, Any]:
        unique = "until_done" if self.frees_at_end else "until_expired"
        return {"unique": unique, "unique_for": self._option("unique_timeout")}

    def terms(self, options: dict[str, Any]) -> Terms:
        def answer(existing: Existing) -> Any:
            if self._option("unique_raises"):
                raise AlreadyQueuedError(int(existing.remaining), existing.task_id)
            return self.AsyncResult(existing.task_id)

        wait = self._option("unique_lock_timeout") if self._option("unique_lock_blocking") else None
        return Terms(timeout=self._option("unique_timeout"), wait=wait, answer=answer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Called under the lease. celery-heimdall claims here too, for calls that Beat or send_task
        # has published without its apply_async.
        request = self.request
        if self._bridges and not request.called_directly:
            mine = str(request.id)
            key, timeout = self.old_key(args, kwargs), self._option("unique_timeout")
            existing = claim(self.heimdall_redis, key, mine, timeout, None)
            if existing is not None and existing.task_id != mine and not is_named(request):
                what = f"{self.name}[{mine}] is skipped"
                logger.info("singleton: %s: %s has its key", what, existing.task_id)
                return None
        return super().__call__(*args, **kwargs)

    @property
    def frees_at_end(self) -> bool:  # type: ignore[override]
        return not self.heimdall.get("unique_wait_for_expiry")

    @property
    def heimdall_redis(self) -> Redis:
        """As celery-heimdall's: the client of its keys."""
        return self.setup_redis()

    def setup_redis(self) -> Redis:
        """Return a client of the result backend's Redis, or the broker's. You can override it."""
        urls = [self.app.conf.get(name) or "" for name in ("result_backend", "broker_url")]
        for url in urls:
            if url.startswith("redis://"):
                return client_of(url, "result_backend or broker_url")
        raise SettingsError(
            f"{self.name}: neither result_backend nor broker_url begins with redis://. Override "
            "setup_redis(), as with celery-heimdall"
        )

    def only_after(self, key: str, seconds: float) -> bool:
        """Return True if this hasn't returned True for ``key`` in the last ``seconds``."""
        mine = uuid()
        existing = claim(self.heimdall_redis, key, mine, seconds, None)
        # A client may repeat a request without a reply: the first one has set the key then.
        return existing is None or existing.task_id == mine

    def old_key(self, args: Any, kwargs: Any) -> str:
        """Return the key that celery-heimdall would use for these arguments."""
        args, kwargs, prefix = args or [], kwargs or {}, self._option("lock_prefix")
        if "key" in self.heimdall:
            return f"{prefix}{_own_key(self.heimdall, args, kwargs)}"
        _, _, data = serialization.dumps((args, kwargs), "json")
        text = f"{self.name}{data}".encode()
        return f"{prefix}{md5(text, usedforsecurity=False).hexdigest()}"

    def old_client(self) -> Redis:
        return self.heimdall_redis

    def _option(self, name: str) -> Any:
        given = self.heimdall.get(name)
        return self.app.conf.get(f"heimdall_{name}", _DEFAULTS[name]) if given is None else given


def _own_key(heimdall: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
    key = heimdall["key"]
    return key(args, kwargs) if callable(key) else key
