"""A pytest plugin: the tasks of Celery's integration suite are made by `singleton_task`.

It is loaded before the suite's conftest.py, which imports the tasks. So the suite stays as it is.
"""

from __future__ import annotations

import importlib
from functools import partial

import celery

from celery_singleton_lock import OnConflict, singleton_task

# Equal calls are common in the suite. Each of them must run, and soon.
_SINGLETON = partial(singleton_task, on_conflict=OnConflict.retry(delay=0.02, max_delay=0.1))

_shared_task, celery.shared_task = celery.shared_task, _SINGLETON
try:
    importlib.import_module("t.integration.tasks")
finally:
    celery.shared_task = _shared_task
