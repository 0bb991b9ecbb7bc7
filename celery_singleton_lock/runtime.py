"""One set of lock objects per app and process: the only module that wires classes."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from celery import Celery
from celery.utils.nodenames import gethostname

from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.core.events import EventName, Events
from celery_singleton_lock.core.heartbeat import Heartbeat
from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.locker import LeaseNotes, Locker
from celery_singleton_lock.core.store import Store
from celery_singleton_lock.errors import SettingsError
from celery_singleton_lock.instrumentation.logging import LEVELS, log_event
from celery_singleton_lock.instrumentation.monitor import Monitor
from celery_singleton_lock.instrumentation.signals import SIGNALS, send_signal
from celery_singleton_lock.settings import Settings, has_broker_in_memory, read_settings
from celery_singleton_lock.stores import open_store, shards_of

__all__ = ["IN_MEMORY", "Runtime", "singleton_tasks"]

logger = logging.getLogger("celery_singleton_lock")

#: Why a store in memory is refused.
IN_MEMORY = (
    "locks in memory:// exclude nothing between processes, and this app may run in several: "
    'set singleton_lock_url = "redis://host:6379/0" or another server. memory:// is for '
    "task_always_eager, and for a broker memory:// with a pool in this process (solo, threads); "
    "tests also have the pytest fixture singleton_store"
)
# Where an app keeps its runtimes, so that they end with it: {(process id, eager): Runtime}.
_ATTRIBUTE = "_singleton_runtimes"


@dataclass(frozen=True, slots=True)
class _Parts:
    store: Store
    heartbeat: Heartbeat
    locker: Locker


class Runtime:
    """The lock objects of one app in this process; made at first use, made anew after a fork.

    Args:
        app: The Celery app.
        store: Instead of the one its settings name.
        clock: Of deadlines.
    """

    #: Where a pool child notes its leases for the worker parent; set by the bootstep before the
    #: pool forks.
    ledger: LeaseNotes | None = None
    #: Name of this worker; set there too.
    worker_name = ""

    def __init__(
        self, app: Celery, *, store: Store | None = None, clock: Clock | None = None
    ) -> None:
        self.app = app
        self.clock = clock or SystemClock()
        self.events = Events([log_event, send_signal, Monitor(app)], _is_observed)
        #: Claims without a message that could not be freed: the task of each, by its key.
        self.orphans: dict[str, str] = {}
        #: The result backend with the timeouts of a publisher; created by the first that needs it.
        self.quick_backend: Any = None
        #: The limits of this app's tasks, by scope, and of how many tasks they are.
        self._limits: tuple[int, dict[str, int]] = (0, {})
        self._given_store = store
        self._parts: _Parts | None = None
        self._guard = threading.Lock()

    @cached_property
    def settings(self) -> Settings:
        return read_settings(self.app)

    @cached_property
    def keyspace(self) -> Keyspace:
        return Keyspace(self.settings.prefix, shards_of(self.settings.url))

    @property
    def store(self) -> Store:
        return (self._parts or self._wire()).store

    @property
    def heartbeat(self) -> Heartbeat:
        return (self._parts or self._wire()).heartbeat

    @property
    def locker(self) -> Locker:
        return (self._parts or self._wire()).locker

    @cached_property
    def _host(self) -> str:
        return gethostname()

    @property
    def worker(self) -> str:
        """This process's name in records: the worker's, or the host's outside workers."""
        return Runtime.worker_name or self._host

    def limit_of(self, scope: str) -> int:
        """The limit that the tasks of ``scope`` have, if this process knows them; equal by check.

        Read once: a ``hold()`` in a task must not cost more the more tasks its app has.
        """
        number = len(self.app.tasks)
        if self._limits[0] != number:
            # The tasks' own options, not the merged policies: no setting sets scope or limit, and
            # a task that contradicts the settings must not break an unrelated hold().
            said = ((task.name, task.singleton or {}) for task in singleton_tasks(self.app))
            limits = {opts.get("scope") or name: opts.get("limit", 1) for name, opts in said}
            self._limits = (number, limits)
        return self._limits[1].get(scope, 1)

    def close(self) -> None:
        """End the heartbeat and close the connections, where there are any."""
        if self._parts is not None:
            self._parts.heartbeat.close()
            self._parts.store.close()

    def _wire(self) -> _Parts:
        # Two threads may come first: two heartbeats would each renew what the other released.
        with self._guard:
            if self._parts is None:
                self._parts = self._new_parts()
            return self._parts

    def _new_parts(self) -> _Parts:
        store = self._given_store or self._first_store()
        heartbeat = Heartbeat(store, self.clock, self.events)
        # Its thread ends with the app; but not with the interpreter, where a body may run still.
        weakref.finalize(self, heartbeat.close).atexit = False
        locker = Locker(store, self.clock, heartbeat, self.events, Runtime.ledger)
        return _Parts(store, heartbeat, locker)

    def _first_store(self) -> Store:
        settings = self.settings
        if not settings.url:
            raise SettingsError(
                "there is nowhere to keep locks: neither the result backend nor the broker is "
                'Redis. Set singleton_lock_url = "redis://host:6379/0". In tests without a server '
                "use the pytest fixture singleton_store, or task_always_eager."
            )
        conf = self.app.conf
        one_process = conf.task_always_eager or has_broker_in_memory(conf)
        if settings.url.startswith("memory:") and not one_process:
            raise SettingsError(IN_MEMORY)
        logger.info("singleton locks live in %s (%s)", settings.safe_url, settings.url_source)
        return self.open_store()

    def open_store(self) -> Store:
        """Another store of the app's settings, with connections of its own."""
        settings = self.settings
        return open_store(
            settings.url,
            clock=self.clock,
            fence_base=settings.fence_base,
            options=settings.connection_options,
            wait_replicas=settings.wait_replicas,
        )

    @classmethod
    def of(cls, app: Celery, *, eager: bool = False) -> Runtime:
        """The runtime of ``app`` in this process; ``eager``: the one without a server.

        After a fork the child has a process id, and so a runtime, of its own: the parent's
        connections and threads are not its, and a lock that another thread held at the fork would
        never be released (a child hung on one 40 of 40 times).
        """
        runtimes: dict[tuple[int, bool], Runtime] = app.__dict__.setdefault(_ATTRIBUTE, {})
        key = (os.getpid(), eager)
        found = runtimes.get(key)
        if found is None:
            store = open_store("memory://") if eager else None
            # One step of the interpreter: of two threads that come first, both get the same one.
            found = runtimes.setdefault(key, Runtime(app, store=store))
        return found

    @classmethod
    def install(cls, app: Celery, runtime: Runtime | None, *, eager: bool = False) -> None:
        """Use ``runtime`` for ``app`` in this process, or forget it (None); for tests."""
        runtimes, key = app.__dict__.setdefault(_ATTRIBUTE, {}), (os.getpid(), eager)
        if runtime is None:
            runtimes.pop(key, None)
        else:
            runtimes[key] = runtime


def _is_observed(name: EventName) -> bool:
    """Whether a sink would do something with an event of this name."""
    # In one function: each task asks three times.
    if logger.isEnabledFor(LEVELS[name]):
        return True
    signal = SIGNALS.get(name)
    if signal is not None and signal.receivers:
        return True
    return name is EventName.CONFLICT and bool(Monitor.worker)


def singleton_tasks(app: Any) -> list[Any]:
    """The registered tasks that hold locks."""
    return [task for task in app.tasks.values() if hasattr(task, "singleton_policy")]
