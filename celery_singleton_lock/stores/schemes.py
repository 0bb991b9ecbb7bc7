"""The schemes of the URLs of stores, and the function that opens a store by its URL.

Another package adds a scheme by an entry point of the group ``celery_singleton_lock.stores``. The
entry point's name is the scheme. It is called with the arguments of ``open_store``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Final, cast

from ..core.clock import Clock, SystemClock
from ..core.store import Store
from ..errors import SettingsError
from ..option_names import suggestion
from .store_url import servers_of, split_url

_SINGLE: Final = ("redis", "rediss", "unix", "redis+socket", "valkey", "valkeys")
_SENTINEL: Final = ("sentinel", "sentinels")
_CLUSTER: Final = ("redis+cluster", "rediss+cluster", "valkey+cluster", "valkeys+cluster")
_ON_REDIS: Final = ("fence_base", "options", "wait_replicas")
_CONSENSUS: Final = ("clock", "fence_base", "options")
# The store of each scheme, and its keyword arguments. A store is imported when it is opened,
# because its client may not be installed.
_STORES: Final = {
    **dict.fromkeys(_SINGLE, ("redis.store:RedisStore", _ON_REDIS)),
    **dict.fromkeys(_SENTINEL, ("redis.store:RedisStore", (*_ON_REDIS, "connect"))),
    **dict.fromkeys(_CLUSTER, ("redis.cluster:ClusterStore", _ON_REDIS)),
    **dict.fromkeys(("redlock", "redlocks"), ("redlock.store:RedlockStore", ())),
    **dict.fromkeys(("etcd", "etcds"), ("etcd.store:EtcdStore", _CONSENSUS)),
    **dict.fromkeys(("zk", "zks"), ("zookeeper.store:ZooKeeperStore", _CONSENSUS)),
    "memory": ("memory:MemoryStore", ("fence_base",)),
}
# The extra that installs the client of a store, by the store's folder.
_EXTRAS: Final = ("etcd", "zookeeper")
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
    if scheme in _SINGLE and len(servers_of(url)) > 1:
        raise SettingsError(
            f"the store's URL names several servers, and {scheme}:// takes one: locks can't "
            "fail over to another server as a broker's connection does. Name one; or use "
            "sentinel://, redis+cluster:// or redlock://host1,host2,host3"
        )
    arguments: dict[str, Any] = {
        "clock": clock,
        "fence_base": fence_base,
        "options": options,
        "wait_replicas": wait_replicas,
    }
    if scheme not in _STORES:
        return _complete(_registered(scheme)(url, **arguments), scheme)
    path, taken = _STORES[scheme]
    if scheme in _SENTINEL:
        arguments["connect"] = _imported("redis.sentinel:SentinelConnections", scheme)
    source = url if scheme != "memory" else clock or SystemClock()
    store: Store = _imported(path, scheme)(source, **{name: arguments[name] for name in taken})
    return store


def _scheme(url: str) -> str:
    return split_url(url).scheme


def _imported(path: str, scheme: str) -> Any:
    """The class at ``path`` in this folder, which is used for stores with ``scheme``."""
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(f"{__package__}.{module}"), name)
    except ImportError as exc:
        extra = module.partition(".")[0]
        if extra not in _EXTRAS:
            raise
        raise SettingsError(
            f"a store with the scheme {scheme!r} needs a client that is not installed ({exc}): "
            f'pip install "celery-singleton-lock[{extra}]"'
        ) from exc


def _complete(store: Store, scheme: str) -> Store:
    """The store of another package, which has the parts that every store needs."""
    for part in ("capabilities", "leases", "claims"):
        if not hasattr(store, part):
            raise SettingsError(
                f"the store for {scheme!r} is a {type(store).__name__} without {part}: each store "
                "needs capabilities, leases and claims, see celery_singleton_lock.core.store.Store"
            )
    return store


def _registered(scheme: str) -> Callable[..., Store]:
    """The entry point that an installed package has registered for ``scheme``."""
    found = list(entry_points(group=_GROUP, name=scheme))
    if not found:
        hint = suggestion(scheme, {*_STORES, *entry_points(group=_GROUP).names})
        raise SettingsError(f"singleton_lock_url has the scheme {scheme!r}{hint}")
    try:
        return cast(Callable[..., Store], found[0].load())
    except Exception as exc:
        raise SettingsError(
            f"the store for {scheme!r}, registered as {found[0].value}, can't be loaded: {exc}"
        ) from exc
