"""The results of calls that leave the queue of a key without a body: they are lost or cancelled.

A call without a result would keep its caller, its chain and its chord waiting.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from celery import Celery, states
from celery.app.task import Context
from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend
from celery.exceptions import TaskRevokedError, WorkerLostError
from kombu.serialization import loads, prepare_accept_content

from ..celery_compat import backend_of
from ..message.stored_message import StoredMessage
from ..message.times import done_at

logger = logging.getLogger("celery_singleton_lock")

#: Seconds to wait for the result backend.
RESULT_TIMEOUT: Final = 2.0
#: The beginning of the result of a cancelled call.
TAKEN_OUT: Final = "taken out of the queue of its key"


# No message: the store has none of a call that joined by running, or it can't be read.


def has_ended(app: Celery, task_id: str, message: StoredMessage | None) -> bool:
    """Whether the result backend has the call's result; False if it keeps none that can be read.

    The result of an earlier call with the same id is none: it is older than the message.
    """
    backend = _backend_of(app, message)
    if isinstance(backend, (DisabledBackend, RPCBackend)):
        return False
    result = app.AsyncResult(task_id, backend=backend)
    done = done_at(result.date_done, app) if result.state in states.READY_STATES else None
    if done is None or message is None:
        return done is not None
    return done.timestamp() > message.at


def fail_lost(app: Celery, task_id: str, message: StoredMessage | None, runs: int) -> None:
    """Store FAILURE for a call that has begun ``runs`` times, and whose process died each time."""
    if runs > 1:
        bound = "OnConflict.queue(max_crashes=...)"
        text = f"its process died each of the {runs} times that it ran ({bound})"
    else:
        text = "its worker died while it ran; its message was acknowledged"
    error = WorkerLostError(text)
    request, stores = _request_of(app, task_id, message)
    backend = _backend_of(app, message)
    backend.mark_as_failure(task_id, error, request=request, store_result=stores)


def revoke(app: Celery, task_id: str, message: StoredMessage | None, reason: str) -> None:
    """Store REVOKED for a call that never begins."""
    request, stores = _request_of(app, task_id, message)
    options = {"store_result": stores, "call_errbacks": False, "state": states.REVOKED}
    # mark_as_revoked() would leave the later links of a chain PENDING forever, and a chord over
    # such chains would never end.
    backend = _backend_of(app, message)
    backend.mark_as_failure(task_id, TaskRevokedError(reason), request=request, **options)


def _backend_of(app: Celery, message: StoredMessage | None) -> Any:
    return app.backend if message is None else backend_of(app, message.headers["task"])


def _request_of(app: Celery, task_id: str, message: StoredMessage | None) -> tuple[Context, bool]:
    """The request of the message, and whether its result is stored."""
    if message is None:  # RPC needs its queue of replies
        return Context({"id": task_id}), not isinstance(app.backend, RPCBackend)
    headers: dict[str, Any] = dict(message.headers)
    properties = message.properties
    try:
        args, kwargs, embed = loads(
            message.body,
            message.content_type,
            message.content_encoding,
            accept=prepare_accept_content(app.conf.accept_content),
        )
    except Exception:
        # This worker does not accept the content type, or lacks a class. The embedded links and
        # chord are unknown then.
        logger.exception("singleton: the arguments of the call %s can't be read", headers["id"])
        args, kwargs, embed = (), {}, {}
    request = Context(
        {
            **headers,
            **(embed or {}),
            "args": args,
            "kwargs": kwargs,
            "reply_to": properties.get("reply_to"),
            "correlation_id": properties.get("correlation_id"),
            # Celery reads it before it publishes error callbacks.
            "delivery_info": {
                "exchange": message.exchange,
                "routing_key": properties.get("routing_key"),
                "priority": properties.get("priority"),
            },
        }
    )
    task: Any = app.tasks.get(headers["task"])
    ignored = headers.get("ignore_result")
    if ignored is None:
        ignored = getattr(task, "ignore_result", False)
    stores = not ignored or getattr(task, "store_errors_even_if_ignored", False)
    return request, bool(stores)
