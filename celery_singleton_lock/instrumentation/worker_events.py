"""Worker events, for Flower and other monitors."""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import ref

from celery import Celery

from ..core.events import Event, EventName


class Monitor:
    """Sends a worker event for a call that a conflict ends, if this worker sends events.

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
        app, outcome = self._app(), event.data.get("outcome")
        if not Monitor.worker or app is None:
            return
        fields: dict[str, Any]
        if event.name is EventName.CONFLICT and outcome == "skip":
            kind = "task-skipped"
            fields = {"name": event.task, "key": event.key, "holder": str(event.holder)}
        elif event.name is EventName.CANCELLED or outcome == "revoke":
            kind = "task-revoked"
            fields = {"terminated": False, "signum": None, "expired": False}
        else:
            return
        with app.events.default_dispatcher(Monitor.worker) as dispatcher:
            dispatcher.send(kind, uuid=event.task_id, **fields)
