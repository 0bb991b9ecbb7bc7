"""The worker event ``task-skipped``, for Flower and other monitors."""

from __future__ import annotations

from typing import ClassVar
from weakref import ref

from celery import Celery

from celery_singleton_lock.core.events import Event, EventName

__all__ = ["Monitor"]


class Monitor:
    """The sink that sends ``task-skipped`` (fields: uuid, name, key, holder) while events are on.

    A pool child can't see whether its worker was started with ``-E``, so the worker's bootstep sets
    ``worker`` before the fork; for the whole process, since a runtime may be older than that.
    """

    #: Name of this process's worker if it sends events, else empty. Monitors file by it: without
    #: it, each event would come from a worker of its own, ``gen<pid>@<host>``.
    worker: ClassVar[str] = ""

    def __init__(self, app: Celery) -> None:
        # The keeper's thread has this sink, and would keep the app for ever.
        self._app = ref(app)

    @staticmethod
    def hears(name: EventName) -> bool:
        """Whether such an event may have to be sent."""
        return name is EventName.CONFLICT and bool(Monitor.worker)

    def __call__(self, event: Event) -> None:
        if not Monitor.hears(event.name):
            return
        if event.data.get("outcome") != "skip":
            return
        app = self._app()
        if app is None:
            return
        with app.events.default_dispatcher(Monitor.worker) as dispatcher:
            dispatcher.send(
                "task-skipped",
                uuid=event.task_id,
                name=event.task,
                key=event.key,
                holder=str(event.holder),
            )
