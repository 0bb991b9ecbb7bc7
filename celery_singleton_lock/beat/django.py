"""django-celery-beat's DatabaseScheduler with an election: ``--scheduler singleton_django``."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from celery.beat import ScheduleEntry

from ..celery_compat import (
    convert_row_options,
    forget_row_changes,
    mark_row_changed,
    reread_rows,
    row_now,
)
from .due_time import like
from .entry import checked_options, leave_out
from .scheduler import LeaderMixin, end_without

try:
    from django_celery_beat.schedulers import DatabaseScheduler, ModelEntry
except ModuleNotFoundError as exc:
    end_without("django", "django_celery_beat", exc)

# A row has no column for options['singleton'], so an entry stores the value in the headers column.
_HEADER = "singleton"


class DjangoEntry(ModelEntry):
    """A row of PeriodicTask whose headers may contain ``{"singleton": {...}}``.

    Raises:
        ValueError: The row can't be read. The scheduler leaves it out.
    """

    options: Any

    def __init__(self, model: Any, app: Any = None) -> None:
        #: Whether the row has a last run. The base class replaces a missing one by a date.
        self.ran = model.last_run_at is not None
        try:
            super().__init__(model, app=app)
            singleton = self.options["headers"].pop(_HEADER, None)
            if singleton is not None:
                self.options["singleton"] = singleton
            self.options = checked_options(self.options)
        except (AttributeError, LookupError, TypeError, ValueError) as exc:
            # The headers may be any text. (An error of the database is none of these.)
            leave_out(model.name, exc)
            raise ValueError(f"the row {model.name!r} can't be read") from exc


def _into_headers(singleton: Any = None, headers: Any = None, **options: Any) -> dict[str, Any]:
    if singleton is not None:
        headers = {**(headers or {}), _HEADER: singleton}
    return {**options, "headers": headers}


convert_row_options(DjangoEntry, _into_headers)


class LeaderDatabaseScheduler(LeaderMixin, DatabaseScheduler):
    """Rows are written only from time to time, so the stored last runs are authoritative."""

    Entry = DjangoEntry

    def elected(self) -> None:
        """Read the rows without writing them: another beat may have written later last runs."""
        forget_row_changes(self)
        super().elected()

    def reload(self) -> None:
        """Read all rows again: which ones are read, and when, depends on the clock."""
        super().reload()
        reread_rows(self)

    def sync(self) -> None:
        """Write the rows, only while leading: a later write would overwrite the next leader's."""
        # At the exit this also runs for the scheduler of the banner, which has no election.
        election = getattr(self, "_election", None)
        if election is None or not election.leading:
            forget_row_changes(self)
        super().sync()

    def keeps_last_run(self, entry: Any) -> bool:
        """True: a later date in the row was set by a user, and counts."""
        return bool(entry.ran)

    def set_last_run(self, entry: Any, at: datetime) -> None:
        """Set the last run in the row too, because the row is written to the database."""
        entry.last_run_at = entry.model.last_run_at = like(at, row_now(entry))

    def store_last_run(self, entry: Any) -> None:
        """Have the row written with the next ones."""
        mark_row_changed(self, entry)

    def advance(self, entry: ScheduleEntry, tick_at: datetime) -> Any:
        following = super().advance(entry, tick_at)
        if following.model.one_off:
            # The row is written before the send, not minutes later. A clocked entry is due whatever
            # its last run is; only the run count in the row keeps the next leader from running the
            # entry again. The row is written even if the lease was lost a moment ago, because this
            # tick is authorized and will be sent.
            super().sync()
        return following
