"""The memory store with the operations of its parts as methods, for tests that override them."""

from __future__ import annotations

from typing import Any

from celery_singleton_lock.stores.memory import MemoryStore

# The method of the store that carries out each operation of a part.
_METHODS = {
    "leases": {
        "acquire": "acquire",
        "renew": "renew_leases",
        "release": "release",
        "inspect": "inspect",
    },
    "claims": {"take": "take_claim"},
    "schedule": {"authorize": "authorize_run", "last_runs": "last_runs"},
    "call_queue": {"release": "release_queued"},
}


class FlatStore(MemoryStore):
    """A memory store with methods that a subclass overrides, such as ``acquire``, ``take_claim``.

    Every client of its parts calls these methods. The parts themselves don't.
    """

    def __init__(self, clock: Any, *, fence_base: int = 0) -> None:
        super().__init__(clock, fence_base=fence_base)
        self._inner: dict[str, Any] = {}
        for name, methods in _METHODS.items():
            part = self._inner[name] = getattr(self, name)
            setattr(self, name, _Outer(part, {one: getattr(self, methods[one]) for one in methods}))

    def acquire(self, request: Any, /, *, timeout: float = 0) -> Any:
        return self._inner["leases"].acquire(request, timeout=timeout)

    def renew_leases(self, leases: Any, /, *, timeout: float = 0) -> Any:
        return self._inner["leases"].renew(leases, timeout=timeout)

    def release(self, request: Any, /, *, timeout: float = 0) -> Any:
        return self._inner["leases"].release(request, timeout=timeout)

    def inspect(self, key: str, /) -> Any:
        return self._inner["leases"].inspect(key)

    def take_claim(self, request: Any, /, *, timeout: float = 0) -> Any:
        return self._inner["claims"].take(request, timeout=timeout)

    def authorize_run(self, request: Any, /, *, timeout: float = 0) -> Any:
        return self._inner["schedule"].authorize(request, timeout=timeout)

    def last_runs(self, keys: Any, /, *, timeout: float = 0) -> Any:
        return self._inner["schedule"].last_runs(keys, timeout=timeout)

    def release_queued(self, request: Any, /, *, timeout: float = 0) -> Any:
        return self._inner["call_queue"].release(request, timeout=timeout)


class _Outer:
    """A part, some of whose methods are those of the store."""

    def __init__(self, part: Any, methods: dict[str, Any]) -> None:
        self._part = part
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)
