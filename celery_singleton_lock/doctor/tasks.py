"""Checks of the tasks' policies against each other, their store, and Celery's settings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from celery_singleton_lock.beat.election import check_leader_ttl
from celery_singleton_lock.doctor.context import Context, Findings, error, note, ok, warning
from celery_singleton_lock.errors import SettingsError
from celery_singleton_lock.publish.claim import RPC_CURE
from celery_singleton_lock.runtime import singleton_tasks
from celery_singleton_lock.worker.bootstep import check_results, check_tasks


def check_beat(context: Context) -> Findings:
    try:
        check_leader_ttl(context.store, context.settings)
    except SettingsError as exc:
        yield error("beat", str(exc), "no beat that elects a leader starts")


def check_policies(context: Context) -> Findings:
    """Policies with which a worker would refuse to start."""
    tasks = singleton_tasks(context.app)
    if not tasks:
        text = "no singleton task is registered in this app"
        remedy = "name the app of your workers with -A, and have it import its tasks (include=...)"
        yield warning("tasks", text, remedy)
        return
    try:
        check_tasks(context.app, context.store)
    except SettingsError as exc:
        yield error("tasks", str(exc), "no worker starts before this is corrected")
        return
    yield ok("tasks", f"{len(tasks)} with a lock")
    if problem := check_results(context.app):
        yield warning("tasks", problem, RPC_CURE)


def check_timeouts(context: Context) -> Findings:
    """The ttl and the time limits, compared with the broker's visibility timeout."""
    timeout, ttls = context.settings.visibility_timeout, context.ttls_by_task
    if timeout is None:
        return
    # check_policies reports the other tasks.
    tasks = [task for task in singleton_tasks(context.app) if task.name in ttls]
    if names := _named(task for task in tasks if ttls[task.name] > timeout):
        yield warning(
            "timeouts",
            f"ttl is longer than visibility_timeout ({timeout:g} s) of {names}: a dead worker's "
            "message comes back while its lease still stands, and waits",
            "a ttl below visibility_timeout",
        )
    if names := _named(t for t in tasks if t.acks_late and _time_limit(t) > timeout):
        yield note(
            "timeouts",
            f"acks_late, with a time limit above visibility_timeout ({timeout:g} s) or none: "
            f"{names}. The message of a longer body is delivered again; the copies wait, and are "
            "dropped when it is done",
            "visibility_timeout above the longest body, in broker_transport_options",
        )


def _time_limit(task: Any) -> float:
    return float(task.time_limit or task.app.conf.task_time_limit or "inf")


def _named(tasks: Iterable[Any]) -> str:
    return ", ".join(task.name for task in tasks)
