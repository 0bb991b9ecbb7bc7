"""A private RabbitMQ node: own name, ports, data, cookie and epmd, no plugins.

It boots in about 5 s, so there is one per test session; each test gets a virtual host of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self
from uuid import uuid4

from example_project.private_server import free_port
from tests.harness.deliveries import wait_until
from tests.harness.processes import Process

#: Where Debian's package has the scripts; those on the PATH are wrappers which switch to the user
#: `rabbitmq` and to the node of the system.
SCRIPTS = Path("/usr/lib/rabbitmq/bin")

#: The root of another Debian, if the RabbitMQ that is installed there is to be used.
ROOT = Path(os.environ.get("RABBITMQ_ROOT", "/"))

#: Runs a command in `ROOT`, with this system's processes, devices and temporary files.
IN_ROOT = (
    "unshare",
    "--mount",
    "sh",
    "-ec",
    'for d in proc dev tmp; do mount --rbind "/$d" "$0/$d"; done; exec chroot "$0" "$@"',
    str(ROOT),
)

#: Seconds until a node is up: 5 alone on the machine, several times that beside other tests.
BOOT_TIMEOUT = 90.0

#: Seconds; RabbitMQ's own default for a delivery that is not acknowledged.
CONSUMER_TIMEOUT = 1800.0

#: Seconds between two looks of the node for such deliveries (RabbitMQ's default is 60).
TICK = 0.5


def find_rabbit() -> Path | None:
    """The directory of RabbitMQ's scripts, or None where it is not installed."""
    if (ROOT / SCRIPTS.relative_to("/") / "rabbitmq-server").exists():
        return SCRIPTS
    found = shutil.which("rabbitmq-server")
    return Path(found).parent if found else None


class RabbitServer:
    """The node. Start it once; `vhost` gives every test a clean place.

    Args:
        consumer_timeout: Seconds after which the node closes the channel of a consumer that did
            not acknowledge a delivery; changed later with `consumer_timeout`.
    """

    def __init__(self, *, consumer_timeout: float = CONSUMER_TIMEOUT) -> None:
        scripts = find_rabbit()
        if scripts is None:
            raise RuntimeError("RabbitMQ is not installed. Debian: apt-get install rabbitmq-server")
        self._scripts = scripts
        self._in_root = () if Path("/") == ROOT else IN_ROOT
        self._default_timeout = consumer_timeout
        self._directory = Path(tempfile.mkdtemp(prefix="csl-rabbit-"))
        self.port = free_port()
        self._env = self._environment()
        self._epmd = Process(
            [*self._in_root, "epmd", "-port", self._env["ERL_EPMD_PORT"], "-address", "127.0.0.1"],
            name="epmd",
        )
        self._node = Process(
            [*self._in_root, str(scripts / "rabbitmq-server")], env=self._env, name="rabbitmq"
        )

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Self:
        """Boot the node and wait until it listens."""
        # Started here, not by the node, which would leave it behind as a daemon.
        self._epmd.start()
        self._node.start()
        self._node.wait_for_log(r"Server startup complete", timeout=BOOT_TIMEOUT)
        return self

    def stop(self) -> None:
        """Kill the node: its data are of no further use, and an orderly end takes seconds."""
        for process in (self._node, self._epmd):
            if process.alive:
                process.kill_group()
        shutil.rmtree(self._directory, ignore_errors=True)

    def url(self, vhost: str = "") -> str:
        """The broker URL of a virtual host; of the default one when none is named."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}/{vhost}"

    def vhost(self) -> str:
        """Make a new virtual host; `url` takes its name."""
        name = f"t{uuid4().hex[:12]}"
        # One call instead of two: each boots an Erlang of its own, which takes most of a second.
        self.ctl(
            "eval",
            f'rabbit_vhost:add(<<"{name}">>, <<"tests">>),'
            f'rabbit_auth_backend_internal:set_permissions(<<"guest">>, <<"{name}">>,'
            ' <<".*">>, <<".*">>, <<".*">>, <<"tests">>).',
        )
        return name

    def close_connections(self, vhost: str | None = None) -> None:
        """Close all client connections, or those of one virtual host, from the node's side."""
        only = ["--vhost", vhost] if vhost else ["--global"]
        self.ctl("close_all_connections", *only, "cut by a test")

    @contextmanager
    def consumer_timeout(self, seconds: float) -> Iterator[None]:
        """Another timeout for deliveries without acknowledgement, for channels opened meanwhile.

        The node looks every `TICK` seconds, so a channel is closed at most that much later.
        """
        self._set_consumer_timeout(seconds)
        try:
            yield
        finally:
            self._set_consumer_timeout(self._default_timeout)

    def wait_until_empty(self, vhost: str) -> None:
        """Wait until no queue of the virtual host has a message, delayed ones included.

        The node counts those of quorum queues every few seconds only: this shows that nothing
        stays, not that all has happened.
        """

        def empty() -> bool:
            table = self.ctl("list_queues", "--vhost", vhost, "--no-table-headers", "messages")
            return not any(int(number) for number in re.findall(r"^\d+$", table, re.MULTILINE))

        wait_until(empty, f"the queues of {vhost} are empty")

    def ctl(self, *arguments: str) -> str:
        """Run ``rabbitmqctl`` on the node; returns what it printed."""
        done = subprocess.run(
            [*self._in_root, str(self._scripts / "rabbitmqctl"), "--quiet", *arguments],
            env={**os.environ, **self._env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"rabbitmqctl {arguments}: {done.stdout}"
        return done.stdout

    def log(self) -> str:
        """What the node wrote."""
        return self._node.log

    def _set_consumer_timeout(self, seconds: float) -> None:
        self.ctl("eval", f"application:set_env(rabbit, consumer_timeout, {round(seconds * 1000)}).")

    def _environment(self) -> dict[str, str]:
        directory, dist_port, epmd_port = self._directory, free_port(), free_port()
        config = directory / "rabbitmq.conf"
        config.write_text(
            f"listeners.tcp.1 = 127.0.0.1:{self.port}\n"
            f"consumer_timeout = {round(self._default_timeout * 1000)}\n"
            "log.console = true\n"
            "log.file = false\n"
            # A disk that is nearly full must not block the publishers of a test.
            "disk_free_limit.absolute = 1MB\n"
            "vm_memory_high_watermark.relative = 0.9\n"
        )
        # This one has no name in rabbitmq.conf.
        advanced = directory / "advanced.config"
        advanced.write_text(f"[{{rabbit, [{{channel_tick_interval, {round(TICK * 1000)}}}]}}].\n")
        (directory / "enabled_plugins").write_text("[].")
        (directory / "home").mkdir()
        return {
            # The cookie of this node is made there, apart from the user's own.
            "HOME": str(directory / "home"),
            "ERL_EPMD_PORT": str(epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"csl{self.port}@localhost",
            "RABBITMQ_DIST_PORT": str(dist_port),
            "RABBITMQ_CTL_DIST_PORT_MIN": str(dist_port + 1),
            "RABBITMQ_CTL_DIST_PORT_MAX": str(dist_port + 100),
            "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
            "RABBITMQ_LOG_BASE": str(directory / "log"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_CONFIG_FILE": str(config),
            "RABBITMQ_CONF_ENV_FILE": str(directory / "no-env-file"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(advanced),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(directory / "generated"),
            "RABBITMQ_SCHEMA_DIR": str(directory / "schema"),
            "RABBITMQ_PID_FILE": str(directory / "pid"),
            # Makes the script become the node (exec) instead of a shell that waits for it, so that
            # a signal and the death signal of the parent reach the node.
            "RUNNING_UNDER_SYSTEMD": "true",
        }
