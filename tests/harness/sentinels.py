"""Redis Sentinel, for tests: a master, two replicas and three sentinels, all real processes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import redis

from example_project.private_server import PrivateServer, find_binary, free_port
from tests.harness.addresses import LOCAL, redis_arguments
from tests.harness.certificates import Certificates
from tests.harness.deliveries import wait_until
from tests.harness.processes import Process

MASTER = "mymaster"

#: Seconds after which a silent master is thought to be down; a failover takes 1 to 3 more.
DOWN_AFTER = 1.0

_CONFIG = """\
bind {bind}
protected-mode no
port {port}
dir {directory}
sentinel monitor {name} {address} {master} 2
sentinel down-after-milliseconds {name} {down_after_ms}
sentinel failover-timeout {name} 5000
sentinel parallel-syncs {name} 2
"""
_REPLICAS = ("SENTINEL REPLICAS", MASTER)
_SYNC_AT_ONCE = ["--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1"]


class Sentinels:
    """The six processes; a context manager.

    Args:
        arguments: More arguments of the three servers.
        tls: All six speak TLS, among themselves too, on ports of their own; `url` names those. The
            plain ports are for the test.
        address: Where all listen beside 127.0.0.1, and by which they know each other.
    """

    def __init__(
        self,
        arguments: Sequence[str] = (),
        *,
        tls: Certificates | None = None,
        address: str = LOCAL,
    ) -> None:
        self._stack = ExitStack()
        self._arguments = [*_SYNC_AT_ONCE, *redis_arguments(address), *arguments]
        self._address = address
        self._tls = tls
        # By which the servers know each other: of each plain port, the one with TLS, if there is.
        self._names: dict[int, int] = {}
        #: The servers, the first master first.
        self.servers: list[PrivateServer] = []
        self.sentinel_ports: list[int] = []
        #: Their processes, in the same order.
        self.sentinels: list[Process] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            master = self._start_server(stack)
            for _ in range(2):
                self._start_server(stack, "--replicaof", self._address, str(self.name_of(master)))
            for _ in range(3):
                self._start_sentinel(stack, self.name_of(master))
            self.wait_until_whole()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def kombu_url(self) -> str:
        """In kombu's form, which leaves the master's name to an option."""
        return ";".join(f"sentinel://127.0.0.1:{port}" for port in self.sentinel_ports)

    @property
    def url(self) -> str:
        """In our own form."""
        hosts = ",".join(f"{self._address}:{self._names[port]}" for port in self.sentinel_ports)
        url = f"{'sentinels' if self._tls else 'sentinel'}://{hosts}/0?master_name={MASTER}"
        return f"{url}&ssl_ca_certs={self._tls.ca}" if self._tls else url

    def name_of(self, server: PrivateServer) -> int:
        """The port by which the sentinels know a server."""
        return self._names[server.port]

    def master(self) -> PrivateServer:
        """The one that the sentinels name."""
        with redis.Redis(port=self.sentinel_ports[0]) as sentinel:
            port = int(_master_address(sentinel)[1])
        return next(server for server in self.servers if self.name_of(server) == port)

    def replicas(self) -> list[PrivateServer]:
        """The other two, alive or not."""
        master = self.master()
        return [server for server in self.servers if server is not master]

    def wait_until_able(self, number: int) -> None:
        """Wait until `fail_over` would lead to a promotion.

        All three must know that the replicas are such; they learn it by an INFO every ten seconds.
        If the last INFO of a sentinel named a master, the sentinel demotes that server as soon as
        another one promotes it: the failover ends in ``-failover-abort-slave-timeout``. The one
        that is asked must not be in TILT mode: a sentinel that has stood still does nothing
        for 30 s.

        Args:
            number: Of the sentinel that will be asked: 0, 1 or 2.
        """
        for port in self.sentinel_ports:
            wait_until(partial(self._knows_roles, port), "the sentinels know the replicas")
        with redis.Redis(port=self.sentinel_ports[number]) as sentinel:
            wait_until(partial(_acts, sentinel), "the sentinel is not in TILT mode")

    def fail_over(self, number: int) -> None:
        """Ask a sentinel to promote a replica of a master that is well."""
        with redis.Redis(port=self.sentinel_ports[number]) as sentinel:
            sentinel.execute_command("SENTINEL FAILOVER", MASTER)

    def wait_until_promoted(self, old: PrivateServer) -> PrivateServer:
        """Wait until all sentinels name another master than ``old`` and it is one."""

        def named() -> set[int]:
            ports = set()
            for port in self.sentinel_ports:
                with redis.Redis(port=port) as sentinel:
                    ports.add(int(_master_address(sentinel)[1]))
            return ports

        wait_until(lambda: self.name_of(old) not in named(), "a replica is promoted", timeout=60)
        new = self.master()
        wait_until(lambda: role_of(new) == "master", "the promoted replica is a master")
        return new

    def wait_until_whole(self) -> None:
        """Wait until every sentinel knows the others and two replicas that are in step."""
        for port in self.sentinel_ports:
            with redis.Redis(port=port, decode_responses=True) as sentinel:
                whole = partial(_is_whole, sentinel)
                wait_until(whole, "the sentinels know each other", timeout=60)
        for replica in self.replicas():
            wait_until(partial(_link_is, "up", replica), "the replicas are in step")

    def _knows_roles(self, port: int) -> bool:
        """Whether the sentinel on ``port`` knows of two replicas that they are in step."""
        with redis.Redis(port=port, decode_responses=True) as sentinel:
            replicas = [_fields(reply) for reply in sentinel.execute_command(*_REPLICAS)]
            master = _master_address(sentinel)[1]
        known = ("slave", "slave", "ok", str(master))
        names = ("flags", "role-reported", "master-link-status", "master-port")
        return len(replicas) == 2 and all(
            tuple(replica[name] for name in names) == known for replica in replicas
        )

    def _start_server(self, stack: ExitStack, *arguments: str) -> PrivateServer:
        port = free_port()
        tls = self._tls.redis_arguments(port) if self._tls else []
        server = PrivateServer(arguments=[*self._arguments, *tls, *arguments])
        self.servers.append(stack.enter_context(server))
        self._names[server.port] = port if self._tls else server.port
        return server

    def _start_sentinel(self, stack: ExitStack, master: int) -> None:
        directory = stack.enter_context(TemporaryDirectory(prefix="csl-sentinel-"))
        port, tls_port = free_port(), free_port()
        self._names[port] = tls_port if self._tls else port
        path = Path(directory) / "sentinel.conf"
        tls = self._tls.redis_arguments(tls_port) if self._tls else []
        path.write_text(
            _CONFIG.format(
                port=port,
                directory=directory,
                bind=" ".join(dict.fromkeys((LOCAL, self._address))),
                address=self._address,
                name=MASTER,
                master=master,
                down_after_ms=int(DOWN_AFTER * 1000),
            )
            # A sentinel's options stand in its file; as arguments they have dashes.
            + "".join(
                f"{name.removeprefix('--')} {value}\n"
                for name, value in zip(tls[::2], tls[1::2], strict=True)
            )
        )
        process = Process([find_binary(), str(path), "--sentinel"], name=f"sentinel-{port}")
        stack.callback(process.end)
        process.start()
        self.sentinel_ports.append(port)
        self.sentinels.append(process)
        with redis.Redis(port=port) as client:
            wait_until(lambda: _answers(client), f"the sentinel on {port} answers")


def _master_address(sentinel: redis.Redis) -> Any:
    """Host and port of the master. The method of redis-py 6.4 raises a TypeError."""
    return sentinel.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", MASTER)


def client_of(server: PrivateServer) -> redis.Redis:
    """A client of one server, decoding responses."""
    return redis.Redis(port=server.port, decode_responses=True)


def role_of(server: PrivateServer) -> str:
    """Whether a server is a master or a slave; empty if it doesn't answer."""
    with client_of(server) as client:
        try:
            return str(client.role()[0])
        except redis.exceptions.RedisError:
            return ""


def link_of(server: PrivateServer) -> str:
    """Whether a replica's link to its master is up or down; empty of a master."""
    with client_of(server) as client:
        info: Any = client.info("replication")
        return str(info.get("master_link_status", ""))


def _link_is(state: str, server: PrivateServer) -> bool:
    return link_of(server) == state


def cut_replication(master: PrivateServer, replicas: Sequence[PrivateServer]) -> None:
    """From now on the replicas get nothing of what the master writes, and all of them live.

    They log in to a master that has no logins, and so never get their stream back.
    """
    for replica in replicas:
        with client_of(replica) as client:
            client.config_set("masterauth", "there is no such login")
    with client_of(master) as client:
        client.execute_command("CLIENT KILL TYPE replica")
    for replica in replicas:
        wait_until(partial(_link_is, "down", replica), "the stream is cut")


def add_worker_login(servers: Sequence[PrivateServer]) -> str:
    """Have workers log in, as sentinels and replicas don't; the login, as a URL has it."""
    for server in servers:
        with client_of(server) as client:
            client.execute_command("ACL", "SETUSER", "worker", "on", ">pw", "~*", "&*", "+@all")
    return "worker:pw"


def partition(master: PrivateServer) -> None:
    """From now on only clients that have logged in reach ``master``: no sentinel, no replica.

    It lives, and believes that it is a master: no server can correct it. What an ACL does here
    as to whom it answers is what a network does that was cut between the two groups.
    """
    with client_of(master) as client:
        client.execute_command("ACL", "SETUSER", "default", "off")
        client.execute_command("CLIENT KILL TYPE replica")
        client.client_kill_filter(user="default", skipme=True)


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.exceptions.RedisError:
        return False


def _acts(sentinel: redis.Redis) -> bool:
    info: Any = sentinel.info("sentinel")
    return int(info["sentinel_tilt"]) == 0


def _fields(reply: Any) -> dict[str, str]:
    """What a sentinel says of a server, in RESP2 or RESP3."""
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    return {name: str(value) for name, value in pairs}


def _is_whole(sentinel: redis.Redis) -> bool:
    state = _fields(sentinel.execute_command("SENTINEL MASTER", MASTER))
    names = ("num-slaves", "num-other-sentinels", "flags")
    return tuple(state[name] for name in names) == ("2", "2", "master")
