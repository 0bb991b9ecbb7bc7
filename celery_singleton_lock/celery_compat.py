"""Access to private and version-dependent names of Celery, kombu, billiard and beat schedulers.

Every such name is used in this module only (``tests/unit/test_celery_compat.py``). Each docstring
documents the purpose of the name, the versions that have it, and the behaviour without it. A
private name of a store's client belongs to the module that wraps the client.
Importing this module imports nothing that an app with one task has not imported already, and does
not fail if a cosmetic name is missing. Celery 5.5 to 5.7 is supported; "all" means these versions.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from copy import copy
from datetime import timedelta
from typing import Any, Final, TypeVar

from billiard.einfo import ExceptionWithTraceback  # type: ignore[attr-defined]  # the stubs lack it
from celery import VERSION as celery_version
from celery import _state as _celery_state
from celery import current_app, states
from celery.app import utils as _app_utils
from celery.app.autoretry import add_autoretry_behaviour
from celery.app.task import Context, Task
from celery.exceptions import Terminated, WorkerLostError
from celery.utils import time as _celery_time
from kombu.serialization import registry  # type: ignore[attr-defined]  # the stubs lack it

_R = TypeVar("_R")

_state: Any = _celery_state

# Apps and tasks.


def real_app(app: Any = None) -> Any:
    """The app behind a proxy; None: the current app.

    ``_get_current_object``: all. Without it the proxy itself is used.
    """
    chosen = current_app if app is None else app
    return getattr(chosen, "_get_current_object", lambda: chosen)()


def call_at_close(app: Any, function: Callable[[Any], object]) -> None:
    """Call ``function(app)`` at each ``app.close()``, also at the end of ``with app:``.

    Celery has no signal for it, so the method is replaced in this one app. ``close``: all.
    """
    close = app.close

    def close_both() -> None:
        try:
            function(app)
        finally:
            close()

    app.close = close_both


def in_current_task(app: Any, function: Callable[[], _R]) -> Callable[[], _R]:
    """``function`` for another thread, with the running task of this one as its current task.

    A message that is published by it has the task as its parent. ``_state._task_stack``: all.
    """
    task = app.current_worker_task
    if task is None:
        return function
    request = task.request_stack.top

    def call() -> _R:
        _state._task_stack.push(task)
        task.request_stack.push(request)
        try:
            return function()
        finally:
            task.request_stack.pop()
            _state._task_stack.pop()

    return call


def dump_models(task: Any, args: Any, kwargs: Any, serializer: str) -> tuple[Any, Any]:
    """The arguments with pydantic models dumped, as Celery publishes them.

    ``_dump_pydantic_arguments``: 5.7. Earlier versions do not dump arguments, and neither does this
    function.
    """
    dump = getattr(task, "_dump_pydantic_arguments", None)
    return dump(args, kwargs) if dump and serializer != "pickle" else (args, kwargs)


def fail_as_body(task: Any, error: Exception) -> Any:
    """Raise ``error`` so that the task's ``autoretry_for`` applies to it.

    Celery wraps ``task.run`` for ``autoretry_for``, but the error occurs outside of ``run``. So
    Celery's wrapper is applied to a stand-in that raises the error. ``add_autoretry_behaviour``:
    all.
    """
    stand_in = _FailingBody(task, error)
    add_autoretry_behaviour(stand_in)
    return stand_in.run()


def is_retried(task: Any, error: Exception) -> bool:
    """Whether the task's ``autoretry_for`` names ``error``; it may have no retry left."""
    named = tuple(getattr(task, "autoretry_for", ()))
    return isinstance(error, named) and not isinstance(
        error, tuple(getattr(task, "dont_autoretry_for", ()))
    )


class _FailingBody:
    """A stand-in for a task, with another ``run``."""

    def __init__(self, task: Any, error: Exception) -> None:
        self._task = task
        self._error = error

    def __getattr__(self, name: str) -> Any:
        # `_orig_run`: all. Celery sets this attribute on a task whose run it has wrapped.
        if name == "_orig_run":
            raise AttributeError(name)
        return getattr(self._task, name)

    def run(self) -> Any:
        raise self._error


def acks_failures(task: Any) -> bool:
    """Whether the message of a failed task with ``acks_late`` is acknowledged.

    ``acks_on_failure``: 5.7, for failures only; ``acks_on_failure_or_timeout``: all.
    """
    older = getattr(task, "acks_on_failure_or_timeout", True)
    return getattr(task, "acks_on_failure", older) is not False


def may_reject_when_done(task: Any) -> bool:
    """Whether a Reject that ``on_success`` raises rejects the message.

    5.7, whose tasks have ``acks_on_failure``. Earlier versions take it for an internal error, and
    acknowledge the message as that of a failed task.
    """
    return hasattr(task, "acks_on_failure")


def dead_letters(task: Any) -> bool:
    """Whether the broker may keep a message of ``task`` that is rejected, and deliver it later.

    Only RabbitMQ has dead letter exchanges; kombu's virtual transports delete such a message.
    """
    return bool(task.acks_late) and driver_of(task.app) == "amqp"


def requeues_on_timeout(task: Any) -> bool:
    """Whether the message is requeued after a hard time limit.

    ``acks_on_timeout``: 5.7. Earlier versions acknowledge the message.
    """
    return bool(task.acks_late and not getattr(task, "acks_on_timeout", True))


def retries_lost_worker(task: Any) -> bool:
    """Whether Celery publishes a retry for a task whose pool child was lost.

    ``retry_on_worker_lost``: 5.7. In earlier versions it is an attribute without effect.
    """
    return hasattr(Task, "retry_on_worker_lost") and bool(task.retry_on_worker_lost)


#: Options of a task that are new in Celery 5.7, and what earlier versions have instead.
NEWER_OPTIONS: Final = {
    "acks_on_failure": "acks_on_failure_or_timeout",
    "acks_on_timeout": "acks_on_failure_or_timeout",
    "retry_on_worker_lost": "acks_late=True with reject_on_worker_lost=True",
}


def namespace_of(conf: Any) -> str:
    """The namespace of ``app.config_from_object``, such as ``CELERY_``.

    ``ConfigurationView.prefix``: all. Without it, misspelled settings with a namespace are not
    reported.
    """
    return getattr(conf, "prefix", None) or ""


def hide_setting(name: str) -> None:
    """Make ``celery report`` and ``celery inspect conf`` show the setting as asterisks.

    ``celery.app.utils.HIDDEN_SETTINGS``: all; Celery has no public API. Without the pattern the
    setting is shown.
    """
    names = vars(_app_utils)
    hidden = names.get("HIDDEN_SETTINGS")
    if isinstance(hidden, re.Pattern) and name not in hidden.pattern:
        names["HIDDEN_SETTINGS"] = re.compile(f"{hidden.pattern}|{name}", hidden.flags)


# The broker.


def serialized(
    producer: Any, body: Any, options: Mapping[str, Any], headers: dict[str, Any]
) -> tuple[str | bytes, str, str]:
    """The body that ``producer.publish(body, **options)`` would send; its content type, encoding.

    A compressed body adds to the ``headers``. ``Producer._prepare``: all.

    Raises:
        EncodeError: The body can't be serialized.
    """
    compression = options.get("compression")
    found: tuple[str | bytes, str, str] = producer._prepare(
        body,
        options.get("serializer"),
        options.get("content_type"),
        options.get("content_encoding"),
        producer.compression if compression is None else compression,
        headers,
    )
    return found


def exchange_of(producer: Any, options: Mapping[str, Any]) -> tuple[str, int | str]:
    """The exchange's name and the delivery mode of ``producer.publish(..., **options)``.

    ``Producer._delivery_details``: all.
    """
    exchange = options.get("exchange")
    name, mode = producer._delivery_details(
        producer.exchange if exchange is None else exchange, options.get("delivery_mode")
    )
    return name, mode


def driver_of(app: Any) -> str:
    """kombu's ``driver_type`` of the broker: ``amqp``, ``redis`` and so on; all.

    No connection is opened.
    """
    return str(app.producer_pool.connections.connection.transport.driver_type)


def library_errors(producer: Any) -> AbstractContextManager[None]:
    """A block in which errors of a broker's client are kombu's, as Celery's ``send_task`` does.

    ``Connection._reraise_as_library_errors``: all.
    """
    errors: AbstractContextManager[None] = producer.connection._reraise_as_library_errors()
    return errors


def repeats_publish() -> bool:
    """Whether Celery publishes what follows a task, and repeats that itself if the broker fails.

    A link, the next task of a chain, or the body of a chord. ``_callback_publish_retry``: 5.7. The
    others, and Celery for any other message, leave it to kombu, by the option ``retry``.
    """
    amqp = sys.modules.get("celery.app.amqp")
    repeats = getattr(amqp, "_callback_publish_retry", None)
    return repeats is not None and bool(repeats.get())


def limit_broker_timeouts(connection: Any, timeout: float) -> None:
    """Let each read and write of ``connection`` wait for at most ``timeout`` seconds.

    The user's own ``broker_transport_options`` count. kombu's Redis transport waits for a reply
    without a limit, and so does its AMQP transport, except while it connects. Other transports have
    limits of their own, or no server. ``driver_type`` and these options: all.
    """
    names = {"amqp": ("read_timeout", "write_timeout"), "redis": ("socket_timeout",)}
    driver = str(connection.transport.driver_type)
    limits = dict.fromkeys(names.get(driver, ()), timeout)
    if driver == "redis":  # the AMQP transport reads connect_timeout itself
        limits["socket_connect_timeout"] = connection.connect_timeout or timeout
    connection.transport_options = {**limits, **connection.transport_options}


def ask_broker(connection: Any, channel: Any) -> None:
    """Wait for a reply of the broker over ``connection``, on which ``channel`` publishes.

    kombu has no such request. ``conn_or_acquire``: the Redis transport of all versions; it gives
    the client that publishes. Another channel is opened for other transports: one round trip of
    AMQP, a request for the queues at Amazon SQS, nothing for brokers without a server.
    """
    publishing_client = getattr(channel, "conn_or_acquire", None)
    if publishing_client is None:
        connection.channel().close()
    else:
        with publishing_client() as client:
            client.ping()


def elapsed_seconds(app: Any, seconds: float) -> float:
    """Seconds until the time that Celery computes from a ``countdown`` or ``expires`` in seconds.

    ``add_seconds_to_datetime``: 5.7. Celery 5.5 and 5.6 add the seconds to the local time of the
    app's time zone, so a change of summer time in between makes a difference of an hour.
    """
    if hasattr(_celery_time, "add_seconds_to_datetime"):
        return seconds
    now = app.now()
    return (now + timedelta(seconds=seconds)).timestamp() - now.timestamp()  # type: ignore[no-any-return]


def delays_natively(app: Any) -> bool:
    """Whether the broker delays a message by its countdown (quorum queues of RabbitMQ).

    Celery converts such a countdown to a routing key of whole seconds, rounded down; publishing
    with less than one second raises ValueError. ``detect_quorum_queues``: since 5.5. Without it the
    worker waits for the countdown.
    """
    try:
        from celery.utils.quorum_queues import detect_quorum_queues
    except ImportError:
        return False
    return bool(detect_quorum_queues(app, driver_of(app))[0])


def bind_delayed_messages(consumer: Any) -> None:
    """Let native delayed delivery reach each queue that a worker consumes.

    Celery binds the queues of the app in turn. 5.5 stops at the first one that the broker lacks,
    such as a queue that this worker's ``-Q`` leaves out. RabbitMQ then drops the delayed messages
    of the others, which also loses requeued calls. Since 5.6 each queue is tried.
    ``bind_queue_to_native_delayed_delivery_exchange``: since kombu 5.5.
    """
    if celery_version >= (5, 6) or not delays_natively(consumer.app):
        return
    from kombu.transport.native_delayed_delivery import (
        bind_queue_to_native_delayed_delivery_exchange as bind,
    )

    with consumer.app.connection_for_write() as connection:
        for queue in consumer.app.amqp.queues.consume_from.values():
            if not queue.exchange or queue.exchange.type != "direct":  # those only cause a warning
                bind(connection, queue)


#: kombu's name of the serializer of a content type; None if it is unknown. ``type_to_name``: all.
#: Without it a requeued message is serialized according to the task's options.
serializer_of: Callable[[str | None], str | None] = getattr(registry, "type_to_name", {}).get


def read_replies_to_sent_pops(channel: Any) -> None:
    """Let a worker's channel read the reply to each BRPOP that it has sent, whatever its limit is.

    kombu's Redis transport sends BRPOP while it may prefetch, and reads the reply only while it
    may. If the countdown of another message ends in between, the limit falls, and a message
    that the server has popped stays in the socket until a body ends. It is in no queue and not
    among the unacknowledged messages, so it is lost if the worker or the broker is killed (4 of 4
    times each with plain Celery 5.7). Read at once, it exceeds the limit by one.

    ``_in_poll``, ``qos.can_consume``: the Redis transport of kombu 5.5 to 5.7. Celery replaces
    ``can_consume`` in the same way for ``worker_disable_prefetch``. Without these names, and for
    other brokers, nothing changes.
    """
    qos: Any = getattr(channel, "qos", None)
    may_prefetch = getattr(qos, "can_consume", None)
    if may_prefetch is not None and hasattr(channel, "_in_poll"):
        qos.can_consume = lambda: bool(channel._in_poll) or may_prefetch()


# The worker's request and its pool.

#: Attributes of the body's request that a header with the same name would replace.
CONTEXT_METHODS: Final = frozenset(
    ("is_eager", *(name for name, value in vars(Context).items() if callable(value)))
)
#: Headers that Celery reads; all others belong to the message's author.
CONTEXT_FIELDS: Final = frozenset(vars(Context)) - CONTEXT_METHODS | {
    *("lang", "task", "argsrepr", "kwargsrepr", "compression"),
}


def is_revoked(request: Any) -> bool:
    """Whether the worker has revoked this request; ``_already_revoked``: all."""
    return bool(getattr(request, "_already_revoked", False))


def is_revoked_here(task_id: str) -> bool:
    """Whether this worker was asked to revoke ``task_id``; not known in a prefork child.

    ``celery.worker.state.revoked``: all. A process that is no worker does not import it.
    """
    state = sys.modules.get("celery.worker.state")
    return state is not None and task_id in state.revoked


def is_cancelled(request: Any) -> bool:
    """Whether a cold shutdown or a lost broker connection has cancelled this request.

    ``_already_cancelled``: all.
    """
    return bool(getattr(request, "_already_cancelled", False))


def has_stored_success(request: Any) -> bool:
    """Whether a pool child has stored SUCCESS before it was lost: its message is acknowledged then.

    ``_success_was_stored``: 5.7. Earlier versions do not look. Celery asks the result backend for
    it next; it gets the reply that is read here.
    """
    find = getattr(request, "_success_was_stored", None)
    if find is None:
        return False
    found = find()
    request._success_was_stored = lambda: found
    return bool(found)


def exception_of(exc_info: Any) -> BaseException:
    """The exception of billiard's ``ExceptionInfo``; billiard 4 wraps it with its traceback.

    A Retry has an attribute ``exc`` too.
    """
    exc: BaseException = exc_info.exception
    return exc.exc if isinstance(exc, ExceptionWithTraceback) else exc


def failure_of(request: Any, exc_info: Any) -> Any:
    """The end of a pool child's run in the form that the request's ``on_failure`` handles.

    billiard 4.3 reports any BaseException of a task; earlier versions report the death of the child
    that it caused, as WorkerLostError. Celery 5.7 treats SystemExit and KeyboardInterrupt as a lost
    worker, and stores the others as failures. Celery 5.5 and 5.6 treat all of them as failures,
    which has two consequences. A message with ``acks_late`` and ``reject_on_worker_lost`` is
    acknowledged, so the job is lost. And its result can't be encoded unless it is pickled, so none
    is stored, and no errback and no chord is called. So these versions get a WorkerLostError (of a
    call that is revoked or cancelled: Terminated, which they have handled already), or an exception
    of the same name that can be stored.

    ``_worker_lost_info``: 5.7.
    """
    exc = exception_of(exc_info)
    if isinstance(exc, Exception) or hasattr(request, "_worker_lost_info"):
        return exc_info
    failure: Exception
    if not isinstance(exc, (SystemExit, KeyboardInterrupt)):
        name = type(exc).__name__
        failure = type(name, (Exception,), {"__module__": type(exc).__module__})(*exc.args)
    elif is_revoked(request) or is_cancelled(request):
        failure = Terminated(repr(exc))
    else:
        failure = WorkerLostError(f"Worker exited prematurely: {exc!r}.")
    found = copy(exc_info)
    found.type, found.exception = type(failure), failure
    return found


def was_asked_to_end(meta: Mapping[str, Any]) -> bool:
    """Whether a result says REVOKED because a worker was asked to revoke the call.

    The call may be running in another worker, or in this one with Celery 5.6, and goes on unless
    it is terminated as well. Celery stores ``"revoked"`` then, but ``"terminated"`` where it
    terminates the call; all.
    """
    reason = getattr(meta.get("result"), "args", ())
    return meta.get("status") == states.REVOKED and tuple(reason) == ("revoked",)


def forks(pool_class: type) -> bool:
    """Whether the worker's pool forks child processes (prefork)."""
    return pool_class.__module__ == "celery.concurrency.prefork"


def pool_index() -> int | None:
    """Index of this pool child, unique among living children; None in any other process.

    billiard's pool sets ``index`` on its processes: billiard 4. Without it the worker's parent
    can't free a dead child's leases; their ttl frees the keys.
    """
    from billiard.process import current_process

    return getattr(current_process(), "index", None)


# Signals.


def live_receivers(signal: Any, sender: Any) -> list[Callable[..., Any]]:
    """The receivers of ``signal`` for ``sender``, each to be called as `Signal.send` calls it.

    ``_live_receivers``: all. Without it, all of them count as one function.
    """
    find = getattr(signal, "_live_receivers", None)
    return find(sender) if find else [lambda signal, **named: signal.send(**named)]


# The result backend.


def backend_of(app: Any, name: str) -> Any:
    """The result backend of the task ``name``: its own (the option ``backend``), or the app's."""
    task = app.tasks.get(name)
    return app.backend if task is None else task.backend


def result_meta(backend: Any, task_id: str) -> Mapping[str, Any]:
    """The metadata that the backend has stored for ``task_id``, read once.

    ``_get_task_meta_for``: all key-value backends. The fallback ``get_task_meta`` retries if
    ``result_backend_always_retry`` is set, by default endlessly.
    """
    read = getattr(backend, "_get_task_meta_for", None) or backend.get_task_meta
    return read(task_id)  # type: ignore[no-any-return]


def keeps_local_time(app: Any) -> bool:
    """Whether a naive time of the result backend is local; other backends keep UTC.

    django-celery-results 2.x stores Django's time, which is naive and local if ``USE_TZ`` is False.
    """
    return any(
        cls.__module__.startswith("django_celery_results.") for cls in type(app.backend).__mro__
    )


def limit_backend_timeouts(app: Any, timeout: float) -> Any:
    """A copy of the app's Redis backend that waits ``timeout`` seconds and does not retry.

    Celery's own backend waits 120 s for a server that does not answer, and redis-py retries.
    ``connparams``: the Redis and Sentinel backends of all versions. None for other backends.
    """
    backend = app.backend
    if not isinstance(getattr(backend, "connparams", None), dict):
        return None
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    limited = type(backend)(app=app, url=backend.url)
    # A backend on a Unix socket has no socket_connect_timeout.
    timeouts = {"socket_timeout", "socket_connect_timeout"} & limited.connparams.keys()
    limited.connparams |= dict.fromkeys(timeouts, timeout)
    limited.connparams["retry"] = Retry(NoBackoff(), 0)
    return limited


def close_backend(backend: Any) -> None:
    """Close the idle connections of a backend that ``limit_backend_timeouts`` has created.

    ``client``: the Redis and Sentinel backends of all versions, which create it at first use.
    """
    client = vars(backend).get("client")
    if client is not None:
        client.connection_pool.disconnect(inuse_connections=False)


# Schedulers of celery beat.


def rebuild_heap(scheduler: Any) -> None:
    """Make the next tick build the heap of due entries again.

    ``_heap``: Celery's Scheduler, all. Without it the scheduler keeps its own order, and a new
    leader may check an entry late, never early.
    """
    scheduler._heap = None


def forget_row_changes(scheduler: Any) -> None:
    """Drop last runs that django-celery-beat has not yet written to its rows.

    ``_dirty``: django-celery-beat 2.x. Without it a deposed leader may write older last runs to the
    rows. The last runs in the store are authoritative anyway.
    """
    getattr(scheduler, "_dirty", set()).clear()


def mark_row_changed(scheduler: Any, entry: Any) -> None:
    """Make django-celery-beat write the entry's last run to its row, with the next rows.

    ``_dirty``: django-celery-beat 2.x. Without it the row keeps its last run until the entry ticks.
    """
    entry.model.no_changes = True  # the other beats need not read all rows again
    getattr(scheduler, "_dirty", set()).add(entry.name)


def reread_rows(scheduler: Any) -> None:
    """Make django-celery-beat read all rows at the next tick.

    ``_initial_read``: django-celery-beat 2.x. Without it rows are read after one has changed.
    """
    scheduler._initial_read = True


def row_now(entry: Any) -> Any:
    """The current time in the form of a row of django-celery-beat, naive or aware.

    ``_default_now``: django-celery-beat 2.x; Celery's ``default_now`` is the fallback.
    """
    return getattr(entry, "_default_now", entry.default_now)()


def convert_row_options(entry_class: Any, convert: Callable[..., dict[str, Any]]) -> None:
    """Pass an entry's options through ``convert`` before they are written to a row.

    ``_unpack_options``: a class method of django-celery-beat 2.x's ModelEntry. Without it options
    that have no column of their own are not stored.
    """
    original = getattr(entry_class, "_unpack_options", None)
    if original is not None:
        entry_class._unpack_options = staticmethod(lambda **options: original(**convert(**options)))


def entry_after(entry: Any, last_run: Any, *, ran: bool = True) -> Any:
    """RedBeat's entry with ``last_run`` as its last run, written to its key.

    Args:
        entry: The entry.
        last_run: The last run.
        ran: Whether this is one run more, and no correction.

    ``_next_instance``: RedBeat 2.x. There is no fallback: without it no run would be recorded.
    """
    return entry._next_instance(last_run_at=last_run, only_update_last_run_at=not ran)
