"""The interface of a store: its parts, and the base class Store.

Expected outcomes are return values. Every operation may raise StoreUnavailable (no reply: the
operation may or may not have taken effect) and StoreError (the store refused it). Every operation
is idempotent for its token, so a client may repeat it after a lost reply. `core.store_requests` has
the requests and replies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

from ..errors import StoreError
from .call_queue import CallQueue
from .lease import Lease, OperatorRelease, Record, Token
from .pauses import Pauses
from .store_requests import (
    Acquire,
    Authorization,
    AuthorizeRun,
    ClaimChange,
    ClaimRequest,
    Granted,
    Mark,
    NewestCall,
    Refused,
    Release,
    ReleaseReply,
    Renewal,
    ReplaceArguments,
    Replaced,
    Trace,
)

#: Called with the reply to an asynchronous release or the error of its last try, and with whether
#: an earlier try, which got no reply, may have been carried out.
OnReply: TypeAlias = Callable[[ReleaseReply | StoreError, bool], None]

#: Stands for a missing right to use keys with our names.
NO_KEYS: Final = "keys"
#: How long an operator's note on a release is kept, in seconds.
RELEASE_NOTE_TTL: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The capabilities of a store. A worker checks them against each task's policy when it starts.

    Attributes:
        fence: Whether grants have fencing tokens.
        name: The store's name in messages.
        trusted: The share of a ttl for which a reply guarantees the lease, counted from when the
            request was sent. It's below 1 if the store may count the ttl from an earlier heartbeat.
        min_ttl: The shortest ttl in seconds. A shorter one is refused.
        max_limit: The largest ``limit`` that one decision can examine. None means any.
        renewal_batch: How many leases the heartbeat passes to one call of `Leases.renew`. None
            means all. The replies of one call take effect before the next call.
        renews_for_others: Whether a process can renew, by key and token alone, a lease that was
            granted to another process of its host. The parent heartbeat needs this. It is not
            possible if a lease ends with its holder's connection.
        rates: Whether an acquire can count the starts of a key (``rate``).
        usable_before_fork: Whether a process may use the store and fork later. It may not if the
            client starts threads.
    """

    fence: bool
    name: str
    trusted: float = 1.0
    min_ttl: float = 0.0
    max_limit: int | None = None
    renewal_batch: int | None = None
    renews_for_others: bool = False
    rates: bool = False
    usable_before_fork: bool = False


class Ticket(Protocol):
    """The ticket of one client in the wait queue for a key. One thread at a time uses it."""

    def wait(self, seconds: float) -> str | None:
        """Block until the client is woken, but at most ``seconds``.

        Returns:
            The handoff token for the next acquire. It's empty if the client was not woken, and None
            if the store does not wake this client any more and the ticket is of no further use.
        """

    def fileno(self) -> int | None:
        """Return the descriptor that becomes readable when the client is woken, for coroutines.

        ``wait(0)`` opens it and reads the reply. The result is None while there is no descriptor.
        """

    def leave(self, *, counted: bool) -> None:
        """Leave the wait queue. This method never raises.

        Args:
            counted: Whether the store still counts the client as waiting.
        """


class ConnectionWatch(Protocol):
    """Notices that a connection to the store ends. Any thread may call the methods."""

    def opened(self, sock: Any, /) -> None:
        """A connection has got its first reply. ``sock``: its socket, with the method fileno()."""

    def closing(self, sock: Any, /) -> None:
        """This process is about to close a connection."""

    def ended(self) -> None:
        """A connection without a socket has ended, or a reply came from another server."""


class Leases(ABC):
    """The leases of a store, and the completion records of their attempts."""

    @abstractmethod
    def acquire(self, request: Acquire, /, *, timeout: float) -> Granted | Refused:
        """Take a free slot, or return a record that holds one.

        A repeated request with the same token gets the same reply.
        """

    @abstractmethod
    def renew(self, leases: Sequence[Lease], /, *, timeout: float) -> list[Renewal]:
        """Prolong each lease to its ttl if its token still holds the key.

        The claim of a lease (``claim_key``) is prolonged too, if the lease's task still holds it.
        The claim's ttl is never shortened. If a lease isn't renewed, its claim isn't changed: the
        operation that ended the lease has set the claim's ttl.

        Returns:
            One reply per lease, in the same order.
        """

    @abstractmethod
    def release(self, request: Release, /, *, timeout: float) -> ReleaseReply:
        """Release the key that the token holds. The key of another token is never changed."""

    @abstractmethod
    def mark(self, request: Mark, /, *, timeout: float) -> None:
        """Raise the completion record of the token's attempt.

        Its state and its sequence never go back.
        """

    @abstractmethod
    def trace(self, key: str, /, *, timeout: float) -> Trace:
        """Return what is left on ``key`` of a lease that a release did not find."""

    @abstractmethod
    def inspect(self, key: str, /) -> Record | None:
        """Return the record of one key, which may be a claim, or None if the key is free."""

    def missing_rights(self, key: str, /) -> list[str]:
        """Return the commands that each lease needs and the login lacks, for the doctor.

        Args:
            key: A key that does not exist.

        Returns:
            The commands. ``NO_KEYS`` is one of them if the login may not use keys of such a name.
        """
        return []


class Claims(ABC):
    """The claims of published messages in a store."""

    @abstractmethod
    def take(self, request: ClaimRequest, /, *, timeout: float) -> Record | None:
        """Claim ``request.key`` for a message, or return the record of the claim that prevents it.

        A claim that the task has already doesn't prevent it. That claim keeps its phase, and its
        ttl is prolonged only if ``request.prolongs``, and never shortened.

        Raises:
            StoreError: The key holds something that isn't a record.
        """

    @abstractmethod
    def change(self, token: Token, change: ClaimChange, /, *, timeout: float) -> None:
        """Change a claim without a lease.

        The claim of a running task is changed by its lease. So here it isn't changed, except to the
        phase RUNNING. A missing claim isn't created: it may have been freed, and no later operation
        would free it again.
        """


class AsyncReleases(ABC):
    """Releases without waiting for the reply."""

    @abstractmethod
    def send(self, request: Release, /, *, timeout: float, on_reply: OnReply) -> bool:
        """Send a release. It's carried out before any later request of the same process.

        Args:
            request: See `Leases.release`.
            timeout: Seconds to wait for each reply if the release has to be sent again.
            on_reply: Called once with the reply, on any thread, unless this method returns False.
                If the last try failed, it's called again if a later request sends the release
                successfully.

        Returns:
            Whether the release was sent. If it wasn't, the caller uses `Leases.release`.
        """

    @abstractmethod
    def drain(self, *, timeout: float) -> None:
        """Read the replies to pending releases, and resend each release that got no reply.

        Args:
            timeout: Seconds to wait for each reply. The method gives up after three missing
                replies, because it runs on the heartbeat's thread and delays renewals.
        """


class WaitQueue(ABC):
    """The clients that wait for each key. A release wakes the one that has waited longest."""

    @abstractmethod
    def ticket(self, key: str, nonce: str, /, *, timeout: float) -> Ticket | None:
        """Return a ticket in the wait queue for ``key``, or None if the store wakes no clients now.

        This sends nothing. When the key is released, the store wakes the client that has waited
        longest, and reserves the key for it for a moment. A wake-up may be lost at any time, so a
        waiting client still polls, though less often.

        Args:
            key: The first of the slots that are requested.
            nonce: The nonce of the requesting token.
            timeout: Seconds to wait for a connection, when one is needed.
        """

    @abstractmethod
    def lengths(self, keys: Sequence[str], /) -> list[int]:
        """Return the number of clients that wait for each of ``keys``, for operators."""

    def missing_rights(self, key: str, /) -> list[str]:
        """The commands that this part needs and the login lacks. ``key`` is not held."""
        return []


class NewestCalls(ABC):
    """The newest call for each key, for ``on_conflict="cancel_running"``."""

    @abstractmethod
    def register(
        self, key: str, call: NewestCall, /, *, ttl: float, timeout: float, reservation: str = ""
    ) -> NewestCall:
        """Register ``call`` as the newest of ``key`` for ``ttl`` seconds. Return the newest call.

        A newer call that is already registered stays. If the time of ``call`` is in the future, now
        is stored instead. If ``call`` is the newest, the reservation of ``key`` with the token
        ``reservation`` is deleted, and a client that waits for ``key`` is woken.
        """

    @abstractmethod
    def of(self, keys: Sequence[str], /, *, timeout: float) -> list[NewestCall | None]:
        """Return the newest call for each of ``keys``, or None. They're read in one round trip."""


class QueuedArguments(ABC):
    """The arguments of queued messages, which later calls may replace (``debounce``)."""

    @abstractmethod
    def replace(self, request: ReplaceArguments, /, *, timeout: float) -> Replaced:
        """Replace the arguments of a queued message. The grant of its lease returns the newest.

        The claim is checked in the same step. After the grant, the reply is NOT_QUEUED.
        """


class Schedule(ABC):
    """The last runs of schedule entries, which the elected Beat replaces."""

    @abstractmethod
    def authorize(self, request: AuthorizeRun, /, *, timeout: float) -> Authorization:
        """Replace an entry's last run if the leader's token and ``expected`` are stored."""

    @abstractmethod
    def last_runs(self, keys: Sequence[str], /, *, timeout: float) -> list[str | None]:
        """Return the last run at each of ``keys``, or None. They're read in one round trip."""


class Operators(ABC):
    """What people see and do: the command line, the dashboard and the doctor.

    Attributes:
        progress: None, or a function that is called with what a long search has done so far, in
            words.
    """

    progress: Callable[[str], None] | None = None

    @abstractmethod
    def scan(self, pattern: str, /) -> Iterator[Record]:
        """Return all records whose keys match the glob ``pattern``, sorted by key.

        The result isn't a snapshot: keys may change while it's read.
        """

    @abstractmethod
    def free(self, key: str, token: str | None, /, by: OperatorRelease | None = None) -> bool:
        """Delete ``key``, of any kind, if ``token`` holds it. None means any token.

        This raises the shard's fence, so that a later grant has a higher fence than the old holder.
        With ``by``, the text ``<token> <by as JSON>`` is stored at `Keyspace.release_note` for
        `RELEASE_NOTE_TTL` seconds.
        """

    @abstractmethod
    def release_notes(self, keys: Sequence[str], /, *, timeout: float) -> list[str | None]:
        """Return the note of :meth:`free` at each of ``keys``, or None, in one round trip."""

    @abstractmethod
    def texts(self, pattern: str, /) -> Iterator[tuple[str, str, float]]:
        """List the completion records and notes whose keys match the glob ``pattern``, sorted.

        Each key comes with its text and its ttl in seconds. The text of a completion record is
        ``<state> <sequence> <nonce>``.
        """

    def problems(self, key: str, /) -> list[str]:
        """Return any reasons why apps don't see each other's locks under the prefix of ``key``."""
        return []

    def info(self, section: str, /) -> dict[str, str]:
        """Return one section of the server's INFO. It's empty if the server has or gives none."""
        return {}

    def size(self) -> int | None:
        """Return the number of keys of all programs that a search has to pass.

        None means that it's unknown, or that a search finds our keys alone.
        """
        return None

    def foreign_keys(self, pattern: str, /) -> Iterator[tuple[str, str]]:
        """Return the keys that match ``pattern`` but aren't this library's, each with a reason."""
        return iter(())

    def survey(
        self,
        pattern: str,
        report: Callable[[str, str], None],
        /,
        texts: Callable[[str, str], None] | None = None,
    ) -> Iterator[Record]:
        """Return the result of :meth:`scan`, and report what else the same search finds.

        Args:
            pattern: The pattern of :meth:`scan`.
            report: Called with each of the :meth:`foreign_keys`.
            texts: Called with the key and the text of each record and note (see :meth:`texts`), and
                perhaps of other keys.
        """
        for key, reason in self.foreign_keys(pattern):
            report(key, reason)
        yield from self.scan(pattern)
        if texts is not None:
            for key, text, _ in self.texts(pattern):
                texts(key, text)


class Store:
    """A store: leases and claims, and the parts that not every store has.

    Subclass it to add a store. A part that is missing is None. A worker refuses the options that
    need it.

    Attributes:
        capabilities: What the leases of this store can do.
        leases: Required.
        claims: Required.
        operators: Without it, the command line, the dashboard and `explain` can't show the locks.
        schedule: Without it, Beat can't be elected.
        wait_queue: Without it, clients that wait for a key poll.
        call_queue: Without it, no task can have ``on_conflict="queue"``.
        newest_calls: Without it, no task can have ``on_conflict="cancel_running"``.
        arguments: Without it, no task can have ``on_duplicate="replace"``.
        async_releases: Without it, each release waits for its reply.
        pauses: Without it, no key and no scope can be paused.
    """

    capabilities: Capabilities
    leases: Leases
    claims: Claims
    operators: Operators | None = None
    schedule: Schedule | None = None
    wait_queue: WaitQueue | None = None
    call_queue: CallQueue | None = None
    newest_calls: NewestCalls | None = None
    arguments: QueuedArguments | None = None
    async_releases: AsyncReleases | None = None
    pauses: Pauses | None = None

    def watch_connections(self, watch: ConnectionWatch, /) -> None:
        """Report each connection of this process to ``watch`` from now on.

        A server that has lost its data has also lost its connections. So the heartbeat renews all
        leases soon after a connection has ended. Without these reports, it notices the loss of a
        lease at the next renewal.
        """

    def close(self) -> None:
        """Close this process's connections."""


def operators_of(store: Store) -> Operators:
    """Return the part for operators.

    Raises:
        StoreError: The store has no such part.
    """
    if store.operators is None:
        raise StoreError(f"the store {store.capabilities.name!r} can't list or free its keys")
    return store.operators
