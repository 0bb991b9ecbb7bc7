"""The worker event ``task-skipped``, for Flower and other monitors."""

from __future__ import annotations

from celery import Celery

from celery_singleton_lock.core.events import Event, EventName

__all__ = ["Monitor"]


class Monitor:
    """The sink that sends ``task-skipped`` (fields: uuid, name, key, holder) while events are on.

    A pool child can't see whether its worker was started with ``-E``, so the worker's bootstep sets
    ``enabled`` before the fork.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self.enabled = False

    def __call__(self, event: Event) -> None:
        if not self.enabled or event.name is not EventName.CONFLICT:
            return
        if event.data.get("outcome") != "skip":
            return
        with self._app.events.default_dispatcher() as dispatcher:
            dispatcher.send(
                "task-skipped",
                uuid=event.task_id,
                name=event.task,
                key=event.key,
                holder=str(event.holder),
            )
