"""Many leases of one process, for minutes, in a server that is killed and restarted meanwhile.

The server keeps its data (an append-only file, written at each command), so no lease may be lost,
and no other client may get one: an intruder asks for some of them all the time.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import uuid4

import redis
from celery import Celery

from celery_singleton_lock.core.lease import Holder, Lease, Token
from celery_singleton_lock.core.store import Store
from celery_singleton_lock.core.store_requests import Acquire, Granted, Release
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores import open_store
from example_project.private_server import PrivateServer
from tests.harness.keys import EVERY_NAME
from tests.load.memory import Sample, sample

_SHARES = (0.2, 0.6)
_ASKED_AT_ONCE = 20


@dataclass(frozen=True, kw_only=True)
class LeaseLoad:
    """What to hold.

    Attributes:
        leases: How many.
        seconds: For how long.
        ttl: Seconds. A server that is away, or reads its file, for two thirds of it, loses leases.
        restarts: How often the server is killed and restarted meanwhile.
        downtime: Seconds that it is away each time.
        keeps: Whether the server keeps its data; if it doesn't, the run has to fail.
    """

    leases: int = 2000
    seconds: float = 60.0
    ttl: float = 60.0
    restarts: int = 3
    downtime: float = 1.0
    keeps: bool = True


@dataclass(frozen=True, kw_only=True)
class LeaseReport:
    """What became of them.

    Attributes:
        outage: Seconds that the server was away for, at the longest: until it had read its file.
        lost: Leases that ended early.
        shortest: Seconds of trust that the least trusted lease had left, at the worst moment.
        intruded: Leases that another client was granted while their holder trusted them.
        asked: How often another client asked.
        left: Keys in the store after the release of all.
    """

    leases: int
    seconds: float
    restarts: int
    outage: float
    lost: int
    shortest: float
    intruded: int
    asked: int
    left: int
    samples: list[Sample] = field(default_factory=list)

    @property
    def grown(self) -> float:
        """MiB by which this process grew between the first and the last sample."""
        return self.samples[-1].parents - self.samples[0].parents

    @property
    def ok(self) -> bool:
        return not (self.lost or self.intruded or self.left)

    def __str__(self) -> str:
        lines = [
            f"{self.leases} leases for {self.seconds:.0f} s over {self.restarts} restarts, of at "
            f"most {self.outage:.1f} s",
            f"lost {self.lost}, granted to others {self.intruded} of {self.asked} asked for, left "
            f"{self.left}; at the worst moment a lease had {self.shortest:.1f} s of trust left",
            *map(str, self.samples),
            f"process grew by {self.grown:+.1f} MiB",
        ]
        return "\n".join(lines)


def run(load: LeaseLoad) -> LeaseReport:
    """Acquire all, hold on to them, release them."""
    with PrivateServer(appendonly=load.keeps) as server, _runtime(server.url(1)) as runtime:
        intruder = open_store(server.url(1))
        leases = [_acquire(runtime, f"key:{number}", load.ttl) for number in range(load.leases)]
        client = redis.Redis.from_url(server.url(1))
        began = time.monotonic()
        restarts = _moments(began, load)
        shares = list(_SHARES)
        samples: list[Sample] = []
        shortest, outage, intruded, asked, restarted = load.ttl, 0.0, 0, 0, 0
        while (elapsed := time.monotonic() - began) < load.seconds:
            if restarts and time.monotonic() >= restarts[0]:
                restarts.pop(0)
                outage = max(outage, _restart(server, client, load.downtime))
                restarted += 1
            shortest = min(shortest, *(lease.remaining() for lease in leases))
            got, tried = _intrude(intruder, leases)
            intruded, asked = intruded + got, asked + tried
            if shares and elapsed >= shares[0] * load.seconds:
                samples.append(sample(shares.pop(0), [os.getpid()], client))
            time.sleep(0.2)
        samples.append(sample(1.0, [os.getpid()], client))
        lost = sum(lease.lost for lease in leases)
        seconds = time.monotonic() - began
        for lease in leases:
            runtime.locker.release(lease, Release(keys=(lease.key,), token=lease.token))
        left = sum(1 for _ in client.scan_iter(f"{EVERY_NAME}:key:*", 1000))
        client.close()
        intruder.close()
    return LeaseReport(
        leases=load.leases,
        seconds=seconds,
        restarts=restarted,
        outage=outage,
        lost=lost,
        shortest=shortest,
        intruded=intruded,
        asked=asked,
        left=left,
        samples=samples,
    )


def _moments(began: float, load: LeaseLoad) -> list[float]:
    """When the server is killed: evenly, none near the ends."""
    step = load.seconds / (load.restarts + 1)
    return [began + step * (number + 1) for number in range(load.restarts)]


def _restart(server: PrivateServer, client: redis.Redis, downtime: float) -> float:
    """Kill and start again; seconds until it serves its data."""
    killed = time.monotonic()
    server.kill()
    time.sleep(downtime)  # the outage itself
    server.start()
    while True:
        try:
            client.dbsize()
            return time.monotonic() - killed
        except redis.exceptions.RedisError:
            time.sleep(0.05)  # it reads its file


@contextmanager
def _runtime(url: str) -> Iterator[Runtime]:
    app = Celery("leases", set_as_current=False, broker=url, backend=url)
    runtime = Runtime(app)
    try:
        yield runtime
    finally:
        runtime.close()
        app.close()


def _acquire(runtime: Runtime, name: str, ttl: float) -> Lease:
    reply = runtime.locker.acquire(_call(runtime.keyspace.lock("load", name), ttl))
    assert isinstance(reply, Lease), reply
    return reply


def _call(key: str, ttl: float) -> Acquire:
    nonce = uuid4().hex
    holder = Holder(task_id=f"load-{nonce}", worker="load", pid=os.getpid(), since=time.time())
    return Acquire(slots=(key,), token=Token(holder.task_id, 0, 0, nonce), holder=holder, ttl=ttl)


def _intrude(store: Store, leases: list[Lease]) -> tuple[int, int]:
    """Ask for some leases that another has; how many were granted, of how many answers."""
    granted = answers = 0
    for lease in random.sample(leases, min(_ASKED_AT_ONCE, len(leases))):
        try:
            reply = store.leases.acquire(_call(lease.key, 1.0), timeout=1.0)
        except StoreError:
            continue  # an idle connection that the restart has cut
        # Asked after the grant: a holder that knows of its loss by then is not intruded upon.
        granted += isinstance(reply, Granted) and not lease.lost
        answers += 1
    return granted, answers
