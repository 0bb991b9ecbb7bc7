"""What a worker does with the message of a singleton task: its name, its headers, its child's end.

Celery creates one request per message. The request of a singleton task gives the delivery a nonce
of its own before a child sees it, because neither the task id nor ``redelivered`` identifies a
delivery. It removes foreign headers with this library's names, and notes the queue of the message
(`message.origin`). If a pool child died or is being killed, it releases the leases of the
child (`worker.dead_child`).

All of this runs in the main thread of the worker's parent (prefork), or in the thread that consumes
messages, which must not wait for the store. In other pools than prefork the request is in the
process that runs the body.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from celery import Celery
from celery.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery.utils.imports import symbol_by_name
from celery.worker.request import Request
from kombu.exceptions import ContentDisallowed, DecodeError

from .. import celery_compat
from ..celery_compat import CONTEXT_FIELDS, CONTEXT_METHODS
from ..core.lease import Kind
from ..message.header import (
    HEADER,
    SCHEDULED_AT_HEADER,
    call_in_queue,
    call_of,
    header_of,
    mint_nonce,
)
from ..message.origin import find_origin
from ..message.request_data import ATTRIBUTE, Arrival
from ..runtime import Runtime
from .dead_child import change_claim, is_alive, is_requeued, release_leases
from .discarded import discard_claim, take_out

logger = logging.getLogger("celery_singleton_lock")

# The end of a call that was acknowledged early.
_SHUT_DOWN: Final = (
    "a cold shutdown of its worker ended it, and its message was acknowledged before "
    "(acks_late=True keeps it)"
)
# Prefix of this library's headers. Celery makes every header an attribute of the body's request.
_OURS: Final = "singleton_"


class SingletonRequestMixin:
    """A base of ``Task.Request`` that precedes the task's original request class.

    The names of the arguments are Celery's, because Celery passes some by keyword.
    """

    # Set by Celery's class.
    app: Celery
    content_type: str | None
    id: str
    task: Any
    time_start: float | None
    worker_pid: int | None
    request_dict: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # a Request's: see mixed_request
        self._sift()
        message = self.request_dict
        # Celery does not pass the message's content type to the body.
        serializer = celery_compat.serializer_of(self.content_type)
        message[ATTRIBUTE] = Arrival(nonce=mint_nonce(), serializer=serializer)
        info = message.get("delivery_info")
        if info and (exchange := info.get("exchange")):
            self._note_origin(exchange, info.get("routing_key") or "")
        if "singleton" in (message.get("properties") or ()):
            _warn_of_unread_options(self.task.name)

    def _sift(self) -> None:
        """Remove headers that only this process or Celery may set; collect the author's headers.

        A foreign ``singleton_*`` header could pretend that the body has begun, and so make it run
        without a lease. A header with the name of a method of the request would hide the method,
        and the message could not be copied for a requeue.

        The body's ``request.headers`` gets none of this library's headers, because users copy it to
        other messages. If the message has a header ``headers`` (monitoring agents write one),
        Celery uses its value as all headers, so the other headers are added here. The value may be
        a copy of all headers. Celery's own headers are removed from it, because a copy of the
        message would be sent with their old values, such as ``eta``.
        """
        message = self.request_dict
        header = header_of(message, str(self.id))
        own: dict[str, Any] = {}
        for name in message.keys() - CONTEXT_FIELDS:
            if name in CONTEXT_METHODS or _is_ours(name):
                del message[name]
            else:
                own[name] = message[name]
        nested = message.get("headers")
        if nested and isinstance(nested, Mapping):
            names = nested.keys() - CONTEXT_FIELDS - CONTEXT_METHODS
            own.update((name, nested[name]) for name in names if not _is_ours(name))
        message["headers"] = own
        if header:
            message[HEADER] = header
            if "broker" in header:
                Runtime.of(self.app).note_broker(header)

    def _note_origin(self, exchange: str, routing_key: str) -> None:
        """Note the queue that a message came from, if it was sent to an exchange.

        A message that was routed to several queues is a separate call in each of them, and each
        call must run: the copies are not deliveries of one message. Their common claim, and their
        common place in the queue of their key, end when the first copy arrives.
        """
        origin = find_origin(self.app, exchange, routing_key)
        if origin is None:
            return
        queue, is_shared = origin
        message = self.request_dict
        message[ATTRIBUTE] = arrival = message[ATTRIBUTE]._replace(queue=queue)
        if not is_shared:
            return
        discard_claim(self)
        take_out(self.app, message, "fanout")
        header = dict(header_of(message, str(self.id)))
        if not header:
            message[ATTRIBUTE] = arrival._replace(is_unnamed=True)
        header.pop("claim", None)
        header.pop("queue", None)
        header |= {"id": str(self.id), "call": call_in_queue(call_of(header), queue)}
        message[HEADER] = header

    def revoked(self) -> bool:
        """As Celery's. If the message is discarded, its claim is freed."""
        discarded = bool(super().revoked())  # type: ignore[misc]
        if discarded:
            # Celery has noted the id of an expired message as a revoked one.
            is_expired = self.maybe_expire()  # type: ignore[attr-defined]
            self._discard("expired" if is_expired else "revoked")
        return discarded

    def reject(self, requeue: bool = False) -> None:
        """As Celery's. If it never reached the pool, its claim is freed: its ``eta`` is no time."""
        super().reject(requeue)  # type: ignore[misc]
        if not requeue and self.time_start is None:
            self._discard("invalid")

    def _discard(self, reason: str) -> None:
        discard_claim(self, reason)
        take_out(self.app, self.request_dict, reason)

    def cancel(self, pool: Any, signal: Any = None, **options: Any) -> None:
        """As Celery's, which a cold shutdown calls. A call that does not come back has failed.

        Celery stores RETRY for a call whose message is acknowledged early, and nothing retries it.
        """
        is_lost = bool(self.time_start) and not self.task.acks_late
        if is_lost and "emit_retry" in options:
            options["emit_retry"] = False
        super().cancel(pool, signal, **options)  # type: ignore[misc]
        if is_lost and not celery_compat.has_stored_success(self):
            logger.error("singleton: %s[%s] is lost: %s", self.task.name, self.id, _SHUT_DOWN)
            self.task.backend.mark_as_failure(
                self.id,
                WorkerLostError(_SHUT_DOWN),
                request=self._context,  # type: ignore[attr-defined]
                store_result=self.store_errors,  # type: ignore[attr-defined]
            )

    def on_timeout(self, soft: bool, timeout: float) -> None:
        try:
            super().on_timeout(soft, timeout)  # type: ignore[misc]
        finally:
            # The leases are released last, because billiard kills the child when this method
            # returns. Before, Celery stores the result and calls the user's on_failure while the
            # body continues.
            if not soft:
                release_leases(self, Kind.DYING, is_requeued(self, TimeLimitExceeded()))

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> None:
        exc = celery_compat.exception_of(exc_info)
        is_lost = isinstance(exc, (WorkerLostError, Terminated, SystemExit, KeyboardInterrupt))
        if is_lost or not isinstance(exc, Exception):
            # billiard 4.3 reports an exit slightly before the process ends. Then the death is not
            # proven, and the ttl frees the key. After another BaseException, such as CancelledError
            # of asyncio, the process goes on.
            comes_back = is_requeued(self, exc)
            if self.worker_pid is not None and not is_alive(self.worker_pid):
                release_leases(self, None, comes_back)
            elif self.task.acks_late:
                # A body that ended by such an exception has released its lease, but did not know
                # whether Celery requeues the message. A body that continues keeps its claim.
                change_claim(self, comes_back)
            if not comes_back:
                reason = "lost" if is_lost else "ended"
                take_out(self.app, self.request_dict, reason)
        elif not return_ok and isinstance(exc, (ContentDisallowed, DecodeError)):
            # The child could not decode the message, which this process has decoded. An error of
            # the body comes with return_ok.
            self._discard("undecodable")
        exc_info = celery_compat.failure_of(self, exc_info)
        super().on_failure(exc_info, send_failed_event, return_ok)  # type: ignore[misc]


@cache
def _warn_of_unread_options(task: str) -> None:
    """Warn, once per task, that no code read the ``singleton`` option of a call."""
    logger.warning(
        "singleton: a call of %s came with singleton={...} that no code read, so it has no claim. "
        "Its caller doesn't know the task: let a plain `celery beat` import it, start beat with "
        "--scheduler singleton, or use claim_and_send() in place of send_task()",
        task,
    )


def _is_ours(header: str) -> bool:
    """Whether ``header`` would become an attribute of the request that only this library sets."""
    return header.startswith(_OURS) and header != SCHEDULED_AT_HEADER


def mixed_request(base: Any) -> type:
    """A class that extends ``base`` (a Request class or its qualified name) with the mixin."""
    cls: type = symbol_by_name(base)
    if issubclass(cls, SingletonRequestMixin):
        return cls
    return type(f"Singleton{cls.__name__}", (SingletonRequestMixin, cls), {})


#: The class that ``SingletonTask.Request`` names.
SingletonRequest: Final = mixed_request(Request)
