"""The processes of a campaign: a lock store, a broker, workers each behind a proxy of its own.

All processes are started by one thread that lives as long as they: the kernel ties a child to the
thread that forked it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

import redis

from example_project.private_server import PrivateServer
from tests.chaos.beats import Beats
from tests.chaos.history import VARIABLE, History
from tests.chaos.proxy import Proxy
from tests.chaos.stepped_clock import SteppedClock
from tests.harness.processes import is_running
from tests.harness.worker import CeleryWorker

Answer = TypeVar("Answer")

#: The login of the code that breaks things; the workers' is the default one.
ADMIN, PASSWORD = "chaos", "chaos"

#: Seconds. Longer than the longest put-back pause of a job, shorter than the longest body.
VISIBILITY_TIMEOUT = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a campaign consists of.

    Attributes:
        app: The module of the tasks.
        ttl: The ttl of the leases, in seconds.
        workers: How many.
        concurrency: Pool processes of each; threads if ``pool`` says so.
        pool: The pool of each.
        beats: How many, of one schedule.
        observer: Seconds that an observer of losses takes, now and then.
        broken: The breakage, see tests.chaos.broken; empty for none.
        compares: Whether the resource compares fences.
        visibility_timeout: Seconds.
        clock: Whether the store's clock can be stepped.
    """

    app: str = "tests.chaos.app"
    ttl: float = 2.0
    workers: int = 2
    concurrency: int = 4
    pool: str = "prefork"
    beats: int = 0
    observer: float = 3.0
    broken: str = ""
    compares: bool = True
    visibility_timeout: float = VISIBILITY_TIMEOUT
    clock: bool = False


class RunningBodies:
    """Which processes are in a body now, by a history in ``directory``; for one thread."""

    def __init__(self, directory: Path) -> None:
        self._history = History(directory)
        self._until: dict[int, float] = {}

    def inside(self, pids: list[int]) -> list[int]:
        """Those of ``pids`` that are in a body, the one that should take longest first."""
        for record in self._history.news():
            if record.event == "start":
                self._until[record.pid] = record.at + record.data["planned"]
            elif record.event == "end":
                self._until.pop(record.pid, None)
        return sorted((pid for pid in pids if pid in self._until), key=self._until.__getitem__)[
            ::-1
        ]


class Post:
    """The place of one worker: its proxy, the present worker, and the former ones.

    A new worker gets a new name: what was noted of the old one is not its own.
    """

    def __init__(self, name: str, proxy: Proxy) -> None:
        self.name = name
        self.proxy = proxy
        self.worker: CeleryWorker | None = None
        self.former: list[CeleryWorker] = []
        # Whether a fault is at it: then no other part wonders that the worker is gone.
        self.busy = threading.Lock()


class Site:
    """All processes; a context manager that ends every one of them.

    Args:
        plan: What there is.
        directory: For the history, the resources and the logs.
        seed: The seed of the proxies' chances.
    """

    def __init__(self, plan: Plan, directory: Path, seed: int) -> None:
        self.plan = plan
        self.directory = directory
        self.history = History(directory / "history")
        #: Used only by the lane that strikes processes.
        self.bodies = RunningBodies(self.history.directory)
        self._seed = seed
        self._stack = ExitStack()
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="starter")
        self._generation = 0

    def __enter__(self) -> Self:
        self.history.directory.mkdir(parents=True)
        with ExitStack() as stack:
            stack.callback(self._starter.shutdown)
            self.clock = SteppedClock(self.directory) if self.plan.clock else None
            self.broker = self._server(stack)
            self.store = self._server(stack, *self._store_options())
            self.beats = self._beats(stack) if self.plan.beats else None
            self.posts = [self._post(stack, number) for number in range(self.plan.workers)]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the workers and the publisher; LOCK_URL leads past the proxies."""
        return {
            "BROKER_URL": self.broker.url(0),
            "RESULT_URL": self.broker.url(1),
            "LOCK_URL": self.store.url(),
            "TTL": str(self.plan.ttl),
            "VISIBILITY_TIMEOUT": str(self.plan.visibility_timeout),
            "CHAOS_BROKEN": self.plan.broken,
            "CHAOS_OBSERVER": str(self.plan.observer),
            "CHAOS_RESOURCE_COMPARES": str(int(self.plan.compares)),
            VARIABLE: str(self.history.directory),
        }

    def admin(self, server: PrivateServer | None = None) -> redis.Redis:
        """A client of the store that no ACL concerns; its calls fail while the store is down."""
        port = (server or self.store).port
        return redis.Redis(
            port=port,
            username=ADMIN,
            password=PASSWORD,
            decode_responses=True,
            socket_timeout=10,
            protocol=2,
        )

    def in_starter(self, work: Callable[[], Answer]) -> Answer:
        """Have the one thread do it that may start processes."""
        return self._starter.submit(work).result(120)

    def start_worker(self, post: Post, *, soft: float = 0.0) -> None:
        """Put a new worker at ``post``; returns at once."""
        self._generation += 1
        name = f"{post.name}-{self._generation}"
        environment = {
            **self.environment,
            "LOCK_URL": f"redis://127.0.0.1:{post.proxy.port}/0",
            "SOFT_SHUTDOWN": str(soft),
        }
        worker = CeleryWorker(
            self.plan.app,
            pool=self.plan.pool,
            concurrency=self.plan.concurrency,
            name=name,
            env=environment,
        )
        if post.worker is not None:
            post.former.append(post.worker)
        post.worker = worker
        self.in_starter(worker.start)

    def workers(self) -> list[CeleryWorker]:
        """All that were started, the living ones too."""
        now = [post.worker for post in self.posts if post.worker is not None]
        return [*now, *(worker for post in self.posts for worker in post.former)]

    def write_deaths(
        self, worker: CeleryWorker, pids: list[int], at: float, *, until: float | None = None
    ) -> None:
        """Write down that those of ``pids`` that are gone died between ``at`` and ``until``."""
        for pid in pids:
            if not is_running(pid):
                self.history.write(
                    "death", pid=pid, at=at, worker=worker.hostname, until=until or at
                )

    def replace_store(self, server: PrivateServer) -> None:
        """From now on ``server`` is the store; no connection leads to the old one."""
        for post in self.posts:
            post.proxy.lead_to(server.port)
        if self.beats is not None:
            self.beats.lead_to(server.port)
        self.store = server

    def new_server(self) -> PrivateServer:
        """Another store server; it ends with the site."""
        return self._server(self._stack, *self._store_options())

    def _server(self, stack: ExitStack, *arguments: str) -> PrivateServer:
        binary = str(self.clock.program) if self.clock and arguments else None
        server = PrivateServer(binary=binary, appendonly=True, arguments=arguments)
        self.in_starter(server.start)
        stack.callback(lambda: self._end_server(server))
        return server

    def _end_server(self, server: PrivateServer) -> None:
        log = server.log()
        (self.directory / f"server-{server.port}.log").write_text(log)
        server.stop()

    @staticmethod
    def _store_options() -> list[str]:
        user = ["--user", ADMIN, "on", f">{PASSWORD}", "~*", "&*", "+@all"]
        return [*user, "--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1"]

    def _beats(self, stack: ExitStack) -> Beats:
        ports = {"broker": self.broker.port, "store": self.store.port}
        beats = Beats(
            stack,
            **ports,
            count=self.plan.beats,
            directory=self.directory,
            broken=self.plan.broken,
        )
        for post in beats.posts:
            self.in_starter(post.beat.start)
        return beats

    def _post(self, stack: ExitStack, number: int) -> Post:
        proxy = stack.enter_context(Proxy(self.store.port, seed=self._seed + number))
        post = Post(f"w{number}", proxy)
        stack.callback(lambda: self._end_post(post))
        return post

    def _end_post(self, post: Post) -> None:
        for worker in [*post.former, post.worker]:
            if worker is None:
                continue
            with suppress(Exception):
                worker.kill_group()
            (self.directory / f"{worker.name}.log").write_text(worker.log)


def stopped(pid: int) -> bool:
    """Whether SIGSTOP has reached a process."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in ("T", "t")


def signal_all(pids: list[int], number: int) -> None:
    """Send a signal to processes of ours; those that are gone are left out."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def now() -> float:
    """CLOCK_MONOTONIC, seconds: the clock of the history."""
    return time.monotonic()
