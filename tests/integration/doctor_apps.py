"""Apps for the doctor, and its findings about them."""

from __future__ import annotations

from typing import Any

from celery import Celery

from celery_singleton_lock import singleton_task
from celery_singleton_lock.doctor import Finding, Severity, diagnose
from celery_singleton_lock.runtime import Runtime


def app_on(url: str, **task_options: Any) -> Celery:
    """An app with one task; a store that is no broker is named beside one in memory."""
    if url.startswith(("redis://", "rediss://")):
        app = Celery("checked", broker=url, backend=url, set_as_current=False)
        app.conf.broker_transport_options = {"socket_connect_timeout": 5}
    else:
        app = Celery("checked", broker="memory://", set_as_current=False)
        app.conf.singleton_lock_url = url

    @singleton_task(app=app, name="checked.work", shared=False, **task_options)
    def work(number: int) -> None: ...

    return app


def findings(app: Celery) -> list[Finding]:
    """All findings about the app as it is now; no connection stays open."""
    runtime = Runtime.of(app)
    try:
        return list(diagnose(app))
    finally:
        runtime.close()
        Runtime.install(app, None)


def found(app: Celery, subject: str) -> list[Finding]:
    """The findings about ``subject``."""
    return [finding for finding in findings(app) if finding.subject == subject]


def severities(app: Celery) -> dict[str, Severity]:
    """The last of each subject."""
    return {finding.subject: finding.severity for finding in findings(app)}


def worst(app: Celery) -> Severity:
    """The worst severity that is found, which decides the exit status."""
    order = list(Severity)
    return max((finding.severity for finding in findings(app)), key=order.index)
