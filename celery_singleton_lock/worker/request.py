"""The worker parent's request of a singleton task: delivery nonces, leases of dead children.

Overview
    Celery creates one request per message. The request of a singleton task gives the delivery a
    nonce, removes foreign headers with this library's names, and notes the queue of the message.
    When a pool child dies or is killed, the request releases the leases that the child noted in
    shared memory. All of this runs in the main thread of the worker's parent (prefork). In other
    pools the request is in the process that runs the body, and only the headers matter.

Guarantees
    Each delivery gets a nonce of its own before a child sees it, because neither the task id nor
    ``redelivered`` identifies a delivery. The key of a dead child is free before its message is
    requeued or its failure is reported.

Non-guarantees
    A release before the child's death is proven: a revoked body that swallowed SystemExit ran for
    7 s more, and Celery reports a hard time limit while the child is still alive. After a hard time
    limit the key is marked as dying for a second.

State model
    A child's leases and the claim of its message, by the event that Celery reports::

        hard time limit  --> lease dying; claim kept as long, or queued if the message is requeued
        child is dead    --> lease released; claim freed, or queued if the message is requeued
        SystemExit       --> the child has settled its lease; claim as above, with acks_late
        revoked, expired --> no lease; claim freed

Failure handling
    If the store does not answer, the parent waits for one reply only. It passes that release and
    the following ones to the parent heartbeat, which retries until the ttl has freed the key.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

from celery import Celery
from celery.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery.utils.imports import symbol_by_name
from celery.worker.request import Request
from kombu import Queue

from .. import celery_compat
from ..celery_compat import CONTEXT_FIELDS, CONTEXT_METHODS
from ..core.events import Event, EventName
from ..core.lease import Holder, Kind, Token
from ..core.store import ClaimChange, Relation, Release, Store
from ..errors import StoreError, StoreUnavailable
from ..publish.claim import Claim
from ..publish.header import (
    HEADER,
    NONCE_KEY,
    QUEUE_KEY,
    SERIALIZER_KEY,
    TICK_HEADER,
    UNNAMED_KEY,
    call_in_queue,
    call_of,
    header_of,
    mint_nonce,
)
from ..runtime import Runtime
from .parent_heartbeat import ParentHeartbeat
from .shared_memory import DeadLease, SharedMemory

logger = logging.getLogger("celery_singleton_lock")

# Seconds to wait for a reply. The parent serves all of its children and must not wait longer.
_PARENT_TIMEOUT: Final = 1.0
# Seconds for which a key is marked as dying. Celery sends TERM, waits 0.1 s, and sends KILL.
_DYING_SECONDS: Final = 1.0
# What the store's replies to a release mean for the log.
_REPLIES: Final = {
    Relation.OURS: "its lease is released",
    Relation.NOT_OURS: "its lease had already ended",
    Relation.TWIN: "another delivery of the message holds the key now",
}
# Prefix of this library's headers. Celery makes every header an attribute of the body's request.
_OURS: Final = "singleton_"
# Celery's native delayed delivery (quorum queues) prefixes the routing key with 28 bits of delay.
# The routing key of the delivered message still has the prefix.
_DELAY_BITS: Final = re.compile(r"^(?:[01]\.){28}")


class SingletonRequestMixin:
    """A base of ``Task.Request`` that precedes the task's original request class.

    The names of the arguments are Celery's, because Celery passes some by keyword.
    """

    # Set by Celery's class.
    app: Celery
    content_type: str | None
    id: str
    task: Any
    worker_pid: int | None
    request_dict: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # a Request's: see mixed_request
        self._sift()
        message = self.request_dict
        message[NONCE_KEY] = mint_nonce()
        # Celery does not pass the message's content type to the body.
        message[SERIALIZER_KEY] = celery_compat.serializer_of(self.content_type)
        info = message.get("delivery_info")
        if info and (exchange := info.get("exchange")):
            self._note_origin(exchange, info.get("routing_key") or "")
        if "singleton" in (message.get("properties") or ()):
            _warn_of_unread_options(self.task.name)

    def _sift(self) -> None:
        """Remove headers that only this process or Celery may set; collect the author's headers.

        A foreign ``singleton_*`` header could pretend that the body has begun, and so make it run
        without a lease. A header with the name of a method of the request would hide the method,
        and the message could not be copied for a put-back.

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

    def _note_origin(self, exchange: str, routing_key: str) -> None:
        """Note the queue that a message came from, if it was sent to an exchange.

        A message that was routed to several queues is a separate call in each of them, and each
        call must run: the copies are not deliveries of one message. Their common claim ends when
        the first copy arrives.
        """
        origin = find_origin(self.app, exchange, routing_key)
        if origin is None:
            return
        queue, is_shared = origin
        message = self.request_dict
        message[QUEUE_KEY] = queue
        if not is_shared:
            return
        self._settle_claim(comes_back=False)
        header = dict(self._header())
        if not header:
            message[UNNAMED_KEY] = True
        header.pop("claim", None)
        header |= {"id": str(self.id), "call": call_in_queue(call_of(header), queue)}
        message[HEADER] = header

    def revoked(self) -> bool:
        """As Celery's. If the message is discarded, its claim is freed."""
        discarded = bool(super().revoked())  # type: ignore[misc]
        if discarded:
            self._settle_claim(comes_back=False)
        return discarded

    def on_timeout(self, soft: bool, timeout: float) -> None:
        try:
            super().on_timeout(soft, timeout)  # type: ignore[misc]
        finally:
            # The leases are settled last, because billiard kills the child when this method
            # returns. Before, Celery stores the result and calls the user's on_failure while the
            # body continues.
            if not soft:
                self._settle_leases(Kind.DYING, self._comes_back(TimeLimitExceeded()))

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> None:
        exc = celery_compat.exception_of(exc_info)
        if isinstance(exc, (WorkerLostError, Terminated, SystemExit)):
            # billiard 4.3 reports an exit slightly before the process ends. Then the death is not
            # proven, and the ttl frees the key.
            if self.worker_pid is not None and not _alive(self.worker_pid):
                self._settle_leases(None, self._comes_back(exc))
            elif self.task.acks_late:
                # A body that ended by SystemExit has settled its lease, but did not know whether
                # Celery requeues the message. A body that continues keeps its claim.
                self._settle_claim(self._comes_back(exc))
        super().on_failure(exc_info, send_failed_event, return_ok)  # type: ignore[misc]

    def _comes_back(self, exc: BaseException) -> bool:
        """Whether Celery requeues the message of a child that ended by ``exc``."""
        if isinstance(exc, TimeLimitExceeded):
            return celery_compat.requeues_on_timeout(self.task)
        if celery_compat.is_revoked(self):
            return False
        if celery_compat.is_cancelled(self):
            return bool(self.task.acks_late)
        # SystemExit is reported before the process ends, and Celery treats it as a lost worker too.
        if not isinstance(exc, (WorkerLostError, SystemExit)):
            return False
        if celery_compat.retries_lost_worker(self.task):
            retries, most = self.request_dict.get("retries") or 0, self.task.max_retries
            return most is None or retries < most
        return bool(self.task.acks_late and self.task.reject_on_worker_lost)

    def _settle_leases(self, become: Kind | None, comes_back: bool = False) -> None:
        """Release the child's leases, or mark them as dying; only those with its tokens."""
        memory = Runtime.lease_notes  # only prefork pools have one
        if not isinstance(memory, SharedMemory) or self.worker_pid in (None, os.getpid()):
            return
        leases = memory.of_dead(self.worker_pid)
        runtime = Runtime.of(self.app)
        has_claim = False
        fate = "is being killed" if become else "died"
        if become:
            memory.conclude(self.worker_pid)
        for lease in leases:
            note, token = lease.note, Token.parse(lease.note.token)
            # The note of an earlier message stays until the store has confirmed its release. Its
            # claim is another message's, and was settled with that message.
            change = None
            if note.claim and token.task_id == str(self.id):
                has_claim, change = True, self._claim_after(become, comes_back, note.claim)
            ttl = _DYING_SECONDS if become else 0.0
            call = Release(keys=note.keys, token=token, become=become, become_ttl=ttl, claim=change)
            end = _End(
                self, runtime, memory, lease, token, f"pool process {self.worker_pid} {fate}"
            )
            _ask(runtime.store, end.what, note.ttl, partial(_release, call=call, end=end), end.fail)
        if become is None:
            memory.settle(self.worker_pid)
            if not has_claim:
                self._settle_claim(comes_back)  # the child held no lease when it died

    def _settle_claim(self, comes_back: bool) -> None:
        """Change the claim of a message that no body runs."""
        change = self._claim_after(None, comes_back)
        if change is None:
            return
        runtime = Runtime.of(self.app)
        token = Token(str(self.id), 0, 0, "-", call_of(self._header()))
        _ask(
            runtime.store,
            f"{self.task.name}[{self.id}] has ended with the claim {change.key}",
            change.ttl or self.task.singleton_policy().unique_for,
            lambda store: store.settle_claim(token, change, timeout=_PARENT_TIMEOUT),
        )

    def _claim_after(
        self, become: Kind | None, comes_back: bool, key: str = ""
    ) -> ClaimChange | None:
        """The change of this message's claim when its child is dead or (``become``) dying.

        Args:
            become: See :meth:`_settle_leases`.
            comes_back: Whether the message is requeued.
            key: The key of the claim, for a message whose publisher set no claim.
        """
        policy = self.task.singleton_policy()
        claim = Claim.from_header(self._header().get("claim"), Runtime.of(self.app).keyspace)
        if claim is None and key and policy.unique:
            claim = Claim.of(policy, key)
        if claim is None:
            return None
        if comes_back:
            return claim.queued()
        # The claim stays while the body may run, because a call published now would conflict with
        # its lease.
        return claim.granted(_DYING_SECONDS) if become else claim.freed()

    def _header(self) -> Mapping[str, Any]:
        return header_of(self.request_dict, str(self.id))


def _ask(
    store: Store,
    what: str,
    ttl: float,
    ask: Callable[[Store], object],
    on_error: Callable[[object], None] = lambda why: None,
) -> None:
    """Run ``ask``, or pass it to the parent heartbeat if the store does not answer. Never raises.

    If the store does not answer, the parent waits for it once, not for each lease of each dead
    child.

    Args:
        store: The store for this thread.
        what: Text for the log.
        ttl: Seconds until the lease or claim expires in the store.
        ask: A function that sends the request to its argument, a store.
        on_error: Called if there is no reply now, with the reason.
    """
    heartbeat = ParentHeartbeat.running
    why: object = "too many others wait for the store"
    if heartbeat is None or not heartbeat.has_left:
        try:
            ask(store)
            return
        except StoreError as exc:
            if heartbeat is not None and isinstance(exc, StoreUnavailable):
                logger.warning("singleton: %s; freed when the store answers again (%s)", what, exc)
                on_error(exc)
                heartbeat.leave(ask, ttl)
                return
            why = exc
    elif heartbeat.leave(ask, ttl):
        on_error("others wait for the store")
        return
    on_error(why)
    logger.warning(
        "singleton: %s; it could not be freed (%s), and expires in %g s. To free it at once: "
        "celery -A ... singleton release",
        *(what, why, ttl),
    )


@dataclass(slots=True)
class _End:
    """The end of the lease of a dead child, and its event: the child can emit none.

    The event is emitted once: with the reply, or when the store does not answer at first.
    """

    request: SingletonRequestMixin
    runtime: Runtime
    memory: SharedMemory
    lease: DeadLease
    token: Token
    fate: str
    reported: bool = False

    @property
    def what(self) -> str:
        return f"{self.fate} while holding {self.lease.note.keys[0]}"

    def reply(self, reply: Relation) -> None:
        acquired_at, meaning = self.lease.acquired_at, _REPLIES.get(reply, str(reply))
        if self.reported or self.lease.concluded:
            logger.info("singleton: %s; %s", self.what, meaning)
        elif reply is Relation.OURS:
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


def _release(store: Store, *, call: Release, end: _End) -> None:
    """Send ``call``. Send it again if an idle connection got no reply: it may have been dropped.

    The parent's connection is idle between the deaths of two children.
    """
    try:
        reply = store.release(call, timeout=_PARENT_TIMEOUT)
    except StoreUnavailable as exc:
        if not exc.was_idle:
            raise
        reply = store.release(call, timeout=_PARENT_TIMEOUT)
    end.reply(reply)


@cache
def _warn_of_unread_options(task: str) -> None:
    """Warn, once per task, that no code read the ``singleton`` option of a call."""
    logger.warning(
        "singleton: a call of %s came with singleton={...} that no code read, so it has no claim. "
        "Its publisher doesn't know the task: let a plain `celery beat` import it, start beat with "
        "--scheduler singleton, or use claim_and_send() in place of send_task()",
        task,
    )


def _is_ours(header: str) -> bool:
    """Whether ``header`` would become an attribute of the request that only this library sets."""
    return header.startswith(_OURS) and header != TICK_HEADER


def mixed_request(base: Any) -> type:
    """A class that extends ``base`` (a Request class or its qualified name) with the mixin."""
    cls: type = symbol_by_name(base)
    if issubclass(cls, SingletonRequestMixin):
        return cls
    return type(f"Singleton{cls.__name__}", (SingletonRequestMixin, cls), {})


#: The class that ``SingletonTask.Request`` names.
SingletonRequest: Final = mixed_request(Request)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as exc:
        return not isinstance(exc, ProcessLookupError)
    return True


# The queue that a message came from. A message has the exchange and routing key with which it was
# published, but not its queue. So the queue is looked up by these two in the app's configuration,
# among the queues that this worker consumes.


def find_origin(app: Celery, exchange: str, routing_key: str) -> tuple[str, bool] | None:
    """The queue of a message that this worker received; None if the configuration has none.

    Args:
        app: The worker's app.
        exchange: The exchange, except the default one, whose routing keys are names of queues.
        routing_key: The routing key of the delivered message.

    Returns:
        The name of the queue, and whether the broker has routed the message to other queues too.
    """
    is_delayed = without_delay(routing_key) != routing_key
    reached = _reached(app, routing_key, None if is_delayed else exchange)
    # Names of the queues, not the dictionary's keys: before Celery 5.7 the keys are the arguments
    # of -Q, such as the alias of a Broadcast.
    consumed = [queue.name for queue in app.amqp.queues.consume_from.values()]
    if len(consumed) > 1:
        consumed = [name for name in consumed if name in reached]
    if not consumed:
        return None
    name = consumed[0]
    # If this worker consumes two such queues, each has a copy, and the copies are
    # indistinguishable.
    is_shared = len(consumed) == 1 and (
        len(reached) > 1 or (name in reached and reached[name].exchange.type == "fanout")
    )
    return name, is_shared


def reached_with_delay(app: Celery, routing_key: str) -> list[str]:
    """Names of the queues to which native delayed delivery takes ``routing_key``."""
    return list(_reached(app, without_delay(routing_key), None))


def without_delay(routing_key: str) -> str:
    """The routing key without the prefix of native delayed delivery."""
    return _DELAY_BITS.sub("", routing_key)


def _reached(app: Celery, routing_key: str, exchange: str | None) -> dict[str, Queue]:
    """The queues that a message reaches, by name; ``exchange`` None: by native delayed delivery."""
    words = routing_key.split(".")
    return {
        queue.name: queue
        for queue in app.amqp.queues.values()
        for bound, key in _bindings(queue)
        if _lets_pass(bound, key or "", exchange, words)
    }


def _bindings(queue: Any) -> list[tuple[Any, str | None]]:
    own = [(queue.exchange, queue.routing_key)] if queue.exchange else []
    return own + [(binding.exchange, binding.routing_key) for binding in queue.bindings or ()]


def _lets_pass(bound: Any, key: str, exchange: str | None, words: Sequence[str]) -> bool:
    """Whether a binding with ``key`` to the exchange ``bound`` passes a message."""
    pattern = key.split(".")
    if exchange is None:
        # Celery binds every exchange that is not direct to the exchange at the end of the delay.
        return bound.type != "direct" and _matches(["#", *pattern], words)
    if bound.name != exchange:
        return False
    if bound.type == "direct":
        return pattern == words
    # A fanout exchange passes all messages. Other types, such as headers, do not route by the key.
    return bound.type != "topic" or _matches(pattern, words)


def _matches(pattern: Sequence[str], words: Sequence[str]) -> bool:
    """Whether a topic exchange passes ``words``: ``*`` is one word, ``#`` any number of words."""
    if not pattern:
        return not words
    if pattern[0] == "#":
        return any(_matches(pattern[1:], words[start:]) for start in range(len(words) + 1))
    return bool(words) and pattern[0] in ("*", words[0]) and _matches(pattern[1:], words[1:])
