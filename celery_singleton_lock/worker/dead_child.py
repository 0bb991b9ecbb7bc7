"""The leases of a pool child that died or is being killed, and the claim of its message.

Overview
    The worker's parent (prefork) releases the leases that a dead child noted in shared memory, and
    changes the claim of its message. All of this runs in the parent's main thread, in the hooks of
    `worker.request`.

Guarantees
    The key of a dead child is free before its message is requeued or its failure is reported.

Non-guarantees
    A release before the child's death is proven: a revoked body that swallowed SystemExit ran for
    7 s more, and Celery reports a hard time limit while the child is still alive. After a hard time
    limit the key is marked as dying for a second.
    The end of the whole worker: then the broker redelivers the message, and `core.process` proves
    the holder dead, or the ttl frees the key.

State model
    A child's leases and the claim of its message, by the event that Celery reports::

        hard time limit  --> lease dying; claim kept as long, or queued if the message is requeued;
                             no lease: claim freed, or queued
        child is dead    --> lease released; claim freed, or queued if the message is requeued
        BaseException    --> the child has released its lease; claim as above, with acks_late
        revoked, expired --> no lease; claim freed

Failure handling
    If the store does not answer, the parent waits for one reply only. It passes that release and
    the following ones to the `RetryQueue`, which retries until the ttl has freed the key.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from celery.exceptions import TimeLimitExceeded, WorkerLostError

from .. import celery_compat
from ..core.events import Event, EventName
from ..core.lease import Holder, Kind, Token
from ..core.retry_queue import MAIN_THREAD_TIMEOUT
from ..core.store import Store
from ..core.store_requests import ClaimChange, Release, ReleaseReply
from ..errors import StoreUnavailable
from ..key_queue import ends as queue_ends
from ..message.claim import Claim
from ..message.header import call_of, header_of, options_of
from ..option_values import Unique
from ..runtime import Runtime
from .main_thread import ask
from .shared_memory import DeadLease, SharedMemory

logger = logging.getLogger("celery_singleton_lock")

# Seconds for which a key is marked as dying. Celery sends TERM, waits 0.1 s, and sends KILL.
_DYING_SECONDS: Final = 1.0
# Seconds to wait for the reply to the mark. The store may have set it although the reply is lost,
# and the child is killed after this: two tries and the kill must end before the mark does.
_DYING_TIMEOUT: Final = 0.3
# What the store's replies to a release mean for the log.
_REPLIES: Final = {
    ReleaseReply.OURS: "its lease is released",
    ReleaseReply.NOT_OURS: "its lease had already ended",
    ReleaseReply.DUPLICATE: "another delivery of the message holds the key now",
}


def is_requeued(request: Any, exc: BaseException) -> bool:
    """Whether Celery requeues the message of a child that ended by ``exc``."""
    if isinstance(exc, TimeLimitExceeded):
        return celery_compat.requeues_on_timeout(request.task)
    if celery_compat.is_revoked(request):
        return False
    if celery_compat.is_cancelled(request):
        return bool(request.task.acks_late)
    # These are reported before the process ends, and Celery treats them as a lost worker too.
    if not isinstance(exc, (WorkerLostError, SystemExit, KeyboardInterrupt)):
        return False
    task = request.task
    if celery_compat.retries_lost_worker(task):
        retries, most = request.request_dict.get("retries") or 0, task.max_retries
        comes_back = most is None or retries < most
    else:
        comes_back = bool(task.acks_late and task.reject_on_worker_lost)
    return comes_back and not celery_compat.has_stored_success(request)


def release_leases(request: Any, become: Kind | None, comes_back: bool = False) -> None:
    """Release the child's leases, or mark them as dying; only those with its tokens.

    Args:
        request: The worker's request of the message.
        become: ``Kind.DYING`` while the child is being killed; None: it is dead.
        comes_back: Whether the message is requeued.
    """
    memory = Runtime.lease_notes
    if not isinstance(memory, SharedMemory):
        # Only prefork pools have one. A greenlet has ended and released its lease before Celery
        # reports it, but did not know whether the message is requeued.
        change_claim(request, comes_back)
        return
    if request.worker_pid in (None, os.getpid()):
        return
    leases = memory.of_dead(request.worker_pid)
    runtime = Runtime.of(request.app)
    has_claim = False
    fate = "is being killed" if become else "died"
    if become:
        memory.conclude(request.worker_pid)
    for lease in leases:
        note, token = lease.note, Token.parse(lease.note.token)
        # The note of an earlier message stays until the store has confirmed its release. Its
        # claim is another message's, and was changed with that message.
        change = None
        if note.claim and token.task_id == str(request.id):
            has_claim, change = True, _claim_after(request, become, comes_back, note.claim)
        ttl = _DYING_SECONDS if become else 0.0
        call = Release(keys=note.keys, token=token, become=become, become_ttl=ttl, claim=change)
        end = _LeaseEnd(
            request, runtime, memory, lease, token, f"pool process {request.worker_pid} {fate}"
        )
        ask(runtime, end.what, note.ttl, partial(_release, call=call, end=end), end.fail)
        if token.task_id == str(request.id):
            removal = queue_ends.of_dead_child(request, note.keys[0], token, comes_back)
            if removal is not None:
                ask(runtime, *removal)
    if become is None:
        memory.empty(request.worker_pid)
    if not has_claim:
        change_claim(request, comes_back)  # the child holds no lease: it waits, or has released it


def change_claim(request: Any, comes_back: bool) -> None:
    """Change the claim of a message that no body runs."""
    if change := claim_change(request, comes_back):
        ask(Runtime.of(request.app), *change)


def claim_change(
    request: Any, comes_back: bool
) -> tuple[str, float, Callable[[Store], object]] | None:
    """The request that changes the claim of a message; the arguments of `ask`."""
    change = _claim_after(request, None, comes_back)
    if change is None:
        return None
    token = _token(request)
    what = f"{request.task.name}[{request.id}] has ended with the claim {change.key}"
    ttl = change.ttl or request.task.singleton_policy().unique_for
    return what, ttl, lambda store: store.claims.change(token, change, timeout=MAIN_THREAD_TIMEOUT)


def _claim_after(
    request: Any, become: Kind | None, comes_back: bool, key: str = ""
) -> ClaimChange | None:
    """The change of the message's claim when its child is dead or is being killed; None: no claim.

    Args:
        request: The worker's request of the message.
        become: ``Kind.DYING`` while the child is being killed; None: it is dead.
        comes_back: Whether the message is requeued.
        key: The key of the claim that the run took, if its publisher took none; empty: unknown.
    """
    task, header = request.task, _header(request)
    policy = task.singleton_policy(options_of(header.get("options")))
    claim = Claim.from_header(header.get("claim"), Runtime.of(request.app).keyspace)
    if claim is None and key and policy.unique:
        claim = Claim.of(policy, key)
    if claim is None:
        return None
    if comes_back:
        return claim.queued()
    # The claim stays while the body may run, because a call published now would conflict with
    # its lease.
    if become and claim.unique is not Unique.UNTIL_START:
        return claim.granted(_DYING_SECONDS)
    if not claim.may_have_arguments(policy):
        return claim.freed()
    is_rejected = celery_compat.dead_letters(task) and not celery_compat.acks_failures(task)
    comes_back_later = is_rejected and not celery_compat.is_revoked(request)
    return claim.freed("" if comes_back_later else _token(request).call_id)


def _token(request: Any) -> Token:
    return Token(str(request.id), 0, 0, "-", call_of(_header(request)))


def _header(request: Any) -> Mapping[str, Any]:
    return header_of(request.request_dict, str(request.id))


def is_alive(pid: int) -> bool:
    """Whether a process has this id."""
    try:
        os.kill(pid, 0)
    except OSError as exc:
        return not isinstance(exc, ProcessLookupError)
    return True


@dataclass(slots=True)
class _LeaseEnd:
    """The end of the lease of a dead child, and its event: the child can emit none.

    The event is emitted once: with the reply, or when the release is given up.
    """

    request: Any
    runtime: Runtime
    memory: SharedMemory
    lease: DeadLease
    token: Token
    fate: str
    reported: bool = False

    @property
    def what(self) -> str:
        return f"{self.fate} while holding {self.lease.note.keys[0]}"

    def reply(self, reply: ReleaseReply) -> None:
        acquired_at, meaning = self.lease.acquired_at, _REPLIES.get(reply, str(reply))
        if self.reported or self.lease.concluded:
            logger.info("singleton: %s; %s", self.what, meaning)
        elif reply is ReleaseReply.OURS:
            self._emit(EventName.FREED, reason=self.fate)
        elif acquired_at is None or self.memory.is_freeing(self.lease):
            logger.info("singleton: %s; %s", self.what, meaning)
        elif self.lease.running:
            self._emit(EventName.FREED, reason=self.fate, detail=meaning)
        else:  # the child's release was carried out, and the child died before the reply
            held = round(self.runtime.clock.now() - acquired_at, 3)
            self._emit(EventName.RELEASED, held=held)

    def fail(self, why: object) -> None:
        if self.lease.acquired_at is not None and not self.reported:
            self._emit(EventName.RELEASE_FAILED, error=str(why), frees_in=self.lease.note.ttl)

    def _emit(self, name: EventName, **data: Any) -> None:
        self.reported = True
        request, task_id, worker = self.request, self.token.task_id, self.runtime.worker
        # A hold() in the body has an id of its own.
        task = request.task.name if task_id == str(request.id) else ""
        holder = Holder(task=task, task_id=task_id, worker=worker, pid=request.worker_pid or 0)
        if name is EventName.FREED:
            data["by"] = worker
        self.runtime.events.emit(
            Event(
                name=name,
                key=self.lease.note.keys[0],
                task=task,
                task_id=task_id,
                lease=self.token.nonce,
                holder=holder,
                data=data,
            )
        )


def _release(store: Store, *, call: Release, end: _LeaseEnd) -> None:
    """Send ``call``. Send it again if an idle connection got no reply: it may have been dropped.

    The parent's connection is idle between the deaths of two children.
    """
    timeout = _DYING_TIMEOUT if call.become else MAIN_THREAD_TIMEOUT
    try:
        reply = store.leases.release(call, timeout=timeout)
    except StoreUnavailable as exc:
        if not exc.was_idle:
            raise
        reply = store.leases.release(call, timeout=timeout)
    end.reply(reply)
