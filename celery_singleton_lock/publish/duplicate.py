"""A duplicate: whether the call that has the claim answers it, and what its caller gets.

Guarantees
    No call is answered with a call that is known to have ended, except in its period. A publisher
    waits for the result backend for about half a second at most, however often it asks: for 0.4 s
    for one answer, and it asks again only if it has waited for less than 0.1 s so far.
    The number of a process's backends does not grow with its duplicates.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, Any, Final

from celery import Celery, states
from celery.backends.rpc import RPCBackend
from celery.exceptions import SoftTimeLimitExceeded
from celery.result import AsyncResult

from ..celery_compat import backend_of, limit_backend_timeouts, result_meta, was_asked_to_end
from ..core.events import Event, EventName
from ..core.key import KeyMaker
from ..core.lease import Holder, Phase, Record, Token
from ..errors import DuplicateTask
from ..instrumentation.sentry import close_check_in
from ..message.claim import Claim
from ..message.skipped import SkippedResult, skipped_value
from ..message.times import done_at
from ..option_values import OnDuplicate, Unique
from ..policy import Policy
from ..runtime import Runtime
from .continuation import continues

if TYPE_CHECKING:
    from .publication import Publication

logger = logging.getLogger("celery_singleton_lock")

#: The remedy for results that only the first caller receives.
RPC_CURE: Final = (
    'Use a result backend that all processes share, such as redis://, or on_duplicate="skip" or '
    '"raise"; where no caller reads the result, ignore_result=True.'
)
# Names of the tasks whose rpc:// results this process has warned about.
_warned: Final[set[str]] = set()
# Seconds to wait for one answer of the result backend.
_TIMEOUT: Final = 0.4
#: Seconds of waiting after which a publication does not ask the result backend again.
ENOUGH: Final = 0.1


def answer(call: Publication, claim: Claim, existing: Record) -> AsyncResult[Any]:
    """The result that the caller of ``call`` gets instead of publishing a message.

    Args:
        call: The duplicate.
        claim: The claim that it requested.
        existing: The record of the call that has the claim.

    Raises:
        DuplicateTask: ``on_duplicate`` is ``"raise"``.
    """
    runtime, on_duplicate = call.runtime, call.policy.on_duplicate
    task_id, holder = Token.task_id_of(existing.token), existing.holder
    # In a period, the store does not know whether the call still runs.
    phase = "published" if claim.is_period else str(existing.phase)
    data = {"outcome": str(on_duplicate), "phase": phase}
    if on_duplicate is not OnDuplicate.REPLACE and _leaves_out_arguments(call):
        data["arguments"] = "dropped"  # the queued message has those of another call
    runtime.events.emit(
        Event(
            name=EventName.DUPLICATE,
            key=existing.key,
            task=call.task,
            task_id=call.task_id,
            holder=holder,
            data=data,
        )
    )
    close_check_in(call.options.get("headers"))
    if on_duplicate is OnDuplicate.SKIP:
        value = skipped_value(call.task, call.key, holder, existing.phase)
        return SkippedResult(call.task_id, value, states.SUCCESS, name=call.task)
    if on_duplicate is OnDuplicate.RAISE:
        age = max(0.0, runtime.clock.wall() - holder.since)
        end = f"in {existing.ttl:.0f} s"
        if claim.is_period:
            end += ", whatever becomes of it"
        else:
            end = f"when it does, or {end} if no worker reports its end"
        raise DuplicateTask(
            f"{call.task} is not published: {task_id} is {phase} with the same key, "
            f"for {age:.1f} s now. Wait for that one, or set another on_duplicate. Its claim "
            f"ends {end}",
            task_id,
            existing.ttl,
        )
    _warn_of_rpc(call, task_id)
    kept: AsyncResult[Any] | None = runtime.eager_results.get(claim.key)
    if kept is not None and kept.id == task_id:
        return kept
    task: Any = runtime.app.tasks.get(call.task)
    if task is not None:  # its class may have results of its own, such as AbortableTask
        result: AsyncResult[Any] = task.AsyncResult(task_id)
        return result
    return runtime.app.AsyncResult(task_id, task_name=call.task)


def takes_over(runtime: Runtime, existing: Record, caller: Holder, *, asks: bool = True) -> bool:
    """Whether the caller takes over the claim, because the call that has it may not do the work.

    That call has expired, or may expire while the caller's does not; or it is the running task,
    which publishes its own successor; or it has ended and its worker could not free the claim: the
    worker was killed after it had stored the result, or the store was unreachable.

    Args:
        runtime: The runtime of the caller's app.
        existing: The record of the call that has the claim.
        caller: The call that requests it.
        asks: Whether the result backend is asked; if not, that call counts as not ended.
    """
    # Two calls that expire count as equal: with expires=60 at the task, each call expires later
    # than the one before. A retry and a requeue copy keep the time. Their claim lasts longer.
    expires = existing.holder.expires
    may_expire = expires and existing.phase is not Phase.RUNNING
    if may_expire and (not caller.expires or expires <= caller.since):
        return True
    if continues(runtime.app.current_worker_task, Token.task_id_of(existing.token)):
        return True
    return asks and _has_ended(runtime, existing, caller.task)


def does_the_work_of(existing: Record, claim: Claim) -> bool:
    """Whether the call that has the claim does the work of the call that requests it.

    It does not if its body is running and the second call needs a run that starts later
    (``until_start``). That happens only if the first call has other terms (``until_done``), because
    with ``until_start`` it would have freed its claim.
    """
    return claim.unique is not Unique.UNTIL_START or existing.phase is not Phase.RUNNING


def sends_results_to_first_caller(
    app: Celery, task: Any, policy: Policy, options: Mapping[str, Any]
) -> bool:
    """Whether only the thread of the first caller can read the result that a duplicate gets.

    The ``rpc://`` backend sends a result to a queue of the thread that published the message.
    """
    ignored = options.get("ignore_result", getattr(task, "ignore_result", False))
    return (
        policy.unique is not None
        and policy.on_duplicate in (OnDuplicate.RETURN_EXISTING, OnDuplicate.REPLACE)
        and isinstance(app.backend if task is None else task.backend, RPCBackend)
        and not ignored
    )


def _warn_of_rpc(call: Publication, task_id: str) -> None:
    """Warn, once per process and task, about a result that this caller may never receive."""
    app, name = call.runtime.app, call.task
    task, policy = app.tasks.get(name), call.policy
    if sends_results_to_first_caller(app, task, policy, call.options) and name not in _warned:
        _warned.add(name)
        logger.warning(
            "singleton: a call of %s returns the result of %s, but rpc:// delivers a result "
            "only to the process and thread that published the message: anywhere else .get() "
            "waits forever. %s",
            *(name, task_id, RPC_CURE),
        )


def _leaves_out_arguments(call: Publication) -> bool:
    """Whether calls with one key may have different arguments, if the task's code is here."""
    key_maker = getattr(call.runtime.app.tasks.get(call.task), "singleton_key_maker", None)
    return isinstance(key_maker, KeyMaker) and not key_maker.names_all


def _has_ended(runtime: Runtime, existing: Record, task: str) -> bool:
    """Whether the result backend of ``task`` has a final state of the call that has the claim."""
    app = runtime.app
    if isinstance(backend_of(app, task), RPCBackend):
        return False  # reading a result removes it from the caller's queue
    try:
        meta = _result_meta(runtime, Token.task_id_of(existing.token), task)
        if meta.get("status") not in states.READY_STATES:
            return False
        if existing.phase is Phase.RUNNING and was_asked_to_end(meta):
            return False  # it runs on, and frees its claim when it ends
        if (ended_at := done_at(meta.get("date_done"), app)) is None:
            return True
        # An older result is that of an earlier call with the same, explicit task id. If this host's
        # clock is ahead of the worker's, the claim of a worker that died just then stays longer.
        return ended_at.timestamp() >= existing.holder.since
    except SoftTimeLimitExceeded:
        raise  # of the body that publishes
    except Exception:
        return False  # there is no result backend, or it does not answer: the claim counts


def _result_meta(runtime: Runtime, task_id: str, task: str) -> Mapping[str, Any]:
    """The metadata of a result, or nothing if the result backend does not answer in time."""
    app = runtime.app
    is_apps_own = backend_of(app, task) is app.backend
    if is_apps_own and runtime.quick_backend is None:
        runtime.quick_backend = limit_backend_timeouts(app, _TIMEOUT)
    if is_apps_own and runtime.quick_backend is not None:
        return result_meta(runtime.quick_backend, task_id)
    # Other clients have no common bound. Such a backend is asked on a thread, which the caller
    # leaves behind after a timeout. Until that thread ends, this process asks nothing else. (In a
    # forked child it is not alive.)
    if runtime.unanswered is not None and runtime.unanswered.is_alive():
        return {}
    answers: list[Mapping[str, Any]] = []
    # Celery makes a backend, with its connections, for each thread; it does not close them at the
    # thread's end. So the next thread gets the backend of one that has ended.
    idle = runtime.idle_backends

    def ask() -> None:
        with suppress(Exception):  # there is no result backend, or it fails
            if is_apps_own:
                backend = idle.pop() if idle else app.backend  # app.backend: this thread's own
            else:
                backend = backend_of(app, task)
            try:
                answers.append(result_meta(backend, task_id))
            finally:
                if is_apps_own:
                    idle.append(backend)
        django_db = sys.modules.get("django.db")
        if django_db and sys.modules["django.conf"].settings.configured:
            # The backend may be in Django's database. Django closes connections at the end of
            # a request; those of another thread stay open until they are collected.
            django_db.connections.close_all()

    # A daemon: the interpreter must not wait for it at its exit.
    thread = Thread(target=ask, name="singleton-result", daemon=True)
    thread.start()
    thread.join(_TIMEOUT)
    if thread.is_alive():
        runtime.unanswered = thread
    return answers[0] if answers else {}
