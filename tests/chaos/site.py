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

from example_project.private_server import PrivateServer, find_valkey
from tests.chaos.beats import Beats
from tests.chaos.clocks import HostClock, SteppedClock
from tests.chaos.history import VARIABLE, History
from tests.chaos.hosts import BROKER, STORE, Host, Worker
from tests.chaos.promises import PROMISES
from tests.chaos.promises import STORE as CHAOS_STORE
from tests.chaos.proxy import Proxy
from tests.chaos.store_kinds import Members, keys_left, open_members
from tests.harness.addresses import LOCAL, redis_arguments
from tests.harness.processes import is_running
from tests.harness.servers import server_version

Answer = TypeVar("Answer")

#: The login of the code that breaks things; the workers' is the default one.
ADMIN, PASSWORD = "chaos", "chaos"

#: Seconds per second by which the wall clocks of three hosts drift; 1 % is far more than any does.
_DRIFTS = (0.01, -0.01, 0.003)

#: The options of three workers in turn.
_POOLS_THAT_CHANGE = ((), ("--max-tasks-per-child", "5"), ("--autoscale", "4,1"))

#: Seconds. Longer than the longest requeued pause of a job, shorter than the longest body.
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
        beside: The pool of another worker beside them; empty: there is none.
        beats: How many, of one schedule.
        observer: Seconds that an observer of losses takes, now and then.
        broken: The breakage, see tests.chaos.broken; empty for none.
        compares: Whether the resource compares fences.
        visibility_timeout: Seconds.
        clock: Whether the store's clock can be stepped.
        churn: Whether calls are revoked, and two of three workers replace their pool processes
            after a few tasks, or change their number.
        store: What locks; a name of tests.chaos.promises.
        hosts: How many hosts the workers are on, in turn; 0: all are beside the campaign.
        wall_clocks: Whether each host has a wall clock of its own; needs libfaketime.
    """

    app: str = "tests.chaos.app"
    ttl: float = 2.0
    workers: int = 2
    concurrency: int = 4
    pool: str = "prefork"
    beside: str = ""
    beats: int = 0
    observer: float = 3.0
    broken: str = ""
    compares: bool = True
    visibility_timeout: float = VISIBILITY_TIMEOUT
    clock: bool = False
    churn: bool = False
    store: str = "redis"
    hosts: int = 0
    wall_clocks: bool = False


class Progress:
    """Which calls wait and run now, by a history in ``directory``; for one thread."""

    def __init__(self, directory: Path) -> None:
        self._history = History(directory)
        self._bodies: dict[int, tuple[float, str]] = {}  # when it should end, and its call
        self._waiting: dict[str, None] = {}

    def inside(self, worker: Worker) -> list[int]:
        """The children that are in a body, the one that should take longest first."""
        self._read()
        bodies = {pid: self._bodies.get(worker.number_of(pid)) for pid in worker.children()}
        inside = [(body[0], pid) for pid, body in bodies.items() if body is not None]
        return [pid for _, pid in sorted(inside, reverse=True)]

    def call_of(self, worker: Worker, pid: int) -> str:
        """The call whose body a child was in, as of the last look."""
        return self._bodies[worker.number_of(pid)][1]

    def waiting(self) -> list[str]:
        """The calls that no body of theirs has begun, the oldest first."""
        self._read()
        return [*self._waiting]

    def _read(self) -> None:
        for record in self._history.news():
            if record.event == "published":
                self._waiting[record.task_id] = None
            elif record.event == "start":
                self._waiting.pop(record.task_id, None)
                self._bodies[record.pid] = record.at + record.data["planned"], record.task_id
            elif record.event == "end":
                self._bodies.pop(record.pid, None)
            elif record.event == "skip":
                self._waiting.pop(record.task_id, None)


class Post:
    """The place of one worker: its pool, host and proxy (if any), and all workers that were at it.

    A new worker gets a new name: what was noted of the old one is not its own.
    """

    def __init__(self, name: str, pool: str, proxy: Proxy | None, host: Host | None) -> None:
        self.name = name
        self.pool = pool
        self.proxy = proxy
        self.host = host
        self.worker: Worker | None = None
        self.former: list[Worker] = []
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
        self.progress = Progress(self.history.directory)
        self._seed = seed
        self._stack = ExitStack()
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="starter")
        self._generation = 0

    def __enter__(self) -> Self:
        self.history.directory.mkdir(parents=True)
        with ExitStack() as stack:
            stack.callback(self._starter.shutdown)
            self.clock = SteppedClock(self.directory) if self.plan.clock else None
            # Reached by the campaign as 127.0.0.1, by the hosts at its address.
            self.broker = self._server(
                stack,
                *redis_arguments(BROKER if self.plan.hosts else LOCAL),
                # What it did with each message is read from its file (broker_log).
                *("--auto-aof-rewrite-percentage", "0"),
                *(("--aof-timestamp-enabled", "yes") if server_version() >= (7, 0) else ()),
            )
            #: The store, if it has several members; then `store` is not used.
            self.members: Members | None = None
            if PROMISES[self.plan.store].through_proxies:
                self.store = self._server(stack, *self._store_options())
            else:
                address = STORE if self.plan.hosts else LOCAL
                self.members = open_members(
                    self.plan.store, stack, address, self.in_starter, self.history
                )
            self.beats = self._beats(stack) if self.plan.beats else None
            hosts = [self._host(stack, number) for number in range(1, self.plan.hosts + 1)]
            pools = [self.plan.pool] * self.plan.workers
            pools += [self.plan.beside] if self.plan.beside else []
            self.posts = [
                self._post(stack, number, pool, hosts[number % len(hosts)] if hosts else None)
                for number, pool in enumerate(pools)
            ]
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
            "LOCK_URL": self.lock_url,
            CHAOS_STORE: self.plan.store,
            "TTL": str(self.plan.ttl),
            "VISIBILITY_TIMEOUT": str(self.plan.visibility_timeout),
            "CHAOS_BROKEN": self.plan.broken,
            "CHAOS_OBSERVER": str(self.plan.observer),
            "CHAOS_RESOURCE_COMPARES": str(int(self.plan.compares)),
            VARIABLE: str(self.history.directory),
        }

    @property
    def lock_url(self) -> str:
        """The URL of the store, past the proxies; it changes with a failover of a single server."""
        return self.members.url if self.members else self._lock_url(self.store.port)

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
            "SOFT_SHUTDOWN": str(soft),
        }
        if post.pool != self.plan.pool:
            # A body on a thread is interrupted when its sleep ends. Only the signal shows that its
            # process was notified of a loss in time, and a slow observer would delay that.
            environment["CHAOS_OBSERVER"] = "0"
        if post.proxy is not None:
            address = STORE if post.host else LOCAL
            environment["LOCK_URL"] = self._lock_url(post.proxy.port, address)
        if post.host is not None:
            for url in ("BROKER_URL", "RESULT_URL"):
                environment[url] = environment[url].replace(LOCAL, BROKER)
        worker = Worker(
            self.plan.app,
            host=post.host,
            pool=post.pool,
            concurrency=self.plan.concurrency,
            name=name,
            env=environment,
            args=_POOLS_THAT_CHANGE[self._generation % 3] if self._changes(post) else (),
        )
        if post.worker is not None:
            post.former.append(post.worker)
        post.worker = worker
        self.in_starter(worker.start)

    def _changes(self, post: Post) -> bool:
        return self.plan.churn and post.pool == "prefork"

    def workers(self) -> list[Worker]:
        """All that were started, the living ones too."""
        now = [post.worker for post in self.posts if post.worker is not None]
        return [*now, *(worker for post in self.posts for worker in post.former)]

    def write_deaths(
        self, worker: Worker, pids: list[int], at: float, *, until: float | None = None
    ) -> None:
        """Write down that those of ``pids`` that are gone died between ``at`` and ``until``."""
        for pid in pids:
            if not is_running(pid):
                number = worker.number_of(pid)
                self.history.write(
                    "death", pid=number, at=at, worker=worker.hostname, until=until or at
                )

    def replace_store(self, server: PrivateServer) -> None:
        """From now on ``server`` is the store; no connection leads to the old one."""
        for post in self.posts:
            if post.proxy is not None:
                post.proxy.lead_to(server.port)
        if self.beats is not None:
            self.beats.lead_to(server.port)
        self.store = server

    def keys_left(self) -> dict[str, str]:
        """What should not be in a store that is used no more, and why; by key."""
        if self.members is not None:
            return self.members.keys_left()
        with self.admin() as admin:
            return keys_left(admin)

    def new_server(self) -> PrivateServer:
        """Another store server; it ends with the site."""
        return self._server(self._stack, *self._store_options())

    def _server(self, stack: ExitStack, *arguments: str) -> PrivateServer:
        binary = None
        if arguments[:1] == ("--user",):  # the store's
            binary = str(self.clock.program) if self.clock else self._store_binary()
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

    def _store_binary(self) -> str | None:
        return find_valkey() if self.plan.store == "valkey" else None

    def _lock_url(self, port: int, address: str = LOCAL) -> str:
        return f"{self.plan.store}://{address}:{port}/0"

    def _beats(self, stack: ExitStack) -> Beats:
        beats = Beats(
            stack,
            broker=self.broker.port,
            store=None if self.members else self.store.port,
            lock_url=self.environment["LOCK_URL"],
            count=self.plan.beats,
            directory=self.directory,
            broken=self.plan.broken,
        )
        for post in beats.posts:
            self.in_starter(post.beat.start)
        return beats

    def _host(self, stack: ExitStack, number: int) -> Host:
        clock = None
        if self.plan.wall_clocks:
            clock = HostClock(self.directory / f"host-{number}-clock", _DRIFTS[number % 3])
            stack.callback(clock.stop)
        # The last two have one name.
        host = Host(number, f"host-{min(number, max(self.plan.hosts - 1, 1))}", clock)
        stack.callback(host.stop)
        self.in_starter(host.start)
        return host

    def _post(self, stack: ExitStack, number: int, pool: str, host: Host | None) -> Post:
        proxy = None
        if self.members is None:
            address = STORE if host else LOCAL
            proxy = Proxy(self.store.port, seed=self._seed + number, address=address)
            stack.enter_context(proxy)
        post = Post(f"w{number}", pool, proxy, host)
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
