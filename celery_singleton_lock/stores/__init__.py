"""The stores, and from a URL to one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.core.policy import suggestion
from celery_singleton_lock.core.store import Store
from celery_singleton_lock.errors import SettingsError

__all__ = ["is_store_url", "open_store"]

_REDIS_SCHEMES = frozenset({"redis", "rediss", "unix", "redis+socket"})
_SCHEMES = _REDIS_SCHEMES | {"memory"}


def is_store_url(url: str) -> bool:
    """Whether ``url``, of a result backend or broker, names a server that can hold leases."""
    return urlsplit(url).scheme in _REDIS_SCHEMES


def open_store(
    url: str,
    *,
    clock: Clock | None = None,
    fence_base: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Store:
    """The store that ``url`` names; nothing is sent before its first use.

    Args:
        url: ``redis://``, ``rediss://``, ``unix://``, ``redis+socket://`` or ``memory://``.
        clock: Of a memory store.
        fence_base: Fences of this store are above it.
        options: For the client's connection, such as ``{"ssl_ca_certs": ...}``.

    Raises:
        SettingsError: The scheme is unknown, or the URL can't be read.
    """
    scheme = urlsplit(url).scheme
    if scheme == "memory":
        from celery_singleton_lock.stores.memory import MemoryStore

        return MemoryStore(clock or SystemClock(), fence_base=fence_base)
    if scheme in _REDIS_SCHEMES:
        from celery_singleton_lock.stores.redis import RedisStore

        return RedisStore(url, fence_base=fence_base, options=options)
    raise SettingsError(
        f"singleton_lock_url has the scheme {scheme!r}{suggestion(scheme, _SCHEMES)}"
    )
