"""A shared task, as a reusable Django app has it: without an app at hand."""

from __future__ import annotations

from typing import Any

from celery import shared_task

from celery_singleton_lock import SingletonTask, current_lease, singleton_task
from tests.harness.journal import Journal


@singleton_task(bind=True, key="{key}")
def greet(self: Any, key: str) -> dict[str, Any]:
    """What the test wants to know of the lease."""
    with Journal.from_env().run(key, task_id=self.request.id):
        lease = current_lease()
        return {"key": lease.key, "ttl": lease.ttl, "fence": lease.fence}


@singleton_task(key="{key}", unique="until_done")
def greet_once(key: str) -> None:
    """Its calls claim."""


@shared_task(base=SingletonTask, bind=True, singleton={"key": "{key}"})
def greet_in_other_words(self: Any, key: str) -> str:
    """The other form."""
    with Journal.from_env().run(key, task_id=self.request.id):
        return current_lease().key
