"""What the store holds and what the doctor finds, read at most so often."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Final, Generic, TypeVar
from urllib.parse import unquote

from celery import Celery

from .. import inspection
from ..core.clock import Clock
from ..doctor import Finding, diagnose
from ..doctor.context import SCOPE
from ..errors import SingletonLockError, StoreError, StoreUnavailable
from ..inspection import HeldKey, Paused
from ..inspection.pauses import pauses_if_allowed
from ..runtime import Runtime

logger = logging.getLogger("celery_singleton_lock")

T = TypeVar("T")

# Seconds for which a reading is used.
_KEYS_FOR: Final = 1.0
_FINDINGS_FOR: Final = 60.0
# A reading is used for at least this many times the seconds that it took: many keys take a fifth of
# this process's time, and the events of workers have the rest. (The store paces a search through
# the keys of other programs.)
_REST: Final = 4.0
# Seconds to wait for a reading if there is an earlier one. A scrape of Prometheus ends after ten.
_PATIENCE: Final = 2.0
# Seconds to wait for the reply that shows that the store answers.
_PROBE_TIMEOUT: Final = 1.0
#: The task's name in the records of Beat leaders.
BEAT: Final = "celery.beat"


@dataclass(frozen=True)
class Reading:
    """The keys at one moment.

    Attributes:
        at: The time.
        keys: The keys held and claimed, by name.
        error: Why there is no answer of the store; empty: it answered.
        pauses: What is paused.
    """

    at: datetime
    keys: tuple[HeldKey, ...] = ()
    error: str = ""
    pauses: tuple[Paused, ...] = ()

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """For each key the text that a search looks into, in lower case."""
        return tuple(
            "\n".join((key.key, unquote(key.key), key.task, key.task_id, key.worker)).lower()
            for key in self.keys
        )

    def leader(self, name: str) -> HeldKey | None:
        """The holder of the lease that leads the Beats of this name."""
        return next((k for k in self.keys if (k.task, k.task_id) == (BEAT, name)), None)

    def wait(self, key: HeldKey) -> float:
        """Seconds for which the oldest call in the queue of ``key`` has waited."""
        oldest = key.oldest_call
        return max(0.0, (self.at - oldest).total_seconds()) if oldest else 0.0

    def age(self, key: HeldKey) -> float:
        """Seconds for which ``key`` has been held."""
        return max(0.0, (self.at - key.since).total_seconds()) if key.since else 0.0


class Cached(Generic[T]):
    """The result of a function that one thread at a time calls.

    A caller waits for the first result. Later it waits for a moment, and gets the last one if the
    function takes longer.

    Args:
        read: The function.
        clock: The clock.
        seconds: How long a result is used.
    """

    def __init__(self, read: Callable[[], T], clock: Clock, seconds: float) -> None:
        self._read, self._clock, self._seconds = read, clock, seconds
        self._lock = threading.Lock()
        self._until = float("-inf")
        # The last result, if there is one.
        self._values: list[T] = []
        # The call of the function that runs.
        self._running: Future[T] | None = None

    def get(self) -> T:
        """The result.

        Raises:
            Exception: An exception of the function.
        """
        with self._lock:
            if self._values and self._clock.now() < self._until:
                return self._values[0]
            running = self._running or self._begin()
        try:
            return running.result(_PATIENCE if self._values else None)
        except TimeoutError:
            return self._values[0]

    def _begin(self) -> Future[T]:
        running = Future[T]()
        threading.Thread(
            target=self._call, args=(running,), name="singleton-reading", daemon=True
        ).start()
        self._running = running
        return running

    def _call(self, running: Future[T]) -> None:
        begin = self._clock.now()
        try:
            value = self._read()
        except BaseException as exc:
            with self._lock:
                self._running = None
            running.set_exception(exc)
            return
        end = self._clock.now()
        with self._lock:
            self._until = end + max(self._seconds, _REST * (end - begin))
            self._values, self._running = [value], None
        running.set_result(value)

    def forget(self) -> None:
        """Read again at the next call."""
        self._until = float("-inf")


class Readings:
    """The readings of one app.

    Args:
        app: The app.
    """

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.clock = Runtime.of(app).clock
        self.keys = Cached(self._read_keys, self.clock, _KEYS_FOR)
        #: Why the store does not answer; empty: it does. Reads no keys, of which there may be many.
        self.outage = Cached(self._probe, self.clock, _KEYS_FOR)
        #: The doctor's findings; empty until its first round has ended.
        self.findings: tuple[Finding, ...] = ()

    def start(self) -> None:
        """Examine the app once a minute, on a thread of its own."""
        threading.Thread(target=self._examine, name="singleton-doctor", daemon=True).start()

    def _examine(self) -> None:
        while True:
            try:
                self.findings = tuple(diagnose(self.app))
            except Exception:
                logger.exception("singleton serve: the doctor failed")
                self.findings = ()
            self.clock.sleep(_FINDINGS_FOR)

    def _read_keys(self) -> Reading:
        at = datetime.fromtimestamp(self.clock.wall(), UTC)
        try:
            # Without the key with which a doctor, such as this server's, tests the store.
            keys = tuple(key for key in self._held_keys() if key.scope != SCOPE)
            return Reading(at, keys, pauses=tuple(pauses_if_allowed(self.app)))
        except SingletonLockError as exc:
            return Reading(at, error=str(exc))

    def _probe(self) -> str:
        runtime = Runtime.of(self.app)
        try:
            runtime.store.leases.trace(
                runtime.keyspace.lock(SCOPE, "probe"), timeout=_PROBE_TIMEOUT
            )
        except SingletonLockError as exc:
            return str(exc)
        return ""

    def _held_keys(self) -> list[HeldKey]:
        if Runtime.of(self.app).store.wait_queue is not None:
            try:
                return list(inspection.held_keys(self.app, counts_waiting=True, counts_calls=True))
            except StoreUnavailable:
                raise
            except StoreError:
                pass  # the login may list keys, but not read their wait queues
        return list(inspection.held_keys(self.app, counts_calls=True))
