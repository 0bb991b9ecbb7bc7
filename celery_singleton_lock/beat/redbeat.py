"""RedBeat's scheduler with an election in place of its lock: ``--scheduler singleton_redbeat``."""

from __future__ import annotations

import logging
from contextlib import suppress
from datetime import datetime
from typing import Any

from celery.schedules import schedule
from redis.exceptions import LockError, RedisError
from redis.lock import Lock

from ..celery_compat import entry_after
from ..core import observers
from ..message.times import utc
from .due_time import like
from .entry import checked_options, leave_out
from .scheduler import LeaderMixin, end_without

try:
    from redbeat.schedulers import RedBeatScheduler, RedBeatSchedulerEntry, get_redis
except ModuleNotFoundError as exc:
    end_without("redbeat", "redbeat", exc)

logger = logging.getLogger("celery_singleton_lock")


class RedBeatEntry(RedBeatSchedulerEntry):
    """An entry in RedBeat's keys. One that can't be read never ticks, and is not deleted."""

    @classmethod
    def from_key(cls, key: str, app: Any = None) -> Any:
        name = key.removeprefix(cls.generate_key(app, ""))
        try:
            entry = super().from_key(key, app=app)
            entry.options = checked_options(entry.options)
            return entry
        except RedisError:
            raise
        except Exception as exc:
            if isinstance(exc, KeyError) and exc.args == (key,):
                raise  # there is no such entry, or no longer
            # The JSON may have any error. A disabled entry in its place is looked at every 5 s.
            leave_out(name, exc)
        unread = cls(name, schedule=schedule(3600, app=app), enabled=False, app=app)
        unread.last_run_at = None
        return unread


class LeaderRedBeatScheduler(LeaderMixin, RedBeatScheduler):
    """All beats share the entries in RedBeat's keys. The stored last runs are authoritative."""

    Entry = RedBeatEntry
    _waits = False  # for RedBeat's lock, which was logged
    _failed = False  # whether RedBeat's server did not reply to the last request

    def __init__(self, app: Any, **kwargs: Any) -> None:
        super().__init__(app, **kwargs)
        # The election replaces RedBeat's lock. RedBeat ends a process that can't extend the lock,
        # and does not compare the lock before a send.
        old_key: str | None = self.lock_key
        self.lock_key: str | None = None
        # With `singleton_lock_old_locks` the leader holds RedBeat's lock too. RedBeat's close()
        # releases what `lock` is.
        self.lock: Lock | None = None
        if old_key and not kwargs.get("lazy") and self._runtime.settings.old_locks:
            self.lock = get_redis(app).lock(old_key, timeout=self.lock_timeout, blocking=False)

    def setup_schedule(self) -> None:
        # Older versions of redis-py wait for a reply without a limit.
        pool = getattr(get_redis(self.app), "connection_pool", None)
        if pool is not None and pool.connection_kwargs.get("socket_timeout") is None:
            pool.connection_kwargs["socket_timeout"] = self._election.ttl
        super().setup_schedule()

    def update_from_dict(self, dict_: Any) -> None:
        """Store the entries of a configuration. One that RedBeat can't store is left out."""
        for name, entry in dict_.items():
            try:
                super().update_from_dict({name: entry})
            except RedisError:
                raise
            except Exception as exc:  # of RedBeat's encoder, or of a wrong field
                leave_out(name, exc)

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
            logger.info(
                "singleton beat: a RedBeat holds %s; nothing is sent until it stops", lock.name
            )
        self._waits = not holds
        if not holds:
            self._election.progress()  # another beat would have to wait too
        return holds

    def maybe_due(self, entry: Any, **kwargs: Any) -> float:
        """Send ``entry`` if it is due. Return the seconds until its next check."""
        try:
            due, wait = self.is_due(entry)
        except RedisError:
            raise
        except Exception as exc:  # of a stored value of a wrong type
            leave_out(entry.name, exc)
            return self._election.poll
        if due:
            # RedBeat advances the entry within apply_async. Here the tick is authorized first: an
            # entry that may not be sent must not advance.
            self.reserve(entry)
            self.apply_entry(entry, **kwargs)
        return wait

    def reload(self) -> None:
        """Correct the last runs in RedBeat's keys: RedBeat reads only what is due by its own."""
        super().reload()
        app: Any = self.app
        client, now = get_redis(app), utc(app.now())
        later = f"({now.timestamp()}"
        keys = client.zrangebyscore(app.redbeat_conf.schedule_key, later, "+inf")
        with client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hget(key, "meta")
            metas = pipe.execute()
        ahead = [key for key, meta in zip(keys, metas, strict=True) if _is_ahead(meta, now)]
        entries = []
        for key in ahead:
            with suppress(KeyError):  # it was deleted meanwhile
                entries.append(self.Entry.from_key(key, app=app))
        self.restore(entries)

    def keeps_last_run(self, entry: Any) -> bool:
        """True: each run writes the last run to RedBeat's key."""
        return True

    def store_last_run(self, entry: Any) -> None:
        """Write it at once: RedBeat would not read the entry before its wrong last run is due."""
        entry_after(entry, entry.last_run_at, ran=False)

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


def _is_ahead(meta: str | None, now: datetime) -> bool:
    """Whether the ``meta`` of a key has a last run after ``now``."""
    try:
        last = RedBeatSchedulerEntry.decode_meta(meta)["last_run_at"]
        return last is not None and utc(last) > now
    except (AttributeError, KeyError, TypeError, ValueError):
        return False  # the entry is left out when it is read
