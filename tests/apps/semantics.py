"""What a call means: keys, conflicts, retries, canvas, limits. All bodies write the journal.

Most tasks have the key ``{name}`` in the scope ``names``, so that each excludes the others of its
name, whatever its own policy is. A body that is given a gate (`tests.apps.gate`) ends when its test
opens that.

Its environment: BROKER_URL, RESULT_URL, JOURNAL; EAGER=1; NEWER=1, a worker of the next version.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import redis
from celery import Celery, group
from kombu.utils.json import dumps

from celery_singleton_lock import (
    PER_TASK,
    NoLease,
    OnConflict,
    SingletonTask,
    current_lease,
    hold,
    is_skipped,
    singleton_task,
)
from celery_singleton_lock.message import header
from celery_singleton_lock.message.header import Delivery
from tests.apps.gate import Gate
from tests.apps.serializer import LITERALS, SETS
from tests.harness.journal import Journal

NAMES = "names"

app = Celery("semantics", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    accept_content=["json", SETS, LITERALS],
    task_always_eager=os.environ.get("EAGER") == "1",
)


if "NEWER" in os.environ:
    header.VERSION += 1  # type: ignore[misc]


@cache
def _client(pid: int) -> redis.Redis:
    # Without a timeout: it waits at gates.
    return redis.Redis.from_url(os.environ["RESULT_URL"], socket_timeout=None)


def pass_gate(gate: str | None) -> None:
    if gate is not None:
        Gate(_client(os.getpid()), gate).wait()


@contextmanager
def body(task: Any, name: str, **data: Any) -> Iterator[None]:
    """Journal a body, with the key that it holds and which attempt it is."""
    try:
        lease = current_lease()
        held, ttl, fence = lease.key, lease.ttl, lease.fence_number
    except NoLease:
        held = ttl = fence = None
    request = task.request
    data |= {"task": task.name, "held": held, "ttl": ttl, "retries": request.retries}
    with Journal.from_env().run(name, task_id=request.id, fence=fence, **data):
        yield


@app.task(bind=True)
def unlocked(self: Any, name: str, gate: str | None = None) -> str:
    """The variant without a lock."""
    with body(self, name):
        pass_gate(gate)
    return name


# Keys.


@singleton_task(app=app, bind=True)
def by_arguments(
    self: Any,
    name: str,
    account: Any = None,
    options: Mapping[str, Any] | None = None,
    tags: Sequence[Any] = (),
    gate: str | None = None,
) -> str:
    """The key is all arguments."""
    with body(self, name):
        pass_gate(gate)
    return name


@singleton_task(app=app, bind=True, key="{account}")
def by_template(self: Any, name: str, account: Any, gate: str | None = None) -> str:
    with body(self, name):
        pass_gate(gate)
    return name


@singleton_task(app=app, bind=True, key="{account}", serializer=LITERALS)
def by_literals(self: Any, name: str, account: Any, gate: str | None = None) -> str:
    """Its message carries tuples, sets and keys of any type."""
    with body(self, name):
        pass_gate(gate)
    return name


# Celery's check of a call knows no positional-only parameters.
@singleton_task(app=app, typing=False)
def by_collected(account: int, /, name: str, gate: str | None = None, **options: Any) -> str:
    """The key is all arguments, of which some may have one name."""
    with body(by_collected, name):
        pass_gate(gate)
    return name


@singleton_task(app=app, bind=True, key=PER_TASK)
def by_nothing(self: Any, name: str, gate: str | None = None) -> str:
    with body(self, name):
        pass_gate(gate)
    return name


@singleton_task(app=app, bind=True, key=lambda name, gate=None: None if "free" in name else name)
def by_callable(self: Any, name: str, gate: str | None = None) -> str:
    with body(self, name):
        pass_gate(gate)
    return name


# Conflicts.


@singleton_task(app=app, bind=True, key="{name}", scope=NAMES)
def work(self: Any, name: str, gate: str | None = None, fail: bool = False) -> str:
    """Skipped on a conflict; FAILURE with ``fail``."""
    with body(self, name):
        pass_gate(gate)
        if fail:
            raise ArithmeticError(name)
    return name


@singleton_task(app=app, bind=True, key="{name}", scope=NAMES, acks_late=True)
def work_late(self: Any, name: str, gate: str | None = None) -> str:
    """As `work`, acknowledged late."""
    with body(self, name):
        pass_gate(gate)
    return name


@singleton_task(
    app=app, bind=True, key="{name}", scope=NAMES, on_conflict=OnConflict.retry(0.1, 0.4)
)
def patient(
    self: Any, name: str, gate: str | None = None, retry_once: bool = False, more: Any = None
) -> int:
    """Requeue on a conflict; returns the user's retry count."""
    described = json.loads(dumps(describe(self.request)))
    delivery = Delivery.of(vars(self.request))
    ours = {"copies": delivery.sequence, "options": json.loads(dumps(delivery.options))}
    with body(self, name, request=described, more=repr(more), **ours):
        pass_gate(gate)
        if retry_once and self.request.retries == 0:
            raise self.retry(countdown=0, max_retries=1)
    return int(self.request.retries)


def describe(request: Any) -> dict[str, Any]:
    """All that Celery's request says about the message."""
    fields = {
        name: value
        for name, value in vars(request).items()
        if not name.startswith(("_", "singleton_"))
    }
    # The arguments say which call it is; the others differ between any two deliveries.
    for name in ("args", "kwargs", "argsrepr", "kwargsrepr", "delivery_info", "called_directly"):
        fields.pop(name, None)
    info = request.delivery_info or {}
    return {
        **fields,
        **{name: info.get(name) for name in ("exchange", "routing_key", "priority")},
        "argsrepr": getattr(request, "argsrepr", None),
        "kwargsrepr": getattr(request, "kwargsrepr", None),
    }


@singleton_task(
    app=app, bind=True, key="{name}", scope=NAMES, on_conflict=OnConflict.retry(0.1, 0.3, 1)
)
def impatient(self: Any, name: str) -> None:
    """Requeue on a conflict, for one second."""
    with body(self, name):
        pass


@singleton_task(app=app, bind=True, key="{name}", scope=NAMES, on_conflict=OnConflict.retry(60))
def sleepy(self: Any, name: str) -> None:
    """Requeue for a minute."""
    with body(self, name):
        pass


@singleton_task(app=app, bind=True, key="{name}", scope=NAMES, on_conflict=OnConflict.wait(1))
def waiting(self: Any, name: str) -> None:
    with body(self, name):
        pass


@singleton_task(app=app, bind=True, key="{name}", scope=NAMES, on_conflict="raise")
def refusing(self: Any, name: str) -> None:
    with body(self, name):
        pass


@singleton_task(app=app, bind=True, key="{name}", scope=NAMES, on_conflict="revoke")
def revoking(self: Any, name: str) -> None:
    with body(self, name):
        pass


@singleton_task(
    app=app, bind=True, key="{name}", scope=NAMES, on_conflict=OnConflict.cancel_running()
)
def newest(self: Any, name: str, gate: str | None = None) -> str:
    """Interrupted by a newer call."""
    with body(self, name):
        pass_gate(gate)
    return name


@app.task
def spawn(name: str, options: dict[str, Any]) -> str:
    """Publishes `patient` from inside a task; returns its id."""
    return str(patient.apply_async((name,), **options).id)


# Retries.


@singleton_task(app=app, bind=True, key="{name}", scope=NAMES, max_retries=3)
def flaky(self: Any, name: str, attempts: int = 2, countdown: float = 0) -> int:
    """Retries until its last attempt; returns the user's retry count."""
    with body(self, name):
        if self.request.retries < attempts - 1:
            raise self.retry(countdown=countdown)
    return int(self.request.retries)


@singleton_task(app=app, bind=True, key="{name}", scope=NAMES, max_retries=3, acks_late=True)
def flaky_late(self: Any, name: str, attempts: int = 2, countdown: float = 0) -> int:
    with body(self, name):
        if self.request.retries < attempts - 1:
            raise self.retry(countdown=countdown)
    return int(self.request.retries)


@singleton_task(app=app, bind=True, key="{name}", scope=NAMES, max_retries=1, hold_on_retry=False)
def generous(self: Any, name: str, countdown: float = 1) -> int:
    """Lets others have the key through its countdown."""
    with body(self, name):
        if self.request.retries == 0:
            raise self.retry(countdown=countdown)
    return int(self.request.retries)


@singleton_task(app=app, bind=True, key="{name}", scope=NAMES)
def moving(self: Any, name: str, next_name: str, countdown: float, gate: str | None = None) -> str:
    """Its retry works on ``next_name``."""
    with body(self, name):
        if self.request.retries == 0:
            args = (next_name, next_name, countdown, gate)
            # Before Celery 5.7 the keyword arguments of the first attempt would be passed as well.
            raise self.retry(args=args, kwargs={}, countdown=countdown)
        pass_gate(gate)
    return name


@singleton_task(
    app=app,
    bind=True,
    key="{name}",
    scope=NAMES,
    autoretry_for=(ValueError,),
    retry_kwargs={"max_retries": 3, "countdown": 0},
)
def stubborn(self: Any, name: str, failures: int) -> int:
    """Fails so often."""
    with body(self, name):
        if self.request.retries < failures:
            raise ValueError(name)
    return int(self.request.retries)


@singleton_task(
    app=app,
    bind=True,
    key="{name}",
    scope=NAMES,
    autoretry_for=(ValueError,),
    retry_kwargs={"max_retries": 3, "countdown": 2},
)
def slowly_stubborn(self: Any, name: str) -> int:
    """Fails once, and takes its time."""
    with body(self, name):
        if self.request.retries < 1:
            raise ValueError(name)
    return int(self.request.retries)


# Canvas.


@app.task
def unless_skipped(value: Any) -> Any:
    """A link that stops its chain behind a skipped one, as the documentation says."""
    if is_skipped(value):
        raise RuntimeError("the link before was skipped")
    return value


@singleton_task(app=app, bind=True, key="{name}", scope=NAMES)
def collect(self: Any, values: Any, name: str) -> Any:
    """A chord's body, or the next link: returns what it was given."""
    with body(self, name):
        pass
    return values


@singleton_task(app=app, key=lambda request, error, traceback: "errback")
def errback(request: Any, error: Any, traceback: Any) -> None:
    Journal.from_env().note("errback", task_id=request.id)


def replace(task: Any, name: str, by: str) -> str:
    """The body of both tasks below: by itself (once), by another task, a chain or a group."""
    with body(task, name, by=by):
        if by == "itself" and task.request.replaced_task_nesting == 0:
            raise task.replace(task.si(name, by))
        if by == "another":
            raise task.replace(work.si(name))
        if by == "chain":
            raise task.replace(work.si(name) | work.si(name))
        if by == "group":
            raise task.replace(group(work.si(name), work.si(f"{name}-2")))
    return name


@singleton_task(app=app, bind=True, key="{name}", scope=NAMES)
def replaced(self: Any, name: str, by: str) -> str:
    return replace(self, name, by)


@singleton_task(app=app, bind=True, key="{name}", scope=NAMES, acks_late=True)
def replaced_late(self: Any, name: str, by: str) -> str:
    return replace(self, name, by)


# Limits, and leases within leases.


@singleton_task(
    app=app,
    bind=True,
    key="{name}",
    scope="slots",
    limit=3,
    on_conflict=OnConflict.retry(0.1, 0.3),
)
def trio(self: Any, name: str, gate: str | None = None) -> str:
    """Three at a time."""
    with body(self, name):
        pass_gate(gate)
    return name


@singleton_task(app=app, bind=True, key="{name}", scope="slots", limit=3, acks_late=True)
def trio_late(self: Any, name: str, gate: str | None = None) -> str:
    with body(self, name):
        pass_gate(gate)
    return name


@singleton_task(app=app, bind=True, key="{name}", scope=NAMES)
def outer(self: Any, name: str, how: str, gate: str | None = None) -> dict[str, Any]:
    """Calls `inner` of the same name inside its own body."""
    lease = current_lease()
    with hold(name, scope=NAMES, app=app) as held:
        reentered = held is lease
    with body(self, name):
        result = inner.apply((name,)) if how == "apply" else inner.delay(name)
        value = result.get(disable_sync_subtasks=False)
        Journal.from_env().note("after inner", key=name)
        pass_gate(gate)
    return {
        "hold": reentered,
        "skipped": is_skipped(value),
        "same lease": value == str(lease.token),
        "held after": current_lease() is lease and not lease.lost,
    }


@singleton_task(app=app, bind=True, key="{name}", scope=NAMES)
def inner(self: Any, name: str) -> str:
    """Returns the token it runs under."""
    with body(self, f"{name}-inner"):
        return str(current_lease().token)


@app.task(base=SingletonTask, bind=True, singleton={"key": "{name}", "scope": NAMES})
def based(self: Any, name: str, gate: str | None = None) -> str:
    """As `work`, written the other way."""
    with body(self, name):
        pass_gate(gate)
    return name
