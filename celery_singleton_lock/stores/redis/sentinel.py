"""Connections to the master that Redis Sentinel reports.

Guarantees
    A new connection leads to a server that a sentinel names now, and that reports the role of a
    master. After any failure of a connection the next sentinel is asked.

Non-guarantees
    A single master: an old master still answers a process that can reach it, until a sentinel
    demotes it. ``wait_replicas`` and ``min-replicas-to-write`` make this window smaller. Only the
    fence protects a resource in it.

The sentinels are asked whenever a connection is opened, not while an idle one is available. An
address that was noted before would lead to a master that has died meanwhile, and is back without
data until it is demoted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import redis

from ...errors import SettingsError, StoreError, StoreUnavailable
from ..store_url import StoreUrl
from .connection import Connections, read

_PORT: Final = 26379


class SentinelConnections(Connections):
    """The connections to the master with one name.

    Args:
        url: ``sentinel://:password@host1:26379/0;sentinel://host2:26379/0`` (kombu's form), or
            ``sentinel://:password@host1:26379,host2:26379/0?master_name=mymaster``. Password and
            database are the master's. ``sentinels://`` is TLS to the master and the sentinels.
        options: Options of the connections to the master, kombu's ``master_name``, and
            ``sentinel_kwargs``: options of the connections to the sentinels.

    Raises:
        SettingsError: The URL or an option can't be read, or no master is named.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        parsed = StoreUrl.parse(url, port=_PORT)
        query, options = dict(parsed.options), dict(options or {})
        #: The master's name in the configuration of the sentinels.
        named = options.pop("master_name", "")
        self.master_name = query.pop("master_name", "") or named
        if not self.master_name or not isinstance(self.master_name, str):
            raise SettingsError(
                "the store is behind Sentinel, but which master? Set master_name in "
                "broker_transport_options or result_backend_transport_options, or write "
                "sentinel://...?master_name=mymaster"
            )
        # Options of the connections to the sentinels. The other options are for the master.
        kwargs: dict[str, Any] = dict(options.pop("sentinel_kwargs", None) or {})
        for name in ("username", "password"):
            if value := query.pop(f"sentinel_{name}", None):
                kwargs[name] = value
        tls_query, tls_options = _tls_of(query), _tls_of(options)
        all_tls = parsed.scheme == "sentinels"
        scheme = "sentinels" if all_tls or tls_query or tls_options else "sentinel"
        super().__init__(replace(parsed, scheme=scheme, options=query), options)
        if kwargs.pop("ssl", all_tls):
            scheme, kwargs = "sentinels", {**tls_options, **kwargs}
        else:
            scheme, tls_query = "sentinel", {}
        alone = replace(parsed, scheme=scheme, logins=("",), path="", options=tls_query)
        sentinel = Connections(alone, kwargs)
        #: The connections to each sentinel that the URL names.
        self.sentinels = deque(sentinel.at(*address) for address in dict.fromkeys(parsed.hosts))

    def new(self, timeout: float, **options: Any) -> Any:
        host, port = self._discovered(timeout)
        return super().new(timeout, host=host, port=port)

    def greet(self, client: Any) -> None:
        """Check that the server is the master: a replica answers too, with old data.

        Raises:
            StoreUnavailable: The server is not a master.
        """
        client.send_command("ROLE", check_health=False)
        role = read(client)
        if isinstance(role, redis.exceptions.ResponseError):
            return  # the login lacks the right to ROLE; a replica will refuse the first write
        if role[0] not in (b"master", "master"):
            self.drop()
            raise StoreUnavailable(
                f"{client.host}:{client.port} is no master of {self.master_name!r} now: a "
                "failover is under way"
            )

    def drop(self) -> None:
        super().drop()
        # The sentinel that named this master may be cut off from the others.
        self.sentinels.rotate(-1)

    def close(self) -> None:
        super().close()
        for sentinel in list(self.sentinels):
            sentinel.close()

    def _discovered(self, timeout: float) -> tuple[str, int]:
        unknown = StoreError(f"no sentinel knows a master named {self.master_name!r}")
        error: StoreError | None = None
        for _ in range(len(self.sentinels)):
            sentinel = self.sentinels[0]
            try:
                command = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.master_name)
                (reply,) = sentinel.run([command], timeout / len(self.sentinels))
                if reply:
                    return reply[0].decode(), int(reply[1])
                error = error or unknown
            except StoreError as exc:
                error = StoreUnavailable(f"no sentinel names a master: {exc}")
            finally:
                sentinel.close()  # rarely used, and many workers would each keep one open
            self.sentinels.rotate(-1)
        raise error or unknown


def _tls_of(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name.startswith("ssl_")}
