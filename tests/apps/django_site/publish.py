"""``python -m tests.apps.django_site.publish``: what a view does, reported as one line of JSON."""

from __future__ import annotations

import json
from typing import Any

import django

from tests.apps.django_site import app


class RolledBack(Exception):
    """Ends a transaction without a commit."""


def main() -> None:
    django.setup()
    from celery.contrib.django.task import DjangoTask
    from django.db import transaction

    from celery_singleton_lock import LockConflict, SingletonTask, hold
    from celery_singleton_lock.runtime import Runtime
    from tests.apps.django_site.tasks import greet, greet_in_other_words, greet_once

    task: Any = greet
    other_form: Any = greet_in_other_words
    report: dict[str, Any] = {
        "is both": all(
            isinstance(each, SingletonTask) and isinstance(each, DjangoTask)
            for each in (task, other_form)
        ),
        "ttl": task.singleton_policy().ttl,
        "key": task.lock_key("now"),
        "now": task.delay("now").get(timeout=20),
    }
    with transaction.atomic():
        other_form.delay_on_commit("in other words")
        task.apply_async_on_commit(("committed",))
        task.delay_on_commit("committed too")
        task.delay("at once").get(timeout=20)
    try:
        with transaction.atomic():
            task.delay_on_commit("rolled back")
            raise RolledBack
    except RolledBack:
        pass
    with hold("held", scope=task.name, app=app):
        try:
            task.delay("held").get(timeout=20)
        except LockConflict as conflict:
            report["conflict"] = str(conflict)
    task.delay("last").get(timeout=20)
    once: Any = greet_once
    runtime = Runtime.of(app)
    claim = runtime.keyspace.claim(once.name, once.lock_key("once"))

    def is_claimed() -> bool:
        return runtime.store.leases.inspect(claim) is not None

    try:
        with transaction.atomic():
            once.apply_async_on_commit(("once",), queue="idle")
            raise RolledBack
    except RolledBack:
        report["claimed"] = [is_claimed()]
    with transaction.atomic():
        once.apply_async_on_commit(("once",), queue="idle")
        once.apply_async_on_commit(("once",), queue="idle")
        report["claimed"].append(is_claimed())
    report["claimed"].append(is_claimed())
    print(json.dumps(report))


if __name__ == "__main__":
    main()
