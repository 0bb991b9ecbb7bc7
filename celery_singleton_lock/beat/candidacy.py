"""From an app's settings to a candidacy of this process in the election of its beats."""

from __future__ import annotations

import logging
import os

import click

from celery_singleton_lock.beat.election import Election
from celery_singleton_lock.core.lease import Holder
from celery_singleton_lock.core.store import Store
from celery_singleton_lock.errors import SettingsError, StoreError
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.settings import Settings
from celery_singleton_lock.worker.bootstep import check_eviction

__all__ = ["candidacy", "check_leader_ttl"]

logger = logging.getLogger("celery_singleton_lock")


def candidacy(runtime: Runtime) -> Election:
    """The election that the app's settings describe; a wrong setting ends ``celery beat`` here.

    Raises:
        SettingsError: A setting is wrong, and this isn't the program ``celery``.
    """
    try:
        settings = runtime.settings
        try:
            check_eviction(runtime.store, settings)
        except StoreError:
            pass  # the first campaign tells of it
        check_leader_ttl(runtime.store, settings)
        # Its own address in words, for `celery singleton ls`.
        holder = Holder(
            task="celery.beat",
            task_id=settings.beat_name,
            worker=runtime.worker,
            pid=os.getpid(),
        )
        return Election(
            runtime.locker,
            runtime.events,
            key=runtime.keyspace.leader(settings.beat_name),
            ttl=settings.beat_ttl,
            poll=settings.beat_poll,
            holder=holder,
        )
    except SettingsError as exc:
        if click.get_current_context(silent=True) is None:
            raise  # an embedded beat: its caller may catch it
        # One line where beat's log is, no traceback.
        logger.critical("singleton: %s", exc)
        raise SystemExit(1) from None


def check_leader_ttl(store: Store, settings: Settings) -> None:
    """Refuse a leader's ttl that the store can't keep.

    Raises:
        SettingsError: It is shorter than the store's shortest.
    """
    able = store.capabilities
    if settings.beat_ttl < able.min_ttl:
        raise SettingsError(
            f"singleton_lock_beat_ttl={settings.beat_ttl:g} s, but the store ({able.name}) keeps "
            f"no lease for less than {able.min_ttl:g} s: set a longer one, or choose another store"
        )
