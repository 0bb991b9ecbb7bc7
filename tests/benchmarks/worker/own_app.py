"""Singleton tasks, and a plain one beside them."""

from __future__ import annotations

import os
import sys
from importlib import import_module

from celery_singleton_lock import singleton_task
from tests.benchmarks.before import PACKAGE
from tests.benchmarks.worker.wiring import LOCK_URL, make_app, work

app = make_app("field")
app.conf.singleton_lock_url = LOCK_URL


@app.task(name="beside")
def beside(number: int, seconds: float) -> None:
    work(seconds)


@singleton_task(app=app, name="locked")
def locked(number: int, seconds: float) -> None:
    work(seconds)


@singleton_task(app=app, name="locked_by_template", key="account:{number}")
def locked_by_template(number: int, seconds: float) -> None:
    work(seconds)


@singleton_task(app=app, name="claimed_until_start", unique="until_start")
def claimed_until_start(number: int, seconds: float) -> None:
    work(seconds)


@singleton_task(app=app, name="claimed_until_done", unique="until_done")
def claimed_until_done(number: int, seconds: float) -> None:
    work(seconds)


if before := os.environ.get("BEFORE"):
    sys.path.insert(0, before)

    @import_module(PACKAGE).singleton_task(app=app, name="locked_before")
    def locked_before(number: int, seconds: float) -> None:
        work(seconds)
