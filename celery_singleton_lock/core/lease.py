"""What a lease is: a token, a deadline of trust, a fence, and the record of how it was lost.

A lease is created by the locker, prolonged by the heartbeat's thread, and read by the body's
thread. Each field is written by one thread with one assignment, so readers need no lock.

In a prefork worker the parent prolongs it too, from another process, and both say so in a shared
deadline.

Tokens, holders and records aren't changed once they are made, but not frozen either: each task
makes some, and a frozen dataclass costs three times as much to make.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final, Protocol
from urllib.parse import quote, unquote

from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.errors import FenceUnavailable, LeaseLost

__all__ = [
    "Holder",
    "Kind",
    "Lease",
    "Loss",
    "LossReason",
    "Phase",
    "Record",
    "SharedDeadline",
    "Token",
    "drift",
    "reason_of_loss",
    "trust_of",
]

# An allowance for clocks that run at different speeds, and for Redis rounding to milliseconds: 1 %
# plus 2 ms, as the Redlock specification has it (redis.io, "Distributed Locks with Redis").
_DRIFT_RATIO: Final = 0.01
_DRIFT_CONSTANT: Final = 0.002


def drift(ttl: float) -> float:
    """Seconds to subtract from a deadline ``ttl`` seconds away."""
    return ttl * _DRIFT_RATIO + _DRIFT_CONSTANT


@lru_cache(maxsize=64)
def trust_of(ttl: float, trusted: float) -> float:
    """Seconds, from the sending of a request, for which the store's answer vouches.

    Args:
        ttl: Seconds, of the lease.
        trusted: The share of it that the store's expiry counts from the request at the earliest.
    """
    return ttl * trusted - drift(ttl)


# Not json.dumps(), which was half of what an acquire computes: the names are known, and so are the
# kinds of their values. Nor json.loads(), which looks at what it is given before it reads.
_text = json.encoder.encode_basestring_ascii
_read = json.JSONDecoder().decode


def _quoted(task_id: str) -> str:
    if task_id.isascii() and task_id.replace("-", "").isalnum():
        return task_id  # a UUID, or the like
    # An id may be anybody's text: a lone surrogate in it is none, but has a name all the same.
    return quote(task_id, safe="-_.", errors="surrogatepass")


class Kind(StrEnum):
    """What the key's value stands for; the letter is what the store holds."""

    LEASE = "l"  # a body runs
    RESERVED = "r"  # for the next attempt of a task
    COOLING = "c"  # min_hold after the release
    DYING = "d"  # held by a process that is being killed
    CLAIM = "q"  # not a lease: a published message's claim, beside the lease's key


class Phase(StrEnum):
    """What the task of a claim is doing; the word is what the store holds."""

    QUEUED = "queued"
    RUNNING = "running"
    RETRYING = "retrying"


class LossReason(StrEnum):
    EXPIRED = "expired"  # its time was over before this process renewed it
    GONE = "gone"  # the store no longer had it, though its time was not over
    REPLACED = "replaced"  # another holder had the key
    UNREACHABLE = "unreachable"  # the store did not answer until its time was over
    DYING = "dying"  # the worker parent has announced, and reports, the end of this process


@dataclass(slots=True, unsafe_hash=True)
class Token:
    """Names one grant: task, ordinal (which attempt) and nonce (which delivery of that attempt).

    Renew and release compare it; acquire reads from it how an arriving delivery relates to the
    holder. ``call`` tells two calls with one task id apart: the second is not the first's twin, and
    must not be dropped because the first is done.
    """

    task_id: str
    nesting: int
    retries: int
    nonce: str
    call: str = ""
    # Made when it is first asked for, which each step of a lease does.
    _attempt: str = field(default="", init=False, repr=False, compare=False)

    @property
    def task(self) -> str:
        """Task id and call: the same for all attempts and deliveries."""
        name = _quoted(self.task_id)
        return f"{name}+{self.call}" if self.call else name

    @property
    def attempt(self) -> str:
        """The token without its nonce: the same for all deliveries of one attempt."""
        if not self._attempt:
            self._attempt = f"{self.task}|{self.nesting}.{self.retries}"
        return self._attempt

    def __str__(self) -> str:
        return f"{self.attempt}|{self.nonce}"

    @classmethod
    def parse(cls, text: str) -> Token:
        """Raises ValueError if ``text`` is no token."""
        task, ordinal, nonce = text.split("|")
        task_id, _, call = task.partition("+")
        nesting, retries = ordinal.split(".")
        return cls(_unquoted(task_id), int(nesting), int(retries), nonce, call)

    @staticmethod
    def task_id_of(name: str) -> str:
        """The task id in what :attr:`task` gave, of which a claim's token consists."""
        return _unquoted(name.partition("+")[0])

    def next_attempt(self) -> Token:
        """For whom a retry reserves the key: any delivery of the next attempt."""
        return replace(self, retries=self.retries + 1, nonce="-")


def _unquoted(name: str) -> str:
    return unquote(name, errors="surrogatepass")


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Holder:
    """Who has it, for people: written into the store beside the token, never compared."""

    task: str = ""
    task_id: str = ""
    worker: str = ""
    pid: int = 0
    since: float = 0.0  # seconds since the epoch
    expires: float = 0.0  # of a claim: when its message does, seconds since the epoch; 0.0: never

    def to_json(self, known_id: str = "") -> str:
        """What :meth:`from_json` reads, without a task id that is known there: its token has it.

        Written down twice, an id would be a fifth of all that the store keeps of a lease.
        """
        task_id = "" if self.task_id == known_id else f'"task_id":{_text(self.task_id)},'
        expires = f',"expires":{json.dumps(self.expires)}' if self.expires else ""
        return (
            f'{{"task":{_text(self.task)},{task_id}"worker":{_text(self.worker)},'
            f'"pid":{self.pid},"since":{self.since!r}{expires}}}'
        )

    @classmethod
    def from_json(cls, text: str, known_id: str = "") -> Holder:
        """What can be read of ``text``: a newer version may have written more, or otherwise."""
        try:
            get = _read(text).get  # a blank may follow: a client waits
            return cls(
                task=str(get("task", "")),
                task_id=str(get("task_id", known_id)),
                worker=str(get("worker", "")),
                pid=int(get("pid", 0)),
                since=float(get("since", 0.0)),
                expires=float(get("expires", 0.0)),
            )
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            return cls()

    def for_error(self) -> dict[str, Any]:
        """The holder as plain data, for an error or a skipped call's value."""
        return {"task": self.task, "task_id": self.task_id, "worker": self.worker}

    def __str__(self) -> str:
        # A hold() has no task; its id says where it is held.
        name = f"{self.task}[{self.task_id}]" if self.task else self.task_id
        return f"{name} on {self.worker} (pid {self.pid})" if self.worker else name


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Record:
    """One key as the store has it, for people and for the parent's release."""

    key: str
    kind: Kind
    token: str
    fence: int | None
    holder: Holder
    ttl: float  # seconds left in the store; nan if they were not requested
    phase: Phase | None = None  # of a claim

    @classmethod
    def parse(cls, key: str, value: str, ttl: float) -> Record:
        """Reads ``<kind> <token> <fence> <holder json>``; ValueError if that's not what it is.

        A claim has its phase where a lease has its fence, and for a token the name of its task.
        """
        kind, token, fence, holder = value.split(" ", 3)
        is_claim = kind == Kind.CLAIM
        return cls(
            key=key,
            kind=Kind(kind),
            token=token,
            fence=None if is_claim else int(fence) or None,
            holder=Holder.from_json(holder, Token.task_id_of(token.partition("|")[0])),
            ttl=ttl,
            phase=Phase(fence) if is_claim else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """How and when the right ended early."""

    reason: LossReason
    at: float  # on the lease's clock
    detail: str = ""


def reason_of_loss(lease: Lease, replaced: bool) -> tuple[LossReason, str]:
    """Why the store no longer has ``lease``, and the detail for people.

    Args:
        lease: The one that a renewal or a release did not find.
        replaced: Whether another holder has its key.
    """
    if replaced:
        return LossReason.REPLACED, "another holder has the key in the store"
    if lease.clock.now() >= lease.deadline:
        return LossReason.EXPIRED, f"it was not renewed for its ttl of {lease.ttl:g} s"
    return LossReason.GONE, (
        "the store no longer has it: released by an operator, evicted, flushed, restarted without "
        "its data, or failed over to a replica that lacks it"
    )


class SharedDeadline(Protocol):
    """A lease's deadline in memory that its holder shares with the worker's parent."""

    def write(self, valid_until: float) -> None:
        """Holder: write until when its own renewals are valid."""
        ...

    def parents(self) -> float:
        """Until when the parent's renewals are valid; -inf if there are none, or after the end."""
        ...

    def close(self) -> None:
        """Holder: end renewal by the parent; a renewal under way does not count. Idempotent."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """A time-limited right to run one body.

    ``valid_until`` is what this process's own renewals vouch for, on ``clock``: earlier than the
    store's expiry, so that a body that checks stops before another one may start.
    """

    key: str
    token: Token
    ttl: float
    holder: Holder
    valid_until: float
    acquired_at: float
    clock: Clock = field(repr=False)
    fence_number: int | None = None
    max_hold: float | None = None
    claim_key: str = ""  # of the claim that is renewed with it, if any
    trusted: float = 1.0  # share of the ttl that the store's answer vouches for
    loss: Loss | None = None
    released_at: float | None = None  # when its release was first sent, on ``clock``
    reported: bool = False  # whether an event has reported its end
    shared: SharedDeadline | None = field(default=None, repr=False)
    process: int = field(default_factory=os.getpid, repr=False)  # whose lease it is: no fork's

    @property
    def fence(self) -> int:
        """The fencing token: larger than that of every earlier grant of this key.

        A 64-bit number (microseconds of the store's clock, or more): a BigInteger column.

        Raises:
            FenceUnavailable: This store, or a ``limit`` above 1, can't give one.
        """
        if self.fence_number is None:
            raise FenceUnavailable(
                f"the lease on {self.key!r} has no fencing token: its store gives none, or its "
                "task has limit > 1. Set needs_fence=True to hear of it when the worker starts."
            )
        return self.fence_number

    @property
    def deadline(self) -> float:
        """Until when this process may trust the lease, renewed by it or by its parent. No I/O."""
        if self.shared is None:
            return self.valid_until
        return max(self.valid_until, self.shared.parents())

    @property
    def released(self) -> bool:
        """Whether its holder has given it back."""
        return self.released_at is not None

    def renewed(self, until: float) -> None:
        """The store has it: what it answered vouches for it ``until`` then, on ``clock``."""
        self.valid_until = until
        if self.shared is not None:
            self.shared.write(until)

    def end(self) -> None:
        """The lease is not renewed any more."""
        if self.shared is not None:
            self.shared.close()

    @property
    def lost(self) -> bool:
        """Whether the right to run has ended. No I/O; reads the clock at each call."""
        # What outlives the body (a thread, an asyncio task) must not take a released lease for one.
        if self.released_at is not None or self.loss is not None:
            return True
        now = self.clock.now()
        if now < self.valid_until or now < self.deadline:
            return False
        # What was seen as lost stays so: a renewal of the parent's, stopped between its own look
        # at the clock and its note, must not give back what the body was told it has not.
        self.end()
        return True

    @property
    def held_here(self) -> bool:
        """Whether this process has it, so that who holds it may re-enter it. No I/O.

        A forked child of the holder has a copy, which does not learn of the release.
        """
        return self.process == os.getpid() and not self.lost

    def remaining(self) -> float:
        """Seconds this process may still trust the lease, 0.0 once it is lost. No I/O."""
        if self.released_at is not None or self.loss is not None:
            return 0.0
        return max(0.0, self.deadline - self.clock.now())

    def check(self) -> None:
        """Do nothing while the lease holds; call it before each write that matters. No I/O.

        Raises:
            LeaseLost: The lease is lost, and another worker may be running this task.
        """
        if self.lost:
            raise self.lost_error()

    def lost_error(self) -> LeaseLost:
        """The exception for the loss of this lease."""
        now = self.clock.now()
        if self.released and self.loss is None:
            return LeaseLost(
                f"the lease on {self.key!r} was released when its body ended; this code outlived "
                "it. Wait inside the body for what needs the lease.",
                self.key,
                "released",
            )
        loss = self.loss or Loss(reason=LossReason.EXPIRED, at=min(now, self.deadline))
        why = f" ({loss.detail})" if loss.detail else ""
        return LeaseLost(
            f"lease on {self.key!r} was lost {max(0.0, now - loss.at):.1f} s ago: "
            f"{loss.reason}{why}. Another worker may be running this task; stop writing shared "
            "data.",
            self.key,
            str(loss.reason),
        )

    @property
    def hold_until(self) -> float | None:
        """When renewal stops, on ``clock``; None when nothing bounds it."""
        return None if self.max_hold is None else self.acquired_at + self.max_hold
