"""Independent Redis masters on one machine: what a ``redlock://`` URL names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Self

import redis

from example_project.private_server import PrivateServer
from tests.harness.addresses import LOCAL, redis_arguments
from tests.harness.keys import grow_old


class RedlockNodes:
    """Some servers of our own, each on a port of its own, to kill, pause and restart.

    Args:
        count: How many.
        address: Where they listen beside 127.0.0.1; `url` names it.

    Example:
        >>> with RedlockNodes(5) as nodes:  # doctest: +SKIP
        ...     nodes[3].kill()
        ...     open_store(nodes.url())
    """

    def __init__(self, count: int = 5, *, address: str = LOCAL) -> None:
        self._address = address
        self._servers = [PrivateServer(arguments=redis_arguments(address)) for _ in range(count)]

    def __enter__(self) -> Self:
        for server in self._servers:
            server.start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.stop()

    def __getitem__(self, index: int) -> PrivateServer:
        return self._servers[index]

    def __iter__(self) -> Iterator[PrivateServer]:
        return iter(self._servers)

    def __len__(self) -> int:
        return len(self._servers)

    def url(self, *, db: int = 0, quarantine: float | None = 0) -> str:
        """Names all of them; by default they may vote from their start on, as tests are short."""
        hosts = ",".join(f"{self._address}:{server.port}" for server in self._servers)
        option = "" if quarantine is None else f"?quarantine={quarantine:g}"
        return f"redlock://{hosts}/{db}{option}"

    def holders(self, key: str, *, db: int = 0) -> list[str]:
        """The token that each node has at ``key``; empty where it has none, or doesn't answer."""
        return [_token(server.url(db), key) for server in self._servers]

    def restore(self) -> None:
        """Every node runs, and is empty."""
        for server in self._servers:
            if server.alive:
                server.resume()
            else:
                server.start()
            with redis.Redis.from_url(server.url()) as client:
                client.flushall()

    def grow_old(self, seconds: float, *, db: int = 0) -> None:
        """Let the keys of all nodes that run be ``seconds`` older."""
        for server in self._servers:
            if server.alive:
                with redis.Redis.from_url(server.url(db)) as client:
                    grow_old(client, seconds)

    @contextmanager
    def paused(self, indexes: Iterable[int]) -> Iterator[None]:
        """Some of them stand still: they accept connections, and answer nothing."""
        chosen = [self._servers[index] for index in indexes]
        for server in chosen:
            server.pause()
        try:
            yield
        finally:
            for server in chosen:
                server.resume()


def _token(url: str, key: str) -> str:
    try:
        with redis.Redis.from_url(url, socket_timeout=1, decode_responses=True) as client:
            value = client.get(key)
    except redis.exceptions.RedisError:
        return ""
    return str(value).split(" ")[1] if value else ""
