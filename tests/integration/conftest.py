"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any
from uuid import uuid4

import pytest
import redis

from tests.conftest import missing
from tests.harness.browser import find_browser, open_browser
from tests.harness.processes import Process
from tests.harness.serve import ServeProcess
from tests.harness.ticks import Ticks
from tests.harness.worker import CeleryWorker
from tests.integration.stage import APP, Stage, open_stage

Consume = Callable[..., CeleryWorker]

#: Characters of a worker's log beside a test that failed.
_SHOWN = 8000


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Show with a failure what the workers of its module, which still run, have written last."""
    report: Any = yield
    if report.failed and isinstance(stage := getattr(item, "funcargs", {}).get("stage"), Stage):
        for worker in stage.workers:
            report.sections.append((f"end of the log of {worker.name}", worker.log[-_SHOWN:]))
    return report


@pytest.fixture(scope="module")
def stage(
    request: pytest.FixtureRequest,
    redis_server: Any,
    _databases: Iterator[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stage]:
    """A stage for the tests of one module, with the app that the module names ``APP``."""
    url = redis_server.url(next(_databases))
    name = request.module.__name__.rpartition(".")[2]
    app = getattr(request.module, "APP", APP)
    with open_stage(url, tmp_path_factory.mktemp(name), app) as stage:
        yield stage


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, for the tests of one module."""
    if find_browser() is None:
        missing("no Chromium with its driver. Debian: apt-get install chromium chromium-driver")
    with open_browser() as browser:
        yield browser


@pytest.fixture
def name() -> str:
    """What keeps the keys and queues of this test apart from those of other tests."""
    return uuid4().hex[:12]


@pytest.fixture
def consume(stage: Stage) -> Iterator[Consume]:
    """``consume("queue", env={...})``: a worker of one process, for this queue and this test."""
    workers: list[CeleryWorker] = []

    def start(queue: str, **options: Any) -> CeleryWorker:
        worker = stage.worker(**{"concurrency": 1, "queues": [queue], **options})
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        worker.kill_group()


@pytest.fixture
def ticks(redis_client: redis.Redis) -> Ticks:
    """What beats have sent to the queue ``celery``, which no worker consumes."""
    return Ticks(redis_client)


@pytest.fixture
def serve(environment: dict[str, str], _processes: list[Process]) -> Callable[..., ServeProcess]:
    """``serve("tests.apps.pools", "--token-file", "...")``: listens when this returns."""

    def start(app: str, *args: str) -> ServeProcess:
        process = ServeProcess(app, env=environment, args=args).start()
        _processes.append(process)
        return process.wait_until_ready()

    return start
