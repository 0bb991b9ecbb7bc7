"""The store in Redis or Valkey, assembled from its parts.

Overview
    A lease is one string key with a ttl, next to the key of its completion record, the claim of its
    message, its wait queue and the queue of its calls: all in one shard, in one hash slot. Each
    operation is one Lua script, or one command.

Guarantees
    Each operation is atomic and uses the server's clock. Commands on one connection keep their
    order. An acquire or a claim that overtook an asynchronous release of this process is repeated
    after that release (see ``async_release``).

Non-guarantees
    Exclusion over a failover: an acknowledged write may be lost with the old master. WAIT makes
    this only less likely: it neither elects a replica that acknowledged nor stops the old master.

State model::

    (free) --acquire--> lease --release--> (free), reserved, cooling, or reserved for a waiter
                          +--ttl over, free(), data lost--> (free)

Failure handling
    The store retries only a script that the server has lost (once, with its source), an
    asynchronous release without a reply, and the operations next to a lease (mark, claims, the
    newest call) if an idle connection turned out to be broken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...core.store import Capabilities, ConnectionWatch, Store
from ..store_url import StoreUrl
from .async_release import RedisAsyncReleases
from .call_queue import RedisCallQueue
from .claims import RedisArguments, RedisClaims
from .connection import Connections
from .leases import RedisLeases
from .newest_calls import RedisNewestCalls
from .operators import RedisOperators
from .pauses import RedisPauses
from .runner import ScriptRunner
from .schedule import RedisSchedule
from .wait_queue import RedisWaitQueue


class RedisStore(Store):
    """A store on one Redis server.

    Args:
        url: The URL, in a form that ``connect`` reads.
        fence_base: Fences are above this number.
        options: Options of the connection.
        wait_replicas: The number of replicas that must acknowledge a grant before it counts.
        connect: Creates the connections from the URL and the options.

    Raises:
        SettingsError: The URL or an option can't be read.
    """

    #: The number of shards of each prefix; None: it is not compared with that of other apps.
    shards: int | None = 1
    capabilities = Capabilities(
        rates=True,
        fence=True,
        name="redis",
        renewal_batch=512,  # some 70 KB in one pipeline, and 1.2 ms of the server's time
        renews_for_others=True,
        usable_before_fork=True,
    )
    claims: RedisClaims
    arguments: RedisArguments
    async_releases: RedisAsyncReleases
    call_queue: RedisCallQueue
    newest_calls: RedisNewestCalls
    operators: RedisOperators
    pauses: RedisPauses
    schedule: RedisSchedule
    wait_queue: RedisWaitQueue

    def __init__(
        self,
        url: str | StoreUrl,
        *,
        fence_base: int = 0,
        options: Mapping[str, Any] | None = None,
        wait_replicas: int = 0,
        connect: Callable[[Any, Mapping[str, Any] | None], Connections] = Connections,
    ) -> None:
        #: What the parts have in common.
        self.runner = runner = ScriptRunner(connect(url, options), self.shards)
        self.leases = RedisLeases(runner, fence_base, wait_replicas)
        self.claims = RedisClaims(runner)
        self.arguments = RedisArguments(runner)
        self.async_releases = RedisAsyncReleases(runner)
        self.call_queue = RedisCallQueue(runner)
        self.newest_calls = RedisNewestCalls(runner)
        self.operators = RedisOperators(runner)
        self.pauses = RedisPauses(runner)
        self.schedule = RedisSchedule(runner)
        self.wait_queue = RedisWaitQueue(runner, self.leases)

    def servers(self) -> Sequence[Connections]:
        """The connections to each server that has keys of this store."""
        return self.runner.servers()

    def watch_connections(self, watch: ConnectionWatch) -> None:
        self.runner.connections.report_to(watch)

    def close(self) -> None:
        self.runner.drain_open()
        self.runner.connections.close()
