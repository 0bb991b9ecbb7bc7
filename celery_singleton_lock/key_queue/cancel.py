"""An operator takes a call out of the queue of its key."""

from __future__ import annotations

from typing import Final

from celery import Celery

from ..core.call_queue import Removal, Remove
from ..core.events import EventName
from ..core.executor import within
from ..core.heartbeat import MAX_TIMEOUT
from ..core.lease import Token
from ..message.header import Delivery
from ..runtime import Runtime
from ..typed_keys import login
from .hint import emit, free_claim, publish_hint
from .inspection import CallInQueue, message_of, queue_of
from .results import RESULT_TIMEOUT, TAKEN_OUT, has_ended, revoke

# Seconds for which the end of a cancelled call is remembered: a copy of its message may be in the
# broker for long.
_WEEK: Final = 7 * 86400.0


def cancel(app: Celery, call: CallInQueue, *, reason: str = "", user: str = "") -> bool:
    """Take a call out of its queue before it begins. It's revoked.

    Its claim ends, and a chord that it belongs to fails. If it was the first of its queue, the next
    call is sent. You can cancel a call that waits for its retry, but not one that runs.

    Args:
        app: The app.
        call: The call.
        reason: Why you cancel it, for the result.
        user: Who cancels it, for the result. By default the login of this process.

    Returns:
        True if the call was taken out, False if it runs or has left the queue.

    Raises:
        SettingsError: The store doesn't support queues.
        StoreError: The store refused the request, or can't be reached. Cancel the call again.
        Exception: The result backend can't be reached or refused the result. The call doesn't run,
            and a worker stores its result later.
    """
    runtime, queue = Runtime.of(app), queue_of(app)
    found = queue.leave(call.key, call.call_id, timeout=MAX_TIMEOUT)
    if isinstance(found, Removal):
        return False
    message, why = message_of(found.message), f": {reason}" if reason else ""

    def store_result() -> None:
        if not has_ended(app, call.task_id, message):
            revoke(app, call.task_id, message, f"{TAKEN_OUT} by {user or login()}{why}")

    within(RESULT_TIMEOUT, store_result)
    token = Token.parse(f"{call.call_id}|0.0|-")
    if message is not None:
        token = Delivery.of(message.headers).token
        free_claim(runtime, message, timeout=MAX_TIMEOUT)
    ttl = max(runtime.settings.completion_ttl, _WEEK)
    request = Remove(key=call.key, token=token, ended_ttl=ttl)
    removal, following = queue.remove(request, timeout=MAX_TIMEOUT)
    if removal is Removal.REMOVED:
        emit(runtime, EventName.REMOVED, call.key, call.task_id, call.task, reason="cancelled")
    if following is not None:
        publish_hint(app, queue, following)
    return removal is not Removal.RUNNING
