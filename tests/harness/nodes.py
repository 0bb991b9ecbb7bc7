"""pytest-celery nodes whose "containers" are local processes, so that it works without Docker.

pytest-celery talks to a node's container by a dozen attributes of Docker's own class. `LocalContainer`
has those, on top of anything that can start, end and write a log. `CeleryTestContainer.__init__`
asks the Docker daemon for the container, so it isn't called.
"""

from __future__ import annotations

import os
import signal as signals
from collections.abc import Callable
from typing import Any, Protocol
from uuid import uuid4

import celery
from pytest_celery import (
    CeleryTestBackend,
    CeleryTestBroker,
    CeleryTestContainer,
    CeleryTestWorker,
)

from celery_singleton_lock.testing.server import PrivateServer
from tests.harness.processes import TIMEOUT
from tests.harness.worker import CeleryWorker


class Service(Protocol):
    """What a local container runs."""

    @property
    def pid(self) -> int: ...
    @property
    def alive(self) -> bool: ...


class LocalContainer(CeleryTestContainer):
    """A process in the clothes of a Docker container.

    Args:
        name: Of the node.
        make: Starts the process and returns when it is ready; called again by `restart`.
        end: Ends a process that ``make`` returned, in whatever state it is.
        log: Its log so far.
        url: Under which clients reach it; None for a worker.
    """

    def __init__(
        self,
        name: str,
        *,
        make: Callable[[], Any],
        end: Callable[[Any], None],
        log: Callable[[Any], str],
        url: Callable[[Any], str] | None = None,
    ) -> None:
        self._name, self._id = name, uuid4().hex
        self._make, self._end, self._log, self._url = make, end, log, url
        self.process: Any = make()

    @property
    def name(self) -> str:
        return self._name

    @property
    def id(self) -> str:
        return self._id

    @property
    def status(self) -> str:
        return "running" if self.process.alive else "exited"

    @property
    def celeryconfig(self) -> dict[str, str]:
        if self._url is None:
            return {}
        return {"url": self._url(self.process), "host_url": self._url(self.process)}

    def ready(self) -> bool:
        return bool(self.process.alive)

    def reload(self) -> None:
        """Docker's copy of the state gets old; ours is always the state."""

    def logs(self) -> str:
        return self._log(self.process)

    def kill(self, signal: str | int = "SIGKILL") -> None:
        """Signal the process; a SIGKILL takes a worker's pool along, as it does in a container."""
        number = signals.Signals[signal] if isinstance(signal, str) else signals.Signals(signal)
        if number == signals.SIGKILL and isinstance(self.process, CeleryWorker):
            self.process.kill_group()
        elif number == signals.SIGKILL:
            self.process.kill()
        else:
            os.kill(self.process.pid, number)

    def restart(self, timeout: float = TIMEOUT) -> None:
        self._end(self.process)
        self.process = self._make()

    def teardown(self) -> None:
        self._end(self.process)


class WorkerContainer(LocalContainer):
    """A worker also knows what `CeleryTestWorker` asks its container for."""

    def worker_name(self) -> str:
        return str(self.process.name)

    def worker_queue(self) -> str:
        return "celery"

    def version(self) -> str:
        return celery.__version__

    def log_level(self) -> str:
        return "INFO"


def redis_broker() -> CeleryTestBroker:
    """A broker node on a Redis server of its own, which keeps its data over a restart."""
    return CeleryTestBroker(_redis_container("broker"))


def redis_backend() -> CeleryTestBackend:
    """A result backend node on a Redis server of its own, which keeps its data over a restart."""
    return CeleryTestBackend(_redis_container("backend"))


def worker_node(app: str, app_instance: celery.Celery, **options: Any) -> CeleryTestWorker:
    """A worker node.

    Args:
        app: The module of the app.
        app_instance: The app that the test itself uses, for ``node.app``.
        options: Of `CeleryWorker`.
    """

    def make() -> CeleryWorker:
        worker = CeleryWorker(app, **options)
        worker.start()
        return worker.wait_until_ready()

    container = WorkerContainer("worker", make=make, end=CeleryWorker.end, log=lambda w: w.log)
    return CeleryTestWorker(container, app_instance)


def _redis_container(name: str) -> LocalContainer:
    server = PrivateServer(appendonly=True)
    stopped = False

    def end(running: PrivateServer) -> None:
        running.stop(keep_data=True)

    return LocalContainer(
        name, make=server.start, end=end, log=PrivateServer.log, url=PrivateServer.url
    )
