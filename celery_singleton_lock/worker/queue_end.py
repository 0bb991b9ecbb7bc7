"""The end of a call in the queue of its key when no body has taken it out.

A child died, or the message is discarded: it was revoked, has expired, or never becomes a task
(`worker.discarded`). This runs in the thread that consumes messages, which publishes nothing,
because the broker may not answer: the next call is due for a look at once, and this worker is asked
for it. A backlog of expired calls would drain with the pace of the regular looks otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..core.call_queue import Hint, Removal, Remove
from ..core.events import EventName
from ..core.lease import Token
from ..core.store import Store
from ..message.header import header_of
from ..policy import ConflictAction
from ..publish.queue import delivery_of, emit
from ..runtime import Runtime
from .main_thread import TIMEOUT, ask, ask_later

# Seconds in which the message of a call comes back that Celery or the broker requeues.
_COMES_BACK = 60.0


def take_out(request: Any, key: str, token: Token, comes_back: bool) -> None:
    """Take out the call of a dead child, or make it due.

    Args:
        request: The worker's request of the message.
        key: The lock key that the child held.
        token: The token of its lease.
        comes_back: Whether the message is requeued.
    """
    task, header = request.task, header_of(request.request_dict, token.task_id)
    if header.get("queue") or task.singleton_policy().on_conflict.action is ConflictAction.QUEUE:
        what = f"{request.task.name}[{token.task_id}] has ended in the queue of {key}"
        runtime = Runtime.of(request.app)
        # Also if it had ended: the child may have died before it published the next call.
        sequence = delivery_of(request.request_dict).sequence
        end = _end(runtime, key, token, sequence, comes_back=comes_back, always=True)
        ask(runtime, what, *end)


def take_out_discarded(app: Any, headers: Mapping[str, Any], reason: str) -> None:
    """Take out the call of a message with these ``headers`` that no body runs.

    Args:
        app: The app.
        headers: The headers.
        reason: Why; docs/reference/events.md lists the reasons.
    """
    task_id = str(headers.get("id"))
    key = header_of(headers, task_id).get("queue")
    if not key:
        return
    runtime = Runtime.of(app)
    if runtime.keyspace.is_lock(key):
        what = f"{headers.get('task')}[{task_id}] has ended in the queue of {key}"
        delivery = delivery_of(headers)

        def report() -> None:
            task = str(headers.get("task") or "")
            emit(runtime, EventName.REMOVED, key, task_id, task, reason=reason)

        end = _end(runtime, key, delivery.token, delivery.sequence, report=report)
        ask_later(runtime, what, *end)


def _end(
    runtime: Runtime,
    key: str,
    token: Token,
    sequence: int,
    *,
    comes_back: bool = False,
    always: bool = False,
    report: Callable[[], None] = lambda: None,
) -> tuple[float, Any]:
    """The request that takes a call out, or makes its queue due; the arguments of `ask`.

    Args:
        runtime: The app's runtime.
        key: The lock key.
        token: The token of the attempt that has ended.
        sequence: How often its message was requeued.
        comes_back: Whether its message is requeued: then it keeps its place.
        always: Whether the queue is due also if no call follows.
        report: Called if the call was taken out.
    """
    ttl = runtime.settings.completion_ttl

    def end(store: Store) -> None:
        if (queue := store.call_queue) is None:
            return
        following: Hint | None = None
        if not comes_back:
            request = Remove(key=key, token=token, ended_ttl=ttl, sequence=sequence)
            removal, following = queue.remove(request, timeout=TIMEOUT)
            if removal is Removal.REMOVED:
                report()
        if following is not None or always:
            seconds = _COMES_BACK if comes_back else 0.0
            queue.defer(key, seconds=seconds, timeout=TIMEOUT, unpublished=following)
            if not comes_back and runtime.look_soon is not None:
                runtime.look_soon(key)

    return ttl, end
