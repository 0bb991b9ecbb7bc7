"""The end of a call in the queue of its key when no body has taken it out.

A child died, or the message is discarded: it was revoked, has expired, or never becomes a task
(`worker.discarded`). This runs in the thread that consumes messages, which publishes nothing,
because the broker may not answer: the next call is due for a sweep at once, and this worker is
asked for it. A backlog of expired calls would drain with the pace of the regular sweeps otherwise.

The functions here return the request, with a description and the seconds for which it is repeated;
the worker sends it (`worker.main_thread`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..core.call_queue import Hint, Removal, Remove
from ..core.events import EventName
from ..core.keyspace import Keyspace
from ..core.lease import Token
from ..core.retry_queue import MAIN_THREAD_TIMEOUT
from ..core.store import Store
from ..message.header import Delivery, header_of
from ..on_conflict import Queue
from ..runtime import Runtime
from .hint import emit

#: What it is about, the seconds for which it is repeated, and the request.
End = tuple[str, float, Callable[[Store], None]]

# Seconds in which the message of a call comes back that Celery or the broker requeues.
_COMES_BACK = 60.0


def of_dead_child(request: Any, key: str, token: Token, comes_back: bool) -> End | None:
    """The request that takes out the call of a dead child, or makes it due; None: there is none.

    Args:
        request: The worker's request of the message.
        key: The lock key that the child held.
        token: The token of its lease.
        comes_back: Whether the message is requeued.
    """
    task, header = request.task, header_of(request.request_dict, token.task_id)
    if header.get("queue") or isinstance(task.singleton_policy().on_conflict, Queue):
        what = f"{request.task.name}[{token.task_id}] has ended in the queue of {key}"
        runtime, key = Runtime.of(request.app), Keyspace.lock_of(key)
        # Also if it had ended: the child may have died before it published the next call.
        sequence = Delivery.of(request.request_dict).sequence
        end = _end(runtime, key, token, sequence, comes_back=comes_back, always=True)
        return (what, *end)
    return None


def of_discarded(app: Any, headers: Mapping[str, Any], reason: str) -> End | None:
    """The request that takes out the call of a message that nothing runs; None: there is none.

    Args:
        app: The app.
        headers: The headers.
        reason: Why; docs/reference/events.md lists the reasons.
    """
    task_id = str(headers.get("id"))
    key = header_of(headers, task_id).get("queue")
    if not key:
        return None
    runtime = Runtime.of(app)
    if runtime.keyspace.is_lock(key):
        what = f"{headers.get('task')}[{task_id}] has ended in the queue of {key}"
        delivery = Delivery.of(headers)

        def report() -> None:
            task = str(headers.get("task") or "")
            emit(runtime, EventName.REMOVED, key, task_id, task, reason=reason)

        end = _end(runtime, key, delivery.token, delivery.sequence, report=report)
        return (what, *end)
    return None


def _end(
    runtime: Runtime,
    key: str,
    token: Token,
    sequence: int,
    *,
    comes_back: bool = False,
    always: bool = False,
    report: Callable[[], None] = lambda: None,
) -> tuple[float, Callable[[Store], None]]:
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
            removal, following = queue.remove(request, timeout=MAIN_THREAD_TIMEOUT)
            if removal is Removal.REMOVED:
                report()
        if following is not None or always:
            if comes_back:
                call = token.call_id
                queue.defer(key, seconds=_COMES_BACK, timeout=MAIN_THREAD_TIMEOUT, returns=call)
            else:
                queue.defer(key, seconds=0.0, timeout=MAIN_THREAD_TIMEOUT, unpublished=following)
            if not comes_back and runtime.sweep_soon is not None:
                runtime.sweep_soon(key)

    return ttl, end
