"""The names of all keys in the store, and the shard that each is in.

Every key contains its shard in braces, the hash tag of a cluster: ``csl:{prefix:shard}:...``.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple
from urllib.parse import quote

#: The scope of the leases with which Beat processes elect a leader.
BEAT_SCOPE: Final = "celery.beat"
# A longer rendered key is replaced by its digest, so that an argument of 1 MiB makes neither a key
# of 1 MiB nor a record too long for the memory shared with the worker parent.
_MAX_RENDERED_CHARS: Final = 160
# A task's name and a scope have at most 200 characters each. Quoting may turn each character of
# these, and of a rendered key, into twelve.
_MAX_LOCK_CHARS: Final = 12 * 200 + 12 * _MAX_RENDERED_CHARS + 1000
_MAX_CLAIM_CHARS: Final = 2 * 12 * 200 + 12 * _MAX_RENDERED_CHARS + len("00000}:claim|%period|:")
# Ends the task's name in the claim of a period.
_PERIOD: Final = "%period|"
# Quoted in keys: white space ends a word in a shell and a field in a log line, and a line separator
# the line; characters of format are invisible, or reverse the text behind them; '#' separates a key
# from its slot number; '%' begins each quoted character; a store can't encode lone surrogates.
# These are Unicode's categories Cc, Cf, Cs, Zl, Zp and Zs, in full and not as `unicodedata` has
# them: a key must be the same for all versions of Python.
_CONTROL: Final = r"\x00-\x20\x7f-\xa0"
_WIDE: Final = (
    r"\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u1680\u180e\u2000-\u200f\u2028-\u202f"
    r"\u205f-\u206f\u3000\ud800-\udfff\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f"
)
_UNPRINTABLE: Final = f"[#%{_CONTROL}{_WIDE}]"
_UNPRINTABLE_ASCII: Final = f"[#%{_CONTROL}]"
# The part of a claim's name after the prefix. Only characters that `quote_scope` and `_printable`
# leave unquoted may occur. A shard is a number as Python writes it: no "00", no non-ASCII digits.
_CLAIM: Final = (
    r"(0|[1-9][0-9]{0,4})\}:claim(?:\|[A-Za-z0-9._@/+*,=~%-]+){2}"
    rf":[^#{_CONTROL}{_WIDE}]*"
)


class CallQueueNames(NamedTuple):
    """The names of the queue of the calls of one lock key, in the shard of that key.

    Attributes:
        queue: The calls in order.
        calls: Their states and messages.
        due: The keys of the shard whose queues are not empty, by the time of their next sweep.
    """

    queue: str
    calls: str
    due: str

    @classmethod
    def of(cls, key: str) -> CallQueueNames:
        """The names for the lock ``key``, or for a slot of it."""
        shard, _, name = Keyspace.lock_of(key).partition("}:")
        return cls(f"{shard}}}:queue|{name}", f"{shard}}}:calls|{name}", f"{shard}}}:due")

    @staticmethod
    def include(name: str) -> bool:
        """Whether ``name`` is one of these three of any key."""
        return "}:queue|" in name or "}:calls|" in name or name.endswith("}:due")

    @property
    def last_number(self) -> str:
        """The number of the last call that joined a queue in the shard."""
        return f"{Keyspace.shard(self.due)}:number"

    def ended(self, call_id: str) -> str:
        """The completion record of a call (``Token.call_id``) of this queue.

        Its next attempt may be in the queue of another key.
        """
        return f"{self.queue.replace('}:queue|', '}:ended|', 1)}|{call_id}"


@dataclass(frozen=True, slots=True)
class Keyspace:
    """The names in the store: ``<global prefix>csl:{<prefix>:<shard>}:<scope>:<suffix>``.

    The braces are a Redis Cluster hash tag: a lease, its completion record, claim, wait queue and
    the hash of the shard are on one node, so one script may access all of them. The names next to a
    lease contain a '|' before their first ':', or are one word without ':'. A quoted scope contains
    no '|', and a lock's name has a ':', so no scope can produce such a name.

    Attributes:
        global_prefix: Celery's ``global_keyprefix``. It contains no braces, which would be another
            hash tag, and no ``#`` or ``%``, which have a meaning in the suffix.
        start: The beginning of all names, up to the number of the shard.
    """

    prefix: str = "celery"
    shards: int = 1
    global_prefix: str = ""
    start: str = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Joined once: each call of a task computes a key.
        object.__setattr__(self, "start", f"{self.global_prefix}csl:{{{self.prefix}:")

    def lock(self, scope: str, suffix: str) -> str:
        """The key of the lease on ``suffix`` in ``scope``."""
        name = f"{quote_scope(scope)}:{_printable(suffix)}"
        shard = 0 if self.shards == 1 else zlib.crc32(name.encode()) % self.shards
        return f"{self.start}{shard}}}:{name}"

    def leader(self, name: str) -> str:
        """The key of the leader's lease in the beat election called ``name``."""
        # Quoted, so that it contains no '|', which separates it from an entry in `last_run`.
        return self.lock(BEAT_SCOPE, quote_scope(name))

    def all_shards(self) -> list[str]:
        """The prefixes of all names, of each shard; see :meth:`shard`."""
        return [f"{self.start}{number}}}" for number in range(self.shards)]

    def match_all(self) -> str:
        """A glob pattern for every key of this prefix, in every shard."""
        start = re.sub(r"([*?\[\]\\])", r"\\\1", self.start)
        return f"{start}*}}:*"

    def is_full(self, name: str) -> bool:
        """Whether ``name`` is a full name, of any ``prefix``, under this global prefix."""
        return name.startswith(f"{self.global_prefix}csl:{{")

    @staticmethod
    def slots(key: str, limit: int) -> tuple[str, ...]:
        """The keys of the ``limit`` leases that may be held on ``key`` at once.

        The first is ``key`` itself. A client that does not know the limit (``hold()`` in a script,
        a worker before a deploy) conflicts with one of the holders, so it never exceeds the limit.
        """
        return (key, *(f"{key}#{slot}" for slot in range(1, limit))) if limit > 1 else (key,)

    @staticmethod
    def lock_of(slot: str) -> str:
        """The key that a lease on ``slot`` is one on."""
        return slot.partition("#")[0]

    @staticmethod
    def is_slot_of(key: str, slot: str) -> bool:
        """Whether a lease on ``slot`` is one on ``key``."""
        # The first comparison is the cheap one: a process may hold thousands of leases.
        return slot.startswith(key) and Keyspace.lock_of(slot) == key

    @staticmethod
    def shard(key: str) -> str:
        """The prefix of all names in the shard of ``key``."""
        return key[: key.index("}") + 1]

    @staticmethod
    def scope_in(shard: str, scope: str) -> str:
        """What the names of all keys of ``scope`` in a shard begin with."""
        return f"{shard}:{quote_scope(scope)}"

    @staticmethod
    def scope_of(key: str) -> str:
        """The same, for the scope of the lock ``key``."""
        shard, _, name = key.partition("}:")
        return f"{shard}}}:{name.partition(':')[0]}"

    @staticmethod
    def shard_hash(key: str) -> str:
        """The hash of a shard: the last fence that one of its keys got, and what is paused."""
        return f"{Keyspace.shard(key)}:shard"

    @staticmethod
    def stays(key: str) -> bool:
        """Whether ``key`` never expires: of a shard, of all shards, or a queue of calls."""
        return key.endswith(("}:shard", "}:number", ":0}:shards")) or CallQueueNames.include(key)

    @staticmethod
    def last_run(leader: str, entry: str) -> str:
        """The last run of a beat's ``entry``, in the shard of the ``leader`` key."""
        shard, _, name = leader.partition("}:")
        return f"{shard}}}:last|{name}|{_printable(entry)}"

    @staticmethod
    def rate(key: str) -> str:
        """The time that the rate of ``key`` counts by (`core.rate`)."""
        shard, _, name = key.partition("}:")
        return f"{shard}}}:rate|{name}"

    @staticmethod
    def release_note(key: str) -> str:
        """The operator's note on the last release of ``key``, which may be a claim."""
        shard, _, name = key.partition("}:")
        return f"{shard}}}:freed|{name}"

    @staticmethod
    def completion(key: str, attempt: str) -> str:
        """The completion record of an attempt, which is a token without its nonce."""
        return f"{Keyspace.shard(key)}:done|{attempt}"

    @staticmethod
    def arguments(claim: str, call_id: str) -> str:
        """The newest arguments of the message of a call (``Token.call_id``)."""
        return f"{claim.replace('}:claim|', '}:args|', 1)}|{call_id}"

    @staticmethod
    def wait_queue(key: str) -> str:
        """The wait queue of ``key`` and all its slots; with ``!`` appended: its handoff tokens."""
        shard, _, name = key.partition("}:")
        return f"{shard}}}:line|{name.partition('#')[0]}"

    @staticmethod
    def newest_call(key: str) -> str:
        """The newest call of ``key`` under ``on_conflict="cancel_running"``."""
        shard, _, name = key.partition("}:")
        return f"{shard}}}:newest|{name}"

    @staticmethod
    def beside_acquire(key: str, attempt: str) -> list[str]:
        """The keys that an acquire accesses next to ``key``: shard's hash, completion record."""
        # One method for all keys, here and below: one call per key would cost half as much again.
        shard = key[: key.index("}") + 1]
        return [f"{shard}:shard", f"{shard}:done|{attempt}"]

    @staticmethod
    def beside_release(key: str, attempt: str) -> list[str]:
        """The keys that a release accesses next to ``key``: completion, wait queue, handoffs."""
        shard, _, name = key.partition("}:")
        wait_queue = f"{shard}}}:line|{name.partition('#')[0]}"
        return [f"{shard}}}:done|{attempt}", wait_queue, f"{wait_queue}!"]

    @staticmethod
    def claim(task: str, key: str) -> str:
        """The claim of the queued call of ``task`` on the lock ``key``, in the same shard.

        It contains the task's name: a call of another task that shares the key is no duplicate.
        """
        shard, _, name = key.partition("}:")
        return f"{shard}}}:claim|{quote_scope(task)}|{name}"

    @staticmethod
    def period(task: str, key: str) -> str:
        """The claim of ``unique="until_expired"``, which no worker changes.

        It has a name of its own, which no task's name yields ('%p' quotes nothing): workers and
        publishers of other versions and options free the claim of :meth:`claim`.
        """
        shard, _, name = key.partition("}:")
        return f"{shard}}}:claim|{quote_scope(task)}{_PERIOD}{name}"

    @staticmethod
    def is_period(name: str) -> bool:
        """Whether the claim ``name`` is one of :meth:`period`."""
        return _PERIOD in name

    def is_claim(self, name: Any) -> bool:
        """Whether ``name``, read from a message and not trusted, can be a claim of this prefix."""
        start = self.start
        if not isinstance(name, str) or not name.startswith(start):
            return False
        if len(name) > len(start) + _MAX_CLAIM_CHARS:
            return False
        match = _compiled(_CLAIM).fullmatch(name, len(start))
        return match is not None and int(match[1]) < self.shards

    def is_lock(self, name: Any) -> bool:
        """Whether ``name``, read from a message and not trusted, can be a lock of this prefix."""
        start = self.start
        if not isinstance(name, str) or not name.startswith(start) or len(name) > _MAX_LOCK_CHARS:
            return False
        number, _, suffix = name[len(start) :].partition("}:")
        is_shard = number.isascii() and number.isdigit() and int(number) < self.shards
        return is_shard and "|" not in suffix.partition(":")[0] and ":" in suffix

    @staticmethod
    def shard_count(key: str) -> str:
        """The key that stores the number of shards of ``key``'s prefix."""
        return f"{Keyspace.shard(key).rpartition(':')[0]}:0}}:shards"

    @staticmethod
    def same_shard(key: str, other: str) -> bool:
        """Whether one script may access ``key`` and ``other``, which may be any text."""
        return other.startswith(Keyspace.shard(key))


@lru_cache(maxsize=256)
def quote_scope(scope: str) -> str:
    """A scope without ``:`` and ``|``, so that the end of the scope in a key is unambiguous.

    Raises:
        TypeError: The scope is not a string.
    """
    if not isinstance(scope, str):  # `hold()` takes a scope from its caller
        raise TypeError(f"scope={scope!r}: give a name as str")
    return quote(scope, safe="._-@/+*,=~")


def stored_names(text: str) -> set[str]:
    """The stored names, without prefix and shard, that a user may mean by ``text``.

    Either ``text`` is a stored name, or it is a key before quoting, with or without a scope (which
    may end at any of its colons), and with or without a slot number.
    """
    names = {text}
    # A command line may contain any bytes. Not "replace": its "?" may be in another key.
    text = text.encode(errors="backslashreplace").decode()
    base, hash_sign, slot = text.rpartition("#")
    for key, end in ((text, ""), (base, hash_sign + slot)) if slot.isdecimal() else ((text, ""),):
        names.add(_printable(key) + end)
        for colon in re.finditer(":", key):
            scope, suffix = key[: colon.start()], key[colon.end() :]
            # The third form is that of a claim: "claim|<task>|<scope>".
            scopes = {scope, quote_scope(scope), "|".join(map(quote_scope, scope.split("|", 2)))}
            suffixes = {suffix, _printable(suffix)}
            names |= {f"{one}:{other}{end}" for one in scopes for other in suffixes}
    return names


def digest(text: str) -> str:
    """A short name for ``text`` that no other text has (BLAKE2b, 128 bits)."""
    name: str = _blake2b()(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
    return name


# Each process that declares tasks imports this module, but most of them compute no key. Therefore
# the hash is imported, and the patterns are compiled, at the first use. Cached: an import statement
# for each key would cost as much as the hash.
@cache
def _blake2b() -> Callable[..., Any]:
    from hashlib import blake2b

    return blake2b


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _printable(text: str) -> str:
    if len(text) > _MAX_RENDERED_CHARS:
        return f"~{digest(text)}"
    if not text.isascii():
        return _compiled(_UNPRINTABLE).sub(_quoted, text)
    if text.isalnum():
        return text  # usually a digest
    return _compiled(_UNPRINTABLE_ASCII).sub(_quoted, text)


def _quoted(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode(errors="surrogatepass"))
