"""pytest-celery nodes whose "containers" are local processes, so that it works without Docker.

pytest-celery talks to a node's container by a dozen attributes of Docker's own class;
`LocalContainer` has those. `CeleryTestContainer.__init__` asks the Docker daemon for the container,
so it isn't called.
"""

from __future__ import annotations

import os
import signal as signals
from typing import Any
from uuid import uuid4

import celery
from pytest_celery import (
    CeleryTestBackend,
    CeleryTestBroker,
    CeleryTestContainer,
    CeleryTestWorker,
)

from example_project.private_server import PrivateServer
from tests.harness.worker import CeleryWorker


class LocalContainer(CeleryTestContainer):
    """A process in the clothes of a Docker container.

    Args:
        name: The name of the node.
        process: What runs in it.
    """

    def __init__(self, name: str, process: PrivateServer | CeleryWorker) -> None:
        self.process = process
        self._name, self._id = name, uuid4().hex

    @property
    def name(self) -> str:
        return self._name

    @property
    def id(self) -> str:
        return self._id

    @property
    def status(self) -> str:
        return "running" if self.process.alive else "exited"

    def ready(self) -> bool:
        return self.process.alive

    def reload(self) -> None:
        """Docker's copy of the state gets old; ours is always the state."""

    def kill(self, signal: str | int = "SIGKILL") -> None:
        number = signals.Signals[signal] if isinstance(signal, str) else signals.Signals(signal)
        if number == signals.SIGKILL:
            self.power_off()
        else:
            os.kill(self.process.pid, number)

    def power_off(self) -> None:
        """What SIGKILL does to a container: it takes all of it at once."""
        raise NotImplementedError


class ServerContainer(LocalContainer):
    """A Redis server; what it acknowledged is there again after a kill and a restart."""

    process: PrivateServer

    def __init__(self, name: str) -> None:
        super().__init__(name, PrivateServer(appendonly=True).start())

    @property
    def celeryconfig(self) -> dict[str, str]:
        return {"url": self.process.url(), "host_url": self.process.url()}

    def logs(self) -> str:
        return self.process.log()

    def power_off(self) -> None:
        self.process.kill()

    def restart(self, timeout: float = 0) -> None:
        self.process.restart(keep_data=True)

    def teardown(self) -> None:
        self.process.stop()


class WorkerContainer(LocalContainer):
    """A worker with its pool; a restart starts a new process with the same options."""

    process: CeleryWorker

    def __init__(self, module: str, options: dict[str, Any]) -> None:
        self._module, self._options = module, options
        super().__init__("worker", self._started())

    def _started(self) -> CeleryWorker:
        return CeleryWorker(self._module, **self._options).start().wait_until_ready()

    def logs(self) -> str:
        return self.process.log

    def power_off(self) -> None:
        self.process.kill_group()

    def restart(self, timeout: float = 10) -> None:
        self.process.end(timeout)
        self.process = self._started()

    def teardown(self) -> None:
        self.process.kill_group()

    # What CeleryTestWorker asks its container for:

    def worker_name(self) -> str:
        return self.process.name

    def worker_queue(self) -> str:
        return "celery"

    def version(self) -> str:
        return celery.__version__

    def log_level(self) -> str:
        return "INFO"


def redis_broker() -> CeleryTestBroker:
    """A broker node on a Redis server of its own."""
    return CeleryTestBroker(ServerContainer("broker"))


def redis_backend() -> CeleryTestBackend:
    """A result backend node on a Redis server of its own."""
    return CeleryTestBackend(ServerContainer("backend"))


def worker_node(module: str, app: celery.Celery, **options: Any) -> CeleryTestWorker:
    """A worker node.

    Args:
        module: The module of the app that the worker loads.
        app: The app that the test itself uses, for ``node.app``.
        options: The options of `CeleryWorker`.
    """
    return CeleryTestWorker(WorkerContainer(module, options), app)
