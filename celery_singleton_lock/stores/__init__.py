"""Opens a store by its URL.

Another package adds a scheme by an entry point of the group ``celery_singleton_lock.stores``. The
entry point's name is the scheme. It is called with the arguments of ``open_store``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Final

from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.core.store import Store
from celery_singleton_lock.errors import SettingsError
from celery_singleton_lock.policy import suggestion
from celery_singleton_lock.stores.urls import single_urls, split_url

__all__ = [
    "is_sentinel_url",
    "is_store_url",
    "names_nodes",
    "open_store",
    "shards_of",
    "with_tls",
]

_SINGLE: Final = ("redis", "rediss", "unix", "redis+socket", "valkey", "valkeys")
_SENTINEL: Final = ("sentinel", "sentinels")
_CLUSTER: Final = ("redis+cluster", "rediss+cluster", "valkey+cluster", "valkeys+cluster")
_REDLOCK: Final = ("redlock", "redlocks")
# The store of each scheme, and the extra that installs its client. A store is imported when it is
# opened, because its client may not be installed.
_STORES: Final = {
    **dict.fromkeys(_SINGLE, ("redis.store:RedisStore", "")),
    **dict.fromkeys(_SENTINEL, ("redis.store:RedisStore", "")),
    **dict.fromkeys(_CLUSTER, ("redis.cluster:ClusterStore", "")),
    **dict.fromkeys(_REDLOCK, ("redlock.store:RedlockStore", "")),
    **dict.fromkeys(("etcd", "etcds"), ("etcd.store:EtcdStore", "etcd")),
    **dict.fromkeys(("zk", "zks"), ("zookeeper.store:ZooKeeperStore", "zookeeper")),
    "memory": ("memory:MemoryStore", ""),
}
_GROUP: Final = "celery_singleton_lock.stores"
_WITH_TLS: Final = {"redis": "rediss", "valkey": "valkeys"}
# A shard is in one hash slot, so it is on one node. The number exceeds the masters of a cluster.
_CLUSTER_SHARDS: Final = 256


def is_store_url(url: str) -> bool:
    """Whether the URL of a result backend or broker names a server that can store leases."""
    return _scheme(url) in (*_SINGLE, *_SENTINEL, *_CLUSTER)


def is_sentinel_url(url: str) -> bool:
    """Whether ``url`` is a URL of sentinels."""
    return _scheme(url) in _SENTINEL


def shards_of(url: str) -> int:
    """The number of shards that the keys are spread over in the store of ``url``."""
    return _CLUSTER_SHARDS if _scheme(url) in _CLUSTER else 1


def with_tls(url: str) -> str:
    """``url`` with the scheme for TLS."""
    scheme = _scheme(url)
    return url.replace(scheme, _WITH_TLS.get(scheme, scheme), 1)


def names_nodes(url: str) -> bool:
    """Whether ``url`` is a URL of Redlock, which no result backend and no broker has."""
    return _scheme(url) in _REDLOCK


def open_store(
    url: str,
    *,
    clock: Clock | None = None,
    fence_base: int = 0,
    options: Mapping[str, Any] | None = None,
    wait_replicas: int = 0,
) -> Store:
    """The store that ``url`` names. It connects at its first use.

    Args:
        url: ``redis://``, ``rediss://``, ``unix://``, ``redis+socket://``, ``valkey://``,
            ``valkeys://``, ``sentinel://``, ``sentinels://``, ``redis+cluster://`` (``rediss``,
            ``valkey``, ``valkeys``), ``redlock://``, ``redlocks://``, ``etcd://``, ``etcds://``,
            ``zk://``, ``zks://``, ``memory://``, or a scheme of an entry point.
        clock: The clock for deadlines, and for expiry in a memory store.
        fence_base: Fences of this store are above it. Ignored by stores without fences.
        options: Options of the client's connection, such as ``{"ssl_ca_certs": ...}``; for Sentinel
            also ``master_name`` and ``sentinel_kwargs``. The options of Redlock are in its URL.
        wait_replicas: The number of replicas that must acknowledge a grant. Ignored by
            Redlock, whose nodes have no replicas, and by etcd and ZooKeeper, where a majority
            acknowledges every write.

    Raises:
        SettingsError: The scheme is unknown, its client isn't installed, or the URL can't be read.
    """
    scheme = _scheme(url)
    if scheme in _SINGLE and len(single_urls(url)) > 1:
        raise SettingsError(
            f"the store's URL names several servers, and {scheme}:// takes one: locks can't "
            "fail over to another server as a broker's connection does. Name one; or use "
            "sentinel://, redis+cluster:// or redlock://host1,host2,host3"
        )
    open_it = _load(scheme)
    if scheme in _REDLOCK:
        return open_it(url)
    if scheme == "memory":
        return open_it(clock or SystemClock(), fence_base=fence_base)
    arguments: dict[str, Any] = {"fence_base": fence_base, "options": options}
    if scheme in (*_SINGLE, *_SENTINEL, *_CLUSTER):
        if scheme in _SENTINEL:
            arguments["connect"] = _imported("redis.sentinel:SentinelConnections")
        return open_it(url, wait_replicas=wait_replicas, **arguments)
    if scheme in _STORES:
        return open_it(url, clock=clock, **arguments)
    return open_it(url, clock=clock, wait_replicas=wait_replicas, **arguments)


def _scheme(url: str) -> str:
    return split_url(url).scheme


def _load(scheme: str) -> Callable[..., Store]:
    """The class, or the function of another package, that opens a store with ``scheme``."""
    if scheme not in _STORES:
        return _registered(scheme)
    path, extra = _STORES[scheme]
    try:
        known: Callable[..., Store] = _imported(path)
    except ImportError as exc:
        if not extra:
            raise
        raise SettingsError(
            f"a store with the scheme {scheme!r} needs a client that is not installed ({exc}): "
            f'pip install "celery-singleton-lock[{extra}]"'
        ) from exc
    return known


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(f"{__name__}.{module}"), name)


def _registered(scheme: str) -> Callable[..., Store]:
    """The entry point that an installed package has registered for ``scheme``."""
    found = list(entry_points(group=_GROUP, name=scheme))
    if not found:
        known = {*_STORES, *entry_points(group=_GROUP).names}
        raise SettingsError(
            f"singleton_lock_url has the scheme {scheme!r}{suggestion(scheme, known)}"
        )
    try:
        maker: Callable[..., Store] = found[0].load()
    except Exception as exc:
        raise SettingsError(
            f"the store for {scheme!r}, registered as {found[0].value}, can't be loaded: {exc}"
        ) from exc
    return maker
