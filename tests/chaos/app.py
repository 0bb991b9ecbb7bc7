"""The app of a campaign: one sort of task for each way in which a job may end.

Its environment: BROKER_URL, RESULT_URL, LOCK_URL; TTL, VISIBILITY_TIMEOUT and SOFT_SHUTDOWN,
seconds; CHAOS_HISTORY, the directory of the history; CHAOS_STORE, the name of the store's promise;
CHAOS_RESOURCE_COMPARES, 0 for a resource that takes all writes; CHAOS_OBSERVER, seconds that a
receiver of ``lease_lost`` takes; CHAOS_BROKEN, the part of the lock that is broken on purpose
(tests.chaos.broken).
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from celery import Celery, signals
from celery.exceptions import Reject

from celery_singleton_lock import (
    LeaseLost,
    LockConflict,
    OnConflict,
    StoreError,
    hold,
    is_skipped,
    singleton_task,
)
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.instrumentation import (
    lease_acquired,
    lease_conflict,
    lease_lost,
    lease_released,
)
from celery_singleton_lock.message.header import Delivery
from celery_singleton_lock.worker import discarded
from celery_singleton_lock.worker.request import SingletonRequestMixin
from tests.chaos import broken
from tests.chaos.bodies import LIMITS, RATES
from tests.chaos.body import LeaseGuard, run_async_body, run_body
from tests.chaos.broker_log import copy_of
from tests.chaos.history import VARIABLE, History
from tests.chaos.jobs import UNIQUE_FOR
from tests.chaos.promises import PROMISES, STORE
from tests.chaos.restarts import TTL as LASTING_TTL
from tests.chaos.stacks import dump_on_signal
from tests.harness.hints import hasten_hints
from tests.harness.refused import NOT_IN_CHILDREN, ONE_WAY

TTL = float(os.environ["TTL"])


#: Options with which a message is discarded: by the consumer, which does not decode it, does not
#: accept it or does not know its task, or by the pool process.
DAMAGING: tuple[dict[str, Any], ...] = (
    {"serializer": ONE_WAY},
    {"serializer": "pickle"},
    {"serializer": NOT_IN_CHILDREN},
    {"compression": ONE_WAY},
    {"headers": {"renamed": "tests.chaos.app.unknown"}},
)

app = Celery("chaos", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.update(
    accept_content=["json", ONE_WAY, NOT_IN_CHILDREN],
    broker_connection_retry_on_startup=True,
    broker_transport_options={
        "visibility_timeout": float(os.environ["VISIBILITY_TIMEOUT"]),
        # The sweep for messages that got too old, every second.
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        # A process that sweeps has a lock of kombu's; killed in the midst, it would hold up all
        # redeliveries for 5 minutes.
        "unacked_mutex_expire": 5,
    },
    singleton_lock_url=os.environ["LOCK_URL"],
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=4,
    worker_soft_shutdown_timeout=float(os.environ.get("SOFT_SHUTDOWN", "0")),
)

SHARED: dict[str, Any] = {"app": app, "bind": True, "key": "{key}", "scope": "chaos", "ttl": TTL}
RETRY = OnConflict.retry(delay=0.1, max_delay=1, max_wait=None)


@singleton_task(**SHARED, acks_late=True, on_conflict=RETRY)
def late(self: Any, key: str, steps: int, seconds: float) -> str:
    """Acknowledged after the body: has to succeed, whatever happens."""
    return run_body(self, LeaseGuard.current(), key, steps, seconds)


@singleton_task(**SHARED, acks_late=True, on_conflict="skip")
def late_skip(self: Any, key: str, steps: int, seconds: float) -> str:
    """Skipped if it has not begun; else it has to succeed."""
    return run_body(self, LeaseGuard.current(), key, steps, seconds)


@singleton_task(**SHARED, acks_late=True, on_conflict=RETRY, on_lost="continue")
def heedless(self: Any, key: str, steps: int, seconds: float) -> str:
    """It is not interrupted: its last write before a check may come late, and meets the fence."""
    return run_body(self, LeaseGuard.current(), key, steps, seconds)


@singleton_task(**{**SHARED, "ttl": LASTING_TTL}, acks_late=True, on_conflict=RETRY)
def lasting(self: Any, key: str, steps: int, seconds: float) -> str:
    """Over before its first renewal by the clock; keys of its own, each held long by the dead."""
    return run_body(self, LeaseGuard.current(), key, steps, seconds)


@singleton_task(**SHARED, acks_late=True, on_conflict=OnConflict.wait(timeout=3))
def waiting(self: Any, key: str, steps: int, seconds: float) -> str:
    """Waits in the worker, and fails if it has not begun by then."""
    return run_body(self, LeaseGuard.current(), key, steps, seconds)


@singleton_task(
    **{**SHARED, "scope": "chaos-limit"},
    acks_late=True,
    on_conflict=RETRY,
    limit=LIMITS["limited"],
)
def limited(self: Any, key: str, steps: int, seconds: float) -> str:
    """As `late`, but two at a time; its leases have no fence."""
    return run_body(self, LeaseGuard.current(), key, steps, seconds)


if PROMISES[os.environ.get(STORE, "redis")].orders_calls:

    @singleton_task(
        **SHARED, acks_late=True, on_conflict=OnConflict.cancel_running(0.2, timeout=10)
    )
    def latest(self: Any, key: str, steps: int, seconds: float) -> str:
        """Cancelled by a newer call; else as `late`, but it fails if it has not begun in time."""
        return run_body(self, LeaseGuard.current(), key, steps, seconds)

    QUEUE: dict[str, Any] = {**SHARED, "scope": "chaos-queue", "on_conflict": "queue"}

    @singleton_task(**QUEUE, acks_late=True)
    def queued(self: Any, key: str, steps: int, seconds: float) -> str:
        """Runs in the order of the calls of its key: has to succeed, whatever happens."""
        return run_body(self, LeaseGuard.current(), key, steps, seconds)

    @singleton_task(**QUEUE)
    def queued_early(self: Any, key: str, steps: int, seconds: float) -> str:
        """The same, but acknowledged before the body: begins once."""
        return run_body(self, LeaseGuard.current(), key, steps, seconds)

    @singleton_task(
        **{**QUEUE, "scope": "chaos-several"}, acks_late=True, limit=LIMITS["queued_several"]
    )
    def queued_several(self: Any, key: str, steps: int, seconds: float) -> str:
        """As `queued`, but three at a time, which begin in order; its leases have no fence."""
        return run_body(self, LeaseGuard.current(), key, steps, seconds)

    @singleton_task(**{**QUEUE, "scope": "chaos-rate"}, acks_late=True, rate=RATES["rated"])
    def rated(self: Any, key: str, steps: int, seconds: float) -> str:
        """As `queued`, and no faster than its rate."""
        return run_body(self, LeaseGuard.current(), key, steps, seconds)

    NEWEST: dict[str, Any] = {**SHARED, "acks_late": True, "on_conflict": RETRY}

    @singleton_task(**NEWEST, unique="until_start", on_duplicate="replace")
    def newest(self: Any, key: str, steps: int, seconds: float, call: int = 0) -> str:
        """Runs with the arguments of the newest call that was answered with its message."""
        return run_body(self, LeaseGuard.current(), key, steps, seconds, call=call)

    @singleton_task(**NEWEST, debounce=0.3, debounce_max=1.5)
    def debounced(self: Any, key: str, steps: int, seconds: float, call: int = 0) -> str:
        """The same, a moment after that call."""
        return run_body(self, LeaseGuard.current(), key, steps, seconds, call=call)


def called(task_id: str, call: int) -> None:
    """A call has returned to its caller with the id of the message that does its work."""
    _write("called", task_id=task_id, call=call)


@singleton_task(**SHARED, acks_late=True, on_conflict=RETRY, max_retries=None)
def again(self: Any, key: str, steps: int, seconds: float) -> str:
    """Retries itself once; its key stays reserved meanwhile."""
    retries = not self.request.retries
    return run_body(self, LeaseGuard.current(), key, steps, seconds, retries=retries)


CLAIMED: dict[str, Any] = {"unique": "until_start", "unique_for": UNIQUE_FOR["claimed"]}


@singleton_task(**SHARED, **CLAIMED, acks_late=True, on_conflict=RETRY)
def claimed(self: Any, key: str, steps: int, seconds: float) -> str:
    """As `late`, with a claim that outlasts the campaign unless a worker frees it."""
    return run_body(self, LeaseGuard.current(), key, steps, seconds)


@singleton_task(**SHARED, on_conflict=RETRY, on_lost="retry")
def early(self: Any, key: str, steps: int, seconds: float) -> str:
    """Acknowledged before the body: may be lost with its process, and in no other way."""
    return run_body(self, LeaseGuard.current(), key, steps, seconds)


@singleton_task(**SHARED)
def plain(self: Any, key: str, steps: int, seconds: float) -> str:
    """Everything as it is by default: skipped, or failed when its lease is lost."""
    return run_body(self, LeaseGuard.current(), key, steps, seconds)


@app.task(bind=True, acks_late=True, max_retries=None)
def held(self: Any, key: str, steps: int, seconds: float) -> str:
    """A plain task that takes the key in its body: runs once at least, and may run again."""
    done = _done_file(self)
    if done.exists():
        return "done before"
    try:
        with hold(key, scope=SHARED["scope"], ttl=TTL, app=app) as lease:
            guard = LeaseGuard(lease)
            run = run_body(self, guard, key, steps, seconds, lease=lease.token.task_id)
            done.touch()
            return run
    except (LockConflict, LeaseLost, StoreError) as error:
        raise _retry(self, error) from error


@app.task(bind=True, acks_late=True, max_retries=None)
def held_async(self: Any, key: str, steps: int, seconds: float) -> str:
    """The same in a coroutine, which waits for its key before it gives up."""
    done = _done_file(self)

    async def body() -> str:
        async with hold(key, scope=SHARED["scope"], ttl=TTL, wait=0.5, app=app) as lease:
            guard, named = LeaseGuard(lease), lease.token.task_id
            run = await run_async_body(self, guard, key, steps, seconds, lease=named)
            done.touch()
            return run

    if done.exists():
        return "done before"
    try:
        return asyncio.run(body())
    except (LockConflict, LeaseLost, StoreError) as error:
        raise _retry(self, error) from error


def _done_file(task: Any) -> Path:
    """Where a plain task notes that its job is done: ``hold()`` leaves no completion record.

    A body that outlasts the visibility timeout is delivered again. Without a note that delivery
    would run later, outlast it too, and so on for ever.
    """
    return History.from_env().directory / f"done-{task.request.id}"


def _retry(task: Any, error: Exception) -> Exception:
    """Retry; or have the broker deliver the message again, if that could not be published."""
    try:
        retry: Exception = task.retry(exc=error, countdown=0.2, throw=False)
    except Reject as discards:  # Celery's answer to a broker that is away
        return Reject(discards.args[0], requeue=True)
    return retry


def returned(task_id: str, entered: float, *, placed: bool) -> None:
    """A call for a queue, made at the time ``entered``, has returned; whether it has a place."""
    _write("returned", task_id=task_id, entered=entered, placed=placed)


def unsent(task_id: str, *, known: bool) -> None:
    """A call was refused; whether it is known that it has no place."""
    _write("unsent", task_id=task_id, known=known)


def damaged(task_id: str) -> None:
    """A call of `claimed` is about to be published whose message no worker runs."""
    _write("damaged", task_id=task_id)


def answered(task_id: str, entered: float) -> None:
    """A call of `claimed`, made at the time ``entered``, was answered with an earlier message."""
    _write("answered", task_id=task_id, entered=entered)


hasten_hints()

#: The fence of each grant to this process, by its holder; and of the newest of each job, by its id.
_fences: dict[Any, int | None] = {}


def _write(event: str, **fields: Any) -> None:
    # Only in processes of a campaign that has begun: publishers get the signals too.
    if VARIABLE in os.environ:
        History.from_env().write(event, **fields)


@signals.before_task_publish.connect(weak=False)
def _publishing(headers: Any = None, **_: Any) -> None:
    headers["task"] = headers.get("renamed") or headers["task"]
    _write("publishing", task_id=headers["id"], copy=copy_of(headers))


@signals.after_task_publish.connect(weak=False)
def _published(headers: Any = None, sender: Any = None, **_: Any) -> None:
    _write("published", task_id=headers["id"], task=str(sender))


@signals.task_received.connect(weak=False)
def _received(request: Any = None, **_: Any) -> None:
    copy = copy_of(request.request_dict)
    _write("received", task_id=request.id, worker=request.hostname, copy=copy)


@signals.task_prerun.connect(weak=False)
def _taken(task_id: str = "", task: Any = None, **_: Any) -> None:
    # Where releases are observed, each waits for its reply. Those of tasks that are acknowledged
    # late do so anyway; those of the others do in every second worker.
    observed = bool(task.acks_late or sum(task.request.hostname.encode()) % 2)
    if observed:
        lease_released.connect(_released, weak=False)
    else:
        lease_released.disconnect(_released)
    delivery = Delivery.of(vars(task.request))
    copy = [delivery.token.retries, delivery.sequence]
    worker = task.request.hostname
    _write("taken", task_id=task_id, worker=worker, copy=copy, observed=observed)


@signals.task_postrun.connect(weak=False)
def _left(task_id: str = "", state: Any = None, retval: Any = None, **_: Any) -> None:
    leaving = sys.exception()
    if leaving is not None and not isinstance(leaving, Exception):
        # Celery has called the state SUCCESS when the body returned; but a worker's shutdown has
        # struck before all was stored and sent, and a message acknowledged late comes back.
        state = None
    elif is_skipped(retval):
        _write("skip", task_id=task_id)
    error = type(retval).__name__ if isinstance(retval, BaseException) else None
    _write("left", task_id=task_id, state=state and str(state), error=error)


@lease_conflict.connect(weak=False)
def _refused(event: Any = None, **_: Any) -> None:
    if event.data.get("outcome") == "raise":
        _write("refused", task_id=event.task_id)
    elif event.data.get("outcome") == "parked":
        _write("parked", task_id=event.task_id)


@lease_acquired.connect(weak=False)
def _acquired(event: Any = None, **_: Any) -> None:
    _fences[event.holder] = _fences[event.task_id] = event.data.get("fence")


@lease_lost.connect(weak=False)
def _lost(event: Any = None, **_: Any) -> None:
    fence = _fences.get(event.holder)
    _write("lost", task_id=event.task_id, fence=fence, reason=event.data.get("reason"))


#: Seconds in which a receiver is slow once at most, so that a report waits for one such receiver.
_SELDOM = 10.0
_was_slow = [0.0]


@lease_lost.connect(weak=False)
def _be_slow(**_: Any) -> None:
    """A webhook or an error reporter that takes its time."""
    if time.monotonic() > _was_slow[0] + _SELDOM:
        time.sleep(float(os.environ.get("CHAOS_OBSERVER", "0")))
        _was_slow[0] = time.monotonic()


def _released(event: Any = None, **_: Any) -> None:
    _write("released", task_id=event.task_id, fence=_fences.get(event.holder))


class _LogLines(logging.Handler):
    """Events by their log lines: what a body left undone, and a cancelled call."""

    def emit(self, record: Any) -> None:
        event = getattr(record, "singleton_event", None)
        job = getattr(record, "singleton_task_id", "")
        if event == EventName.RELEASE_FAILED:
            error = record.singleton_data["error"]
            _write("release-failed", task_id=job, fence=_fences.get(job), error=error)
        elif event == EventName.STORE_UNREACHABLE:
            if record.singleton_data["action"] == "not-recorded":
                _write("not-marked", task_id=job)
        elif event == EventName.CANCELLED:
            _write("cancelled", task_id=job, by=record.singleton_data["by"])


def _note_discards() -> None:
    """Note the messages that a worker discards, before it frees their claims."""
    before, as_task = discarded._discard, SingletonRequestMixin._discard

    def discard(app: Any, message: Any, reason: str) -> None:
        _write("discarded", task_id=str(message.headers.get("id")), reason=reason)
        before(app, message, reason)

    def discard_task(self: Any, reason: str) -> None:
        _write("discarded", task_id=str(self.id), reason=reason)
        as_task(self, reason)

    discarded._discard = discard
    SingletonRequestMixin._discard = discard_task  # type: ignore[method-assign]


@signals.worker_init.connect(weak=False)
def _prepare(**_: Any) -> None:
    # In workers, before they fork; never in the process of a campaign or a test.
    broken.break_on_purpose(os.environ.get("CHAOS_BROKEN", ""))
    logging.getLogger("celery_singleton_lock").addHandler(_LogLines())
    _note_discards()
    if VARIABLE in os.environ:
        dump_on_signal(History.from_env().directory)
