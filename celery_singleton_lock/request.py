"""The worker parent's part: naming deliveries, and freeing what a dead child held.

Promises
    Every delivery gets a nonce of its own before a child sees it: ``redelivered`` and the task id
    name no delivery. A key that a dead child held is freed once its death is proven, before the
    message is requeued or its failure reported.

Does not promise
    To free anything on an announcement: a revoked body that swallows SystemExit ran 7 s more, and
    on a hard time limit Celery tells while the child still lives. There the key turns into "held by
    a process that is being killed" for a second.

All of this runs in the main thread of the worker parent (prefork). In other pools the request lives
in the process that runs the body, and only the nonce matters.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Final

from celery import Celery
from celery.exceptions import Terminated, WorkerLostError
from celery.utils.imports import symbol_by_name
from celery.worker.request import Request
from kombu.serialization import registry  # type: ignore[attr-defined]  # the stubs lack it

from celery_singleton_lock.core.lease import Kind, Token
from celery_singleton_lock.core.store import Release
from celery_singleton_lock.delivery import NONCE_KEY, SERIALIZER_KEY, mint_nonce
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.runtime import Runtime

__all__ = ["SingletonRequest", "SingletonRequestMixin", "mixed_request"]

logger = logging.getLogger("celery_singleton_lock")

# The parent serves all of its children; it doesn't wait for a silent store longer than this.
_PARENT_TIMEOUT: Final = 1.0
# Celery kills with TERM, 0.1 s, KILL.
_DYING_SECONDS: Final = 1.0


class SingletonRequestMixin:
    """For ``Task.Request``: put before the request class the task has otherwise.

    The names of the arguments are Celery's: it calls some by keyword.
    """

    # Celery's, set by the class that this one is put before.
    app: Celery
    content_type: str | None
    worker_pid: int | None
    _request_dict: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # a Request's: see mixed_request
        self._request_dict[NONCE_KEY] = mint_nonce()
        # Celery tells the body everything about its message but this.
        self._request_dict[SERIALIZER_KEY] = registry.type_to_name.get(self.content_type)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        try:
            super().on_timeout(soft, timeout)  # type: ignore[misc]
        finally:
            # Afterwards, for billiard kills the child when this returns, and not before: meanwhile
            # Celery stores the result and calls the user's on_failure, and the body runs on.
            if not soft:
                self._settle_leases(Kind.DYING)

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> None:
        if self._child_is_dead(exc_info.exception):
            self._settle_leases(None)
        super().on_failure(exc_info, send_failed_event, return_ok)  # type: ignore[misc]

    def _child_is_dead(self, exc: BaseException) -> bool:
        exc = getattr(exc, "exc", exc)  # billiard's ExceptionWithTraceback
        if not isinstance(exc, (WorkerLostError, Terminated, SystemExit)):
            return False
        # billiard 4.3 reports an exit slightly before the process is gone: then the ttl frees the
        # key, for an announcement is no proof.
        return self.worker_pid is not None and not _alive(self.worker_pid)

    def _settle_leases(self, become: Kind | None) -> None:
        """Free what the child held, or mark it as dying; by token, so nobody else's is touched."""
        record = Runtime.shared_record
        if record is None or self.worker_pid is None or self.worker_pid == os.getpid():
            return
        store = Runtime.of(self.app).store
        for held in record.of_dead(self.worker_pid):
            call = Release(
                keys=held.keys,
                token=Token.parse(held.token),
                become=become,
                become_ttl=_DYING_SECONDS if become else 0.0,
            )
            try:
                reply = store.release(call, timeout=_PARENT_TIMEOUT)
            except StoreError as exc:
                logger.warning(
                    "singleton: %s of dead pid %s stays until its ttl of %s s: %s",
                    held.keys[0],
                    self.worker_pid,
                    held.ttl,
                    exc,
                )
                continue
            fate = "is being killed" if become else "died"
            logger.info(
                "singleton: pid %s %s holding %s: %s", self.worker_pid, fate, held.keys[0], reply
            )
        if become is None:
            record.settle(self.worker_pid)


class SingletonRequest(SingletonRequestMixin, Request):  # type: ignore[misc]
    """What ``SingletonTask.Request`` names."""


def mixed_request(base: Any) -> type:
    """``base`` (a Request class or its qualified name) with our part before it."""
    cls: type = symbol_by_name(base)
    if issubclass(cls, SingletonRequestMixin):
        return cls
    if cls is Request:
        return SingletonRequest
    return type(f"Singleton{cls.__name__}", (SingletonRequestMixin, cls), {})


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
