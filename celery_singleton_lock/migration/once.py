"""celery-once's ``QueueOnce`` under a lease."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

from celery import states
from celery.result import EagerResult
from redis import Redis

from ..core.key import PER_TASK
from ..errors import SettingsError
from .bridge import Bridge, Existing, Terms, client_of, refuse_unknown

_OPTIONS: Final = dict.fromkeys(("graceful", "keys", "timeout", "unlock_before_run"), "")
_CALL_OPTIONS: Final = dict.fromkeys(("graceful", "timeout"), "") | dict.fromkeys(
    ("keys", "unlock_before_run"), "celery-once reads it from the task only"
)
_BACKENDS: Final = ("celery_once.backends.Redis", "celery_once.backends.redis.Redis")


class AlreadyQueued(Exception):
    """An equal call is queued or running. It has the attributes of celery-once's error."""

    def __init__(self, countdown: float) -> None:
        self.message = f"Expires in {countdown} seconds"
        self.countdown = countdown


class QueueOnce(Bridge):
    """The compatibility class for celery-once's ``QueueOnce``.

    Write ``@app.task(base=QueueOnce, once={"keys": [...], "graceful": True, "timeout": 60})``.

    Attributes:
        once: celery-once's options.
    """

    abstract = True
    once: Mapping[str, Any] = {}
    token_length = 32  # redis-py's Lock: uuid1().hex

    @classmethod
    def lock_options(cls) -> dict[str, Any]:
        refuse_unknown(cls.once, _OPTIONS, f"{cls.name}: once")
        keys = cls.once.get("keys")
        return {"key": None if keys is None else tuple(keys) or PER_TASK}

    def claim_options(self) -> dict[str, Any]:
        starts = self.unlock_before_run()
        return {
            "unique": "until_start" if starts else "until_done",
            "unique_for": self._timeout({}),
        }

    def terms(self, options: dict[str, Any]) -> Terms:
        once = options.pop("once", None) or {}
        refuse_unknown(once, _CALL_OPTIONS, f"apply_async(once=...) of {self.name}")
        graceful = once.get("graceful", self.once.get("graceful", False))

        def answer(existing: Existing) -> Any:
            if graceful:
                return EagerResult(None, None, states.REJECTED)  # type: ignore[arg-type]
            raise AlreadyQueued(existing.remaining)

        settings = self._once_settings
        wait = settings.get("blocking_timeout", 1) if settings.get("blocking") else None
        return Terms(timeout=self._timeout(once), wait=wait, answer=answer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Called under the lease. A retry has freed its claim in its first attempt, and the key may
        # be the next call's by now.
        request = self.request
        if self.unlock_before_run() and not (request.called_directly or request.retries):
            self.free_old_key(args, kwargs, str(request.id))
        return super().__call__(*args, **kwargs)

    @property
    def frees_at_end(self) -> bool:  # type: ignore[override]
        return not self.unlock_before_run()

    def unlock_before_run(self) -> bool:
        """As celery-once's: whether the claim ends when the body begins."""
        return bool(self.once.get("unlock_before_run", False))

    def get_key(self, args: Any = None, kwargs: Any = None) -> str:
        """Return the name of celery-once's key for a call."""
        signature = inspect.signature(self.run)
        call: dict[str, Any] = signature.bind(*args or (), **kwargs or {}).arguments
        keys = self.once.get("keys")
        named = call if keys is None else {name: call[name] for name in keys}
        parts = [f"{name}-{_text(named[name])!s}" for name in sorted(named)]
        return "_".join(["qo", str(self.name), *parts])

    def old_key(self, args: Any, kwargs: Any) -> str:
        return self.get_key(args, kwargs)

    def old_client(self) -> Redis:
        once = self.app.conf.get("ONCE") or {}
        if once.get("backend") not in _BACKENDS:
            raise SettingsError(
                f"{self.name}: ONCE has backend {once.get('backend')!r}; a QueueOnce of "
                f"celery_singleton_lock.migration takes {_BACKENDS[0]} only. Otherwise make "
                "the task a @singleton_task"
            )
        url = str(self._once_settings.get("url")).replace("redis+socket://", "unix://", 1)
        return client_of(url, "ONCE['settings']['url']")

    @property
    def _once_settings(self) -> Mapping[str, Any]:
        settings: Mapping[str, Any] = (self.app.conf.get("ONCE") or {}).get("settings") or {}
        return settings

    def _timeout(self, once: Mapping[str, Any]) -> float:
        default = self._once_settings.get("default_timeout", 3600)
        return float(once.get("timeout", self.once.get("timeout", default)))


def _text(value: Any) -> Any:
    """The form of a value in a key: dicts are sorted, at any depth of dicts and lists."""
    if isinstance(value, dict):
        pairs = sorted(value.items(), key=lambda pair: pair[0])
        texts = [str({_text(name): _text(inner)}).strip("{}") for name, inner in pairs]
        return "{" + ", ".join(texts) + "}"
    return [_text(inner) for inner in value] if isinstance(value, list) else value
