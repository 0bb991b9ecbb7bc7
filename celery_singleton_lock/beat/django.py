"""django-celery-beat's DatabaseScheduler, elected: ``--scheduler singleton_django``."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from celery.beat import ScheduleEntry
from django_celery_beat.schedulers import DatabaseScheduler, ModelEntry

from celery_singleton_lock.beat.schedule_grid import like
from celery_singleton_lock.beat.scheduler import LeaderMixin
from celery_singleton_lock.celery_compat import (
    convert_row_options,
    forget_row_changes,
    reread_rows,
    row_now,
)

__all__ = ["LeaderDatabaseScheduler", "LeaderEntry"]

# A row has no column for it, but its headers are free: there an entry says `{"unique": ...}`.
_HEADER = "singleton"


class LeaderEntry(ModelEntry):
    """A row of PeriodicTask whose headers may hold ``{"singleton": {...}}``."""

    def __init__(self, model: Any, app: Any = None) -> None:
        #: Whether the row has a last run; the base class puts a date there otherwise.
        self.ran = model.last_run_at is not None
        super().__init__(model, app=app)
        singleton = self.options["headers"].pop(_HEADER, None)
        if isinstance(singleton, Mapping):
            self.options["singleton"] = dict(singleton)


def _into_headers(singleton: Any = None, headers: Any = None, **options: Any) -> dict[str, Any]:
    if singleton:
        headers = {**(headers or {}), _HEADER: singleton}
    return {**options, "headers": headers}


convert_row_options(LeaderEntry, _into_headers)


class LeaderDatabaseScheduler(LeaderMixin, DatabaseScheduler):
    """Rows keep ``last_run_at`` as ever, but written now and then: the stored last runs decide."""

    Entry = LeaderEntry

    def elected(self) -> None:
        """Read all rows again: another beat wrote its runs to them, which no row tells of."""
        super().elected()
        forget_row_changes(self)
        reread_rows(self)

    def deposed(self) -> None:
        """Rows not yet written would set back what the next leader writes."""
        forget_row_changes(self)

    def keeps_last_run(self, entry: Any) -> bool:
        """A row's own date counts if it is later: somebody set it."""
        return bool(entry.ran)

    def set_last_run(self, entry: Any, at: datetime) -> None:
        """In the row too: it is what gets written."""
        entry.last_run_at = entry.model.last_run_at = like(at, row_now(entry))

    def advance(self, entry: ScheduleEntry, slot: datetime) -> Any:
        following = super().advance(entry, slot)
        if following.model.one_off:
            # Before it is sent, and not minutes later: nothing but its count keeps the next leader
            # from running it again, for a clocked one is due whatever its last run.
            self.sync()
        return following
