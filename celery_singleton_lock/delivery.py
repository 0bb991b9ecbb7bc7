"""One arrival of a message at a body: its token, and what its earlier arrivals left in the header.

The header is ours but travels through brokers and foreign publishers: whatever in it is not what we
write is ignored, never trusted and never fatal.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from celery_singleton_lock.core.lease import Token
from celery_singleton_lock.core.options import OnConflict
from celery_singleton_lock.core.policy import CALL_OPTIONS

__all__ = [
    "HEADER",
    "NONCE_KEY",
    "QUEUE_KEY",
    "SERIALIZER_KEY",
    "TICK_HEADER",
    "Delivery",
    "call_header",
    "call_in_queue",
    "call_of",
    "call_within",
    "header_of",
    "is_put_back",
]

#: Message header with everything of ours: an object.
HEADER: Final = "singleton_lock"
#: Message header of the runs that a beat of ours sends: when its run was due, in ISO 8601 and UTC.
#: The task reads it as ``self.request.singleton_tick``.
TICK_HEADER: Final = "singleton_tick"
#: Key of the request in which the worker parent puts the nonce of a delivery.
NONCE_KEY: Final = "singleton_nonce"
#: Key of the request in which it puts the name of the serializer that the message came with.
SERIALIZER_KEY: Final = "singleton_serializer"
#: Key of the request in which it puts the name of the queue that the message came from, where the
#: message doesn't say it.
QUEUE_KEY: Final = "singleton_queue"

# No message is put back more often than this in a lifetime; a larger number was not written by us.
_COUNTS: Final = range(10**9)
_MAX_NAME: Final = 32
# The year 5138: no clock is there yet, and a float counts the milliseconds until then.
_MAX_MOMENT: Final = 1e11
# What a header may be. In this order: of a dict no ABC is asked, which costs as much as all else
# about a header.
_MAPPINGS: Final = (dict, Mapping)


@dataclass(slots=True, kw_only=True)
class Delivery:
    """What is known of a message when its body is about to run. Not changed once it is made.

    Attributes:
        token: Names this delivery of this attempt.
        started: Whether work of this task may have begun: then it is never skipped.
        sequence: How often this attempt was put back; only the newest copy counts.
        tries: Conflicts in a row, for the backoff.
        since: Seconds since the epoch of the first of them; None before.
        losses: How often this task was put back after a lost lease.
        options: The policy's options that the call set.
        claim: What the header says of its claim; unread.
    """

    token: Token
    started: bool = False
    sequence: int = 0
    tries: int = 0
    since: float | None = None
    losses: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    claim: Any = None

    @classmethod
    def of(cls, request: Any) -> Delivery:
        """Read the request of the running task (``celery.app.task.Context``)."""
        nesting, retries = _count(request.replaced_task_nesting), _count(request.retries)
        nonce = getattr(request, NONCE_KEY, None)
        task_id = str(request.id)
        header = header_of(request.headers, task_id)
        token = Token(
            task_id,
            nesting,
            retries,
            # Minted by the worker parent; eager runs have none.
            nonce if isinstance(nonce, str) and nonce.isalnum() else mint_nonce(),
            call_of(header),
        )
        info = request.delivery_info or {}
        # A replaced task or a retry continues work that began.
        started = bool(info.get("redelivered") or nesting or retries)
        options, claim = _options(header.get("options")), header.get("claim")
        if header.get("attempt") != f"{nesting}.{retries}":
            # Written for an earlier attempt: only what the call said lives on.
            return cls(token=token, started=started, options=options, claim=claim)
        return cls(
            token=token,
            started=started or header.get("started") is True,
            sequence=_count(header.get("sequence")),
            tries=_count(header.get("tries")),
            since=_moment(header.get("since")),
            losses=_count(header.get("losses")),
            options=options,
            claim=claim,
        )

    def copied(self) -> Delivery:
        """What the next copy of this message says of itself: that it is newer.

        The highest number that :meth:`of` believes stays what it is: beyond it, a copy would be
        read as the oldest, and dropped for this one.
        """
        return replace(self, sequence=min(self.sequence + 1, _COUNTS[-1]))

    def header(self) -> dict[str, Any]:
        """What travels with the next copy; :meth:`of` reads it."""
        return {
            "id": self.token.task_id,
            "call": self.token.call,
            "attempt": f"{self.token.nesting}.{self.token.retries}",
            "started": self.started,
            "sequence": self.sequence,
            "tries": self.tries,
            "since": self.since,
            "losses": self.losses,
            "options": _plain(self.options),
            "claim": self.claim,
        }


def header_of(headers: Any, task_id: str) -> Mapping[str, Any]:
    """Our header among ``headers`` of a message, if it was written for ``task_id``; else empty.

    Users pass on the headers of a running task (tracing does), and with them what we wrote of it.
    """
    header = headers.get(HEADER) if isinstance(headers, _MAPPINGS) else None
    if not isinstance(header, _MAPPINGS) or header.get("id", task_id) != task_id:
        return {}
    return header


def mint_nonce() -> str:
    """A name for one delivery that no other has."""
    return os.urandom(8).hex()


def call_header(
    headers: Any, *, task_id: str, options: Mapping[str, Any] | None, call: str | None = None
) -> dict[str, Any]:
    """The header of a message about to be published.

    Args:
        headers: What the message has already: a retry goes on with its call's header.
        task_id: The message's.
        options: The policy's options that the call sets (validated before).
        call: The name of the call that this message continues, empty if that has none; None: it is
            a new call, which gets a new name.
    """
    if call is None:
        call = os.urandom(4).hex()
    if not headers or HEADER not in headers:
        new: dict[str, Any] = {"id": task_id, "call": call}
        return new if options is None else {**new, "options": _plain(options)}
    old = header_of(headers, task_id)
    # The copy of a message without a name has none either, or it would be another call than that.
    new = {**old, "id": task_id, "call": "" if old.get("call") == "" else call_of(old) or call}
    return new if options is None else {**new, "options": _plain(options)}


def call_within(running: Any, task_id: str) -> str | None:
    """The name of a call that the ``running`` task publishes; None outside: a new call.

    Args:
        running: Celery's ``current_worker_task``, or None.
        task_id: The message's.
    """
    if running is None:
        return None
    token = Delivery.of(running.request).token
    # self.replace() goes on with the work of the task that it replaces. All else is named after the
    # attempt: should that run again (its worker was killed before its message was acknowledged), a
    # chain link that it publishes again, under the same id, is the same call.
    return token.call if token.task_id == task_id else _name_of_call(token.attempt)


def is_put_back(header: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether a message with ``header`` and Celery's ``options`` is a copy of its attempt."""
    attempt = header.get("attempt")
    if attempt is None:
        return False
    ordinal = (options.get("replaced_task_nesting") or 0, options.get("retries") or 0)
    return bool(attempt == "{}.{}".format(*ordinal))


def _name_of_call(attempt: str) -> str:
    """The name of all calls that one attempt of a task publishes; their ids tell them apart."""
    return _digest(attempt)


def call_in_queue(call: str, queue: str) -> str:
    """The name of the call that one of several queues has got of the same message.

    It stays the same when it is asked for again, for a retry of that call.
    """
    ending = _digest(queue)
    return call if call.endswith(ending) else _digest(call) + ending


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()


def call_of(header: Any) -> str:
    """The name of a call, empty if ``header`` has none."""
    call = header.get("call") if isinstance(header, _MAPPINGS) else None
    return call if isinstance(call, str) and call.isalnum() and len(call) <= _MAX_NAME else ""


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, value in options.items():
        if hasattr(value, "total_seconds"):
            value = value.total_seconds()
        plain[name] = value.to_header() if isinstance(value, OnConflict) else value
    return plain


def _options(value: Any) -> dict[str, Any]:
    if value is None or not isinstance(value, _MAPPINGS):
        return {}
    options = {name: value[name] for name in CALL_OPTIONS if name in value}
    if "on_conflict" in options:
        try:
            options["on_conflict"] = OnConflict.from_header(options["on_conflict"])
        except (TypeError, ValueError, KeyError, AttributeError):
            del options["on_conflict"]
    return options


def _count(value: Any) -> int:
    return value if type(value) is int and value in _COUNTS else 0  # True is no count


def _moment(value: Any) -> float | None:
    """Seconds since the epoch; NaN would end a wait at once, infinity never."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < _MAX_MOMENT else None
