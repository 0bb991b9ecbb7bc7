"""The policies of an app's tasks against each other, their store, and Celery's settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from celery import Celery

from celery_singleton_lock.beat.election import check_leader_ttl
from celery_singleton_lock.doctor.finding import Finding, Severity
from celery_singleton_lock.errors import SettingsError
from celery_singleton_lock.publish.unique import RPC_CURE
from celery_singleton_lock.runtime import Runtime, singleton_tasks
from celery_singleton_lock.worker.bootstep import check_results, check_tasks

__all__ = ["examine_tasks"]


def examine_tasks(app: Celery, runtime: Runtime) -> Iterator[Finding]:
    """What a worker or beat would refuse to start with, and what they would live with badly."""
    try:
        check_leader_ttl(runtime.store, runtime.settings)
    except SettingsError as exc:
        yield Finding(Severity.ERROR, "beat", str(exc), "no beat that elects a leader starts")
    tasks = singleton_tasks(app)
    if not tasks:
        yield Finding(
            Severity.WARNING,
            "tasks",
            "no singleton task is registered in this app",
            "name the app of your workers with -A, and have it import its tasks (include=...)",
        )
        return
    try:
        check_tasks(app, runtime.store)
    except SettingsError as exc:
        yield Finding(Severity.ERROR, "tasks", str(exc), "no worker starts before this is mended")
        return
    yield Finding(Severity.OK, "tasks", f"{len(tasks)} with a lock")
    if problem := check_results(app):
        yield Finding(Severity.WARNING, "tasks", problem, RPC_CURE)
    timeout = runtime.settings.visibility_timeout
    if timeout is not None:
        yield from _ttls(tasks, timeout)
        yield from _time_limits(tasks, timeout)


def _ttls(tasks: list[Any], timeout: float) -> Iterator[Finding]:
    if long := _named(task for task in tasks if task.singleton_policy().ttl > timeout):
        yield Finding(
            Severity.WARNING,
            "timeouts",
            f"ttl is longer than visibility_timeout ({timeout:g} s) of {long}: a dead worker's "
            "message comes back while its lease still stands, and waits",
            "a ttl below visibility_timeout",
        )


def _time_limits(tasks: list[Any], timeout: float) -> Iterator[Finding]:
    def limit(task: Any) -> float:
        return float(task.time_limit or task.app.conf.task_time_limit or "inf")

    if long := _named(task for task in tasks if task.acks_late and limit(task) > timeout):
        yield Finding(
            Severity.NOTE,
            "timeouts",
            f"acks_late, with a time limit above visibility_timeout ({timeout:g} s) or none: "
            f"{long}. The message of a longer body is delivered again; the copies wait, and are "
            "dropped when it is done",
            "visibility_timeout above the longest body, in broker_transport_options",
        )


def _named(tasks: Iterable[Any]) -> str:
    return ", ".join(task.name for task in tasks)
