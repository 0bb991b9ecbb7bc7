"""The fixtures of all tests: servers, workers, a journal, one environment for both sides.

`environment` is what worker processes and the test's own copy of an app read: change it before they
start. All processes end with their test. A server that is missing skips the test on a laptop and
fails it in continuous integration (CI=true).
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from importlib import import_module
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import hypothesis
import pytest
import redis

from example_project.private_server import (
    ExternalServer,
    PrivateServer,
    ServerNotFound,
    find_binary,
    find_server,
)
from tests.ci.parts import pytest_addoption, pytest_collection_modifyitems  # noqa: F401
from tests.harness.app_module import fresh_module
from tests.harness.cluster import Cluster
from tests.harness.etcd import EtcdCluster, find_etcd
from tests.harness.journal import VARIABLE, Journal
from tests.harness.leftovers import pytest_configure  # noqa: F401
from tests.harness.processes import Process
from tests.harness.rabbit import RabbitServer, find_rabbit
from tests.harness.sentinels import Sentinels
from tests.harness.worker import CeleryBeat, CeleryWorker
from tests.harness.zookeeper import ZooKeeperEnsemble, find_zookeeper

# No example is a failure because the machine was busy with something else.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")

# Images of containers set it. Then each process that the tests start would compile the package
# again, and pytest would rewrite all tests in each of its jobs: 8 s of processor time each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Workers and commands in processes of their own start without what Celery imports for a shell.
_LEAN = str(Path(__file__).parent / "harness/lean")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_LEAN, os.environ.get("PYTHONPATH")]))

# A shell that runs the tests in the background has SIGINT ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what has a RabbitMQ node, also where a parameter of the test asks for it."""
    if "rabbit" in getattr(item, "fixturenames", ()) or "rabbit" in item.name:
        item.add_marker("rabbitmq")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Import the tests in an order of this job's own, before they are collected in one for all.

    In a new clone pytest has to rewrite each test, 9 s of processor time for all of them. A job
    that comes to what another one has written need not.
    """
    job = os.environ.get("PYTEST_XDIST_WORKER")
    if job is None:
        return
    directories = [Path(argument) for argument in session.config.args if Path(argument).is_dir()]
    paths = sorted(path for directory in directories for path in directory.rglob("test_*.py"))
    jobs = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    first = len(paths) * int(job.removeprefix("gw")) // jobs
    for path in paths[first:] + paths[:first]:
        name = ".".join(path.resolve().relative_to(session.config.rootpath).with_suffix("").parts)
        with suppress(Exception, pytest.skip.Exception):  # reported when it is collected
            import_module(name)


# Until the tests are collected, there is nothing that the collector of garbage could free.
gc.disable()


def pytest_collection_finish() -> None:
    """Keep the collector from going through all tests again and again, at each of its rounds.

    And from counting what a test has made among what is old: the check of what tests leave behind
    collects the young first.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 100, 10)


def missing(what: str) -> NoReturn:
    """Skip here, fail in continuous integration: a skip would not be noticed there."""
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(f"{what} (CI is set, so this is a failure)", pytrace=False)
    pytest.skip(what)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[PrivateServer | ExternalServer]:
    """The server that tests share, one per xdist worker: don't stop it, don't flush all of it."""
    try:
        server = find_server()
    except ServerNotFound as error:
        missing(str(error))
    with server:
        yield server


@pytest.fixture(scope="session")
def _databases(redis_server: PrivateServer | ExternalServer) -> Iterator[int]:
    """Numbers of databases, none of which another xdist worker gets."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    # A private server belongs to this xdist worker alone; REDIS_URL names the same for all.
    numbers = range(1, redis_server.databases)
    return cycle(numbers[worker::workers] if redis_server.external else numbers)


@pytest.fixture
def redis_url(
    redis_server: PrivateServer | ExternalServer, _databases: Iterator[int]
) -> Iterator[str]:
    """An empty database of the shared server, for this test alone."""
    database = next(_databases)
    url = redis_server.url(database)
    with redis.Redis.from_url(url) as client:
        if redis_server.external and client.dbsize():
            # REDIS_URL may be set for another reason, and the tests empty what they use.
            pytest.fail(
                f"database {database} of REDIS_URL is not empty: the tests delete what they find"
                " there, so it has to name a server that holds nothing (or unset it: the tests"
                " start their own)",
                pytrace=False,
            )
        client.flushdb()
        yield url
        client.flushdb()


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    """A client of the test's database, for looking at keys."""
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture
def private_redis() -> Iterator[PrivateServer]:
    """A server for this test alone, to kill, pause and restart; keeps its data over a kill."""
    try:
        binary = find_binary()
    except ServerNotFound as error:
        missing(str(error))
    with PrivateServer(binary=binary, appendonly=True) as server:
        yield server


@pytest.fixture(scope="session")
def sentinels() -> Iterator[Sentinels]:
    """Sentinel over three servers, that tests share: no server is killed there."""
    need_a_server()
    with Sentinels() as processes:
        yield processes


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Six nodes that tests share: no node is killed there, and slots that move are moved back."""
    need_a_server()
    with Cluster() as processes:
        yield processes


@pytest.fixture
def private_sentinels() -> Iterator[Sentinels]:
    """As `sentinels`, for this test alone."""
    need_a_server()
    with Sentinels() as processes:
        yield processes


@pytest.fixture
def private_cluster() -> Iterator[Cluster]:
    """As `cluster`, for this test alone."""
    need_a_server()
    with Cluster() as processes:
        yield processes


def need_a_server() -> None:
    """Skip here, or fail in continuous integration, if there is no server of Redis."""
    try:
        find_binary()
    except ServerNotFound as error:
        missing(str(error))


@pytest.fixture(scope="session")
def rabbit() -> Iterator[RabbitServer]:
    """A RabbitMQ node, one per xdist worker; takes 5 s to boot."""
    if find_rabbit() is None:
        missing("RabbitMQ is not installed. Debian: apt-get install rabbitmq-server")
    with RabbitServer() as server:
        yield server


@pytest.fixture(scope="session")
def etcd() -> Iterator[EtcdCluster]:
    """An etcd cluster of three, one per xdist worker: revive what you kill."""
    if find_etcd() is None:
        missing("etcd is not installed. Debian: apt-get install etcd-server")
    with EtcdCluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def zookeeper() -> Iterator[ZooKeeperEnsemble]:
    """A ZooKeeper ensemble of three, one per xdist worker: revive what you kill."""
    if find_zookeeper() is None:
        missing("ZooKeeper is not installed. Debian: apt-get install zookeeper")
    with ZooKeeperEnsemble() as ensemble:
        yield ensemble


@pytest.fixture(params=["etcd", "zookeeper"])
def consensus(request: pytest.FixtureRequest) -> EtcdCluster | ZooKeeperEnsemble:
    """Each of the two."""
    found: EtcdCluster | ZooKeeperEnsemble = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def rabbit_url(rabbit: RabbitServer) -> str:
    """The broker URL of a new virtual host, for this test alone."""
    return rabbit.url(rabbit.vhost())


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """What the bodies of this test write."""
    return Journal(tmp_path / "journal.jsonl")


@pytest.fixture
def environment(redis_url: str, journal: Journal) -> dict[str, str]:
    """The environment of this test's workers, beats and app; change it before they start."""
    return {"BROKER_URL": redis_url, "RESULT_URL": redis_url, VARIABLE: str(journal.path)}


@pytest.fixture
def _processes() -> Iterator[list[Process]]:
    """Ends what the factories below started, and shows the logs if the test failed."""
    processes: list[Process] = []
    yield processes
    for process in reversed(processes):
        process.kill_group()
    for process in processes:
        print(f"--- log of {process.name}\n{process.log}")
        process.assert_none_left()


@pytest.fixture
def worker(environment: dict[str, str], _processes: list[Process]) -> Callable[..., CeleryWorker]:
    """``worker("tests.apps.plain", concurrency=2, pool="prefork", env={...})``.

    Options as of `CeleryWorker`; ``env`` is added to `environment`. Returns when the worker is
    ready, or at once with ``wait=False``.
    """

    def start(app: str, *, wait: bool = True, **options: Any) -> CeleryWorker:
        options["env"] = {**environment, **options.get("env", {})}
        process = CeleryWorker(app, **options).start()
        _processes.append(process)
        return process.wait_until_ready() if wait else process

    return start


@pytest.fixture
def beat(environment: dict[str, str], _processes: list[Process]) -> Callable[..., CeleryBeat]:
    """``beat("tests.apps.plain")``, with the options of `CeleryBeat`; as `worker`."""

    def start(app: str, *, wait: bool = True, **options: Any) -> CeleryBeat:
        options["env"] = {**environment, **options.get("env", {})}
        process = CeleryBeat(app, **options).start()
        _processes.append(process)
        return process.wait_until_ready() if wait else process

    return start


@pytest.fixture
def load_app(environment: dict[str, str]) -> Iterator[Callable[..., ModuleType]]:
    """``plain = load_app("tests.apps.plain"); plain.occupy.delay("k")``.

    A fresh copy of the module in this process, on the same servers as the workers.
    """
    with ExitStack() as copies:

        def load(name: str, **env: str) -> ModuleType:
            return copies.enter_context(fresh_module(name, {**environment, **env}))

        yield load
