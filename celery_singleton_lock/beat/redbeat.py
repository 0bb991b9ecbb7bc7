"""RedBeat's scheduler, elected: ``--scheduler singleton_redbeat``. Its own lock is turned off."""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any

from redbeat.schedulers import RedBeatScheduler
from redis.exceptions import RedisError

from celery_singleton_lock.beat.schedule_grid import like
from celery_singleton_lock.beat.scheduler import LeaderMixin
from celery_singleton_lock.celery_compat import entry_after

__all__ = ["LeaderRedBeatScheduler"]

logger = logging.getLogger("celery_singleton_lock")


class LeaderRedBeatScheduler(LeaderMixin, RedBeatScheduler):
    """Entries live in RedBeat's keys, which all beats share; the stored last runs decide."""

    def __init__(self, app: Any, **kwargs: Any) -> None:
        super().__init__(app, **kwargs)
        # The election stands in for it. RedBeat's ends the process that can't extend it, and is
        # compared at no send.
        self.lock_key = None

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """As elected schedulers do; RedBeat's server may be away too."""
        try:
            return super().tick(*args, **kwargs)
        except RedisError as exc:
            self._election.fail(exc)
            return self._election.poll

    def maybe_due(self, entry: Any, **kwargs: Any) -> float:
        """Send ``entry`` if it is due; seconds until it has to be looked at again."""
        due, wait = self.is_due(entry)
        if due:
            # In this order, and not within apply_async: what may not be sent must not move either.
            self.reserve(entry)
            self.apply_entry(entry, **kwargs)
        return wait

    def keeps_last_run(self, entry: Any) -> bool:
        """It is from Redis, where each run writes it."""
        return True

    def advance(self, entry: Any, slot: datetime) -> Any:
        try:
            return entry_after(entry, like(slot, entry.default_now()))
        except RedisError as exc:
            # The run was permitted, so it must be sent; RedBeat's own last run follows with the
            # next one.
            logger.warning(
                "singleton beat: RedBeat's key of %r wasn't written: %s", entry.name, exc
            )
            return entry
