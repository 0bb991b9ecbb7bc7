"""The parts of a store, and the base class `Store`.

An operation returns its reply, even if the reply is that another call holds the key. If no reply
comes, it raises StoreUnavailable, and may or may not have taken effect. If the server refuses the
request, it raises StoreError. Every operation is idempotent for its token, so a client may repeat
it after a lost reply. `core.store_requests` has the requests and replies.
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

#: A function that gets the reply to an asynchronous release, or the error of its last try. Its
#: second argument says whether an earlier try, which got no reply, may have been carried out.
OnReply: TypeAlias = Callable[[ReleaseReply | StoreError, bool], None]

#: Stands for a missing right to use keys with our names.
NO_KEYS: Final = "keys"
#: How long an operator's note on a release is kept, in seconds.
RELEASE_NOTE_TTL: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a store can do. When a worker starts, it checks this against the options of each task.

    Attributes:
        fence: Whether grants have fencing tokens.
        name: The store's name in messages.
        trusted: The fraction of the ttl for which a client may trust a lease, counted from when it
            sent the request. It's below 1 if the store may count the ttl from an earlier
            heartbeat.
        min_ttl: The shortest ttl in seconds. Workers and Beat refuse a shorter one.
        max_limit: The largest ``limit`` whose slots the store can examine in one step. None means
            that there is no maximum.
        renewal_batch: How many leases the heartbeat passes to one call of `Leases.renew`. None
            means all of them. The replies of one call take effect before the next call.
        renews_for_others: Whether a process can renew the lease of another process on its host, by
            key and token alone. The parent heartbeat needs this. It isn't possible if a lease ends
            with its holder's connection.
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
    """The ticket of one client in the wait queue for a key. Only one thread at a time uses it."""

    def wait(self, seconds: float) -> str | None:
        """Block until the store wakes the client, for at most ``seconds`` seconds.

        Returns:
            The handoff token for the next acquire. It's empty if the store didn't wake the client.
            None means that the store no longer wakes this client, so the ticket is of no further
            use.
        """

    def fileno(self) -> int | None:
        """Return the descriptor that becomes readable when the store wakes the client.

        Coroutines wait for it. ``wait(0)`` opens the descriptor and reads the reply. The result is
        None while there is no descriptor.
        """

    def leave(self, *, counted: bool) -> None:
        """Leave the wait queue. This method never raises.

        Args:
            counted: Whether the store still counts the client as waiting.
        """


class ConnectionWatch(Protocol):
    """A watch that notices the end of a connection. Any thread may call its methods."""

    def opened(self, sock: Any, /) -> None:
        """Note that a connection has got its first reply.

        Args:
            sock: The connection's socket, which has the method ``fileno()``.
        """

    def closing(self, sock: Any, /) -> None:
        """Note that this process is about to close a connection."""

    def ended(self) -> None:
        """Note that a connection without a socket ended, or that another server replied."""


class Leases(ABC):
    """The leases of a store, and the completion records of their attempts."""

    @abstractmethod
    def acquire(self, request: Acquire, /, *, timeout: float) -> Granted | Refused:
        """Grant a free slot, or return a refusal with the record of a holder.

        A repeated request with the same token gets the same reply.
        """

    @abstractmethod
    def renew(self, leases: Sequence[Lease], /, *, timeout: float) -> list[Renewal]:
        """Prolong each lease to its ttl if its token still holds the key.

        If the lease's task still holds the claim (``claim_key``), the claim is prolonged too. The
        claim's ttl is never shortened. If a lease isn't renewed, its claim isn't changed, because
        the operation that ended the lease has set the claim's ttl.

        Returns:
            One reply for each lease, in the same order.
        """

    @abstractmethod
    def release(self, request: Release, /, *, timeout: float) -> ReleaseReply:
        """Release the key that the token holds. Never change the key of another token."""

    @abstractmethod
    def mark(self, request: Mark, /, *, timeout: float) -> None:
        """Raise the completion record of the token's attempt.

        The state and the sequence in the record never decrease.
        """

    @abstractmethod
    def trace(self, key: str, /, *, timeout: float) -> Trace:
        """Return what the store has at ``key`` after a release didn't find the lease."""

    @abstractmethod
    def inspect(self, key: str, /) -> Record | None:
        """Return the record of one key, which may be a claim. None means that the key is free."""

    def missing_rights(self, key: str, /) -> list[str]:
        """Return the commands that every lease needs and the login lacks.

        The doctor calls this method.

        Args:
            key: A key that doesn't exist.

        Returns:
            The commands. The list contains ``NO_KEYS`` if the login may not use keys with such a
            name.
        """
        return []


class Claims(ABC):
    """The claims of published messages in a store."""

    @abstractmethod
    def take(self, request: ClaimRequest, /, *, timeout: float) -> Record | None:
        """Claim ``request.key`` for a message, unless the claim of another task prevents it.

        If the task already has the claim, the claim keeps its phase. Its ttl is prolonged only if
        ``request.prolongs`` is True, and is never shortened.

        Returns:
            The record of the claim that prevents it. None if the task has the claim now.

        Raises:
            StoreError: The key holds something that isn't a record.
        """

    @abstractmethod
    def change(self, token: Token, change: ClaimChange, /, *, timeout: float) -> None:
        """Change a claim without a lease.

        The lease of a running task changes the task's claim. So this method doesn't change such a
        claim, except to the phase RUNNING. It doesn't create a missing claim, because the claim may
        have been freed, and no later operation would free it again.
        """


class AsyncReleases(ABC):
    """Sends releases without waiting for the reply."""

    @abstractmethod
    def send(self, request: Release, /, *, timeout: float, on_reply: OnReply) -> bool:
        """Send a release. It's carried out before any later request of the same process.

        Args:
            request: The release (see `Leases.release`).
            timeout: Seconds to wait for each reply if the release has to be sent again.
            on_reply: A function that is called once with the reply, on any thread, unless this
                method returns False. If the last try failed, it's called again if a later request
                sends the release successfully.

        Returns:
            True if the release was sent. If it wasn't, the caller uses `Leases.release`.
        """

    @abstractmethod
    def drain(self, *, timeout: float) -> None:
        """Read the replies to pending releases, and resend each release that got no reply.

        Args:
            timeout: Seconds to wait for each reply. The method gives up after three missing
                replies, because it runs on the heartbeat's thread and delays renewals.
        """


class WaitQueue(ABC):
    """The clients that wait for each key. A release wakes the client that has waited longest."""

    @abstractmethod
    def ticket(self, key: str, nonce: str, /, *, timeout: float) -> Ticket | None:
        """Return a ticket in the wait queue for ``key``, or None if the store wakes no clients now.

        This method sends no request. When the key is released, the store wakes the client that has
        waited longest. It reserves the key for this client for a moment. A wake-up may be lost at
        any time, so a waiting client still polls, but less often.

        Args:
            key: The first of the requested slots.
            nonce: The nonce of the requesting token.
            timeout: Seconds to wait for a connection if one is needed.
        """

    @abstractmethod
    def lengths(self, keys: Sequence[str], /) -> list[int]:
        """Return how many clients wait for each of ``keys``. Operators see these numbers."""

    def missing_rights(self, key: str, /) -> list[str]:
        """Return the commands that this part needs and the login lacks.

        Args:
            key: A key that isn't held.
        """
        return []


class NewestCalls(ABC):
    """The newest call for each key, for ``on_conflict="cancel_running"``."""

    @abstractmethod
    def register(
        self, key: str, call: NewestCall, /, *, ttl: float, timeout: float, reservation: str = ""
    ) -> NewestCall:
        """Register ``call`` as the newest call of ``key`` for ``ttl`` seconds.

        A newer call that is already registered stays. If the time of ``call`` is in the future, the
        store keeps the current time instead. If ``call`` is the newest, the store deletes the
        reservation of ``key`` with the token ``reservation``. It also wakes a client that waits for
        ``key``.

        Returns:
            The newest call.
        """

    @abstractmethod
    def of(self, keys: Sequence[str], /, *, timeout: float) -> list[NewestCall | None]:
        """Return the newest call for each of ``keys``, or None. One round trip reads them all."""


class QueuedArguments(ABC):
    """The arguments of queued messages. Later calls may replace them (``debounce``)."""

    @abstractmethod
    def replace(self, request: ReplaceArguments, /, *, timeout: float) -> Replaced:
        """Replace the arguments of a queued message. The grant of its lease returns the newest.

        The same step checks the claim. After the grant, the reply is NOT_QUEUED.
        """


class Schedule(ABC):
    """The last runs of schedule entries. The elected Beat replaces them."""

    @abstractmethod
    def authorize(self, request: AuthorizeRun, /, *, timeout: float) -> Authorization:
        """Replace an entry's last run if the store has the leader's token and ``expected``."""

    @abstractmethod
    def last_runs(self, keys: Sequence[str], /, *, timeout: float) -> list[str | None]:
        """Return the last run at each of ``keys``, or None. One round trip reads them all."""


class Operators(ABC):
    """The part that the command line, the dashboard and the doctor use.

    Attributes:
        progress: None, or a function. A long search calls it with a text that says what the search
            has done so far.
    """

    progress: Callable[[str], None] | None = None

    @abstractmethod
    def scan(self, pattern: str, /) -> Iterator[Record]:
        """Return all records whose keys match the glob ``pattern``, sorted by key.

        The result isn't a snapshot, because keys may change while it's read.
        """

    @abstractmethod
    def free(self, key: str, token: str | None, /, by: OperatorRelease | None = None) -> bool:
        """Delete ``key``, whatever its kind, if ``token`` holds it. None means any token.

        This raises the shard's fence, so that a later grant has a higher fence than the old holder.
        With ``by``, the store keeps the text ``<token> <by as JSON>`` at `Keyspace.release_note`
        for `RELEASE_NOTE_TTL` seconds.

        Returns:
            Whether the key was deleted.
        """

    @abstractmethod
    def release_notes(self, keys: Sequence[str], /, *, timeout: float) -> list[str | None]:
        """Return the note of :meth:`free` at each of ``keys``, or None if there is none.

        One round trip reads them all.
        """

    @abstractmethod
    def texts(self, pattern: str, /) -> Iterator[tuple[str, str, float]]:
        """List the completion records and notes whose keys match the glob ``pattern``.

        They're sorted by key. Each key comes with its text and its ttl in seconds. The text of a
        completion record is ``<state> <sequence> <nonce>``.
        """

    def problems(self, key: str, /) -> list[str]:
        """Return any reasons why apps don't see each other's locks under the prefix of ``key``."""
        return []

    def info(self, section: str, /) -> dict[str, str]:
        """Return one section of the server's INFO.

        It's empty if the server has no such section or doesn't return it.
        """
        return {}

    def size(self) -> int | None:
        """Return how many keys a search has to pass, including the keys of other programs.

        None means that the number is unknown, or that a search finds only our keys.
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
            pattern: The pattern for :meth:`scan`.
            report: A function that is called with each of the :meth:`foreign_keys` and its reason.
            texts: A function that is called with the key and the text of each record and note (see
                :meth:`texts`), and perhaps of other keys.
        """
        for key, reason in self.foreign_keys(pattern):
            report(key, reason)
        yield from self.scan(pattern)
        if texts is not None:
            for key, text, _ in self.texts(pattern):
                texts(key, text)


class Store:
    """A store has leases, claims, and parts that not every store has.

    Subclass it to add a store. If a part is missing, its attribute is None. A worker refuses the
    options that need a missing part.

    Attributes:
        capabilities: What this store can do.
        leases: Every store has this part.
        claims: Every store has this part.
        operators: Without it, the command line, the dashboard and `explain` can't show the locks.
        schedule: Without it, Beat can't be elected.
        wait_queue: Without it, clients that wait for a key poll.
        call_queue: Without it, no task can have ``on_conflict="queue"``.
        newest_calls: Without it, no task can have ``on_conflict="cancel_running"``.
        arguments: Without it, no task can have ``on_duplicate="replace"`` or ``debounce``.
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

        If a server has lost its data, it has also lost its connections. So the heartbeat renews all
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
