"""One set of lock objects per app and process: the only module that wires classes."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from celery import Celery
from celery.utils.nodenames import gethostname

from celery_singleton_lock.core.clock import Clock, SystemClock
from celery_singleton_lock.core.events import Events
from celery_singleton_lock.core.keeper import Keeper
from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.locker import Locker
from celery_singleton_lock.core.store import Store
from celery_singleton_lock.errors import SettingsError
from celery_singleton_lock.instrumentation.logging import log_event
from celery_singleton_lock.instrumentation.monitor import Monitor
from celery_singleton_lock.instrumentation.signals import send_signal
from celery_singleton_lock.settings import Settings, read_settings
from celery_singleton_lock.shared_record import SharedRecord
from celery_singleton_lock.stores import open_store

__all__ = ["Runtime"]

logger = logging.getLogger("celery_singleton_lock")


class Runtime:
    """The lock objects of one app in this process; made at first use, made anew after a fork.

    Args:
        app: The Celery app.
        store: Instead of the one its settings name.
        clock: Of deadlines.
    """

    #: Memory shared with the pool children; set by the worker's bootstep before it forks.
    shared_record: SharedRecord | None = None
    #: Name of this worker; set there too.
    worker_name = ""

    def __init__(
        self, app: Celery, *, store: Store | None = None, clock: Clock | None = None
    ) -> None:
        self.app = app
        self.clock = clock or SystemClock()
        self._given_store = store
        self.events = Events([log_event, send_signal, Monitor(app)])

    @cached_property
    def settings(self) -> Settings:
        return read_settings(self.app)

    @cached_property
    def keyspace(self) -> Keyspace:
        return Keyspace(self.settings.prefix)

    @cached_property
    def store(self) -> Store:
        if self._given_store is not None:
            return self._given_store
        settings = self.settings
        if not settings.url:
            raise SettingsError(
                "there is nowhere to keep locks: neither the result backend nor the broker is "
                'Redis. Set singleton_lock_url = "redis://host:6379/0".'
            )
        logger.info("singleton locks live in %s (%s)", settings.safe_url, settings.url_source)
        return open_store(
            settings.url,
            clock=self.clock,
            fence_base=settings.fence_base,
            options=settings.connection_options,
        )

    @cached_property
    def keeper(self) -> Keeper:
        return Keeper(self.store, self.clock, self.events)

    @cached_property
    def locker(self) -> Locker:
        return Locker(self.store, self.clock, self.keeper, self.events, Runtime.shared_record)

    @property
    def worker(self) -> str:
        """This process's name in records: the worker's, or the host's outside workers."""
        return Runtime.worker_name or gethostname()

    def close(self) -> None:
        """End the heartbeat and close the connections, where there are any."""
        if "keeper" in self.__dict__:
            self.keeper.close()
        if "store" in self.__dict__:
            self.store.close()

    @classmethod
    def of(cls, app: Celery, *, eager: bool = False) -> Runtime:
        """The runtime of ``app`` in this process; ``eager``: the one without a server."""
        return _runtimes.get(app, eager, lambda: _make(app, eager))

    @classmethod
    def install(cls, app: Celery, runtime: Runtime | None, *, eager: bool = False) -> None:
        """Use ``runtime`` for ``app`` in this process, or forget it (None); for tests."""
        _runtimes.put(app, eager, runtime)


def _make(app: Celery, eager: bool) -> Runtime:
    return Runtime(app, store=open_store("memory://") if eager else None)


class _Registry:
    """Runtimes by app. One per process: connections, threads and locks don't outlive a fork."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._runtimes: WeakKeyDictionary[Any, dict[bool, Runtime]] = WeakKeyDictionary()

    def get(self, app: Celery, eager: bool, make: Callable[[], Runtime]) -> Runtime:
        found = self._runtimes.get(app, {}).get(eager)
        if found is not None:
            return found
        with self._guard:
            return self._runtimes.setdefault(app, {}).setdefault(eager, make())

    def put(self, app: Celery, eager: bool, runtime: Runtime | None) -> None:
        with self._guard:
            of_app = self._runtimes.setdefault(app, {})
            if runtime is None:
                of_app.pop(eager, None)
            else:
                of_app[eager] = runtime


_runtimes = _Registry()


def _forget_parent() -> None:
    # A lock that another thread held at the fork would never be released here (a child hung 40 of
    # 40 times), so the whole registry is replaced, and with it every lock that hangs on it.
    global _runtimes
    _runtimes = _Registry()


os.register_at_fork(after_in_child=_forget_parent)
