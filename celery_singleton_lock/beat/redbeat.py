"""RedBeat's scheduler with an election in place of its lock: ``--scheduler singleton_redbeat``."""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any

from redbeat.schedulers import RedBeatScheduler
from redis.exceptions import RedisError

from ..celery_compat import entry_after
from .scheduler import LeaderMixin, like

logger = logging.getLogger("celery_singleton_lock")


class LeaderRedBeatScheduler(LeaderMixin, RedBeatScheduler):
    """All beats share the entries in RedBeat's keys. The stored last runs are authoritative."""

    def __init__(self, app: Any, **kwargs: Any) -> None:
        super().__init__(app, **kwargs)
        # The election replaces RedBeat's lock. RedBeat ends a process that can't extend the lock,
        # and does not compare the lock before a send.
        self.lock_key = None

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """See `LeaderMixin.tick`. An unreachable RedBeat server is logged, too."""
        try:
            return super().tick(*args, **kwargs)
        except RedisError as exc:
            self._election.fail(exc)
            return self._election.poll

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
