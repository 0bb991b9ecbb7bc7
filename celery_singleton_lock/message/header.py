"""This library's message header, written by the publisher and read as a ``Delivery`` by the worker.

Brokers and foreign publishers may change the header. Values that this library does not write are
ignored: they are never trusted and never cause an error. The exception is a version that is newer
than `VERSION`: its message is requeued as it is.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ..core.lease import Token
from ..on_conflict import OnConflict
from ..policy import CALL_OPTIONS, plain
from .request_data import Arrival, RequestData

#: The name of this library's message header, whose value is an object.
HEADER: Final = "singleton_lock"
#: The version of the header that this release writes: the field ``version``. A later release whose
#: header means something else writes a higher number. A worker that reads one requeues the message
#: unread, for a worker that can. A header without the field has version 1.
VERSION: Final = 1
#: Message header of runs sent by this library's beat schedulers: the due time in ISO 8601 and UTC.
#: The task reads it as ``self.request.singleton_scheduled_at``.
SCHEDULED_AT_HEADER: Final = "singleton_scheduled_at"

# kombu's names of the brokers whose ``redelivered`` flag reaches the task. Its other virtual
# transports restore a message without it.
_MARK_REDELIVERIES: Final = frozenset(("amqp", "redis"))

# The fields that all attempts of a call have, besides its id and name.
_OF_THE_CALL: Final = ("options", "claim", "called_at", "requeued", "queue")

# A UUID of version 4, as Celery makes them.
_RANDOM_ID: Final = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
)

# The valid counts. No message is requeued more often, so this library writes no larger number.
_COUNTS: Final = range(10**9)
_MAX_NAME: Final = 32
# The number of nonces that a copy names: one for each time that it met a store without a reply.
_MOST_NONCES: Final = 20
_NONCE: Final = re.compile(r"[0-9a-f]{16}")
# Seconds since the epoch, in the year 5138; until then a float resolves milliseconds.
_MAX_MOMENT: Final = 1e11
# Types of a header. dict is first, because isinstance() with an ABC costs as much as reading a
# header.
_MAPPINGS: Final = (dict, Mapping)


@dataclass(slots=True, kw_only=True)
class Delivery:
    """A message whose body is about to run; never changed after :meth:`of` has read it.

    Attributes:
        token: Identifies this delivery of this attempt.
        started: Whether the task may have begun; then it is never skipped.
        sequence: Number of requeues of this attempt; only the newest copy counts.
        tries: Number of consecutive conflicts, for the backoff.
        since: Time of the first of these conflicts, in seconds since the epoch; None: none.
        last: Time of the last of these conflicts; None: none.
        losses: Number of requeues of this task after a lost lease.
        options: The policy's options that the call set; None: none.
        claim: The header's claim, not validated.
        period: The key of the period's claim, not validated; only of a duplicate in a canvas.
        called_at: Time of the call, for ``cancel_running``, in seconds since the epoch; None:
            unknown.
        queue: The key in whose queue the call has its place, not validated; None: it has none.
        asked: The nonces with which the deliveries of this message have asked for the lease of a
            call in a queue, without a reply. No body has begun under them.
        requeued: Number of attempts that Celery does not count: a message that a task publishes
            under its own id is its next attempt. The token's nesting is Celery's plus this number.
        newer: The whole header, if a newer version of this library has written it; else None.
        is_plain: Whether the header has the message's id and call, and nothing more.
    """

    token: Token
    started: bool = False
    sequence: int = 0
    tries: int = 0
    since: float | None = None
    last: float | None = None
    losses: int = 0
    options: Mapping[str, Any] | None = None
    claim: Any = None
    period: Any = None
    called_at: float | None = None
    queue: Any = None
    asked: tuple[str, ...] = ()
    requeued: int = 0
    newer: Mapping[str, Any] | None = None
    is_plain: bool = field(default=True, compare=False)

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Delivery:
        """Read the headers of a message, or the attributes of its request, by name."""
        task_id = str(fields.get("id"))
        header = header_of(fields, task_id)
        nesting, retries = fields.get("replaced_task_nesting"), fields.get("retries")
        requeued = 0
        nesting = _count(nesting) if nesting else 0  # most messages have neither
        retries = _count(retries) if retries else 0
        if "requeued" in header:
            requeued = _count(header["requeued"])
            nesting = min(nesting + requeued, _COUNTS[-1])
        token = Token(
            task_id,
            nesting,
            retries,
            Arrival.of(fields).nonce or mint_nonce(),  # eager runs have none
            call_of(header),
        )
        # A replaced task or a retry continues work that has begun.
        info = fields.get("delivery_info")
        started = bool(nesting or retries or (info and info.get("redelivered")))
        new = cls(token=token, started=started, requeued=requeued)
        version = header.get("version", VERSION)
        if token.call and len(header) == 3 and version == VERSION and "id" in header:
            return new  # most messages
        new.is_plain = False
        if type(version) is int and version > VERSION:
            new.newer = header
            return new
        new.options, new.claim = options_of(header.get("options")), header.get("claim")
        new.period = header.get("period")
        new.called_at = moment(header.get("called_at"))
        new.queue = header.get("queue")
        # In a header that was written for an earlier attempt, only the above remains valid.
        if header.get("attempt") == f"{nesting}.{retries}":
            new._read_attempt(header)
        return new

    def _read_attempt(self, header: Mapping[str, Any]) -> None:
        self.started = self.started or header.get("started") is True
        self.sequence, self.tries = _count(header.get("sequence")), _count(header.get("tries"))
        self.since, self.last = moment(header.get("since")), moment(header.get("last"))
        self.losses = _count(header.get("losses"))
        self.asked = _nonces(header.get("asked"))

    def named(self) -> Delivery:
        """This delivery with a unique call name.

        The result counts as started, because a task with its id has run or is running.
        """
        token = replace(self.token, call=self.token.nonce)
        return replace(self, token=token, started=True)

    def copied(self) -> Delivery:
        """The next, newer copy of this message.

        The sequence never exceeds the highest number that :meth:`of` accepts: a larger number would
        be read as 0, the oldest copy, and the copy would be dropped.
        """
        return replace(self, sequence=min(self.sequence + 1, _COUNTS[-1]))

    def header(self) -> dict[str, Any]:
        """The header of the next copy; :meth:`of` reads it."""
        if self.newer is not None:
            return dict(self.newer)
        rare = {"period": self.period, "called_at": self.called_at, "queue": self.queue}
        rare["asked"] = list(self.asked[-_MOST_NONCES:])
        return {name: value for name, value in rare.items() if value} | {
            "version": VERSION,
            "id": self.token.task_id,
            "call": self.token.call,
            "attempt": f"{self.token.nesting}.{self.token.retries}",
            "started": self.started,
            "sequence": self.sequence,
            "tries": self.tries,
            "since": self.since,
            "last": self.last,
            "losses": self.losses,
            "options": plain(self.options or {}),
            "claim": self.claim,
            "requeued": self.requeued,
        }

    def call_header(self) -> dict[str, Any]:
        """The header of the next attempt of the same call."""
        header = self.header()
        kept = {name: value for name in _OF_THE_CALL if (value := header.get(name))}
        return {"version": VERSION, "id": header["id"], "call": header["call"], **kept}


def header_of(message: Mapping[str, Any], task_id: str) -> Mapping[str, Any]:
    """This library's header in a message, if it was written for ``task_id``; else empty.

    Agents, receivers and base classes write ``headers["headers"]``, which then replaces all other
    headers in Celery's request. So the header is looked up at both levels.

    Args:
        message: The message's headers, or the attributes of its request, by name.
        task_id: The message's id. Users copy the headers of one message to another.
    """
    header = message.get(HEADER)
    if isinstance(header, _MAPPINGS) and header.get("id", task_id) == task_id:
        return header
    nested = message.get("headers")
    header = nested.get(HEADER) if nested and isinstance(nested, _MAPPINGS) else None
    if isinstance(header, _MAPPINGS) and header.get("id", task_id) == task_id:
        return header
    return {}


def is_unnamed(request: Any, driver: str) -> bool:
    """Whether ``request`` is the first delivery of a message without this library's header.

    If so, the store's records of its task id belong to another message: this library's copies have
    the header, and the broker marks redeliveries. Not every broker does: SQS and Google Pub/Sub
    redeliver a message after its visibility timeout without a mark.

    Args:
        request: The request of the running task.
        driver: kombu's ``driver_type`` of the broker.
    """
    if driver not in _MARK_REDELIVERIES or request.is_eager:
        return False
    if (request.delivery_info or {}).get("redelivered"):
        return False
    fields = request.__dict__
    return Arrival.of(fields).is_unnamed or not header_of(fields, str(request.id))


def is_named(request: Any) -> bool:
    """Whether the publisher named the call of ``request``, as each ``apply_async`` of a task does.

    A copy of a message that was sent by name has a header too, but it names no call.
    """
    fields = request.__dict__
    named = bool(call_of(header_of(fields, str(request.id))))
    return named and not Arrival.of(fields).is_unnamed


def _nonces(value: Any) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return ()
    return tuple(one for one in value if isinstance(one, str) and _NONCE.fullmatch(one))


def mint_nonce() -> str:
    """A unique name for one delivery."""
    return os.urandom(8).hex()


def add_header(
    message: dict[str, Any], *, task_id: str, options: Mapping[str, Any] | None, running: Any = None
) -> dict[str, Any]:
    """Add this library's header to a message about to be published; return it.

    Args:
        message: Celery's options for the message; its headers are replaced, not changed.
        task_id: The id of the message.
        options: The policy's options that the call sets (validated before).
        running: The task that publishes the message, Celery's ``current_worker_task``; None: none.
    """
    headers = dict(message.get("headers") or {})  # Celery takes a list of pairs, too
    earlier = header_of(headers, task_id) if headers else {}
    if running is not None:
        header = _within(running, message, task_id)
    elif message.get("retries") and "call" in earlier:
        # The worker parent retries the task of a lost child (`Task.retry_on_worker_lost`).
        header = {**earlier, "call": call_of(earlier)}
    else:
        header = {"version": VERSION, "id": task_id, "call": os.urandom(4).hex()}
    if options is not None:
        header["options"] = plain(options)
    elif earlier and earlier.get("options"):
        header["options"] = earlier["options"]
    headers[HEADER] = header
    message["headers"] = headers
    return header


def without_header(message: dict[str, Any]) -> dict[str, Any]:
    """Celery's ``message`` options without this library's header, as those of a plain message."""
    headers = dict(message.get("headers") or {})
    headers.pop(HEADER, None)
    return {**message, "headers": headers} if headers else {**message, "headers": None}


def _within(running: Any, message: Mapping[str, Any], task_id: str) -> dict[str, Any]:
    """The header of a message that the ``running`` task publishes."""
    request = running.request
    delivery = Delivery.of(request.__dict__)
    token = delivery.token
    before = RequestData.of(request).published.get(task_id, 0)
    header: dict[str, Any] = {"version": VERSION, "id": task_id}
    # A plain task has no call; a task that replaces it (`self.replace`) has its id, and is a call.
    is_foreign = not token.call and not hasattr(running, "singleton_policy")
    if before or task_id != token.task_id or is_foreign:
        # The call is named after the attempt: if the attempt runs again (its worker was killed
        # before it acknowledged the message), a chain link that it publishes again with the same id
        # is the same call. Several messages with one id are several calls.
        attempt = _published_attempt(request, token)
        named = f"{attempt}|{before}" if before else attempt
        header["call"] = _digest(named) if attempt else os.urandom(4).hex()
    else:
        # A message with the task's own id is its next attempt: it waits until this attempt has
        # ended, and this attempt's completion record does not apply to it. Celery counts retries
        # and replacements only. The header counts other attempts, such as
        # self.apply_async(task_id=self.request.id).
        nesting = _count(message.get("replaced_task_nesting"))
        retries = _count(message.get("retries"))
        requeued = delivery.requeued
        if (nesting + requeued, retries) <= (token.nesting, token.retries):
            requeued = token.nesting + 1 - nesting
        if retries > token.retries:
            # self.retry(headers=...) and base classes drop the headers of the message.
            header = delivery.call_header()
        header |= {"call": token.call, "requeued": requeued}
        if delivery.called_at is not None:
            header["called_at"] = delivery.called_at
    return header


def _published_attempt(request: Any, token: Token) -> str:
    """The running attempt's name in its redeliveries, and in no other message; empty if unknown.

    A plain task has no call of ours, and its id may be fixed: ``options={"task_id": "import"}`` of
    a beat entry. A message that its second run publishes under a fixed id is no copy of the first
    run's message.
    """
    if token.call and not Arrival.of(request.__dict__).is_unnamed:
        return token.attempt
    # kombu's virtual transports (Redis, SQS) set the tag when a message is published, and keep it
    # when they restore the message. RabbitMQ numbers deliveries instead, outside the properties.
    tag = (request.properties or {}).get("delivery_tag")
    if tag:
        return f"{token.attempt}|{tag}"
    # If its caller has chosen the id, both messages run, one after the other.
    return token.attempt if is_random(token.task_id) else ""


def is_random(task_id: str) -> bool:
    """Whether Celery has made ``task_id``, so that no other call has it."""
    return _RANDOM_ID.fullmatch(task_id) is not None


def call_in_queue(call: str, queue: str) -> str:
    """The name of a message's call in one of several queues; a retry keeps the name."""
    ending = _digest(queue)
    return call if call.endswith(ending) else _digest(call) + ending


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()


def call_of(header: Mapping[str, Any]) -> str:
    """The name of the call in ``header``; empty if there is none."""
    call = header.get("call")
    return call if isinstance(call, str) and call.isalnum() and len(call) <= _MAX_NAME else ""


def options_of(value: Any) -> dict[str, Any]:
    """The options of a call in the field ``options`` of a header; without wrong ones."""
    if value is None or not isinstance(value, _MAPPINGS):
        return {}
    options = {name: value[name] for name in CALL_OPTIONS if name in value}
    if "on_conflict" in options:
        try:
            options["on_conflict"] = OnConflict.of(options["on_conflict"])
        except (TypeError, ValueError, KeyError, AttributeError):
            del options["on_conflict"]
    return options


def _count(value: Any) -> int:
    return value if type(value) is int and value in _COUNTS else 0  # True is no count


def moment(value: Any) -> float | None:
    """A time in seconds since the epoch; None for other values.

    NaN and infinity are refused: with NaN a wait would end at once, with infinity never.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < _MAX_MOMENT else None
