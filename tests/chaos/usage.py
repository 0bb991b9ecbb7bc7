"""What the processes of a campaign use while it runs: whether anything grows by the hour.

``usage.csv`` has a row for each process and round: memory, file descriptors, threads; for a server
its clients and keys, unless it does not answer. The report compares begin and end.
"""

from __future__ import annotations

import csv
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, Final, Self

import psutil
import redis

from example_project.private_server import PrivateServer
from tests.chaos.site import Site, now
from tests.harness.processes import Process

#: The processes in the file; not the servers of a store with several members.
KINDS: Final = frozenset({"worker", "child", "beat", "broker", "store"})
_FILE: Final = "usage.csv"
#: Seconds between two rounds, at least; and rounds of a campaign, at most.
_PAUSE: Final = 1.0
_ROUNDS: Final = 500
#: Seconds that processes have to settle: a short campaign gives them a sixth of its time.
_SETTLED_AFTER: Final = 600.0
#: The part of the remaining time that is compared, at its begin and at its end.
_SHARE: Final = 0.2
_MIB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one process used in one round.

    Attributes:
        at: Seconds since the first round.
        kind: One of ``KINDS``; a child is a pool process.
        pid: The process.
        mib: Its resident memory, in MiB.
        descriptors: Its open files.
        threads: Its threads.
        clients: The connections of a server; None: no server, or no answer.
        keys: The keys of all its databases; None: as above.
    """

    at: float
    kind: str
    pid: int
    mib: float
    descriptors: int
    threads: int
    clients: int | None = None
    keys: int | None = None


#: What is compared, in this order.
_MEASURES: Final = tuple(one.name for one in fields(Usage))[3:]


class Recorder:
    """Writes the file while its ``with`` block runs.

    Args:
        site: The processes.
        seconds: How long the block will take, about.
    """

    def __init__(self, site: Site, seconds: float) -> None:
        self._site, self._pause = site, max(_PAUSE, seconds / _ROUNDS)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        began = now()
        with (self._site.directory / _FILE).open("w", newline="") as file:
            writer = csv.DictWriter(file, [one.name for one in fields(Usage)])
            writer.writeheader()
            while not self._over.wait(self._pause):
                at = round(now() - began, 1)
                for kind, pid, client in self._processes():
                    with suppress(psutil.Error, OSError):  # it ends just now
                        usage = Usage(at=at, kind=kind, **_of_process(pid), **_of_server(client))
                        writer.writerow(asdict(usage))
                file.flush()

    def _processes(self) -> Iterator[tuple[str, int, redis.Redis | None]]:
        site = self._site
        for post in site.posts:
            if post.worker is not None and (pid := _pid(post.worker)):
                yield "worker", pid, None
                yield from (("child", child, None) for child in post.worker.children())
        for one in site.beats.posts if site.beats else ():
            if pid := _pid(one.beat):
                yield "beat", pid, None
        if pid := _pid(site.broker):
            yield "broker", pid, redis.Redis(port=site.broker.port, socket_timeout=1)
        if site.members is None and (pid := _pid(site.store)):
            yield "store", pid, site.admin()


def _pid(process: Process | PrivateServer) -> int:
    """Its process id; 0: it does not run, or not yet."""
    try:
        return process.pid if process.alive else 0
    except RuntimeError:
        return 0


def _of_process(pid: int) -> dict[str, Any]:
    process = psutil.Process(pid)
    with process.oneshot():
        return {
            "pid": pid,
            "mib": round(process.memory_info().rss / _MIB, 1),
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
        }


def _of_server(client: redis.Redis | None) -> dict[str, Any]:
    if client is None:
        return {}
    try:
        with client:
            found: Any = client.info("clients", "keyspace")
    except redis.RedisError:
        return {}  # a fault
    databases = [value for name, value in found.items() if name.startswith("db")]
    return {
        "clients": found["connected_clients"],
        "keys": sum(database["keys"] for database in databases),
    }


def usages(directory: Path) -> list[Usage]:
    """The rows of a campaign, in order."""
    with (directory / _FILE).open(newline="") as file:
        return [_parsed(row) for row in csv.DictReader(file)]


def _parsed(row: dict[str, str]) -> Usage:
    numbers = {
        name: None if value == "" else float(value) if name in ("at", "mib") else int(value)
        for name, value in row.items()
        if name != "kind"
    }
    return Usage(kind=row["kind"], **numbers)  # type: ignore[arg-type]


def changes(rows: Sequence[Usage]) -> Iterator[str]:
    """For each kind of process a line with the medians when it had settled, and at the end."""
    last = max((row.at for row in rows), default=0.0)
    settled = min(_SETTLED_AFTER, last / 6)
    window = (last - settled) * _SHARE
    early = [row for row in rows if settled <= row.at <= settled + window]
    late = [row for row in rows if row.at >= last - window]
    for kind in dict.fromkeys(row.kind for row in rows):
        found = [
            f"{measure} {_text(begin)} -> {_text(end)}"
            for measure in _MEASURES
            if (begin := _median(early, kind, measure)) is not None
            and (end := _median(late, kind, measure)) is not None
        ]
        yield f"{kind}: {', '.join(found)}"


def _median(rows: Sequence[Usage], kind: str, measure: str) -> float | None:
    values = [
        value for row in rows if row.kind == kind and (value := getattr(row, measure)) is not None
    ]
    return median(values) if values else None


def _text(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
