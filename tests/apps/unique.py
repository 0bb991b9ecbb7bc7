"""Tasks whose calls claim: what is published, what is answered, what runs. All write the journal.

A body that is given a gate (`tests.apps.gate`) ends when its test opens that. Each task has the key
``{name}`` in a scope of its own, but for those that share the scope ``shared``.

Its environment: BROKER_URL, RESULT_URL, LOCK_URL (else the result backend's), JOURNAL; EAGER=1;
OTHER_KEY, what `keyed` makes of its key here; LATE_MARKS=1: a requeue is reported late;
WITHOUT=free-at-grant: a protection is taken out, for the test that must fail then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import redis
from celery import Celery
from pydantic import BaseModel

from celery_singleton_lock import OnConflict, is_skipped, singleton_task
from celery_singleton_lock.core.lease import Phase
from celery_singleton_lock.core.store import ClaimChange, Mark
from celery_singleton_lock.message.claim import Claim
from celery_singleton_lock.stores.redis.store import RedisStore
from tests.apps.gate import Gate
from tests.apps.serializer import SETS
from tests.harness.journal import Journal

SHARED = "shared"
SOON = OnConflict.retry(0.1, 0.3, None)

app = Celery("unique", broker=os.environ["BROKER_URL"], backend=os.environ.get("RESULT_URL"))
app.conf.update(
    broker_connection_retry_on_startup=True,
    accept_content=["json", SETS],
    task_always_eager=os.environ.get("EAGER") == "1",
    # A publisher that meets a dead broker says so at once.
    task_publish_retry=False,
)
if "LOCK_URL" in os.environ:
    app.conf.singleton_lock_url = os.environ["LOCK_URL"]


def without_free_at_grant() -> None:
    """Free every claim when its body has ended."""
    Claim.granted = lambda self, ttl: ClaimChange(  # type: ignore[method-assign]
        key=self.key, phase=Phase.RUNNING, ttl=ttl
    )


def with_late_marks() -> None:
    """After a requeue, mark it in the store only when the gate ``mark-<task id>`` is open."""
    mark = RedisStore.mark

    def mark_late(self: RedisStore, request: Mark, *, timeout: float) -> None:
        Gate(_client(os.getpid()), f"mark-{request.token.task_id}").wait()
        mark(self, request, timeout=timeout)

    RedisStore.mark = mark_late  # type: ignore[method-assign]


if os.environ.get("LATE_MARKS"):
    with_late_marks()
if protection := os.environ.get("WITHOUT"):
    {"free-at-grant": without_free_at_grant}[protection]()


@cache
def _client(pid: int) -> redis.Redis:
    # Without a timeout: it waits at gates.
    return redis.Redis.from_url(os.environ["RESULT_URL"], socket_timeout=None)


@contextmanager
def body(task: Any, name: str, **data: Any) -> Iterator[None]:
    request = task.request
    data |= {"task": task.name.rpartition(".")[2], "retries": request.retries}
    with Journal.from_env().run(name, task_id=request.id, **data):
        yield


def work(task: Any, name: str, gate: str | None, seconds: float, fail: bool = False) -> str:
    with body(task, name):
        if gate is not None:
            Gate(_client(os.getpid()), gate).wait()
        time.sleep(seconds)  # work that takes time; nothing waits for it
        if fail:
            raise ArithmeticError(name)
    return name


# One waits, or one waits or runs.


@singleton_task(app=app, bind=True, key="{name}", unique="until_start")
def latest(self: Any, name: str, gate: str | None = None, seconds: float = 0) -> str:
    """As a user writes it: requeued on a conflict, for as long as it takes."""
    return work(self, name, gate, seconds)


@singleton_task(app=app, bind=True, key="{name}", unique="until_start", on_conflict=SOON)
def soon(
    self: Any, name: str, gate: str | None = None, seconds: float = 0, fail: bool = False
) -> str:
    """As `latest`, but back soon."""
    return work(self, name, gate, seconds, fail)


@singleton_task(
    app=app, bind=True, key="{name}", unique="until_start", on_conflict=SOON, acks_late=True
)
def soon_late(self: Any, name: str, gate: str | None = None, seconds: float = 0) -> str:
    return work(self, name, gate, seconds)


@singleton_task(app=app, bind=True, key="{name}", unique="until_done")
def once(
    self: Any, name: str, gate: str | None = None, seconds: float = 0, fail: bool = False
) -> str:
    return work(self, name, gate, seconds, fail)


@singleton_task(app=app, bind=True, key="{name}", unique="until_done", acks_late=True)
def once_late(
    self: Any, name: str, gate: str | None = None, seconds: float = 0, fail: bool = False
) -> str:
    return work(self, name, gate, seconds, fail)


@singleton_task(
    app=app, bind=True, key="{name}", unique="until_done", on_conflict=SOON, scope=SHARED
)
def patient(self: Any, name: str, gate: str | None = None, seconds: float = 0) -> str:
    """Waits for `blocker`, which has the same key and another claim."""
    return work(self, name, gate, seconds)


@singleton_task(app=app, bind=True, key="{name}", unique="until_start", scope=SHARED)
def slowly(self: Any, name: str, gate: str | None = None, seconds: float = 0) -> str:
    """Waits for `blocker` too, requeued for long."""
    return work(self, name, gate, seconds)


@singleton_task(app=app, bind=True, key="{name}", scope=SHARED)
def blocker(self: Any, name: str, gate: str | None = None, seconds: float = 0) -> str:
    return work(self, name, gate, seconds)


@singleton_task(app=app, bind=True, key="{name}", unique="until_done", ignore_result=True)
def silent(self: Any, name: str, gate: str | None = None) -> str:
    """No result shows that it has ended."""
    return work(self, name, gate, 0)


@singleton_task(
    app=app,
    bind=True,
    key="{name}",
    unique="until_start",
    on_store_error="run",
    ttl=3,
    ignore_result=True,
)
def regardless(self: Any, name: str, gate: str | None = None) -> str:
    """Runs without a lock where the store is away."""
    return work(self, name, gate, 0)


# Work that goes on in another message.


@singleton_task(app=app, bind=True, key="{name}", unique="until_done", max_retries=3)
def flaky(self: Any, name: str, attempts: int = 2, countdown: float = 0) -> int:
    with body(self, name):
        if self.request.retries < attempts - 1:
            raise self.retry(countdown=countdown)
    return int(self.request.retries)


@singleton_task(
    app=app, bind=True, key="{name}", unique="until_done", max_retries=3, acks_late=True
)
def flaky_late(self: Any, name: str, attempts: int = 2, countdown: float = 0) -> int:
    with body(self, name):
        if self.request.retries < attempts - 1:
            raise self.retry(countdown=countdown)
    return int(self.request.retries)


@singleton_task(app=app, bind=True, key="{name}", unique="until_start", max_retries=3)
def flaky_start(self: Any, name: str, attempts: int = 2, countdown: float = 0) -> int:
    with body(self, name):
        if self.request.retries < attempts - 1:
            raise self.retry(countdown=countdown)
    return int(self.request.retries)


@singleton_task(app=app, bind=True, key="{name}", unique="until_done", max_retries=1)
def moving(self: Any, name: str, other: str, countdown: float = 0) -> str:
    """Its retry has another key."""
    with body(self, name):
        if self.request.retries == 0:
            # Before Celery 5.7 the keyword arguments of the first attempt would be passed as well.
            raise self.retry(args=(other, other, countdown), kwargs={}, countdown=countdown)
    return name


@singleton_task(app=app, bind=True, key="{name}", unique="until_done")
def replaced(self: Any, name: str, by: str) -> str:
    with body(self, name, by=by):
        if by == "itself" and self.request.replaced_task_nesting == 0:
            raise self.replace(self.si(name, by))
        if by == "another":
            raise self.replace(once.si(name))
        if by == "chain":
            raise self.replace(once.si(name) | once.si(name))
    return name


# Canvas and children.


@app.task
def collect(values: Any) -> Any:
    return values


@app.task
def flag(value: Any) -> Any:
    """Whether the link before it was skipped."""
    return "skipped" if is_skipped(value) else value


@app.task(bind=True)
def note(self: Any, text: str) -> None:
    """A link or an errback: says that it came."""
    Journal.from_env().note(text, key=text, task_id=self.request.id)


@singleton_task(app=app, bind=True, key="{name}", unique="until_done")
def parent(
    self: Any, name: str, how: str = "plain", gate: str | None = None
) -> tuple[str, dict[str, Any]]:
    """Publishes a child with the same name; returns its id and this task's header."""
    with body(self, name):
        header = dict(vars(self.request)["singleton_lock"])
        if how == "headers":
            child = once.apply_async((name,), headers=self.request.headers)
        elif how == "itself":
            child = self.delay(name)
        else:
            child = once.delay(name)
        if gate is not None:
            Gate(_client(os.getpid()), gate).wait()
    return child.id, header


@singleton_task(app=app, bind=True, key="{name}", unique="until_done", on_duplicate="skip")
def skipping(self: Any, name: str, gate: str | None = None) -> str:
    return work(self, name, gate, 0)


# Keys.


class Order(BaseModel):
    account: int
    note: str = ""


@singleton_task(app=app, bind=True, unique="until_done")
def by_arguments(self: Any, name: str, value: Any = None, gate: str | None = None) -> str:
    return work(self, name, gate, 0)


@singleton_task(app=app, bind=True, key="{name}:{value}", unique="until_done")
def by_template(self: Any, name: str, value: Any = None, gate: str | None = None) -> str:
    return work(self, name, gate, 0)


@singleton_task(app=app, bind=True, key="{order.account}", pydantic=True, unique="until_done")
def by_model(self: Any, order: Order, gate: str | None = None) -> str:
    return work(self, str(order.account), gate, 0)


def elsewhere(name: str) -> str | None:
    """None where OTHER_KEY is "none", an error where it is "error"."""
    other = os.environ.get("OTHER_KEY")
    if other == "error":
        raise ArithmeticError(name)
    return None if other == "none" else f"{name}{other or ''}"


@singleton_task(app=app, bind=True, key=elsewhere, unique="until_start", ignore_result=True)
def keyed(self: Any, name: str) -> str:
    """Its publisher and its worker may disagree on the key."""
    return work(self, name, None, 0)


@singleton_task(app=app, bind=True, key="{name}", unique="until_done", on_conflict=SOON)
def again(self: Any, name: str, left: int = 2) -> int:
    """Publishes its own successor, as a poller does; that may come before this one has ended."""
    with body(self, name):
        if left:
            self.apply_async((name,), {"left": left - 1})
    return left
