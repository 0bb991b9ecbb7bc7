"""Leases in Redis or Valkey: one key per lease, and one script or command per operation.

Overview
    A lease is a string key with a ttl. Its value is the kind, the token, the fence and the holder
    as JSON. Each operation is one Lua script. A free claim is taken by one SET command. If
    ``wait_replicas`` is set, WAIT follows an acquire in the same pipeline. The command line and the
    doctor find keys with SCAN, and read them one by one.

Guarantees
    Each operation is atomic and uses the server's clock. Commands on one connection keep their
    order. An acquire or take_claim that overtook an asynchronous release of this process is
    repeated after that release (see ``async_release``).

Non-guarantees
    Exclusion over a failover: an acknowledged write may be lost with the old master. WAIT makes
    this only less likely: it neither elects a replica that acknowledged nor stops the old master.

State model::

    (free) --acquire--> lease --release--> (free), reserved, cooling, or reserved for a waiter
                          +--ttl over, free(), data lost--> (free)

Failure handling
    The store retries only a script that the server has lost (once, with its source), an
    asynchronous release without a reply, and the operations next to a lease (mark, take_claim,
    change_claim) if an idle connection turned out to be broken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha1
from itertools import repeat
from typing import Any, Final, TypeVar

import redis

from ...core.call_queue import Hint
from ...core.key import Keyspace
from ...core.lease import Kind, Lease, OperatorRelease, Phase, Record, Token
from ...core.store import (
    NOTE_TTL,
    Acquire,
    Authorization,
    AuthorizeRun,
    Capabilities,
    ClaimChange,
    ClaimRequest,
    ConnectionWatch,
    Granted,
    GrantedArguments,
    Mark,
    NewestCall,
    OnReply,
    QueuedRelease,
    Refused,
    Relation,
    Release,
    ReleaseReply,
    Renewal,
    ReplaceArguments,
    Replaced,
    Store,
    Ticket,
    Trace,
)
from ...errors import StoreError, StoreUnavailable
from ..eviction import risk
from ..urls import StoreUrl
from . import scripts
from .async_release import PendingReleases
from .call_queue import RedisCallQueue, hint_of
from .connection import OPERATOR_TIMEOUT, Connections
from .server_errors import denied_by, is_denied, is_wrong_type
from .wait_queue import RedisTicket, WaitQueues

R = TypeVar("R")
T = TypeVar("T")

_CAPABILITIES: Final = Capabilities(
    fence=True,
    name="redis",
    renewal_batch=512,  # some 70 KB in one pipeline, and 1.2 ms of the server's time
    renews_for_others=True,
    releases_async=True,
    wakes_waiters=True,
    orders_calls=True,
    usable_before_fork=True,
    replaces_arguments=True,
)
_RELATIONS: Final = {relation.encode(): relation for relation in Relation}
_RELEASE_REPLIES: Final = {reply.encode(): reply for reply in ReleaseReply}
_REPLIES_TO_REPLACE: Final = {1: Replaced.YES, 0: Replaced.NOT_QUEUED, -1: Replaced.FIXED}
# The share of the timeout in which the replicas must acknowledge. The rest is for the reply, which
# an idle server sends up to 0.1 s late (hz). A reply after the timeout is not a grant.
_WAIT_RATIO: Final = 0.5

_NO_SCAN: Final = (
    "keys are found by short names, task ids and patterns with SCAN, which the store's login may "
    "not use: give the full key (csl:{...}:...), or grant +scan"
)
#: What a login lacks that may not use keys of our names.
NAMES: Final = "keys"
# Places in the server's table of keys per SCAN; half of them or more are occupied, unless many keys
# were deleted. Each SCAN blocks the server's other clients for some 0.08 ms.
_SCAN_COUNT: Final = 100
# Seconds of pause after a SCAN that found no key of ours, so that a search through the keys of
# other programs takes a tenth of the server's time.
_PAUSE: Final = 9 * 0.08e-3
# Reads in one pipeline. The server may serve other clients between them.
_READ_AT_ONCE: Final = 500


class RedisStore(Store):
    """A store on one Redis server.

    Args:
        url: The URL, in a form that ``connect`` reads.
        fence_base: Fences are above this number.
        options: Options of the connection.
        wait_replicas: The number of replicas that must acknowledge a grant before it counts.
        connect: Creates the connections from the URL and the options.

    Raises:
        SettingsError: The URL or an option can't be read.
    """

    #: The number of shards of each prefix.
    shards = 1

    def __init__(
        self,
        url: str | StoreUrl,
        *,
        fence_base: int = 0,
        options: Mapping[str, Any] | None = None,
        wait_replicas: int = 0,
        connect: Callable[[Any, Mapping[str, Any] | None], Connections] = Connections,
    ) -> None:
        self._connections = connect(url, options)
        self._fence_base = f"{fence_base}"
        self._wait_replicas = wait_replicas
        self._queues = WaitQueues()
        self.call_queue = RedisCallQueue(self._run_checked, self._run)
        self._pending = PendingReleases(self._release)
        # Shards, named by their fence counters, for whose prefix the stored number of shards was
        # found equal.
        self._known_shards: set[str] = set()
        # Shards whose server has run release.lua, and so has it loaded.
        self._loaded: set[str] = set()
        # SET accepts NX together with GET since Redis 7.0. Older servers run the script instead.
        self._claims_by_set = True

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    # --- the lease -------------------------------------------------------------------------------

    def acquire(self, request: Acquire, *, timeout: float) -> Granted | Refused:
        # A refusal returns the holder of the first of several slots, but a pending release may be
        # on any of them.
        pending = self._pending.open_on(request.slots) if len(request.slots) > 1 else ()
        reply = self._acquire(request, timeout)
        if isinstance(reply, Granted):
            return reply
        superseding = self._pending.superseding(reply.record)
        if not superseding and not pending:
            return reply
        for one in superseding or self._pending.open_on(request.slots):
            self._pending.resend(one)
        return self._acquire(request, timeout)

    def _acquire(self, request: Acquire, timeout: float) -> Granted | Refused:
        commands = [scripts.acquire_command(request, self._fence_base)]
        fence = commands[0][3]  # names the shard
        just_checked = fence not in self._known_shards and self._check_shards(fence, timeout)
        if self._wait_replicas:
            # WAIT follows the script in the pipeline, because a script can't wait for replicas.
            waited = scripts.milliseconds(timeout * _WAIT_RATIO)
            commands.append(("WAIT", f"{self._wait_replicas}", waited))
        replies = self._pipeline(commands, timeout)
        reply = replies[0]
        if just_checked:
            self._known_shards.add(fence)  # again, if the server had lost the script
        if self._pending.lost:
            self._pending.resend_lost()
        if isinstance(reply, bytes):
            found: Granted | Refused = Granted(key=request.slots[0], fence=int(reply) or None)
        elif request.claim is not None and request.claim.arguments:
            found = _with_arguments(request, *reply)
        else:
            found = slot_or_refusal(reply)
        if self._wait_replicas and isinstance(found, Granted) and replies[1] < self._wait_replicas:
            with suppress(StoreError):  # the ttl frees the key; no body runs with this lease
                self.release(request.undo(), timeout=timeout)
            raise StoreUnavailable(
                f"{replies[1]} replica(s) had the grant of {found.key!r} in time, and "
                f"wait_replicas asks for {self._wait_replicas}: it was given back"
            )
        return found

    def renew(self, leases: Sequence[Lease], *, timeout: float) -> list[Renewal]:
        # Pending releases are not resent here, because all other leases would wait for that.
        chunks = scripts.chunks_of(leases)
        commands = [*map(scripts.renewal_command, chunks)]
        replies = self._pipeline(commands, timeout) if commands else []
        found: list[Renewal] = []
        for chunk, reply in zip(chunks, replies, strict=True):
            found += scripts.renewals_of(len(chunk), reply)
        return found

    def release(self, request: Release, *, timeout: float) -> ReleaseReply:
        reply = self._release(request, timeout)
        if self._pending.lost:
            self._pending.resend_lost()
        return reply

    def release_queued(
        self, request: QueuedRelease, *, timeout: float
    ) -> tuple[ReleaseReply, Hint | None]:
        reply, *call = self._run(scripts.queued_release_command(request), timeout)
        if self._pending.lost:
            self._pending.resend_lost()
        return _RELEASE_REPLIES[reply], hint_of(request.keys[0], call) if call else None

    def _release(self, request: Release, timeout: float) -> ReleaseReply:
        (reply,) = self._pipeline([scripts.release_command(request)], timeout)
        self._loaded.add(Keyspace.shard(request.keys[0]))
        return _RELEASE_REPLIES[reply]

    def release_async(self, request: Release, *, timeout: float, on_reply: OnReply) -> bool:
        if Keyspace.shard(request.keys[0]) not in self._loaded:
            return False  # a NOSCRIPT reply would be read too late
        pending = self._pending.begin(request, timeout, on_reply)
        if self._connections.send_async(scripts.release_command(request), timeout, pending):
            return True
        self._pending.withdraw(pending)
        return False

    def watch_connections(self, watch: ConnectionWatch) -> None:
        self._connections.report_to(watch)

    def drain(self, *, timeout: float) -> None:
        self._connections.drain(timeout)
        self._pending.resend_all(timeout)

    def trace(self, key: str, *, timeout: float) -> Trace:
        command = scripts.TRACE.command([key, Keyspace.fence(key)])
        value, ttl, fence, now = self._run(command, timeout)
        record = None if value is None else record_of(key.encode(), value, ttl)
        return Trace(record=record, fence=int(fence), now=int(now) / 1e6)

    # --- next to the lease -----------------------------------------------------------------------

    def ticket(self, key: str, nonce: str, *, timeout: float) -> Ticket | None:
        if self._queues.denied:
            return None
        queue = Keyspace.wait_queue(key)
        home = partial(self._connections.home_of, queue, timeout)
        return RedisTicket(self._queues, queue, nonce, home, timeout)

    def note_call(
        self, key: str, call: NewestCall, *, ttl: float, timeout: float, reservation: str = ""
    ) -> NewestCall:
        queue = Keyspace.wait_queue(key)
        keys = [Keyspace.newest_call(key), key, queue, f"{queue}!"]
        at = "" if call.called_at is None else repr(call.called_at)
        arguments = [at, call.call_id, scripts.milliseconds(ttl), reservation]
        command = scripts.NEWEST_CALL.command(keys, arguments)
        return _call(_repeated(self._run, command, timeout))

    def newest_calls(self, keys: Sequence[str], *, timeout: float) -> list[NewestCall | None]:
        # GET, as in last_runs(). A node of a cluster that does not answer has no effect on others.
        commands = [("GET", Keyspace.newest_call(key)) for key in keys]
        replies = self._connections.run(commands, timeout, check=False)
        return [_call(reply) if isinstance(reply, bytes) else None for reply in replies]

    def mark(self, request: Mark, *, timeout: float) -> None:
        token, claim = request.token, request.claim
        keys = [Keyspace.completion(request.key, token.attempt)]
        ttl_ms = scripts.milliseconds(request.ttl)
        arguments = [str(request.state), f"{request.sequence}", token.nonce, ttl_ms]
        if claim is not None:
            keys += scripts.keys_of(claim)
            arguments += [token.call_id, scripts.phase_of(claim), scripts.milliseconds(claim.ttl)]
        _repeated(self._run, scripts.MARK.command(keys, arguments), timeout)

    def take_claim(self, request: ClaimRequest, *, timeout: float) -> Record | None:
        if Keyspace.fence(request.key) not in self._known_shards:
            self._check_shards(request.key, timeout)
        record = self._admit(request, timeout)
        if self._pending.lost:
            self._pending.resend_lost()
        superseding = self._pending.superseding(record)
        for pending in superseding:
            self._pending.resend(pending)
        return self._admit(request, timeout) if superseding else record

    def _admit(self, request: ClaimRequest, timeout: float) -> Record | None:
        take_claim = self._claim_by_set
        by_script = request.instead_of or request.wants_ttl or request.arguments
        if by_script or not self._claims_by_set:
            take_claim = self._claim_by_script
        return _repeated(take_claim, request, timeout)

    def _claim_by_set(self, request: ClaimRequest, timeout: float) -> Record | None:
        # A free claim is the common case. SET NX takes it at a quarter of a script's cost to the
        # server. With GET it returns the existing claim otherwise.
        token = request.token
        value = (
            f"{Kind.CLAIM} {token.call_id} {Phase.QUEUED} {request.holder.to_json(token.task_id)}"
        )
        ttl_ms = scripts.milliseconds(request.ttl)
        command = ("SET", request.key, value, "PX", ttl_ms, "NX", "GET")
        try:
            (found,) = self._connections.run([command], timeout)
        except StoreUnavailable:
            raise
        except StoreError:
            # The script may be refused too. Then its error is reported.
            record = self._claim_by_script(request, timeout)
            self._claims_by_set = False
            return record
        if found is None:
            return None
        if found.startswith(f"{Kind.CLAIM} {token.call_id} ".encode()):
            # The same message: prolong its claim.
            return self._claim_by_script(request, timeout) if request.prolongs else None
        return _claim_record(request, found, math.nan)

    def _claim_by_script(self, request: ClaimRequest, timeout: float) -> Record | None:
        token = request.token
        holder = request.holder.to_json(token.task_id)
        arguments = [token.call_id, scripts.milliseconds(request.ttl), holder, request.instead_of]
        keys = [request.key]
        if request.arguments or not request.prolongs:
            arguments.append("0" if request.prolongs else "1")
        if request.arguments:
            keys.append(request.arguments)
            arguments.append(f"{request.due_in * 1000:.0f}")
        reply = self._run(scripts.TAKE_CLAIM.command(keys, arguments), timeout)
        return _claim_record(request, *reply) if reply else None

    def replace_arguments(self, request: ReplaceArguments, *, timeout: float) -> Replaced:
        due_max = "" if request.due_max is None else f"{request.due_max * 1000:.0f}"
        due = [f"{request.due_in * 1000:.0f}", due_max]
        arguments = [request.call_id, request.arguments, scripts.milliseconds(request.ttl), *due]
        command = scripts.REPLACE.command([request.claim, request.key], arguments)
        return _REPLIES_TO_REPLACE[_repeated(self._run, command, timeout)]

    def change_claim(self, token: Token, change: ClaimChange, *, timeout: float) -> None:
        arguments = [token.call_id, scripts.phase_of(change), scripts.milliseconds(change.ttl)]
        command = scripts.CHANGE_CLAIM.command(scripts.keys_of(change), arguments)
        _repeated(self._run, command, timeout)

    def authorize_run(self, request: AuthorizeRun, *, timeout: float) -> Authorization:
        ttl_ms = scripts.milliseconds(request.ttl)
        arguments = [str(request.token), request.expected or "", request.new, ttl_ms]
        command = scripts.AUTHORIZE_RUN.command([request.leader, request.entry], arguments)
        return Authorization(self._run(command, timeout).decode())

    def last_runs(self, keys: Sequence[str], *, timeout: float) -> list[str | None]:
        # GET instead of MGET: every login has the right to GET, which the scripts need, and a
        # pipeline is one round trip too.
        replies = self._connections.run([("GET", key) for key in keys], timeout) if keys else []
        return [reply if reply is None else reply.decode() for reply in replies]

    # --- operators -------------------------------------------------------------------------------

    def free(self, key: str, token: str | None, by: OperatorRelease | None = None) -> bool:
        keys, arguments = [key, Keyspace.fence(key)], [token or ""]
        if by is not None:
            keys.append(Keyspace.note(key))
            arguments += [by.to_json(), scripts.milliseconds(NOTE_TTL)]
        command = scripts.FREE.command(keys, arguments)
        return bool(self._run(command, OPERATOR_TIMEOUT))

    def inspect(self, key: str) -> Record | None:
        self._drain_open()
        return self._read(key, OPERATOR_TIMEOUT)

    def scan(self, pattern: str) -> Iterator[Record]:
        return self.survey(pattern, lambda key, reason: None)

    def survey(
        self,
        pattern: str,
        report: Callable[[str, str], None],
        texts: Callable[[str, str], None] | None = None,
    ) -> Iterator[Record]:
        """See `Store.survey`. Each key is scanned and read once."""
        # All names are read first. The names of a million keys fit into memory; their values may
        # not.
        names = self._names(pattern)
        for start in range(0, len(names), _READ_AT_ONCE):
            self._report(f"read {start:,} of {len(names):,} keys of ours")
            found = [*self._read_each("GET", names[start : start + _READ_AT_ONCE])]
            others = [key for key, value, _ in found if isinstance(value, Exception)]
            kinds = {key: kind for key, kind, _ in self._read_each("TYPE", others)}
            for key, value, ttl_ms in found:
                if key in kinds or ttl_ms == -1:
                    name = key.decode(errors="replace")
                    if what := _problem_with(name, kinds.get(key, b"string"), ttl_ms):
                        report(name, what)
                if key not in kinds and value is not None:
                    record = record_of(key, value, ttl_ms)
                    if record is not None:
                        yield record
                    elif texts is not None:
                        texts(key.decode(errors="replace"), value.decode(errors="replace"))

    def texts(self, pattern: str) -> Iterator[tuple[str, str, float]]:
        names = self._names(pattern)
        for start in range(0, len(names), _READ_AT_ONCE):
            for key, value, ttl_ms in self._read_each("GET", names[start : start + _READ_AT_ONCE]):
                if isinstance(value, bytes):
                    yield key.decode(), value.decode(errors="replace"), max(ttl_ms, 0) / 1000

    def foreign_keys(self, pattern: str) -> Iterator[tuple[str, str]]:
        """Keys that match ``pattern`` but were not written by this library, each with a reason.

        Examples are locks of other recipes under the same name: SETNX without an expiry, a list, a
        set.
        """
        found: list[tuple[str, str]] = []
        for _ in self.survey(pattern, lambda *foreign: found.append(foreign)):
            pass
        return iter(found)

    def waiting(self, keys: Sequence[str]) -> list[int | None]:
        if not keys:
            return []
        now = f"{int(self.trace(keys[0], timeout=OPERATOR_TIMEOUT).now * 1000)}"
        counts: list[scripts.Command] = [
            ("ZCOUNT", Keyspace.wait_queue(key), now, "+inf") for key in keys
        ]
        replies = self._connections.run(counts, OPERATOR_TIMEOUT)
        return [int(reply) for reply in replies]

    def missing_rights(self, key: str, *, queue_of_calls: bool = False) -> list[str]:
        """See `Store.missing_rights`.

        ``key`` is one for which no client waits. The method leaves nothing in the store.
        """
        queue = Keyspace.wait_queue(key)
        handoffs = f"{queue}!"
        commands: list[scripts.Command] = [
            ("RPUSH", handoffs, "you"),
            ("BLPOP", handoffs, 0.01),
            ("ZADD", queue, "XX", 0, "you"),
            ("ZCOUNT", queue, 0, 0),
            ("ZREM", queue, "you"),
        ]
        if queue_of_calls:
            # The others wake waiting clients alone.
            commands = [one for one in commands if one[0] in ("ZADD", "ZCOUNT", "ZREM")]
            commands += [
                ("EXISTS", queue),
                ("HSET", handoffs, "you", 1),
                ("HGET", handoffs, "you"),
                ("HDEL", handoffs, "you"),
                ("ZCARD", queue),
                ("ZRANGE", queue, 0, 0),
                ("ZRANGEBYSCORE", queue, 0, 0),
                ("ZRANK", queue, "you"),
            ]
        missing = self._denied([partial(self._connections.run, [one]) for one in commands])
        if "BLPOP" in missing or "HDEL" in missing:
            self._connections.run([("DEL", handoffs)], OPERATOR_TIMEOUT)
        return missing

    def missing_basics(self, key: str) -> list[str]:
        """The commands that each lease needs and the login lacks; for the doctor.

        Leaves nothing in the store.

        Args:
            key: A key that does not exist.

        Returns:
            The commands; ``NAMES`` among them if the login may not use keys of such a name.
        """
        script = "return 1"
        commands: list[scripts.Command] = [
            ("EVAL", script, 1, key),
            ("EVALSHA", sha1(script.encode(), usedforsecurity=False).hexdigest(), 1, key),
            ("SET", key, "", "PX", 1),
            ("GET", key),
            ("PTTL", key),
            ("PEXPIRE", key, 1),
            ("DEL", key),
        ]
        tries = [partial(self._connections.run, [one]) for one in commands]
        # It has no key, by which a cluster would find the server.
        return self._denied([*tries, partial(self.servers()[0].run, [("TIME",)])])

    @staticmethod
    def _denied(tries: Iterable[Callable[[float], object]]) -> list[str]:
        """What the login may not use, as the server's refusals of the ``tries`` name it."""
        denied: dict[str, None] = {}
        for send in tries:
            try:
                send(OPERATOR_TIMEOUT)
            except redis.exceptions.NoScriptError:
                pass  # the login may use EVALSHA
            except StoreError as exc:
                if not is_denied(exc.__cause__):
                    raise
                denied[denied_by(exc.__cause__) or NAMES] = None
        return list(denied)

    def info(self, section: str) -> dict[str, str]:
        """One section of INFO, of the server that endangers leases most by evicting keys.

        Empty if the servers deny INFO. A server that does not answer counts only if none does.
        """
        found: list[dict[str, str]] = []
        error: StoreUnavailable | None = None
        for server in self.servers():
            try:
                found.append(server.info(section))
            except StoreUnavailable as exc:
                error = exc
        if error is not None and not found:
            raise error
        return max(found, key=risk)

    def servers(self) -> Sequence[Connections]:
        """The connections to each server that has keys of this store."""
        return self._connections.masters(OPERATOR_TIMEOUT)

    def problems(self, key: str) -> list[str]:
        problem = self._problem_with_shards(key, OPERATOR_TIMEOUT)
        return [problem] if problem else []

    def close(self) -> None:
        self._drain_open()
        self._connections.close()

    def _drain_open(self) -> None:
        if self._pending.open():
            self.drain(timeout=OPERATOR_TIMEOUT)

    # --- requests --------------------------------------------------------------------------------

    def _run(self, command: scripts.Command, timeout: float) -> Any:
        """Run a script once, then resend asynchronous releases whose reply was lost."""
        (reply,) = self._pipeline([command], timeout)
        if self._pending.lost:
            self._pending.resend_lost()
        return reply

    def _run_checked(self, command: scripts.Command, timeout: float) -> Any:
        """As :meth:`_run`, once the number of shards is known to be that of the other apps."""
        key = command[3]
        if Keyspace.fence(key) not in self._known_shards:
            self._check_shards(key, timeout)
        return self._run(command, timeout)

    def _pipeline(self, commands: Sequence[scripts.Command], timeout: float) -> list[Any]:
        """The reply to each command. Load the scripts into a server that has lost them."""
        try:
            return self._connections.run(commands, timeout)
        except redis.exceptions.NoScriptError:
            # The server was restarted, or SCRIPT FLUSH was called. Only the commands before the
            # first error were executed, and every script may run twice. EVAL loads and runs in one
            # step, so no other client's flush comes in between, and it needs no right to SCRIPT.
            if commands[0][1] in scripts.ACQUIRES:
                # The server may have lost its data, with the number of shards, too.
                if self._loaded:
                    self._connections.note_other_server()
                self._loaded.clear()
                self._known_shards.clear()
            return self._connections.run([*map(scripts.with_source, commands)], timeout)

    def _read(self, key: str, timeout: float) -> Record | None:
        value, ttl = self._connections.run([("GET", key), ("PTTL", key)], timeout)
        return None if value is None else record_of(key.encode(), value, ttl)

    def _names(self, pattern: str) -> list[bytes]:
        """The keys of all servers that match ``pattern``, sorted."""
        found: set[bytes] = set()  # SCAN may return a key twice
        pages = 0
        for server in self.servers():
            cursor = b"0"
            while True:
                command = ("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT)
                try:
                    ((cursor, keys),) = server.run([command], OPERATOR_TIMEOUT)
                except StoreError as exc:
                    if not is_denied(exc.__cause__):
                        raise
                    raise StoreError(f"{_NO_SCAN} ({exc})") from exc
                found.update(keys)
                if cursor == b"0":
                    break
                pages += 1
                self._report(f"searched {pages:,} pages of keys: {len(found):,} keys are ours")
                # Pages of our own keys, which the caller wants to see, need no pause.
                if (foreign := 1 - 4 * len(keys) / _SCAN_COUNT) > 0:
                    server.clock.sleep(_PAUSE * foreign)
        return sorted(found)

    def _report(self, text: str) -> None:
        if self.progress is not None:
            self.progress(text)

    def size(self) -> int | None:
        """See `Store.size`."""
        try:
            counts = [server.run([("DBSIZE",)], OPERATOR_TIMEOUT) for server in self.servers()]
        except StoreUnavailable:
            raise
        except StoreError:
            return None  # the login may not ask for it
        return sum(int(count) for (count,) in counts)

    def _read_each(self, read: str, keys: Sequence[bytes]) -> Iterator[tuple[bytes, Any, int]]:
        """Each key, the reply to the command ``read`` for it, and its ttl in ms.

        The reply to GET for a list or a set is an exception that names the problem.
        """
        reads: list[scripts.Command] = []
        for key in keys:
            # Packing text costs half as much as packing bytes.
            name = key.decode() if key.isascii() else key
            reads += ((read, name), ("PTTL", name))
        replies = self._connections.run(reads, OPERATOR_TIMEOUT, check=False) if reads else []
        self._connections.checked([reply for reply in replies if not is_wrong_type(reply)])
        each = iter(replies)
        return zip(keys, each, each, strict=False)

    def _check_shards(self, key: str, timeout: float) -> bool:
        """Check that this app and the others use one number of shards.

        Returns:
            Whether a request was sent; False if the result for this prefix is known already.

        Raises:
            StoreError: The numbers differ, or the store refuses the request.
            StoreUnavailable: The store doesn't answer.
        """
        if Keyspace.shards_note(key) in map(Keyspace.shards_note, list(self._known_shards)):
            self._known_shards.add(Keyspace.fence(key))
            return False
        if problem := self._problem_with_shards(key, timeout):
            raise StoreError(problem)
        return True

    def _problem_with_shards(self, key: str, timeout: float) -> str:
        """Compare this store's number of shards with the number that is stored in Redis.

        Every key contains its shard (``...csl:{prefix:shard}:...``). Apps with different numbers of
        shards would use different keys, and two bodies would run at once. That happens if one app
        names a node of a cluster as a plain server, or if data were moved between a server and a
        cluster.

        Returns:
            The problem; empty if the numbers are equal.

        Raises:
            StoreError: The store refuses the request.
            StoreUnavailable: The store doesn't answer.
        """
        note = Keyspace.shards_note(key)
        noted = int(self._run(scripts.SHARDS.command([note], [f"{self.shards}"]), timeout))
        if noted != self.shards:
            return (
                f"the locks here are kept in {noted} shard(s), says {note!r}, and this app looks "
                f"for them in {self.shards}: two apps would not see each other's locks. Name the "
                "store alike everywhere (a cluster is redis+cluster://, in every app); if no "
                "worker of the other sort is left, delete that key"
            )
        self._known_shards.add(Keyspace.fence(key))
        return ""


def _with_arguments(
    request: Acquire, reply: bytes | Sequence[Any], arguments: Any
) -> Granted | Refused:
    """The reply of ``arguments.lua``: that of ``acquire.lua``, and the newest arguments."""
    if isinstance(reply, bytes):
        fence = int(reply) or None
        return GrantedArguments(key=request.slots[0], fence=fence, arguments=arguments)
    if reply[0] == b"not_due":
        refused = Refused(relation=Relation.NOT_DUE)
        refused.due_in = arguments / 1000
        return refused
    found = slot_or_refusal(reply)
    if isinstance(found, Granted):
        return GrantedArguments(key=found.key, fence=None, arguments=arguments)
    return found


def slot_or_refusal(reply: Sequence[Any]) -> Granted | Refused:
    """The reply of ``acquire.lua`` that is not a fence: one of several slots, or a refusal."""
    word, *found = reply
    if word == b"granted":
        return Granted(key=found[0].decode(), fence=None)
    record = record_of(*found[:3]) if found else None
    refused = Refused(relation=_RELATIONS[word], record=record)
    if len(found) > 3:
        others = map(record_of, found[3::2], found[4::2], repeat(math.nan))
        refused.others = tuple(filter(None, others))
    return refused


def _call(text: bytes) -> NewestCall:
    called_at, task = text.decode().split(" ")
    return NewestCall(call_id=task, called_at=float(called_at))


def _repeated(operation: Callable[[R, float], T], request: R, timeout: float) -> T:
    """Run an idempotent operation, a second time if it got no reply on an idle connection.

    A NAT or load balancer may have dropped that connection while the server is reachable.
    """
    try:
        return operation(request, timeout)
    except StoreUnavailable as exc:
        if not exc.was_idle:
            raise
        return operation(request, timeout)


def _claim_record(request: ClaimRequest, value: bytes, ttl_ms: float) -> Record:
    record = record_of(request.key.encode(), value, ttl_ms)
    if record is None:
        raise StoreError(f"{request.key!r} holds something that this version can't read")
    return record


def _problem_with(name: str, kind: bytes, ttl_ms: int) -> str:
    """The problem with a key; empty: none."""
    if kind not in (b"string", b"none") and not Keyspace.is_queue(name):
        return f"is a {kind.decode()}, not a string"
    return "has no expiry" if ttl_ms == -1 and not Keyspace.stays(name) else ""


def record_of(key: bytes, value: bytes, ttl_ms: float) -> Record | None:
    """The record in a key's value; None if other software or a newer version wrote the value."""
    try:
        return Record.parse(key.decode(), value.decode(), max(ttl_ms, 0) / 1000)
    except ValueError:
        return None
