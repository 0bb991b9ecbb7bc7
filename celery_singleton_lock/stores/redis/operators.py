"""What people see and do in Redis: keys are found with SCAN, and read one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from ...core.keyspace import CallQueueNames, Keyspace
from ...core.lease import OperatorRelease, Record
from ...core.store import RELEASE_NOTE_TTL, Operators
from ...errors import StoreError, StoreUnavailable
from ..eviction import risk
from . import scripts
from .connection import OPERATOR_TIMEOUT
from .replies import record_of
from .runner import ScriptRunner
from .server_errors import is_denied, is_wrong_type

_NO_SCAN: Final = (
    "keys are found by short names, task ids and patterns with SCAN, which the store's login may "
    "not use: give the full key (csl:{...}:...), or grant +scan"
)
# Places in the server's table of keys per SCAN; half of them or more are occupied, unless many keys
# were deleted. Each SCAN blocks the server's other clients for some 0.08 ms.
_SCAN_COUNT: Final = 100
# Seconds of pause after a SCAN that found no key of ours, so that a search through the keys of
# other programs takes a tenth of the server's time.
_PAUSE: Final = 9 * 0.08e-3
# Reads in one pipeline. The server may serve other clients between them.
_READ_AT_ONCE: Final = 500


class RedisOperators(Operators):
    """See `Operators`."""

    def __init__(self, runner: ScriptRunner) -> None:
        self._runner = runner

    def free(self, key: str, token: str | None, by: OperatorRelease | None = None) -> bool:
        keys, arguments = [key, Keyspace.shard_hash(key)], [token or ""]
        if by is not None:
            keys.append(Keyspace.release_note(key))
            arguments += [by.to_json(), scripts.milliseconds(RELEASE_NOTE_TTL)]
        command = scripts.FREE.command(keys, arguments)
        return bool(self._runner.run(command, OPERATOR_TIMEOUT))

    def scan(self, pattern: str) -> Iterator[Record]:
        return self.survey(pattern, lambda key, reason: None)

    def survey(
        self,
        pattern: str,
        report: Callable[[str, str], None],
        texts: Callable[[str, str], None] | None = None,
    ) -> Iterator[Record]:
        """See `Operators.survey`. Each key is scanned and read once."""
        # All names are read first. The names of a million keys fit into memory; their values may
        # not.
        names = []
        for key in self._names(pattern):
            name = key.decode(errors="replace")
            if not (Keyspace.stays(name) and _is_no_string(name)):
                names.append(key)
            elif texts is not None:
                texts(name, "")
        for start in range(0, len(names), _READ_AT_ONCE):
            self._report(f"read {start:,} of {len(names):,} keys of ours")
            for key, value, ttl_ms in self._strings(names[start : start + _READ_AT_ONCE], report):
                record = record_of(key, value, ttl_ms)
                if record is not None:
                    yield record
                elif texts is not None:
                    texts(key.decode(errors="replace"), value.decode(errors="replace"))

    def _strings(
        self, keys: Sequence[bytes], report: Callable[[str, str], None]
    ) -> Iterator[tuple[bytes, bytes, int]]:
        """Each key of a string, its value and its ttl in ms; a problem with a key is reported."""
        found = [*self._read_each("GET", keys)]
        others = [key for key, value, _ in found if isinstance(value, Exception)]
        kinds = {key: kind for key, kind, _ in self._read_each("TYPE", others)}
        for key, value, ttl_ms in found:
            if key in kinds or ttl_ms == -1:
                name = key.decode(errors="replace")
                if what := _problem_with(name, kinds.get(key, b"string"), ttl_ms):
                    report(name, what)
            if key not in kinds and value is not None:
                yield key, value, ttl_ms

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

    def info(self, section: str) -> dict[str, str]:
        """One section of INFO, of the server that endangers leases most by evicting keys.

        Empty if the servers deny INFO. A server that does not answer counts only if none does.
        """
        found: list[dict[str, str]] = []
        error: StoreUnavailable | None = None
        for server in self._runner.servers():
            try:
                found.append(server.info(section))
            except StoreUnavailable as exc:
                error = exc
        if error is not None and not found:
            raise error
        return max(found, key=risk)

    def problems(self, key: str) -> list[str]:
        problem = self._runner.problem_with_shards(key, OPERATOR_TIMEOUT)
        return [problem] if problem else []

    def _names(self, pattern: str) -> list[bytes]:
        """The keys of all servers that match ``pattern``, sorted."""
        found: set[bytes] = set()  # SCAN may return a key twice
        pages = 0
        for server in self._runner.servers():
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
        """See `Operators.size`."""
        try:
            counts = [
                server.run([("DBSIZE",)], OPERATOR_TIMEOUT) for server in self._runner.servers()
            ]
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
        replies = (
            self._runner.connections.run(reads, OPERATOR_TIMEOUT, check=False) if reads else []
        )
        self._runner.connections.checked([reply for reply in replies if not is_wrong_type(reply)])
        each = iter(replies)
        return zip(keys, each, each, strict=False)

    def release_notes(self, keys: Sequence[str], *, timeout: float) -> list[str | None]:
        return self._runner.texts(keys, timeout)


def _problem_with(name: str, kind: bytes, ttl_ms: int) -> str:
    """The problem with a key; empty: none."""
    if kind not in (b"string", b"none") and not _is_no_string(name):
        return f"is a {kind.decode()}, not a string"
    return "has no expiry" if ttl_ms == -1 and not Keyspace.stays(name) else ""


def _is_no_string(name: str) -> bool:
    """Whether ``name`` is a queue of clients or calls, handoff tokens, or a shard's hash."""
    return name.endswith("}:shard") or "}:line|" in name or CallQueueNames.include(name)
