"""A real load under a real Prometheus: a worker, beats and `serve`; conflicts and faults."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import redis

from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.inspection import HeldKey, held_keys
from example_project.private_server import PrivateServer
from tests.harness.app_module import fresh_module
from tests.harness.deliveries import wait_until
from tests.harness.processes import TIMEOUT, Process, kill_process
from tests.harness.prometheus import Prometheus
from tests.harness.serve import ServeProcess
from tests.harness.worker import CeleryBeat, CeleryWorker

APP: Final = "tests.apps.board"
#: Seconds between two rounds of calls.
PAUSE: Final = 0.5
#: Seconds: no body of this length ends by itself before its fault.
_LONG: Final = 20.0


class Load:
    """The processes, and the calls of one client.

    Args:
        shop: The app's module.
        locks: The server of the lock store alone.
        worker, beats: The processes that publish and run.
        prometheus: What scrapes `serve`.
    """

    def __init__(
        self,
        shop: ModuleType,
        locks: PrivateServer,
        worker: CeleryWorker,
        beats: list[CeleryBeat],
        prometheus: Prometheus,
    ) -> None:
        self._shop, self._locks, self._worker, self._beats = shop, locks, worker, beats
        self.prometheus = prometheus
        # The same calls each time.
        self._random = random.Random(7)
        self._rounds = 0

    @property
    def faults(self) -> list[Callable[[], None]]:
        """What goes wrong, in this order."""
        return [self.kill_child, self.delete_lease, self.kill_leader, self.stop_store]

    def call(self) -> None:
        """Publish the calls of one round."""
        shop, choose, number = self._shop, self._random, self._rounds
        self._rounds += 1
        if choose.random() < 0.7:
            shop.sync.delay(choose.randrange(6), choose.uniform(0.3, 3.0))
        if number % 120 == 2:
            for card in [1] * choose.randrange(10, 16) + [2] * choose.randrange(4, 9):
                shop.charge.delay(card, choose.uniform(0.8, 1.6))
        if number % 90 == 4:
            for _ in range(4):
                shop.reindex.delay(choose.uniform(2.0, 4.0))
        if number % 70 in (8, 10, 12):
            shop.build.delay("monthly", choose.uniform(2.0, 4.0))
        if number % 50 in (11, 13, 15):
            shop.preview.delay("front", 4.0)
        if number % 110 == 15:
            self._deliver_twice()
        time.sleep(PAUSE)

    def _deliver_twice(self) -> None:
        """A message comes again after its work is done, as after a `visibility_timeout`."""
        result = self._shop.sync.apply_async((99, 0.1), queue="aside")
        with redis.Redis.from_url(self._shop.app.conf.broker_url) as client:
            message = client.rpop("aside")
            client.lpush("celery", message)
            result.get(timeout=TIMEOUT)
            client.lpush("celery", message)

    def kill_child(self) -> None:
        """A process of the pool is killed, as for its memory."""
        kill_process(self._begin(account=100).pid)

    def delete_lease(self) -> None:
        """The store forgets a lease, as by an eviction."""
        self._begin(account=101)
        with redis.Redis.from_url(self._locks.url()) as client:
            client.delete(self._shop.sync.lock_key(101, _LONG))
        self._worker.wait_for_event(EventName.LEASE_LOST)

    def kill_leader(self) -> None:
        """The beat that leads is killed; the other one takes over."""

        def leader() -> CeleryBeat | None:
            return next((beat for beat in self._beats if beat.events(EventName.LEADING)), None)

        wait_until(leader, "a beat leads").kill_group()

    def stop_store(self) -> None:
        """The lock store does not answer until workers have noticed."""
        since = len(self._worker.lines)
        self._locks.pause()
        try:
            self._worker.wait_for_event(EventName.STORE_UNREACHABLE, since=since)
        finally:
            self._locks.resume()

    def _begin(self, account: int) -> HeldKey:
        """Start a body that takes long; its key."""
        self._shop.sync.delay(account, _LONG)
        key = f"account:{account}"

        def held() -> HeldKey | None:
            found = held_keys(self._shop.app)
            return next((one for one in found if one.key.endswith(key)), None)

        return wait_until(held, f"{key} is held")


@contextmanager
def open_load(folder: Path, interval: int) -> Iterator[Load]:
    """Start everything; end it all afterwards."""
    with ExitStack() as stack:
        broker, locks = (stack.enter_context(PrivateServer()) for _ in range(2))
        env = {"BROKER_URL": broker.url(1), "RESULT_URL": broker.url(2), "LOCK_URL": locks.url()}

        def start(process: Process) -> Any:
            stack.callback(process.end)
            return process.start().wait_until_ready()  # type: ignore[attr-defined]

        server: ServeProcess = start(ServeProcess(APP, env=env))
        prometheus = start(Prometheus(server, folder, interval))
        worker = start(CeleryWorker(APP, concurrency=10, env=env, args=["-E"]))
        beats = [start(CeleryBeat(APP, env=env, name=name)) for name in ("one", "two")]
        shop = stack.enter_context(fresh_module(APP, env))
        yield Load(shop, locks, worker, beats, prometheus)
