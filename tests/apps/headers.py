"""Messages whose headers other code has changed, and tasks that publish themselves again.

Each task has a variant without a lock, which has to run as often. A body that is given a gate
(`tests.apps.gate`) ends when its test opens the gate.

Its environment: BROKER_URL, RESULT_URL, JOURNAL; FOREIGN, what changes the headers: ``nested``,
``copied`` and ``all`` (a receiver of before_task_publish writes ``headers["headers"]``: its own
headers alone, with ours, or with all others), ``before`` and ``behind`` (a base class whose
``apply_async`` replaces them), ``sentry`` (sentry-sdk); PROTOCOL.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import redis
from celery import Celery, Task, chain, signals
from celery.exceptions import Ignore, Reject
from kombu import Connection
from kombu.exceptions import OperationalError

from celery_singleton_lock import OnConflict, SingletonTask, current_lease, singleton_task
from celery_singleton_lock.errors import NoLease
from tests.apps.gate import Gate
from tests.harness.journal import Journal

NAMES = "names"
SOON = OnConflict.retry(0.1, 0.4)
FOREIGN = os.environ.get("FOREIGN", "")
TRACE = {"x-trace": "abc"}

app = Celery("headers", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    task_protocol=int(os.environ.get("PROTOCOL", "2")),
)


class Before(SingletonTask[..., Any]):
    """Before ours in the MRO: the headers of a retry or a copy are lost when we see it."""

    abstract = True

    def apply_async(self, *args: Any, **options: Any) -> Any:
        return super().apply_async(*args, **{**options, "headers": dict(TRACE)})


class Behind(Task):  # type: ignore[type-arg]
    """After ours in the MRO: the headers that we wrote are lost when Celery sees the message."""

    abstract = True

    def apply_async(self, *args: Any, **options: Any) -> Any:
        return super().apply_async(*args, **{**options, "headers": dict(TRACE)})


BASE: Any = {"before": Before, "behind": Behind}.get(FOREIGN, SingletonTask)

if FOREIGN in ("nested", "copied", "all"):

    @signals.before_task_publish.connect
    def nest(headers: Any = None, **_: Any) -> None:
        prefix = {"nested": None, "copied": "singleton_", "all": ""}[FOREIGN]
        copied = {
            name: headers[name]
            for name in headers
            if prefix is not None and name != "headers" and name.startswith(prefix)
        }
        headers.setdefault("headers", {}).update(TRACE, **copied)


if FOREIGN == "sentry":
    import sentry_sdk
    from sentry_sdk.transport import Transport

    class Discarding(Transport):
        def capture_envelope(self, envelope: Any) -> None: ...

    sentry_sdk.init(dsn="http://key@127.0.0.1:9/1", transport=Discarding, traces_sample_rate=1.0)


@cache
def _client(pid: int) -> redis.Redis:
    # Without a timeout: it waits at gates.
    return redis.Redis.from_url(os.environ["RESULT_URL"], socket_timeout=None)


@contextmanager
def body(task: Any, name: str, gate: str | None) -> Iterator[None]:
    try:
        ttl: float | None = current_lease().ttl
    except NoLease:
        ttl = None
    request = task.request
    headers = dict(request.headers or {})
    tenant = (getattr(request, "tenant", None), headers.get("tenant"), headers.get("x-trace"))
    ours = sorted(each for each in headers if each.startswith("singleton_"))
    data = {"task": task.name, "ttl": ttl, "headers": sorted({*headers, *vars(request)})}
    data["eta"] = request.eta
    with Journal.from_env().run(name, task_id=request.id, tenant=tenant, ours=ours, **data):
        if gate is not None:
            Gate(_client(os.getpid()), gate).wait()
        yield


def work(self: Any, name: str, gate: str | None = None, retry_once: bool = False) -> str:
    with body(self, name, gate):
        if retry_once and self.request.retries == 0:
            raise self.retry(countdown=0)
    return name


SHARED: dict[str, Any] = {
    **{"app": app, "bind": True, "base": BASE},
    **{"key": "{name}", "scope": NAMES, "on_conflict": SOON},
}
patient = singleton_task(name="patient", **SHARED)(work)
late = singleton_task(name="late", acks_late=True, **SHARED)(work)
impatient = singleton_task(
    name="impatient", **{**SHARED, "on_conflict": OnConflict.retry(0.1, 0.3, 1)}
)(work)
claimed = singleton_task(
    name="claimed", unique="until_start", **{**SHARED, "on_conflict": OnConflict.retry(0.1, 0.4)}
)(work)
plain = app.task(name="plain", bind=True)(work)


# Tasks that publish themselves again, under their own id.


def requeue(self: Any, name: str, left: int, how: str) -> None:
    task_id = self.request.id
    args = (name, left - 1, how)
    if how == "apply_async":
        self.apply_async(args, task_id=task_id)
    elif how == "with headers":
        self.apply_async(args, task_id=task_id, headers=self.request.headers)
    elif how == "signature":
        self.signature_from_request(args=args).apply_async()
    elif how == "send_task":
        self.app.send_task(self.name, args, task_id=task_id)
    elif how == "send_task with headers":
        self.app.send_task(self.name, args, task_id=task_id, headers=self.request.headers)
    elif how == "chain":
        chain(self.si(*args).set(task_id=task_id), note.si(name)).apply_async()
    else:
        raise AssertionError(how)


def again(self: Any, name: str, left: int, how: str, gate: str | None = None) -> int:
    with body(self, name, gate):
        if left:
            requeue(self, name, left, how)
            raise Ignore
    return left


def returning(self: Any, name: str, left: int, how: str) -> int:
    with body(self, name, None):
        if left:
            requeue(self, name, left, how)
    return left


def persistent(self: Any, name: str, left: int, how: str, gate: str | None = None) -> None:
    """Publishes itself again, the first time to a broker that is away."""
    with body(self, name, None):
        if not left:
            return
        args = (name, 0, how)
        away: dict[str, Any] = {"connection": Connection("redis://127.0.0.1:1"), "retry": False}
        if how == "retry":
            try:
                raise AssertionError(self.retry(args=args, countdown=0, throw=False, **away))
            except Reject:
                outcome = self.retry(args=args, countdown=0, throw=False)
        else:
            try:
                raise AssertionError(self.apply_async(args, task_id=self.request.id, **away))
            except OperationalError:
                self.apply_async(args, task_id=self.request.id)
            outcome = Ignore()
        if gate is not None:
            Gate(_client(os.getpid()), gate).wait()
        raise outcome


@app.task(bind=True, acks_late=True)
def dispatch(self: Any, name: str, how: str, gate: str | None = None) -> None:
    """A plain task that publishes a singleton task, under the same id in each of its runs."""
    try:
        if how == "replace":
            self.replace(late.si(name))
        late.apply_async((name,), task_id=self.request.id if how == "own id" else f"{name}-child")
    finally:
        if gate is not None:
            Gate(_client(os.getpid()), gate).wait()


@app.task(bind=True)
def note(self: Any, name: str) -> None:
    Journal.from_env().note(name, key=name, task_id=self.request.id)


@singleton_task(app=app, bind=True, key="{name}-{number}", acks_late=True)
def numbered(self: Any, name: str, number: int, many: int = 0) -> None:
    """Publishes ``many`` calls of its own, with other keys, all under its own id."""
    with body(self, name, None):
        for each in range(many):
            self.apply_async((name, number + 1 + each), task_id=self.request.id)


def locked(name: str, **options: Any) -> Any:
    # on_conflict is "skip": a message that continues running work must not be skipped.
    return singleton_task(name=name, **{**SHARED, **options, "on_conflict": "skip"})


again_late = locked("again_late", acks_late=True)(again)
again_early = locked("again_early")(again)
returning_late = locked("returning_late", acks_late=True)(returning)
once_late = locked("once_late", acks_late=True, unique="until_done")(again)
persistent_once = locked("persistent_once", acks_late=True, unique="until_done")(persistent)
plain_again = app.task(name="plain_again", bind=True, acks_late=True)(again)
plain_returning = app.task(name="plain_returning", bind=True, acks_late=True)(returning)


@app.task(bind=True, acks_late=True)
def plain_numbered(self: Any, name: str, number: int, many: int = 0) -> None:
    with body(self, name, None):
        for each in range(many):
            self.apply_async((name, number + 1 + each), task_id=self.request.id)
