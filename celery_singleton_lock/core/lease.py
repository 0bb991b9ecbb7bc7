"""Leases, their tokens, and the values that a store keeps of them.

The locker creates a lease, the heartbeat's thread prolongs it, and the task's thread reads it. Each
field is written by one thread with one assignment, so readers need no lock.

In a prefork worker the parent process prolongs the lease too. Child and parent each write their
deadline into a `SharedDeadline`.

Tokens, holders and records are never changed after creation, but they are not frozen: each task
creates some, and creating a frozen dataclass costs three times as much.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import quote, unquote

from ..errors import FenceUnavailable, LeaseLost
from .clock import Clock
from .clock_drift import drift
from .process import Process, this_process

if TYPE_CHECKING:
    from .call_queue import Hint

_FOREVER: Final = float("inf")
#: The task in the token of a key that is reserved for the client that was woken. No task id is
#: quoted like this, so no delivery, release or renewal matches such a key.
HANDOFF_TASK: Final = "%waiter"


@lru_cache(maxsize=64)
def trust_of(ttl: float, trusted: float) -> float:
    """Seconds, from the sending of a request, for which the store's reply guarantees the lease.

    Args:
        ttl: The lease's ttl in seconds.
        trusted: See `Capabilities.trusted`.
    """
    return ttl * trusted - drift(ttl)


# json.dumps() would be half of the computing time of an acquire. The names and the types of the
# values are known, so the text is composed directly. json.loads() checks its argument before it
# decodes; the decoder's method does not.
_text = json.encoder.encode_basestring_ascii
_read = json.JSONDecoder().decode


def _quoted(task_id: str) -> str:
    if task_id.isascii() and task_id.replace("-", "").isalnum():
        return task_id  # usually a UUID
    # A task id may be any text. A lone surrogate cannot be encoded, but must have a name too.
    return quote(task_id, safe="-_.", errors="surrogatepass")


class Kind(StrEnum):
    """The kind of a key's value. The store keeps the letter."""

    LEASE = "l"  #: A running task holds the key.
    RESERVED = "r"  #: The key is reserved for the next attempt of a task.
    COOLING = "c"  #: The key is kept after the release until ``min_hold`` has passed.
    DYING = "d"  #: A process that is being killed holds the key.
    CLAIM = "q"  #: The claim of a published message, not a lease. Its key is next to the lease's.


class Phase(StrEnum):
    """The state of a claim's task. The store keeps the word."""

    QUEUED = "queued"  #: The task's message was sent.
    RUNNING = "running"  #: The task runs.
    RETRYING = "retrying"  #: The task waits for its next attempt.


class LossReason(StrEnum):
    """Why a lease was lost."""

    EXPIRED = "expired"  #: The deadline passed before this process renewed the lease.
    GONE = "gone"  #: The store no longer had the lease before its deadline.
    REPLACED = "replaced"  #: Another holder had the key.
    UNREACHABLE = "unreachable"  #: The store didn't reply until the deadline.
    OPERATOR = "operator"  #: An operator released the key.
    DYING = "dying"  #: The worker parent ends this process, and reports the loss.


@dataclass(slots=True, unsafe_hash=True)
class Token:
    """The name of a request for a key: its task, the number of the attempt, and a nonce.

    A renewal and a release compare the whole token. An acquire compares two tokens to find out how
    an arriving delivery relates to the holder. ``call`` distinguishes two calls with the same task
    id. They aren't duplicates, so the second one still runs after the first is done.
    """

    task_id: str
    nesting: int
    retries: int
    nonce: str
    call: str = ""
    #: The task id, and ``+<call>`` if ``call`` is set. All attempts and deliveries share it.
    call_id: str = field(init=False, repr=False, compare=False)
    #: The token without its nonce. All deliveries of one attempt share it.
    attempt: str = field(init=False, repr=False, compare=False)
    #: The whole token as text.
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        name = _quoted(self.task_id)
        self.call_id = f"{name}+{self.call}" if self.call else name
        self.attempt = f"{self.call_id}|{self.nesting}.{self.retries}"
        self.text = f"{self.attempt}|{self.nonce}"

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> Token:
        """Parse a token.

        Raises:
            ValueError: ``text`` isn't a token.
        """
        call_id, ordinal, nonce = text.split("|")
        task_id, _, call = call_id.partition("+")
        nesting, retries = ordinal.split(".")
        return cls(cls.task_id_of(task_id), int(nesting), int(retries), nonce, call)

    @staticmethod
    def task_id_of(call_id: str) -> str:
        """Return the task id in a value of :attr:`call_id`.

        The token of a claim contains only such a value.
        """
        return unquote(call_id.partition("+")[0], errors="surrogatepass")

    def next_attempt(self) -> Token:
        """Return the token for which a retry reserves the key.

        It's for any delivery of the next attempt.
        """
        return replace(self, retries=self.retries + 1, nonce="-")


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Holder:
    """A description of the holder, for people and for the proof that its process is dead.

    It's stored next to the token. The store never compares it. All times are in seconds since the
    epoch.

    Attributes:
        task: The task's name. It's empty for a ``hold()``.
        task_id: The task's id, or the id of the ``hold()``.
        worker: The worker's name, or the host's outside of workers.
        pid: The process id.
        since: When the key was acquired, or the claimed call was sent.
        first_try: When a requeued call was first tried. 0 means ``since``.
        expires: When the message of a claim expires. 0 means never.
        process: How another process on the host can tell that this one is dead. It's empty if it
            can't.
        ttl: The ``ttl`` that the call has set, in seconds. 0 means that of the task.
    """

    task: str = ""
    task_id: str = ""
    worker: str = ""
    pid: int = 0
    since: float = 0.0
    first_try: float = 0.0
    expires: float = 0.0
    process: str = ""  # see process.py
    ttl: float = 0.0

    def to_json(self, known_id: str = "") -> str:
        """Return the JSON that :meth:`from_json` reads, without a task id that equals ``known_id``.

        The token contains the task id. A second copy would be a fifth of the data of each lease.
        """
        task_id = "" if self.task_id == known_id else f'"task_id":{_text(self.task_id)},'
        more = f',"expires":{json.dumps(self.expires)}' if self.expires else ""
        if self.first_try:
            more += f',"first_try":{self.first_try!r}'
        if self.process:
            more += f',"proc":{_text(self.process)}'
        if self.ttl:
            more += f',"ttl":{self.ttl!r}'
        return (
            f'{{"task":{_text(self.task)},{task_id}"worker":{_text(self.worker)},'
            f'"pid":{self.pid},"since":{self.since!r}{more}}}'
        )

    @classmethod
    def from_json(cls, text: str, known_id: str = "") -> Holder:
        """Read what is readable in ``text``. A newer version may have written other fields."""
        try:
            get = _read(text).get  # a blank follows the JSON while a client waits
            return cls(
                task=str(get("task", "")),
                task_id=str(get("task_id", known_id)),
                worker=str(get("worker", "")),
                pid=int(get("pid", 0)),
                since=float(get("since", 0.0)),
                first_try=float(get("first_try", 0.0)),
                expires=float(get("expires", 0.0)),
                process=str(get("proc", "")),
                ttl=float(get("ttl", 0.0)),
            )
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            return cls()

    def for_error(self) -> dict[str, Any]:
        """Return the holder as plain data, for an error or for a skip result."""
        return {"task": self.task, "task_id": self.task_id, "worker": self.worker}

    def __str__(self) -> str:
        if self.task_id == HANDOFF_TASK:
            return "the client that has waited longest, for which the key is reserved"
        # A hold() has no task; its id contains the host and the process.
        name = f"{self.task}[{self.task_id}]" if self.task else self.task_id
        return f"{name} on {self.worker} (pid {self.pid})" if self.worker else name


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Record:
    """The content of one key, for people and for a release by the worker parent.

    Attributes:
        key: The full key.
        kind: What the key holds, such as a lease or a claim.
        token: The text of the token that holds it.
        fence: The fencing token. None if there is none.
        holder: The holder.
        ttl: In how many seconds the key expires. It's nan if that wasn't requested.
        phase: The state of a claim's task. None for other kinds.
    """

    key: str
    kind: Kind
    token: str
    fence: int | None
    holder: Holder
    ttl: float
    phase: Phase | None = None

    @classmethod
    def parse(cls, key: str, value: str, ttl: float) -> Record:
        """Parse ``<kind> <token> <fence> <holder json>``.

        A claim has its phase instead of the fence, and its call id instead of the token.

        Raises:
            ValueError: ``value`` has another form.
        """
        kind, token, fence, holder = value.split(" ", 3)
        is_claim, call_id = kind == Kind.CLAIM, token.partition("|")[0]
        return cls(
            key=key,
            kind=Kind(kind),
            token=token,
            fence=None if is_claim else int(fence) or None,
            holder=Holder.from_json(holder, Token.task_id_of(call_id)),
            ttl=ttl,
            phase=Phase(fence) if is_claim else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Why and when a lease was lost."""

    reason: LossReason
    at: float  # on the lease's clock
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRelease:
    """A note that says who released a key by hand, and why. The store keeps it for an hour.

    Attributes:
        user: The operator's login.
        host: The operator's host.
        reason: The reason, in the operator's words. It may be empty.
        at: When the operator released the key, in seconds since the epoch.
        token: The token that held the key. The store adds it.
    """

    user: str
    host: str
    reason: str = ""
    at: float = 0.0
    token: str = ""

    def to_json(self) -> str:
        """The part of the note that the operator's process knows; the token precedes it."""
        names = ("user", "host", "reason", "at")
        return json.dumps({name: getattr(self, name) for name in names})

    @classmethod
    def parse(cls, text: str) -> OperatorRelease | None:
        """Parse ``<token> <json>``; None for any other text."""
        token, _, rest = text.partition(" ")
        try:
            get = _read(rest).get
            user, host, reason = (str(get(name, "")) for name in ("user", "host", "reason"))
            at = float(get("at", 0.0))
            return cls(user=user, host=host, reason=reason, at=at, token=token)
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            return None

    def __str__(self) -> str:
        who = f"{self.user} on {self.host}"
        return f"{who}: {self.reason}" if self.reason else who


def reason_of_loss(lease: Lease, replaced: bool, note: str | None = None) -> tuple[LossReason, str]:
    """The reason for the loss of ``lease``, and a detail for people.

    Args:
        lease: A lease that a renewal or a release did not find in the store.
        replaced: Whether another holder has the lease's key.
        note: The operator's note on the last release of the key; None: there is none.
    """
    by = OperatorRelease.parse(note) if note else None
    if by is not None and by.token == str(lease.token):
        return LossReason.OPERATOR, f"released by {by}"
    if replaced:
        return LossReason.REPLACED, "another holder has the key in the store"
    if lease.clock.now() >= lease.deadline:
        return LossReason.EXPIRED, f"it was not renewed for its ttl of {lease.ttl:g} s"
    return LossReason.GONE, (
        "the store no longer has it: released by an operator, evicted, flushed, restarted without "
        "its data, or failed over to a replica that lacks it"
    )


class SharedDeadline(Protocol):
    """The deadline of a lease in memory shared by its holder and the worker parent."""

    def write(self, valid_until: float) -> None:
        """Write the deadline of the holder's own renewals. Called by the holder."""

    def parents(self) -> float:
        """The deadline of the parent's renewals; -inf if there are none, or after the end."""

    def announce(self, acquired_at: float) -> None:
        """Note that an event reports the grant, so that the parent reports the end if need be."""

    def conclude(self) -> bool:
        """Whether the holder reports the end of the lease; False: the parent has reported it."""

    def close(self) -> None:
        """End renewal by the parent. Called by the holder; idempotent.

        The reply to a renewal in flight has no effect.
        """


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Lease:
    """A lock with an expiry, which is renewed while the task or block runs.

    This process stops trusting its lease a little before the store lets it expire. So a task that
    calls :meth:`check` stops before another run can start.

    Attributes:
        key: The full key, as in the store.
    """

    key: str
    token: Token
    ttl: float
    holder: Holder
    valid_until: float
    acquired_at: float
    clock: Clock
    fence_number: int | None = None
    hold_until: float = _FOREVER  # renewal stops then; inf: there is no limit
    claim_key: str = ""  # the key of the claim that is renewed with the lease; empty: none
    # The holder; not a fork of it. None: another process of this worker.
    process: Process | None = field(default_factory=this_process)
    loss: Loss | None = None
    released_at: float | None = None  # time at which the release was first sent
    reported: bool = False  # whether an event has reported the end of the lease
    shared: SharedDeadline | None = None
    #: The lease held around this one on the same thread; set with ``task.context.held_lease``.
    outer: Lease | None = field(init=False)
    #: The arguments that the grant returned; set only if the acquire requested them.
    arguments: bytes | None = field(init=False)
    #: The call that may begin now, in the queue of the key; set only by the grant to a call of it.
    following: Hint | None = field(init=False)
    # The rest is set by the heartbeat. A process may have thousands of leases, and a sweep reads
    # their times several times. Therefore the times are stored, not computed.
    due: float = field(init=False)  # time of the next renewal
    # The time at which a sweep has to examine the lease: at ``due``, or at the deadline if that is
    # earlier. Never later than the deadline, which the worker parent can only extend.
    sweep_at: float = field(init=False)
    failures: int = field(init=False)  # consecutive renewals without a reply
    error: str = field(init=False)  # the error of the last of these, if there are any

    def __repr__(self) -> str:
        """The key, the fencing token, and what is left of the lease, in one line."""
        fence = "" if self.fence_number is None else f" fence={self.fence_number}"
        if self.loss is not None:
            state = f"lost ({self.loss.reason})"
        elif self.released_at is not None:
            state = "released"
        else:
            state = f"valid for {self.remaining():.1f} s"
        return f"<Lease {self.key!r}{fence}, {state}>"

    @property
    def fence(self) -> int:
        """The fencing token, which is larger than that of every earlier lease of this key.

        Store it in a 64-bit column (BigInteger). On Redis it's a time in microseconds.

        Raises:
            FenceUnavailable: The store has no fencing tokens, or ``limit`` is above 1.
        """
        if self.fence_number is None:
            raise FenceUnavailable(
                f"the lease on {self.key!r} has no fencing token: its store gives none, or its "
                "task has limit > 1. Set needs_fence=True to be told when the worker starts."
            )
        return self.fence_number

    @property
    def deadline(self) -> float:
        """The time until which this process may trust the lease. No I/O.

        The later of the deadlines of this process's and the parent's renewals.
        """
        if self.shared is None:
            return self.valid_until
        return max(self.valid_until, self.shared.parents())

    def renewed(self, until: float) -> None:
        """Note that the store renewed the lease; ``until`` is the new deadline, on ``clock``."""
        self.valid_until = until
        if self.shared is not None:
            self.shared.write(until)

    def end(self) -> None:
        """End renewal by the parent; this process's own renewal has ended already."""
        if self.shared is not None:
            self.shared.close()

    @property
    def lost(self) -> bool:
        """Whether the lease is lost. This reads the clock and sends no request."""
        # A thread or an asyncio task that outlives the body must not trust a released lease.
        if self.released_at is not None or self.loss is not None:
            return True
        now = self.clock.now()
        if now < self.valid_until or now < self.deadline:
            return False
        # A loss that the body has observed is final. The parent may be stopped between reading the
        # clock and writing its renewal; that late renewal must not revive the lease. So the first
        # call after the deadline ends the parent's renewal, in the shared memory.
        self.end()
        return True

    @property
    def held_here(self) -> bool:
        """Whether this process holds the lease, so that the holder may re-enter it.

        Asks no store, see :attr:`lost`.
        A forked child of the holder has a copy of this object, which a release does not change.
        """
        return self.process is this_process() and not self.lost

    def remaining(self) -> float:
        """Return how many seconds the lease is still valid in this process, or 0.0 if it's lost.

        This sends no request.
        """
        if self.released_at is not None or self.loss is not None:
            return 0.0
        return max(0.0, self.deadline - self.clock.now())

    def check(self) -> None:
        """Raise if the lease is lost. Call it before each write that matters.

        This sends no request; see :attr:`lost`.

        Raises:
            LeaseLost: The lease is lost. Another worker may be running this task.
        """
        if self.lost:
            raise self.lost_error()

    def lost_error(self) -> LeaseLost:
        """The exception for the loss of this lease."""
        now = self.clock.now()
        if self.released_at is not None and self.loss is None:
            return LeaseLost(
                f"the lease on {self.key!r} was released when its task ended; this code outlived "
                "it. Wait inside the task for what needs the lease.",
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
