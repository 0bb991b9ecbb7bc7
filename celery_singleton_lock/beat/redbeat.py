"""RedBeat's scheduler with an election in place of its lock: ``--scheduler singleton_redbeat``."""

from __future__ import annotations

import logging
from contextlib import suppress
from datetime import datetime
from typing import Any

from redbeat.schedulers import RedBeatScheduler, get_redis
from redis.exceptions import LockError, RedisError
from redis.lock import Lock

from ..celery_compat import entry_after
from ..core import observers
from .scheduler import LeaderMixin, like

logger = logging.getLogger("celery_singleton_lock")


class LeaderRedBeatScheduler(LeaderMixin, RedBeatScheduler):
    """All beats share the entries in RedBeat's keys. The stored last runs are authoritative."""

    _waits = False  # for RedBeat's lock, which was logged
    _failed = False  # whether RedBeat's server did not reply to the last request

    def __init__(self, app: Any, **kwargs: Any) -> None:
        super().__init__(app, **kwargs)
        # The election replaces RedBeat's lock. RedBeat ends a process that can't extend the lock,
        # and does not compare the lock before a send.
        old_key: str | None = self.lock_key
        self.lock_key: str | None = None
        # With `singleton_lock_bridge` the leader holds RedBeat's lock too. RedBeat's close()
        # releases what `lock` is.
        self.lock: Lock | None = None
        if old_key and not kwargs.get("lazy") and self._runtime.settings.bridge:
            self.lock = get_redis(app).lock(old_key, timeout=self.lock_timeout, blocking=False)

    def setup_schedule(self) -> None:
        # Older versions of redis-py wait for a reply without a limit.
        pool = getattr(get_redis(self.app), "connection_pool", None)
        if pool is not None and pool.connection_kwargs.get("socket_timeout") is None:
            pool.connection_kwargs["socket_timeout"] = self._election.ttl
        super().setup_schedule()

    @observers.elsewhere()
    def tick(self, *args: Any, **kwargs: Any) -> float:
        """See `LeaderMixin.tick`. An unreachable RedBeat server is logged, too."""
        try:
            if self._failed:
                get_redis(self.app).ping()
                self._failed = False
            if self.lock is not None and not self._holds(self.lock):
                return min(self._election.pause(), self._election.poll)
            return super().tick(*args, **kwargs)
        except RedisError as exc:
            # No progress: a leader that can't read the schedule resigns, and does not stand until
            # the server replies.
            self._failed = True
            self._election.fail(exc)
            return self._election.poll

    def _holds(self, lock: Lock) -> bool:
        """Whether this process leads and holds RedBeat's lock, for another ``lock_timeout``."""
        if not self.leads():
            if not self._election.leading:
                with suppress(LockError):  # it is not held
                    lock.release()
            return False
        try:
            lock.reacquire()
            return True
        except LockError:  # it is not held yet, or has expired
            holds = bool(lock.acquire())
        if not holds and not self._waits:
            logger.info("singleton beat: a RedBeat holds %s; no ticks until it stops", lock.name)
        self._waits = not holds
        if not holds:
            self._election.progress()  # another beat would have to wait too
        return holds

    def maybe_due(self, entry: Any, **kwargs: Any) -> float:
        """Send ``entry`` if it is due. Return the seconds until its next check."""
        due, wait = self.is_due(entry)
        if due:
            # RedBeat advances the entry within apply_async. Here the tick is authorized first: an
            # entry that may not be sent must not advance.
            self.reserve(entry)
            self.apply_entry(entry, **kwargs)
        return wait

    def keeps_last_run(self, entry: Any) -> bool:
        """True: each run writes the last run to RedBeat's key."""
        return True

    def advance(self, entry: Any, tick_at: datetime) -> Any:
        try:
            return entry_after(entry, like(tick_at, entry.default_now()))
        except RedisError as exc:
            # The tick is authorized, so it must be sent. RedBeat's own last run follows with the
            # next tick.
            logger.warning(
                "singleton beat: RedBeat's key of %r wasn't written: %s", entry.name, exc
            )
            return entry
