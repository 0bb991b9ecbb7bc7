"""Leases in Redis or Valkey: a key per lease, a Lua script or a command per operation.

Promises
    Each operation is one script, or one command (see `admission`), so it happens wholly or not at
    all. Nothing is retried in here but a script that the server had forgotten, and a release that
    nobody waits for (see `posted`).

Does not promise
    Exclusion over a failover: an acknowledged write may be lost with the old master. That at least
    ``wait_replicas`` have it makes this less likely, and no more: WAIT neither elects a replica
    that acknowledged nor stops the old master.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final, TypeVar

from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.lease import Lease, Record, Token
from celery_singleton_lock.core.store import (
    Acquire,
    Admit,
    Authorization,
    AuthorizeTick,
    Capabilities,
    ClaimChange,
    Granted,
    MarkerState,
    OnReply,
    Refused,
    Relation,
    Release,
    Renewal,
    Trace,
)
from celery_singleton_lock.core.wait_queue import Ticket
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.stores.redis.admission import Admissions
from celery_singleton_lock.stores.redis.async_release import PendingReleases
from celery_singleton_lock.stores.redis.connection import Connections
from celery_singleton_lock.stores.redis.inspect import OPERATOR_TIMEOUT, RedisOperators
from celery_singleton_lock.stores.redis.inspect import record_of as _record
from celery_singleton_lock.stores.redis.lease_calls import acquire_call, phase_of, release_call
from celery_singleton_lock.stores.redis.nodes import AnyConnections
from celery_singleton_lock.stores.redis.renewal import (
    RENEW,
    chunks_of,
    renewal_call,
    renewals_of,
)
from celery_singleton_lock.stores.redis.replicas import Replicas
from celery_singleton_lock.stores.redis.replies import ScriptForgotten
from celery_singleton_lock.stores.redis.scripts import Call, Command
from celery_singleton_lock.stores.redis.scripts import Script as _Script
from celery_singleton_lock.stores.redis.scripts import milliseconds as _ms
from celery_singleton_lock.stores.redis.shards import Shards
from celery_singleton_lock.stores.redis.wait_queue import Places

__all__ = ["SETTLE_CLAIM", "RedisStore"]

_T = TypeVar("_T")

_ACQUIRE = _Script("claims", "wait_queue", "acquire")
_RELEASE = _Script("claims", "wait_queue", "release")
_MARK = _Script("claims", "mark")
SETTLE_CLAIM = _Script("claims", "settle_claim")
_FREE = _Script("free")
_AUTHORIZE_TICK = _Script("authorize_tick")
_SHARDS = _Script("shards")
_TRACE = _Script("trace")
# Leases in one pipeline of renewals: some 70 KB, and 1.2 ms of the server's time.
_RENEWAL_BATCH: Final = 512
_CAPABILITIES: Final = Capabilities(
    fence=True,
    name="redis",
    renewal_batch=_RENEWAL_BATCH,
    renews_for_others=True,
    releases_async=True,
    wakes_waiters=True,
    usable_before_fork=True,
)


class RedisStore(RedisOperators):
    """One Redis server at a time, by URL.

    Args:
        url: In a form that ``connect`` reads.
        fence_base: Fences are above it.
        options: For the connection.
        wait_replicas: How many replicas must have a grant before it counts.
        connect: How ``url`` is reached.

    Raises:
        SettingsError: The URL or an option can't be read.
    """

    #: How many shards the keys of a prefix are spread over.
    shards = 1

    def __init__(
        self,
        url: str,
        *,
        fence_base: int = 0,
        options: Mapping[str, Any] | None = None,
        wait_replicas: int = 0,
        connect: Callable[[str, Mapping[str, Any] | None], AnyConnections] = Connections,
    ) -> None:
        self._connections = connect(url, options)
        self._fence_base = fence_base
        self._replicas = Replicas(wait_replicas)
        self._shards = Shards(self.shards, self._write_shards_down)
        self._places = Places()
        self._posted = PendingReleases(self._release)
        self._admissions = Admissions(self._connections, self._ask)
        # Shards whose server has run the release's script, as far as this process knows.
        self._taught: set[str] = set()

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    def problems(self, key: str) -> list[str]:
        problem = self._shards.disagreement(key, OPERATOR_TIMEOUT)
        return [problem] if problem else []

    def acquire(self, call: Acquire, *, timeout: float) -> Granted | Refused:
        # A refusal names who has the first of several slots: a release may be late on any of them.
        late = self._posted.under_way(call.slots) if len(call.slots) > 1 else ()
        reply = self._acquire(call, timeout)
        if isinstance(reply, Granted):
            return reply
        overtaken = self._posted.overtaken(reply.record)
        if overtaken is not None:
            self._posted.make_again(overtaken)
        elif late:
            for posted in self._posted.under_way(call.slots):
                self._posted.make_again(posted)
        else:
            return reply
        return self._acquire(call, timeout)

    def _acquire(self, call: Acquire, timeout: float) -> Granted | Refused:
        self._check_shards(call.slots[0], timeout)
        wait = self._replicas.wait(timeout)
        reply, *counts = self._ask(
            _ACQUIRE, acquire_call(call, self._fence_base), timeout, then=wait
        )
        granted = _granted(call, reply)
        if granted is None:
            word, *found = reply
            record = _record(*found) if found else None
            return Refused(relation=Relation(word.decode()), record=record)
        if counts and (too_few := self._replicas.too_few(granted.key, counts)):
            self._take_back(granted.key, call.token, timeout)
            raise StoreUnavailable(too_few)
        return granted

    def ticket(self, key: str, nonce: str, *, timeout: float) -> Ticket | None:
        line = Keyspace.wait_queue(key)
        home = partial(self._connections.home_of, line, timeout)
        return self._places.place(line, nonce, home, timeout)

    def renew(self, leases: Sequence[Lease], *, timeout: float) -> list[Renewal]:
        return [*chain.from_iterable(self._renewals(chunks_of(leases), timeout))]

    def release(self, call: Release, *, timeout: float) -> Relation:
        released = self._release(call, timeout)
        if self._posted.lost:
            self._posted.repeat()
        return released

    def release_async(
        self,
        call: Release,
        *,
        timeout: float,
        on_reply: OnReply,
    ) -> bool:
        if Keyspace.shard(call.keys[0]) not in self._taught:
            return False  # where nobody waits, nobody hears in time that the script is unknown
        posted = self._posted.begin(call, timeout, on_reply)
        command = _RELEASE.evalsha(release_call(call))
        if self._connections.send_async(command, timeout, posted):
            return True
        self._posted.withdraw(posted)
        return False

    def drain(self, *, timeout: float) -> None:
        self._connections.drain(timeout)
        self._posted.lose_all()
        self._posted.repeat(timeout)

    def trace(self, key: str, *, timeout: float) -> Trace:
        value, ttl, fence, now = self._run(_TRACE, [key, Keyspace.fence(key)], [], timeout)
        record = None if value is None else _record(key.encode(), value, ttl)
        return Trace(record=record, fence=int(fence), now=int(now) / 1e6)

    def mark(
        self,
        key: str,
        token: Token,
        state: MarkerState,
        sequence: int,
        ttl: float,
        *,
        timeout: float,
        claim: ClaimChange | None = None,
    ) -> None:
        keys = [Keyspace.marker(key, token.attempt)]
        arguments = [str(state), sequence, token.nonce, _ms(ttl)]
        if claim is not None:
            keys.append(claim.key)
            arguments += [token.task, phase_of(claim), _ms(claim.ttl)]
        _repeatable(lambda: self._run(_MARK, keys, arguments, timeout))

    def admit(self, call: Admit, *, timeout: float) -> Record | None:
        self._check_shards(call.key, timeout)
        record = self._admit(call, timeout)
        if self._posted.lost:
            self._posted.repeat()
        overtaken = self._posted.overtaken(record) if record is not None else None
        if overtaken is not None:
            self._posted.make_again(overtaken)
            return self._admit(call, timeout)
        return record

    def _admit(self, call: Admit, timeout: float) -> Record | None:
        try:
            return self._admissions.admit(call, timeout)
        except StoreUnavailable as exc:
            if not exc.was_idle:
                raise
            return self._admissions.admit(call, timeout)  # see _repeatable; this is a hot path

    def settle_claim(self, token: Token, change: ClaimChange, *, timeout: float) -> None:
        arguments = [token.task, phase_of(change), _ms(change.ttl)]
        _repeatable(lambda: self._run(SETTLE_CLAIM, [change.key], arguments, timeout))

    def authorize_tick(self, call: AuthorizeTick, *, timeout: float) -> Authorization:
        reply = self._run(
            _AUTHORIZE_TICK,
            [call.leader, call.entry],
            [str(call.token), call.expected or "", call.new, _ms(call.ttl)],
            timeout,
        )
        return Authorization(reply.decode())

    def last_runs(self, keys: Sequence[str], *, timeout: float) -> list[str | None]:
        # Not MGET: whoever may run the scripts may GET, and a pipeline is one round trip too.
        replies = self._connections.run([("GET", key) for key in keys], timeout) if keys else []
        return [reply if reply is None else reply.decode() for reply in replies]

    def free(self, key: str, token: str | None) -> bool:
        keys = [key, Keyspace.fence(key)]
        return bool(self._run(_FREE, keys, [token or ""], OPERATOR_TIMEOUT))

    def inspect(self, key: str) -> Record | None:
        self._collect_rest()
        return super().inspect(key)

    def close(self) -> None:
        self._collect_rest()
        self._connections.close()

    def _collect_rest(self) -> None:
        if self._posted.open():
            self.drain(timeout=OPERATOR_TIMEOUT)

    def _run(
        self, script: _Script, keys: Sequence[Any], arguments: Sequence[Any], timeout: float
    ) -> Any:
        return self._ask(script, (keys, arguments), timeout)[0]

    def _ask(
        self, script: _Script, call: Call, timeout: float, *, then: Sequence[Command] = ()
    ) -> list[Any]:
        """Run ``script`` once; the first answer there is after a posted release was lost makes it
        again. Not a heartbeat's, for which others wait.
        """
        replies = self._pipeline(script, [call], timeout, then=then)
        if self._posted.lost:
            self._posted.repeat()
        return replies

    def _release(self, call: Release, timeout: float) -> Relation:
        (reply,) = self._pipeline(_RELEASE, [release_call(call)], timeout)
        self._taught.add(Keyspace.shard(call.keys[0]))
        return Relation(reply.decode())

    def _pipeline(
        self,
        script: _Script,
        calls: Sequence[Any],
        timeout: float,
        *,
        then: Sequence[Command] = (),
    ) -> list[Any]:
        """Run ``script`` once per call; a server that forgot the script is taught it again."""
        try:
            return self._connections.run([*map(script.evalsha, calls), *then], timeout)
        except ScriptForgotten:
            # A restart or SCRIPT FLUSH. None of the commands ran but those before the first error,
            # and every script may run twice. EVAL teaches and runs at once: no other client's flush
            # gets in between, and the login needs no right to SCRIPT.
            if script is _ACQUIRE:
                self._shards.forget()
                self._taught.clear()
            return self._connections.run([*map(script.eval, calls), *then], timeout)

    def _renewals(self, chunks: Sequence[Sequence[Lease]], timeout: float) -> list[list[Renewal]]:
        """Renew the leases of each chunk, all in one shard, and their claims with them."""
        replies = self._pipeline(RENEW, [renewal_call(chunk) for chunk in chunks], timeout)
        return [renewals_of(chunk, reply) for chunk, reply in zip(chunks, replies, strict=True)]

    def _check_shards(self, key: str, timeout: float) -> None:
        problem = self._shards.disagreement(key, timeout)
        if problem:
            raise StoreError(problem)

    def _write_shards_down(self, note: str, number: int, timeout: float) -> int:
        return int(self._run(_SHARDS, [note], [number], timeout))

    def _take_back(self, key: str, token: Token, timeout: float) -> None:
        try:
            self.release(Release(keys=(key,), token=token), timeout=timeout)
        except StoreError:
            pass  # the ttl frees it; what matters is that nobody runs under it


def _repeatable(operation: Callable[[], _T]) -> _T:
    """The reply to an idempotent operation.

    It is sent a second time if it got no reply on an idle connection: a NAT or load balancer may
    have dropped that connection while the server is reachable.

    Raises:
        StoreUnavailable, StoreError: As the operation.
    """
    try:
        return operation()
    except StoreUnavailable as exc:
        if not exc.was_idle:
            raise
        return operation()


def _granted(call: Acquire, reply: Any) -> Granted | None:
    if isinstance(reply, bytes):
        return Granted(key=call.slots[0], fence=int(reply) or None)
    word, *slot = reply
    return Granted(key=slot[0].decode(), fence=None) if word == b"granted" else None
