"""The stores, and from a URL to one of them.

A package of somebody else's adds a scheme by an entry point of the group
``celery_singleton_lock.stores``: its name is the scheme, and it is called as ``open_store`` is.
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
from celery_singleton_lock.stores.redlock import url as redlock_url
from celery_singleton_lock.stores.urls import single_urls, split_url

__all__ = [
    "is_sentinel_url",
    "is_store_url",
    "names_nodes",
    "open_store",
    "shards_of",
    "with_tls",
]

_SINGLE: Final = frozenset({"redis", "rediss", "unix", "redis+socket", "valkey", "valkeys"})
_SENTINEL: Final = frozenset({"sentinel", "sentinels"})
_CLUSTER: Final = frozenset(
    {"redis+cluster", "rediss+cluster", "valkey+cluster", "valkeys+cluster"}
)
# Scheme to class, and to the extra that installs the client.
_CONSENSUS: Final = {
    **dict.fromkeys(
        ("etcd", "etcds"),
        ("celery_singleton_lock.stores.etcd.store:EtcdStore", "etcd"),
    ),
    **dict.fromkeys(
        ("zk", "zks"), ("celery_singleton_lock.stores.zookeeper.store:ZooKeeperStore", "zookeeper")
    ),
}
_SCHEMES: Final = _SINGLE | _SENTINEL | _CLUSTER | redlock_url.SCHEMES | {*_CONSENSUS, "memory"}
_GROUP: Final = "celery_singleton_lock.stores"
_WITH_TLS: Final = {"redis": "rediss", "valkey": "valkeys"}
# A fixed number, and more than a cluster has masters: each shard is in one slot, so on one node.
_CLUSTER_SHARDS: Final = 256


def is_store_url(url: str) -> bool:
    """Whether ``url``, of a result backend or broker, names a server that can hold leases."""
    return split_url(url).scheme in _SINGLE | _SENTINEL | _CLUSTER


def is_sentinel_url(url: str) -> bool:
    """Whether ``url`` is one of sentinels, of which a setting may name several."""
    return split_url(url).scheme in _SENTINEL


def shards_of(url: str) -> int:
    """How many shards the keys are spread over in the store that ``url`` names."""
    return _CLUSTER_SHARDS if split_url(url).scheme in _CLUSTER else 1


def with_tls(url: str) -> str:
    """``url`` by the name that its scheme has with TLS, where that is another one."""
    scheme = split_url(url).scheme
    return url.replace(scheme, _WITH_TLS.get(scheme, scheme), 1)


def names_nodes(url: str) -> bool:
    """Whether ``url`` names several servers, as no result backend or broker does."""
    return url.partition("://")[0] in redlock_url.SCHEMES


def open_store(
    url: str,
    *,
    clock: Clock | None = None,
    fence_base: int = 0,
    options: Mapping[str, Any] | None = None,
    wait_replicas: int = 0,
) -> Store:
    """The store that ``url`` names; nothing is sent before its first use.

    Args:
        url: ``redis://``, ``rediss://``, ``unix://``, ``redis+socket://``, ``valkey://``,
            ``valkeys://``, ``sentinel://``, ``sentinels://``, ``redis+cluster://`` (``rediss``,
            ``valkey``, ``valkeys``), ``redlock://``, ``redlocks://``, ``etcd://``, ``etcds://``,
            ``zk://``, ``zks://``, ``memory://``, or a scheme of an entry point.
        clock: Of deadlines, and of a memory store.
        fence_base: Fences of this store are above it; of no effect where it has none.
        options: For the client's connection, such as ``{"ssl_ca_certs": ...}``; for Sentinel also
            ``master_name`` and ``sentinel_kwargs``. Redlock's are in its URL.
        wait_replicas: How many replicas must have a grant before it counts; of no effect with
            Redlock, whose nodes have none, and in etcd and ZooKeeper: a majority has it anyway.

    Raises:
        SettingsError: The scheme is unknown, its client isn't installed, or the URL can't be read.
    """
    if names_nodes(url):
        from celery_singleton_lock.stores.redlock.store import RedlockStore

        return RedlockStore(url)
    scheme = split_url(url).scheme
    if scheme == "memory":
        from celery_singleton_lock.stores.memory import MemoryStore

        return MemoryStore(clock or SystemClock(), fence_base=fence_base)
    if scheme in _SINGLE:
        from celery_singleton_lock.stores.redis.store import RedisStore

        if len(single_urls(url)) > 1:
            raise SettingsError(
                f"the store's URL names several servers, and {scheme}:// takes one: locks can't "
                "fail over to another server as a broker's connection does. Name one; or use "
                "sentinel://, redis+cluster:// or redlock://host1,host2,host3"
            )
        return RedisStore(url, fence_base=fence_base, options=options, wait_replicas=wait_replicas)
    if scheme in _SENTINEL:
        from celery_singleton_lock.stores.redis.sentinel import SentinelConnections
        from celery_singleton_lock.stores.redis.store import RedisStore

        return RedisStore(
            url,
            fence_base=fence_base,
            options=options,
            wait_replicas=wait_replicas,
            connect=SentinelConnections,
        )
    if scheme in _CLUSTER:
        from celery_singleton_lock.stores.redis.cluster import ClusterStore

        return ClusterStore(
            url, fence_base=fence_base, options=options, wait_replicas=wait_replicas
        )
    if scheme in _CONSENSUS:
        return _load(scheme)(url, clock=clock, fence_base=fence_base, options=options)
    return _registered(scheme)(
        url, clock=clock, fence_base=fence_base, options=options, wait_replicas=wait_replicas
    )


def _load(scheme: str) -> Callable[..., Store]:
    """The class of a scheme of ours; its client may not be installed."""
    path, extra = _CONSENSUS[scheme]
    module, _, name = path.partition(":")
    try:
        found: Callable[..., Store] = getattr(import_module(module), name)
    except ImportError as exc:
        raise SettingsError(
            f"a store with the scheme {scheme!r} needs a client that is not installed ({exc}): "
            f'pip install "celery-singleton-lock[{extra}]"'
        ) from exc
    return found


def _registered(scheme: str) -> Callable[..., Store]:
    """What an installed package has registered for ``scheme``."""
    found = list(entry_points(group=_GROUP, name=scheme))
    if not found:
        known = {*_SCHEMES, *entry_points(group=_GROUP).names}
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
