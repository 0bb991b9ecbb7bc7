"""The worker events ``task-skipped`` and ``task-revoked``, for Flower and other monitors."""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import ref

from celery import Celery

from celery_singleton_lock.core.events import Event, EventName


class Monitor:
    """Sends a worker event for a call that ends by a conflict, if this worker sends events.

    ``task-skipped`` has the fields uuid, name, key and holder. ``task-revoked`` has the fields of
    the event that Celery's worker sends for its own revocations.

    A pool child can't see whether its worker was started with ``-E``, so the worker's bootstep sets
    ``worker`` before the fork. It is a class variable, because runtimes may already exist then.
    """

    #: Name of this process's worker if it sends events, else empty. Monitors group events by it;
    #: without it, every process would appear as a worker, ``gen<pid>@<host>``.
    worker: ClassVar[str] = ""

    def __init__(self, app: Celery) -> None:
        # The heartbeat's thread refers to this object, and must not keep the app alive.
        self._app = ref(app)

    def __call__(self, event: Event) -> None:
        if event.name is not EventName.CONFLICT or not Monitor.worker:
            return
        outcome = event.data.get("outcome")
        fields: dict[str, Any]
        if outcome == "skip":
            kind = "task-skipped"
            fields = {"name": event.task, "key": event.key, "holder": str(event.holder)}
        elif outcome == "revoke":
            kind = "task-revoked"
            fields = {"terminated": False, "signum": None, "expired": False}
        else:
            return
        app = self._app()
        if app is None:
            return
        with app.events.default_dispatcher(Monitor.worker) as dispatcher:
            dispatcher.send(kind, uuid=event.task_id, **fields)
