"""The Lua scripts, the commands that run them, and the packing of commands.

Unused trailing KEYS and ARGV are omitted: every argument costs packing here and parsing in the
server, most tasks have no claim, and most releases delete the key. Arguments are text, because
packing text is faster than packing numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from operator import attrgetter
from typing import Any, Final

from ...core.keyspace import CallQueueNames, Keyspace
from ...core.lease import Kind, Lease, LossReason, Token
from ...core.rate import Rate
from ...core.store_requests import (
    RENEWED,
    Acquire,
    ClaimChange,
    QueuedAcquire,
    QueuedRelease,
    Release,
    Renewal,
    rate_of,
)

#: The words of a command.
Command = Sequence[Any]


class Script:
    """A script: the files ``lua/<name>.lua``, concatenated; ``<name>()``: as a Lua function."""

    __slots__ = ("grants", "rated", "sha", "source")

    #: All scripts, by digest.
    known: Final[dict[str, Script]] = {}

    def __init__(self, *names: str, grants: bool = False, rated: Script | None = None) -> None:
        #: Whether it grants leases, and the same script for a key that has a rate.
        self.grants, self.rated = grants, rated
        folder = files("celery_singleton_lock.stores.redis") / "lua"
        self.source = b"".join(_source(folder, name) for name in names)
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest()
        Script.known[self.sha] = self

    def command(self, keys: Sequence[str], arguments: Sequence[Any] = ()) -> Command:
        """The command that runs the script by its digest, if the server knows the script.

        Args:
            keys: KEYS. All are in one shard.
            arguments: ARGV.
        """
        return ("EVALSHA", self.sha, f"{len(keys)}", *keys, *arguments)


def _source(folder: Traversable, name: str) -> bytes:
    file = name.removesuffix("()")
    source = (folder / f"{file}.lua").read_bytes()
    return source if file == name else b"local function %b()\n%bend\n" % (file.encode(), source)


def with_source(command: Command) -> Command:
    """An EVALSHA command as the EVAL that loads the script into the server and runs it.

    Any other command is returned unchanged.
    """
    if command[0] != "EVALSHA":
        return command
    return ("EVAL", Script.known[command[1]].source, *command[2:])


def _granting(*names: str) -> Script:
    """A script that grants leases."""
    parts = ("claims", "wait_queue", "shard_pauses")
    rated = Script(*parts, "rate", *names, grants=True)
    return Script(*parts, "no_rate", *names, grants=True, rated=rated)


ACQUIRE: Final = _granting("acquire")
ACQUIRE_ARGUMENTS: Final = _granting("acquire()", "arguments")
QUEUE_ACQUIRE: Final = _granting("call_queue", "acquire()", "queue_acquire")
RELEASE: Final = Script("claims", "wait_queue", "release")
RENEW: Final = Script("renew")
DUE: Final = Script("due")
PROLONG: Final = Script("claims", "prolong")
MARK: Final = Script("claims", "mark")
TAKE_CLAIM: Final = Script("take_claim")
REPLACE: Final = Script("claims", "replace")
CHANGE_CLAIM: Final = Script("claims", "change_claim")
AUTHORIZE_RUN: Final = Script("authorize_run")
TRACE: Final = Script("trace")
NEWEST_CALL: Final = Script("newest_call")
FREE: Final = Script("free")
QUEUE_JOIN: Final = Script("claims", "call_queue", "queue_join")
QUEUE_RELEASE: Final = Script("claims", "wait_queue", "call_queue", "release()", "queue_release")
QUEUE_SWEEP: Final = Script("shard_pauses", "call_queue", "queue_sweep")
QUEUE_REMOVE: Final = Script("call_queue", "queue_remove")
QUEUE_DUE: Final = Script("queue_due")
QUEUE_DEFER: Final = Script("call_queue", "queue_defer")
QUEUE_POSITION: Final = Script("queue_position")
QUEUE_KEYS: Final = Script("queue_keys")
QUEUE_DEPTHS: Final = Script("queue_depths")
QUEUE_CALLS: Final = Script("call_queue", "queue_calls")
SHARDS: Final = Script("shards")
PAUSE: Final = Script("shard_pauses", "pause")
RESUME: Final = Script("shard_pauses", "resume")
PAUSES: Final = Script("shard_pauses", "pauses_of_shard")

# Keys per EVALSHA. One EVALSHA blocks the server for some 2.3 us per key: 64 keys take about
# 0.15 ms, and up to 0.6 ms with claims (median on a busy machine). All chunks are in one pipeline.
_CHUNK: Final = 64
#: A number that no queue reaches.
ANY_NUMBER: Final = "1e15"
_CLAIM_KEY: Final = attrgetter("claim_key")
_RENEWALS: Final = {0: LossReason.GONE, -1: LossReason.REPLACED, 2: LossReason.DYING}


def acquire_command(request: Acquire, fence_base: str) -> Command:
    """The run of ``acquire.lua``. Fences are above ``fence_base``."""
    token, claim, wait_ttl = request.token, request.claim, request.wait_ttl
    key, attempt = request.slots[0], token.attempt
    words = ["EVALSHA", ACQUIRE.sha, "", *Keyspace.beside_acquire(key, attempt), *request.slots]
    optional: Sequence[str] = ()
    if claim is not None:
        words.append(claim.key)
        if claim.arguments:
            words[1] = ACQUIRE_ARGUMENTS.sha
            words.append(claim.arguments)
        flags = (request.frees_claim, request.refused_if_claimed, request.keeps_claim)
        optional = [phase_of(claim), *("1" if flag else "0" for flag in flags)]
    if wait_ttl is not None:
        words.append(Keyspace.wait_queue(key))
        waits = milliseconds(wait_ttl) if wait_ttl else "0"
        optional = [*(optional or ("-", "0", "0", "0")), waits, request.handoff]
    words[2] = f"{len(words) - 3}"
    words += (
        token.text,
        milliseconds(request.ttl),
        f"{request.sequence}",
        request.holder.to_json(token.task_id),
        fence_base,
        *optional,
    )
    return _further_acquire(words, request) if request.is_extended else words


def _further_acquire(words: Command, request: Acquire) -> Command:
    """The command ``words`` for the acquire of a call with a place, or of a key with a rate."""
    if isinstance(request, QueuedAcquire):
        words = _queued_acquire(words, request)
    rate = rate_of(request)
    return words if rate is None else _rated(words, request.slots[0], rate)


def _rated(words: Command, key: str, rate: Rate) -> Command:
    script, interval = Script.known[words[1]].rated, f"{math.ceil(rate.interval * 1e6 - 1e-3)}"
    assert script is not None, "a rate is counted by what grants leases"
    return _with_more(words, script, [Keyspace.rate(key)], [interval, f"{rate.burst}"])


def _queued_acquire(words: Command, request: QueuedAcquire) -> Command:
    names = CallQueueNames.of(request.slots[0])
    keys = [*names, names.last_number, names.ended(request.token.call_id)]
    most = ANY_NUMBER if request.most_begins is None else f"{request.most_begins}"
    limit = len(request.slots) if request.limit is None else request.limit
    asked = f" {' '.join(request.asked)} "
    arguments = ["1" if request.late else "0", most, asked, f"{limit}"]
    return _with_more(words, QUEUE_ACQUIRE, keys, arguments)


def _with_more(
    words: Sequence[Any], script: Script, keys: Sequence[str], arguments: Sequence[str]
) -> Command:
    """The command ``words``, as the ``script`` that wraps its own, with more keys and arguments."""
    count = int(words[2])
    own, rest = words[3 : 3 + count], words[3 + count :]
    return script.command([*own, *keys], [*rest, *arguments])


def release_command(request: Release) -> Command:
    """The run of ``release.lua``."""
    token, claim, become = request.token, request.claim, request.become
    keys, attempt = request.keys, token.attempt
    # The wait queue is always declared: only the script finds out whether a client waits, and some
    # servers refuse access to undeclared keys.
    words = ["EVALSHA", RELEASE.sha, "", *Keyspace.beside_release(keys[0], attempt), *keys]
    if claim is not None:
        words.append(claim.key)
        if claim.arguments:
            words.append(claim.arguments)
    words[2] = f"{len(words) - 3}"
    words += (attempt, token.nonce)
    if not (request.completion or become or claim):
        return words
    words += (str(request.completion or ""), milliseconds(request.completion_ttl))
    if become or claim:
        next_token = str(request.next_token or token)
        words += (str(become or ""), milliseconds(request.become_ttl), next_token)
    if claim is not None:
        words += (phase_of(claim), milliseconds(claim.ttl))
        if claim.arguments:
            words.append("1")
    return words


def queued_release_command(request: QueuedRelease) -> Command:
    """The run of ``queue_release.lua``."""
    names = CallQueueNames.of(request.keys[0])
    ttl = "" if request.ended_ttl is None else milliseconds(request.ended_ttl)
    begun = "1" if request.has_begun else "0"
    may_return_from = first_open_of(request.token, request.may_return_from)
    arguments = [ttl, f"{request.due_in * 1000:.0f}", begun, may_return_from]
    keys = [*names, names.ended(request.token.call_id)]
    return _with_more(release_command(request), QUEUE_RELEASE, keys, arguments)


def first_open_of(token: Token, retries: int | None) -> str:
    """The first attempt that may still come, as the scripts take it."""
    return "-" if retries is None else f"{token.nesting}.{retries}"


def chunks_of(leases: Sequence[Lease]) -> list[Sequence[Lease]]:
    """``leases`` in order, in chunks for one run of ``renew.lua`` each."""
    return [leases[start : start + _CHUNK] for start in range(0, len(leases), _CHUNK)]


def renewal_command(chunk: Sequence[Lease], *, claims: bool = True) -> Command:
    """The run of ``renew.lua`` for ``chunk``, without claims in another shard than their lease."""
    begin = f"{Kind.LEASE} "
    keys = [lease.key for lease in chunk]
    values = [f"{begin}{lease.token.text} " for lease in chunk]
    claimed: list[Lease] = []
    if claims and any(map(_CLAIM_KEY, chunk)):
        for number, lease in enumerate(chunk, start=1):
            if lease.claim_key and Keyspace.same_shard(lease.key, lease.claim_key):
                claimed.append(lease)
                keys.append(lease.claim_key)
                values.append(f"{number}")
    ttls = {lease.ttl for lease in chunk}
    if len(ttls) == 1:
        return RENEW.command(keys, [f"{len(chunk)}", milliseconds(*ttls), *values])
    each = [milliseconds(lease.ttl) for lease in (*chunk, *claimed)]
    return RENEW.command(keys, [f"{len(chunk)}", "", *values, *each])


def renewals_of(count: int, reply: Sequence[int]) -> list[Renewal]:
    """The reply of ``renew.lua`` for ``count`` leases, converted to one reply per lease."""
    found: list[Renewal] = [RENEWED] * count
    for number, reason in zip(reply[::2], reply[1::2], strict=True):
        found[number - 1] = _RENEWALS[reason]
    return found


def keys_of(change: ClaimChange) -> list[str]:
    """The keys that a change of a claim outside an acquire writes to."""
    return [change.key, change.arguments] if change.arguments else [change.key]


def phase_of(claim: ClaimChange) -> str:
    """The argument for a claim's new phase; empty: the claim is freed."""
    return str(claim.phase or "")


@lru_cache(maxsize=64)
def milliseconds(seconds: float) -> str:
    """A ttl in ms as an argument; at least 1, because the server refuses 0."""
    return str(max(1, round(seconds * 1000)))


# The RESP length lines, precomputed: formatting the number would double the cost of a word.
_length_line: Final = tuple(f"${length}" for length in range(512)).__getitem__


def pack(words: Sequence[Any]) -> bytes:
    """The bytes of a command in RESP.

    With redis-py's packing a task adds 5 to 10 % more: 13 us to 260 us in a solo worker, 11 us to
    173 us in a prefork worker, there 18 us to 185 us of its child's processor time. It executes
    4903 instructions of the interpreter instead of 3139. (Medians of 400 and 700 rounds of 40 tasks
    with each packing, alternating in one worker; Python 3.11, redis-py 8.1.0 without hiredis.
    redis-py 5.2.1 differs by less than 1 us.)

    Args:
        words: Text, bytes or numbers.
    """
    try:
        # Most words are short ASCII text. Joining them as text avoids a call per word and halves
        # the cost.
        parts = [*words, *words]
        parts[::2] = map(_length_line, map(len, words))
        parts[1::2] = words
        text = "\r\n".join(parts)
        if text.isascii():
            return f"*{len(words)}\r\n{text}\r\n".encode()
    except (TypeError, IndexError):
        pass  # a word is a number, bytes or a long text
    return b"*%d\r\n" % len(words) + b"".join(map(_packed_word, words))


def _packed_word(value: Any) -> bytes:
    """One word of a command: text, bytes or a number."""
    data = value if isinstance(value, bytes) else str(value).encode()
    return b"$%d\r\n%b\r\n" % (len(data), data)
