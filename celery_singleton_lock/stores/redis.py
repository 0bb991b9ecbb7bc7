"""Leases in one Redis (or Valkey): a key per lease, a Lua script per operation.

Promises
    Each operation is one EVALSHA, so it happens wholly or not at all. Nothing is retried in here
    but a script that the server had forgotten; a connection on which anything went wrong, were it
    an exception thrown into the thread between send and read, is closed and never used again: the
    next call would read the earlier call's reply.

Does not promise
    Exclusion over a failover: an acknowledged write may be lost with the old master.

Connections
    Not the broker's pool, whose size and retries belong to the broker: redis-py's own defaults
    blocked 59 s on a dead link, and turned a lost reply into "not acquired". Idle connections are
    kept per timeout, and per native thread under gevent, where a socket belongs to a thread's hub.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, parse_url
from redis.retry import Retry

from celery_singleton_lock.core import native
from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.lease import Lease, Record, Token
from celery_singleton_lock.core.store import (
    Acquire,
    Capabilities,
    Granted,
    MarkerState,
    Refused,
    Relation,
    Release,
    Released,
    Renewal,
)
from celery_singleton_lock.errors import SettingsError, StoreError, StoreUnavailable

__all__ = ["RedisStore", "connection_url"]

# One EVALSHA over N keys stalls the server about 1 us a key: 250 keys keep that under half a
# millisecond, and one pipeline carries all chunks.
_RENEW_CHUNK: Final = 250
_SCAN_COUNT: Final = 500
_OPERATOR_TIMEOUT: Final = 2.0


class _Script:
    __slots__ = ("sha", "source")

    def __init__(self, name: str) -> None:
        path = files("celery_singleton_lock.stores") / "lua" / f"{name}.lua"
        self.source = path.read_bytes()
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest()


_ACQUIRE, _RENEW, _RELEASE, _MARK, _FREE = map(
    _Script, ("acquire", "renew", "release", "mark", "free")
)


class RedisStore:
    """One Redis server, by URL.

    Raises:
        SettingsError: The URL or an option can't be read.
    """

    def __init__(
        self, url: str, *, fence_base: int = 0, options: Mapping[str, Any] | None = None
    ) -> None:
        try:
            # Not ConnectionPool.from_url: it adds options for a pool that we don't use, by which a
            # server may replace our timeouts (redis-py 7's maintenance notifications).
            self._options: dict[str, Any] = {**parse_url(connection_url(url)), **(options or {})}
            self._make = self._options.pop("connection_class", Connection)
            for name in ("socket_timeout", "socket_connect_timeout", "decode_responses"):
                self._options.pop(name, None)
            # Sends nothing, but refuses options that it doesn't know: better here than in a body.
            self._new_connection(_OPERATOR_TIMEOUT)
        except (ValueError, TypeError) as exc:
            raise SettingsError(f"the store's URL can't be read: {exc}") from exc
        self._fence_base = fence_base
        # Connections of redis-py, whose methods are only partly typed.
        self._idle: dict[tuple[int, float], deque[Any]] = {}

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(fence=True, name="redis")

    def acquire(self, call: Acquire, *, timeout: float) -> Granted | Refused:
        key, token = call.slots[0], call.token
        reply = self._run(
            _ACQUIRE,
            [Keyspace.fence(key), Keyspace.marker(key, token.attempt), *call.slots],
            [
                token.task,
                token.nesting,
                token.retries,
                token.nonce,
                _ms(call.ttl),
                call.sequence,
                call.holder.to_json(),
                self._fence_base,
            ],
            timeout,
        )
        word, *rest = reply
        if word == b"granted":
            return Granted(key=rest[0].decode(), fence=int(rest[1]) or None)
        record = _record(rest[0], rest[1], rest[2]) if rest else None
        return Refused(relation=Relation(word.decode()), record=record)

    def renew(self, leases: Sequence[Lease], *, timeout: float) -> list[Renewal]:
        calls = []
        for start in range(0, len(leases), _RENEW_CHUNK):
            chunk = leases[start : start + _RENEW_CHUNK]
            arguments = [item for lease in chunk for item in (str(lease.token), _ms(lease.ttl))]
            calls.append(([lease.key for lease in chunk], arguments))
        replies = self._pipeline(_RENEW, calls, timeout)
        return [_RENEWALS[number] for reply in replies for number in reply]

    def release(self, call: Release, *, timeout: float) -> Released:
        token = call.token
        reply = self._run(
            _RELEASE,
            [Keyspace.marker(call.keys[0], token.attempt), *call.keys],
            [
                token.attempt,
                token.nonce,
                str(call.become or ""),
                _ms(call.become_ttl),
                str(call.next_token or token),
                str(call.marker or ""),
                _ms(call.marker_ttl),
            ],
            timeout,
        )
        return Released(reply.decode())

    def mark(
        self,
        key: str,
        token: Token,
        state: MarkerState,
        sequence: int,
        ttl: float,
        *,
        timeout: float,
    ) -> None:
        marker = Keyspace.marker(key, token.attempt)
        self._run(_MARK, [marker], [str(state), sequence, token.nonce, _ms(ttl)], timeout)

    def inspect(self, key: str) -> Record | None:
        value, ttl = self._commands([("GET", key), ("PTTL", key)], _OPERATOR_TIMEOUT)
        return None if value is None else _record(key.encode(), value, ttl)

    def scan(self, pattern: str) -> Iterator[Record]:
        cursor = b"0"
        while True:
            # TYPE: somebody else's list under our prefix would fail the GET.
            command = ("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT, "TYPE", "string")
            ((cursor, keys),) = self._commands([command], _OPERATOR_TIMEOUT)
            if keys:
                reads = [item for key in keys for item in (("GET", key), ("PTTL", key))]
                replies = iter(self._commands(reads, _OPERATOR_TIMEOUT))
                for key, value, ttl in zip(keys, replies, replies, strict=False):
                    record = _record(key, value, ttl) if value is not None else None
                    if record is not None:
                        yield record
            if cursor == b"0":
                return

    def free(self, key: str, token: str | None) -> bool:
        keys = [key, Keyspace.fence(key)]
        return bool(self._run(_FREE, keys, [token or ""], _OPERATOR_TIMEOUT))

    def info(self, section: str) -> dict[str, str]:
        """One section of INFO; empty where the server denies it."""
        try:
            (text,) = self._commands([("INFO", section)], _OPERATOR_TIMEOUT)
        except StoreUnavailable:
            raise
        except StoreError as exc:
            if isinstance(exc.__cause__, redis.exceptions.AuthenticationError):
                raise  # it isn't INFO that is denied
            return {}
        lines = text.decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def close(self) -> None:
        while self._idle:
            for connection in self._idle.popitem()[1]:
                connection.disconnect()

    def _run(
        self, script: _Script, keys: Sequence[Any], arguments: Sequence[Any], timeout: float
    ) -> Any:
        return self._pipeline(script, [(keys, arguments)], timeout)[0]

    def _pipeline(
        self, script: _Script, calls: Sequence[tuple[Sequence[Any], Sequence[Any]]], timeout: float
    ) -> list[Any]:
        """Run ``script`` once per call; a server that forgot the script is taught it again."""
        commands = [("EVALSHA", script.sha, len(keys), *keys, *args) for keys, args in calls]
        try:
            return self._commands(commands, timeout)
        except _ScriptForgotten:
            # A restart or SCRIPT FLUSH. None of the commands ran but those before the first error,
            # and every script may run twice. EVAL teaches and runs at once: no other client's flush
            # gets in between, and the login needs no right to SCRIPT.
            commands = [("EVAL", script.source, *command[2:]) for command in commands]
            return self._commands(commands, timeout)

    def _commands(self, commands: Sequence[tuple[Any, ...]], timeout: float) -> list[Any]:
        """Send all commands at once, read all replies; the first error reply is raised."""
        # Of this thread alone where a socket belongs to its thread's hub; else of whoever needs it.
        thread = native.get_ident() if native.is_patched() else 0
        idle = self._idle.setdefault((thread, timeout), deque())
        try:
            connection = idle.pop()
        except IndexError:
            connection = self._new_connection(timeout)
        clean = False
        try:
            packed = connection.pack_commands(commands)
            connection.send_packed_command(packed, check_health=False)
            replies = [_read(connection) for _ in commands]
            clean = True
        except redis.exceptions.AuthenticationError as exc:
            raise StoreError(f"the store refuses the login: {exc}") from exc
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError) as exc:
            _disconnect_all(idle)
            raise StoreUnavailable(f"the store doesn't answer: {exc}") from exc
        except redis.exceptions.RedisError as exc:
            raise StoreError(f"the store refuses: {exc}") from exc
        finally:
            if clean:
                idle.append(connection)
            else:
                connection.disconnect()
        for reply in replies:
            if isinstance(reply, redis.exceptions.NoScriptError):
                raise _ScriptForgotten
            if isinstance(reply, redis.exceptions.ReadOnlyError):
                # A failover behind this address: the connections lead to the demoted master, and
                # would for ever. A fresh one may lead to the new.
                _disconnect_all(idle)
                raise StoreUnavailable(f"the store is a replica now: {reply}") from reply
            if isinstance(reply, redis.exceptions.ResponseError):
                raise _mapped(reply) from reply
        return replies

    def _new_connection(self, timeout: float) -> Any:
        return self._make(
            **self._options,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),
        )


def _disconnect_all(idle: deque[Any]) -> None:
    """What broke one connection broke the others: the next try shall meet a fresh one."""
    while idle:
        idle.pop().disconnect()


class _ScriptForgotten(Exception):
    """NOSCRIPT, seen by nobody outside."""


_RENEWALS: Final = {
    1: Renewal.RENEWED,
    0: Renewal.EXPIRED,
    -1: Renewal.REPLACED,
    2: Renewal.DYING,
}


def connection_url(url: str) -> str:
    """The form redis-py reads, of a URL in Celery's or kombu's form.

    ``redis+socket:///path?virtual_host=1`` is kombu's for a unix socket; the ssl module's names of
    ``ssl_cert_reqs`` are Celery's.
    """
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    if parts.scheme == "redis+socket":
        db = query.pop("virtual_host", "") or query.pop("db", "") or "0"
        query["db"] = db.strip("/")
        parts = parts._replace(scheme="unix", path=unquote(parts.path))
    if "ssl_cert_reqs" in query:
        query["ssl_cert_reqs"] = query["ssl_cert_reqs"].removeprefix("CERT_").lower()
    # Not geturl(): it drops the // of a unix:// URL, which has no host.
    suffix = f"?{urlencode(query)}" if query else ""
    return f"{parts.scheme}://{parts.netloc}{parts.path}{suffix}"


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _read(connection: Any) -> Any:
    try:
        return connection.read_response()
    except redis.exceptions.ConnectionError:
        raise  # a ResponseError's cousin in name only: the stream is broken
    except redis.exceptions.ResponseError as exc:
        return exc  # one reply among others; the connection is in step


def _record(key: bytes, value: bytes, ttl_ms: int) -> Record | None:
    try:
        return Record.parse(key.decode(), value.decode(), max(0, ttl_ms) / 1000)
    except ValueError:
        return None  # written by something else, or by a newer version


def _mapped(error: redis.exceptions.ResponseError) -> StoreError:
    # LOADING and READONLY pass by themselves; a wrong type or missing right doesn't. All are worth
    # another try later, none is a grant.
    return StoreError(f"the store refuses: {error}")
