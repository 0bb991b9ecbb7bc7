"""The lock objects of one app in one process. Only this module connects their classes."""

from __future__ import annotations

import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from celery import Celery
from celery.utils.nodenames import gethostname

from .celery_compat import call_at_close, close_backend
from .core import native_threads
from .core.alarm import LockAlarm
from .core.clock import Clock, SystemClock
from .core.events import Events
from .core.heartbeat import Heartbeat
from .core.keyspace import Keyspace
from .core.locker import LeaseNotes, Locker
from .core.outages import Outages
from .core.process import Process, identity_of_this_process, processes, this_process
from .core.rate import Rate
from .core.store import Store
from .errors import SettingsError, StoreError
from .instrumentation import SINKS, has_observers, is_observed, send_worker_event
from .settings import Settings, has_broker_in_memory, read_settings
from .stores import open_store, shards_of
from .stores.eviction import REMEDY, Eviction, eviction_of

if TYPE_CHECKING:
    from .core.executor import Executor

logger = logging.getLogger("celery_singleton_lock")

# The stores that this process or the worker parent before its fork has named in the log: pool
# children, which may be recycled after each task, do not repeat the line.
_logged_places: set[tuple[str, str]] = set()

#: The advice to a test that runs a task where there is no store.
WITHOUT_SERVER: Final = (
    "In tests without a server, use the fixture singleton_store, or task_always_eager."
)
#: The reason for refusing a store in memory.
IN_MEMORY = (
    "locks in memory:// exclude nothing between processes, and this app may run in several: "
    'set singleton_lock_url = "redis://host:6379/0" or another server. memory:// is for '
    "task_always_eager, and for a broker memory:// with a pool in this process (solo, threads); "
    "tests also have the pytest fixture singleton_store"
)
# More requests at once gain nothing from one store. But while a part of it does not answer, each
# request to that part occupies a thread until its timeout.
_MOST_COMMANDS: Final = 32
# Celery's default number of connections for publishing (broker_pool_limit).
_MOST_PUBLISHERS: Final = 10
# The user and password in a URL.
_CREDENTIALS: Final = re.compile("//[^/@]*@")
# The number of names of the broker that are noted: a header may contain anything.
_MAX_BROKERS: Final = 100
# Attribute of an app that contains its runtimes: {(process id, eager): Runtime}.
_ATTRIBUTE = "_singleton_runtimes"


class Runtime:
    """The lock objects of one app in this process, created at first use and again after a fork.

    Args:
        app: The Celery app.
        store: Replaces the store in the settings.
        clock: The clock of the deadlines.
    """

    #: The object in which a pool child notes its leases for the worker's parent; set by the
    #: bootstep before the pool forks.
    lease_notes: LeaseNotes | None = None
    #: The name of this worker, also set by the bootstep.
    worker_name = ""
    #: Whether the worker refuses leases that its store may evict; None: the store has not said
    #: whether it may. Also set by the bootstep.
    may_evict: bool | None = False
    #: Whether a thread renews the leases; else only calls of the heartbeat's ``sweep``.
    renews_by_thread = True

    def __init__(
        self, app: Celery, *, store: Store | None = None, clock: Clock | None = None
    ) -> None:
        self.app = app
        self.clock = clock or SystemClock()
        self.events = Events(
            SINKS,
            is_observed,
            record=send_worker_event,
            reaches_sinks=has_observers,
        )
        #: Claims without a message that could not be freed: the name of the task, by key.
        self.orphans: dict[str, str] = {}
        #: The results of eager calls, by the key of their period's claim.
        self.eager_results: dict[str, Any] = {}
        #: The result backend with the timeouts of a publisher; created when it is needed.
        self.quick_backend: Any = None
        #: The result backends of other kinds that no thread uses now.
        self.idle_backends: list[Any] = []
        #: The producers that publish the next calls of queues; created when they are needed.
        self.hint_producers: Any = None
        #: Asks this worker to look at the queue of a key now; None: none of its threads looks.
        self.sweep_soon: Callable[[str], None] | None = None
        #: The last thread that another result backend did not answer in time.
        self.unanswered: threading.Thread | None = None
        #: The number of registered tasks that were read, and the singleton tasks by scope.
        self._scopes: tuple[int, dict[str, list[Any]]] = (0, {})
        self._given_store = store
        self._host = gethostname()
        #: The identity of this process in the records of its leases.
        self.process = identity_of_this_process()
        self._locker: Locker | None = None
        # Of this locker: one ends its heartbeat after the runtime, one its store after that.
        self._finalizers: tuple[weakref.finalize[..., Any], ...] = ()
        self._guard = threading.Lock()

    @cached_property
    def settings(self) -> Settings:
        return read_settings(self.app)

    @cached_property
    def outages(self) -> Outages:
        """The outages of the store, as this process sees them."""
        return Outages(self.events, self.clock, self.settings.safe_url)

    @cached_property
    def keyspace(self) -> Keyspace:
        return self.keyspace_under(self.settings.global_keyprefix or "")

    def keyspace_under(self, global_keyprefix: str) -> Keyspace:
        """The keys of this app under a prefix of Celery's."""
        return Keyspace(self.settings.prefix, shards_of(self.settings.url), global_keyprefix)

    @cached_property
    def broker(self) -> str:
        """The URL of the broker to which the app publishes, without user and password."""
        connection: Any = self.app.connection_for_write()
        return _CREDENTIALS.sub("//", str(connection.as_uri()))

    @cached_property
    def brokers(self) -> set[str]:
        """The names of this broker in the URLs of all apps, as far as they are known."""
        return {self.broker}

    def note_broker(self, header: Mapping[str, Any]) -> None:
        """Note what the app that sent the message with this ``header`` calls its broker.

        It is this broker: the message has come from it.
        """
        broker = header.get("broker")
        if isinstance(broker, str) and len(self.brokers) < _MAX_BROKERS:
            self.brokers.add(broker)

    @property
    def store(self) -> Store:
        return (self._locker or self._connect()).store

    @property
    def locker(self) -> Locker:
        return self._locker or self._connect()

    @property
    def worker(self) -> str:
        """The name of this process in records: the worker's name, outside workers the host's."""
        return Runtime.worker_name or self._host

    def rate_of(self, scope: str) -> Rate | None:
        """The rate of the tasks of ``scope``. The bootstep checks that all agree."""
        tasks = self.scopes.get(scope)
        rate = (tasks[-1].singleton or {}).get("rate") if tasks else None
        return None if rate is None else Rate.of("rate", rate)

    def limit_of(self, scope: str) -> int:
        """The limit of the tasks of ``scope``; 1 by default. The bootstep checks that all agree."""
        tasks = self.scopes.get(scope)
        return (tasks[-1].singleton or {}).get("limit", 1) if tasks else 1

    @property
    def scopes(self) -> dict[str, list[Any]]:
        """The registered singleton tasks, by scope.

        They are read once, so that the cost of a ``hold()`` does not depend on their number.
        """
        number = len(self.app.tasks)
        if self._scopes[0] != number:
            found: dict[str, list[Any]] = {}
            for task in singleton_tasks(self.app):
                # The task's own options are read instead of the merged policy: no setting sets key,
                # scope or limit, and a task that contradicts the settings must not break an
                # unrelated hold().
                found.setdefault((task.singleton or {}).get("scope") or task.name, []).append(task)
            self._scopes = (number, found)
        return self._scopes[1]

    @cached_property
    def commands(self) -> Executor:
        """Threads for the requests of coroutines to the store. None of them waits for a holder."""
        return _executor(_MOST_COMMANDS, "command")

    @cached_property
    def publishers(self) -> Executor:
        """Threads that publish for coroutines, and may wait for the broker."""
        return _executor(_MOST_PUBLISHERS, "publisher")

    def drain(self, timeout: float) -> None:
        """Read the replies to asynchronous releases; wait at most ``timeout`` seconds for each."""
        if self._locker is not None and (releases := self._locker.store.async_releases):
            releases.drain(timeout=timeout)

    def flush(self) -> None:
        """Wait a moment for the requests that are repeated until the store answers."""
        if self._locker is not None:
            self._locker.retry_queue.flush()

    def end(self) -> None:
        """As :meth:`flush`, and give up the requests that are left: this process ends."""
        if self._locker is not None:
            self._locker.retry_queue.end()

    def close(self) -> None:
        """End the threads and close the connections, if there are any. The next use opens others.

        The heartbeat and the connections of leases that are held end after the last of them.
        """
        for name in ("commands", "publishers"):
            if (threads := self.__dict__.pop(name, None)) is not None:
                threads.close()
        with self._guard:
            locker, self._locker = self._locker, None
            finalizers, self._finalizers = self._finalizers, ()
            backend, self.quick_backend = self.quick_backend, None
            self.idle_backends = []
        if backend is not None:
            close_backend(backend)
        if locker is not None:
            end_heartbeat, end_store = finalizers
            end_heartbeat()
            # Some stores end the leases of this process when they are closed. While there are
            # leases, the store is closed after the heartbeat.
            if not locker.heartbeat:
                end_store.detach()
                locker.retry_queue.end()
                locker.retry_queue.close()
                locker.store.close()
                # Until the store is collected it keeps its watch, and the heartbeat's alarm would
                # keep its descriptors.
                locker.store.watch_connections(LockAlarm())

    def _connect(self) -> Locker:
        # Only one of two concurrent first callers creates the objects: with two heartbeats, each
        # would renew leases that were released through the other.
        with self._guard:
            if self._locker is None:
                store = self._given_store or self._first_store()
                heartbeat = Heartbeat(store, self.clock, self.events, self.outages)
                heartbeat.renews_by_thread = self.renews_by_thread
                # The heartbeat's thread ends with the app, but not when the interpreter exits,
                # because a body may still run. The connections end with the heartbeat.
                end_heartbeat = weakref.finalize(self, heartbeat.close)
                end_store = weakref.finalize(heartbeat, _close_later, store, this_process())
                end_heartbeat.atexit = end_store.atexit = False
                if self._given_store is not None:
                    end_store.detach()
                self._finalizers = (end_heartbeat, end_store)
                self._locker = Locker(
                    store, self.clock, heartbeat, self.events, Runtime.lease_notes
                )
                if Runtime.may_evict is not False:
                    self._locker.guard = self._refuse_evictable
            return self._locker

    def eviction(self) -> Eviction | None:
        """What the store's server may evict now; see `eviction_of`."""
        operators = self.store.operators
        return eviction_of(operators.info("memory") if operators else {})

    def refuse_evictable_leases(self, *, is_known: bool) -> None:
        """Grant no lease in this process, or in a pool child, while the store may evict leases.

        Args:
            is_known: Whether it may; if not, it has not answered, and is asked before the first
                lease.
        """
        Runtime.may_evict = True if is_known else None
        self.locker.guard = self._refuse_evictable

    def _refuse_evictable(self) -> None:
        """Raise while the store may evict leases, which is asked before each acquire.

        The requests are as rare as the tries of the messages, whose requeues are delayed more and
        more.

        Raises:
            StoreError: It may, or it does not answer.
        """
        found = self.eviction()
        if found is not None and found.forbids_leases(allow_eviction=self.settings.allow_eviction):
            reason = f"{found.text}. To do: {REMEDY}"
            if Runtime.may_evict is None:
                logger.error("singleton: no locks: %s: %s", self.settings.safe_url, reason)
                Runtime.may_evict = True
            raise StoreError(reason)
        self.locker.guard = None
        if Runtime.may_evict:
            logger.warning(
                "singleton: %s does not endanger leases any more: they are granted",
                self.settings.safe_url,
            )

    def _first_store(self) -> Store:
        settings = self.settings
        if not settings.url:
            raise SettingsError(
                "there is nowhere to keep locks: neither the result backend nor the broker is "
                f"Redis, for the app {self.app.main or 'default'!r}. If another app is meant, name "
                "it with -A on the command line, give app=..., or call its set_default() "
                '(current_app is per thread). Else set singleton_lock_url = "redis://host:6379/0". '
                f"{WITHOUT_SERVER}"
            )
        conf = self.app.conf
        one_process = conf.task_always_eager or has_broker_in_memory(conf)
        if settings.url.startswith("memory:") and not one_process:
            raise SettingsError(IN_MEMORY)
        place = (settings.safe_url, settings.url_source)
        if place not in _logged_places:
            _logged_places.add(place)
            prefix = settings.global_keyprefix
            under = f", under keys that begin with {prefix!r}" if prefix else ""
            logger.info("singleton locks live in %s (%s)%s", *place, under)
        return self.open_store()

    def open_store(self) -> Store:
        """Open another store by the app's settings, with its own connections."""
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
        """The runtime of ``app`` in this process; ``eager``: the runtime without a server.

        A forked child is another process and has another runtime. It must not use the parent's
        connections, and it has none of the parent's threads. A lock that another thread held at the
        fork would never be released (a child hung on such a lock 40 of 40 times).
        """
        try:
            found: Runtime = app.__dict__[_ATTRIBUTE][processes[os.getpid()], eager]
        except KeyError:
            store = open_store("memory://") if eager else None
            # setdefault() is atomic: two concurrent first callers get the same runtime.
            found = _runtimes(app).setdefault((this_process(), eager), Runtime(app, store=store))
        return found

    @classmethod
    def install(cls, app: Celery, runtime: Runtime | None, *, eager: bool = False) -> None:
        """Use ``runtime`` for ``app`` in this process, or remove it (None). For tests."""
        runtimes, key = _runtimes(app), (this_process(), eager)
        if runtime is None:
            runtimes.pop(key, None)
        else:
            runtimes[key] = runtime


def _runtimes(app: Celery) -> dict[tuple[Process, bool], Runtime]:
    """The runtimes of ``app`` in all processes; those of this process end with ``app.close()``."""
    if _ATTRIBUTE not in app.__dict__:  # two threads at once: closed twice, which does nothing
        call_at_close(app, _close_runtimes)
    runtimes: dict[tuple[Process, bool], Runtime] = app.__dict__.setdefault(_ATTRIBUTE, {})
    return runtimes


def _close_runtimes(app: Celery) -> None:
    for (process, _), runtime in list(_runtimes(app).items()):
        if process is this_process():
            runtime.close()


def _close_later(store: Store, process: Process) -> None:
    """Close ``store``, which a collected runtime of ``process`` has used, on a thread of its own.

    The garbage collector calls this on any thread, even on one that is inside the store's client or
    inside :mod:`threading`, whose locks a :class:`threading.Thread` needs.
    """
    # A forked child has a copy of its parent's store. Where threads are patched, the sockets belong
    # to another thread's hub; they are closed when they are collected.
    if process is this_process() and not native_threads.is_patched():
        with suppress(RuntimeError):  # the interpreter exits, or the process has too many threads
            native_threads.original("start_new_thread")(_close, (store,))


def _close(store: Store) -> None:
    try:
        store.close()
    except Exception:
        logger.exception("singleton: the store of a collected app could not be closed")


def _executor(most: int, name: str) -> Executor:
    from .core.executor import Executor  # imports asyncio, which few processes need

    return Executor(most, name)


def singleton_tasks(app: Any) -> list[Any]:
    """The registered tasks that hold locks."""
    return [task for task in app.tasks.values() if hasattr(task, "singleton_policy")]
