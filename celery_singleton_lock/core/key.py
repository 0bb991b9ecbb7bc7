"""Lock keys: from the arguments of a call to the one name it has in the store.

The same call written five ways (positional, keyword, default left out, dict order, tuple for list)
must be one key, on the publisher as on the worker: arguments are bound to the signature, defaults
applied, and what a message would make of them is what counts.
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
import string
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from celery_singleton_lock.errors import LockKeyError

if TYPE_CHECKING:
    import hashlib

__all__ = [
    "PER_TASK",
    "SCALARS",
    "KeyMaker",
    "KeySpec",
    "Keyspace",
    "PerTask",
    "digest",
    "stored_names",
]


# json.dumps(sort_keys=True) makes a new encoder each time.
_in_order: Final = json.JSONEncoder(sort_keys=True).encode


def _float_text(value: float) -> str:
    text = float.__repr__(value)
    return _ODD_FLOATS.get(text, text)


_ODD_FLOATS: Final = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
# What the encoder writes of a single value, at a fifth of the cost: it makes itself anew for each.
_TEXT_OF: Final[Mapping[type, Callable[[Any], str]]] = {
    str: json.encoder.encode_basestring_ascii,
    int: int.__repr__,
    float: _float_text,
    bool: {True: "true", False: "false"}.__getitem__,
    type(None): {None: "null"}.__getitem__,
}
#: What JSON gives back as it is, once it has taken it.
SCALARS: Final = frozenset(_TEXT_OF)


class PerTask:
    """The type of :data:`PER_TASK`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "PER_TASK"


#: ``key=PER_TASK``: one key for the task, whatever its arguments.
PER_TASK: Final = PerTask()

#: What a policy's ``key`` may be; ``None`` stands for all bound arguments.
KeySpec = str | tuple[str, ...] | PerTask | Callable[..., "str | None"] | None

# A rendered key longer than this is replaced by its digest, so that a 1 MiB argument makes neither
# a 1 MiB key in the store nor a record too long for the memory shared with the worker parent.
_MAX_RENDERED_CHARS: Final = 160
# A task's name and a scope of 200 characters each, of which one may be twelve when quoted, and a
# rendered key, of which one may be three.
_MAX_CLAIM_CHARS: Final = 2 * 12 * 200 + 3 * _MAX_RENDERED_CHARS + len("claim||:")
# Blanks end a word in a shell and a field in a log line, so they don't stand in keys. '#' separates
# a key from the number of its slot, and '%' is what they are all written with.
# Lone surrogates are no text: the store would fail at them.
_UNPRINTABLE: Final = r"[\x00-\x20#%\x7f-\xa0\ud800-\udfff]"
# What stands behind a claim's shard, its letters as `quote_scope` and `_printable` leave them.
_CLAIM: Final = r"claim(?:\|[A-Za-z0-9._@/+*,=~%-]+){2}:[^\x00-\x20#\x7f-\xa0\ud800-\udfff]*"


@dataclass(frozen=True, slots=True)
class Keyspace:
    """The names in the store: ``csl:{<prefix>:<shard>}:<scope>:<rest>``.

    The braces are a Redis Cluster hash tag: a lease, its fence counter and its marker live on one
    node, so that one script may touch all three.
    """

    prefix: str = "celery"
    shards: int = 1

    def lock(self, scope: str, rest: str) -> str:
        """The key of the lease on ``rest`` in ``scope``."""
        name = f"{quote_scope(scope)}:{_printable(rest)}"
        shard = 0 if self.shards == 1 else zlib.crc32(name.encode()) % self.shards
        return f"csl:{{{self.prefix}:{shard}}}:{name}"

    def leader(self, name: str) -> str:
        """The key of the lease of whoever leads the beats called ``name``."""
        # No '|' in it, so that no name of beats runs into one of an entry below.
        return self.lock("celery.beat", quote_scope(name))

    def match_all(self) -> str:
        """A glob pattern for every key of this prefix, in every shard."""
        return f"csl:{{{_glob_quote(self.prefix)}:*}}:*"

    @staticmethod
    def slots(key: str, limit: int) -> tuple[str, ...]:
        """The keys of the ``limit`` leases that may be held on ``key`` at once.

        The first is ``key`` itself: who doesn't know the limit (a ``hold()`` in a script, a worker
        of the deploy before) meets one of the holders, and never runs beside all of them.
        """
        return (key, *(f"{key}#{slot}" for slot in range(1, limit))) if limit > 1 else (key,)

    @staticmethod
    def is_slot_of(key: str, slot: str) -> bool:
        """Whether a lease on ``slot`` is one on ``key``."""
        # The first is for those who hold thousands of leases, and ask this of each.
        return slot.startswith(key) and slot.partition("#")[0] == key

    @staticmethod
    def fence(key: str) -> str:
        """The fence counter that ``key`` shares with its shard."""
        return f"{_shard_of(key)}:fence"

    @staticmethod
    def stays(key: str) -> bool:
        """Whether ``key`` is one that stays for ever: a fence counter, or the number of shards."""
        return key.endswith(("}:fence", ":0}:shards"))

    @staticmethod
    def last_run(leader: str, entry: str) -> str:
        """Where the last run of ``entry`` is, in the shard of the beats' ``leader`` key."""
        # As with markers: no scope can forge it, and no record is at it, so `ls` doesn't list it.
        shard, _, name = leader.partition("}:")
        return f"{shard}}}:last|{name}|{_printable(entry)}"

    @staticmethod
    def marker(key: str, attempt: str) -> str:
        """The marker of one attempt of a task (``attempt`` is a token without its nonce)."""
        # A quoted scope holds no '|', so no scope can forge this name.
        return f"{_shard_of(key)}:done|{attempt}"

    @staticmethod
    def wait_queue(key: str) -> str:
        """Those who wait for ``key``, or for any of its slots."""
        shard = _shard_of(key)  # as with markers: no scope can forge the name
        return f"{shard}:line|{key.partition('#')[0].removeprefix(shard + ':')}"

    @staticmethod
    def beside_acquire(key: str, attempt: str) -> list[str]:
        """The keys beside ``key`` that an acquire touches: fence counter, marker."""
        # All in one function, here and below: two calls per task would cost half as much again.
        shard = key[: key.index("}") + 1]
        return [f"{shard}:fence", f"{shard}:done|{attempt}"]

    @staticmethod
    def beside_release(key: str, attempt: str) -> list[str]:
        """The keys beside ``key`` that a release touches: marker, line, the list of its calls."""
        shard, _, name = key.partition("}:")
        line = f"{shard}}}:line|{name.partition('#')[0]}"
        return [f"{shard}}}:done|{attempt}", line, f"{line}!"]

    @staticmethod
    def is_wait_queue(name: str) -> bool:
        """Whether ``name`` is a line, or what calls its first; neither is a text."""
        return "}:line|" in name

    @staticmethod
    def claim(task: str, key: str) -> str:
        """The claim of the queued call of ``task`` on the lock ``key``, in the same shard.

        The task's name is part of it: another task that shares the key does other work, and its
        call is no duplicate.
        """
        shard, _, name = key.partition("}:")
        return f"{shard}}}:claim|{quote_scope(task)}|{name}"

    def is_claim(self, name: Any) -> bool:
        """Whether ``name`` (of a message, so of anybody) can be a claim of this prefix."""
        start = f"csl:{{{self.prefix}:"
        if not isinstance(name, str) or not name.startswith(start):
            return False
        shard, _, rest = name.removeprefix(start).partition("}:")
        if not (shard.isdecimal() and len(shard) < 6 and int(shard) < self.shards):
            return False
        if shard != str(int(shard)):
            return False  # "00", and digits of other scripts: numbers, too, but of no shard
        return len(rest) <= _MAX_CLAIM_CHARS and _compiled(_CLAIM).fullmatch(rest) is not None

    @staticmethod
    def shard(key: str) -> str:
        """What the names of ``key``'s shard begin with; on a Redis Cluster they are one slot's."""
        return _shard_of(key)

    @staticmethod
    def shards_note(key: str) -> str:
        """Where the number of shards of ``key``'s prefix is written down in the store."""
        return f"{_shard_of(key).rpartition(':')[0]}:0}}:shards"

    @staticmethod
    def same_shard(key: str, other: str) -> bool:
        """Whether one script may touch both: ``key``, and ``other``, which may be of any form."""
        return other.startswith(_shard_of(key))


@lru_cache(maxsize=256)
def quote_scope(scope: str) -> str:
    """A scope in which ``:`` separates nothing, so that scope and key can't run into each other.

    Raises:
        TypeError: It is no text.
    """
    if not isinstance(scope, str):  # of hold(), of which it is asked for
        raise TypeError(f"scope={scope!r}: give a name as str")
    return quote(scope, safe="._-@/+*,=~")


def stored_names(text: str) -> set[str]:
    """The names after the shard that a user may mean by ``text``.

    Either ``text`` is a stored name, or it is a key before quoting, with or without a scope (which
    may end at any of its colons), and with or without a slot number.
    """
    names = {text}
    text = text.encode(errors="replace").decode()  # from a command line: any bytes
    base, hash_sign, slot = text.rpartition("#")
    for key, end in ((text, ""), (base, hash_sign + slot)) if slot.isdecimal() else ((text, ""),):
        names.add(_printable(key) + end)
        for colon in re.finditer(":", key):
            scope, rest = key[: colon.start()], key[colon.end() :]
            names |= {
                f"{one}:{other}{end}"
                # Also the name of a claim, which begins with "claim|" and its task.
                for one in (
                    scope,
                    quote_scope(scope),
                    "|".join(map(quote_scope, scope.split("|", 2))),
                )
                for other in (rest, _printable(rest))
            }
    return names


def _shard_of(key: str) -> str:
    return key[: key.index("}") + 1]


def _glob_quote(text: str) -> str:
    return re.sub(r"([*?\[\]\\])", r"\\\1", text)


def digest(text: str) -> str:
    """A short name for ``text`` that no other text has (BLAKE2b, 128 bits)."""
    return _blake2b()(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


# Who declares tasks imports this module, and most of those processes make no key: neither a pattern
# nor a hash is prepared before one is needed.


@cache
def _blake2b() -> type[hashlib.blake2b]:
    from hashlib import blake2b

    return blake2b


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _printable(text: str) -> str:
    if len(text) > _MAX_RENDERED_CHARS:
        return f"~{digest(text)}"
    return _compiled(_UNPRINTABLE).sub(lambda match: f"%{ord(match[0]):02X}", text)


@dataclass(frozen=True, slots=True)
class _PlainSignature:
    """Of a function without ``*``, ``/`` or ``**``: inspect's own binding costs ten times as much.

    Attributes:
        positional: The names, in order.
        names: All of them.
        defaults: Of those that have one.
    """

    positional: tuple[str, ...]
    names: frozenset[str]
    defaults: Mapping[str, Any]

    @classmethod
    def of(cls, signature: inspect.Signature) -> _PlainSignature | None:
        parameters = signature.parameters.values()
        if any(p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters):
            return None
        return cls(
            tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD),
            frozenset(signature.parameters),
            {p.name: p.default for p in parameters if p.default is not p.empty},
        )

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The arguments by name; None if they don't fit, which inspect can explain."""
        if len(args) > len(self.positional):
            return None
        given = dict(zip(self.positional, args, strict=False))
        if kwargs:
            if not (kwargs.keys() <= self.names and given.keys().isdisjoint(kwargs)):
                return None
            given |= kwargs
        if len(given) < len(self.names):
            given = {**self.defaults, **given}
        return given if len(given) == len(self.names) else None


class KeyMaker:
    """Computes the rest of a lock key from the arguments of a call.

    Args:
        spec: The policy's ``key``.
        signature: Of the task's body, without a bound ``self``.
        dumps: The serialiser's JSON encoder: what a message makes of an argument.

    Raises:
        TypeError: ``spec`` is of no known kind.
        ValueError: The template has no placeholder, or names an argument that does not exist.
    """

    __slots__ = (
        *("_collector", "_dumps", "_plain", "_rest", "_shadowed", "_signature"),
        "spec",
    )

    def __init__(
        self, spec: KeySpec, signature: inspect.Signature, dumps: Callable[[Any], str]
    ) -> None:
        self.spec = spec
        self._signature = signature
        self._plain = _PlainSignature.of(signature)
        parameters = signature.parameters.values()
        # The name of the ``**`` parameter.
        self._collector = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
        # Names that it may collect although a parameter has them too.
        self._shadowed = {p.name for p in parameters if p.kind is p.POSITIONAL_ONLY}
        self._dumps = dumps
        self._rest = self._compile(spec)

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        """The key of this call, or None when a callable key says "no lock for this one".

        Raises:
            TypeError: The arguments don't fit the task's signature.
            LockKeyError: An argument has no JSON form, or the template or callable failed.
        """
        return self._rest(args, kwargs)

    def _compile(self, spec: KeySpec) -> Callable[[Sequence[Any], Mapping[str, Any]], str | None]:
        if spec is None:
            if self._collector is not None:
                return self._digest_of_all
            return lambda args, kwargs: self._digest_of(self.bind(args, kwargs))
        if isinstance(spec, PerTask):
            return lambda args, kwargs: "*"
        if isinstance(spec, str):
            template = _Template(spec, self._signature)
            return lambda args, kwargs: template.render(self.bind(args, kwargs))
        if isinstance(spec, tuple):
            return self._compile_names(spec)
        if callable(spec):
            return lambda args, kwargs: _call(spec, args, kwargs)
        raise TypeError(
            f"key={spec!r} is a {type(spec).__name__}; write a template such as "
            '"account:{account_id}", a tuple of argument names, PER_TASK or a callable'
        )

    def _compile_names(
        self, names: tuple[str, ...]
    ) -> Callable[[Sequence[Any], Mapping[str, Any]], str]:
        if not names:
            raise ValueError("key=() names no argument; for one key per task write key=PER_TASK")
        for name in names:
            _check_name(name, self._signature, f"key={names!r}")

        def rest(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
            bound = self.bind(args, kwargs)
            return self._digest_of({name: bound.get(name) for name in names})

        return rest

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name, defaults applied; TypeError if they don't fit the signature.

        Arguments that ``**`` collects are in the result twice: as a dict under the name of that
        parameter, and each under its own name. A parameter takes precedence over an item of the
        same name: for ``f(1, a=2)`` of ``def f(a, /, **options)``, ``a`` is 1.
        """
        if self._plain is not None and (found := self._plain.bind(args, kwargs)) is not None:
            return found
        declared, collected = self._bind(args, kwargs)
        if self._collector is not None:
            declared[self._collector] = collected
        return {**collected, **declared}

    def _bind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arguments of the declared parameters, and what ``**`` collects."""
        if self._collector is None:
            bound = self._signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return dict(bound.arguments), {}
        # Up to Python 3.12, inspect refuses these where the parameter has a default.
        shadowed = {name: kwargs[name] for name in self._shadowed & kwargs.keys()}
        others = {name: value for name, value in kwargs.items() if name not in shadowed}
        bound = self._signature.bind(*args, **others)
        bound.apply_defaults()
        declared = dict(bound.arguments)
        return declared, declared.pop(self._collector) | shadowed

    def _digest_of_all(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        declared, collected = self._bind(args, kwargs)
        if declared.keys().isdisjoint(collected) and not any("\n" in name for name in collected):
            return self._digest_of(declared | collected)
        # Quote names that could be read as a parameter's name or as several lines. The first line
        # has no "=", so the text of no other call can begin with it.
        quoted = {_in_order(name): value for name, value in collected.items()}
        return digest(f"**\n{self._text_of(declared | quoted)}")

    def _digest_of(self, arguments: dict[str, Any]) -> str:
        return digest(self._text_of(arguments))

    def _text_of(self, arguments: dict[str, Any]) -> str:
        """One line for each argument."""
        parts = []
        for name in sorted(arguments):
            value = arguments[name]
            text_of = _TEXT_OF.get(type(value))
            try:
                if text_of is None:
                    # The detour gives tuple, list and what the message carries one form.
                    value, text_of = json.loads(self._dumps(value)), _in_order
                parts.append(f"{name}={text_of(value)}")
            except (TypeError, ValueError, RecursionError) as exc:
                raise LockKeyError(
                    f"argument {name!r} ({type(arguments[name]).__name__}) can't be part of a lock "
                    f"key: {exc}. Leave it out with key=(names of the others) or compute the key "
                    "with a callable."
                ) from exc
        return "\n".join(parts)


def _call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    name = getattr(function, "__name__", repr(function))
    try:
        key = function(*args, **kwargs)
    except Exception as exc:
        raise LockKeyError(f"the key function {name} raised {exc!r}") from exc
    if key is None or (isinstance(key, str) and key):
        return key
    raise LockKeyError(
        f"the key function {name} returned {key!r}; return a non-empty str, or None for no lock"
    )


def _check_name(name: str, signature: inspect.Signature, where: str) -> None:
    kinds = signature.parameters.values()
    if name in signature.parameters or any(p.kind is p.VAR_KEYWORD for p in kinds):
        return
    known = ", ".join(signature.parameters) or "none"
    raise ValueError(f"{where} names {name!r}, which is no argument of the task (it has: {known})")


class _Template(string.Formatter):
    """A key template. ``{order.account_id}`` reads an attribute, or a mapping's item.

    The second because a pydantic task's worker sees a dict where its publisher saw a model.
    """

    def __init__(self, template: str, signature: inspect.Signature) -> None:
        self._template = template
        pieces = list(self.parse(template))
        fields = [field for _, field, _, _ in pieces if field is not None]
        if not fields:
            raise ValueError(
                f"key={template!r} has no placeholder, so all calls would share it; write "
                'something like "account:{account_id}", or key=PER_TASK if that is meant'
            )
        for field in fields:
            name = re.split(r"[.\[]", field, maxsplit=1)[0]
            if not name or name.isdigit():
                raise ValueError(f"key={template!r}: name the argument in {{{field}}}")
            _check_name(name, signature, f"key={template!r}")
        literals = _literals(pieces)
        for literal, following in zip(literals[1:], fields[1:], strict=False):
            if not literal:
                raise ValueError(
                    f"key={template!r}: put a separator before {{{following}}}; without one, "
                    "different arguments would render to the same key"
                )
        self._plain = _plain_pieces(pieces)
        # With two placeholders, ("a:b", "c") and ("a", "b:c") must not meet in "a:b:c".
        self._escapes = _escapes(literals) if len(fields) > 1 else {}

    def render(self, arguments: dict[str, Any]) -> str:
        try:
            if self._plain is None:
                return self.vformat(self._template, (), arguments)
            return "".join(
                [
                    literal if name is None else literal + self.format_field(arguments[name], "")
                    for literal, name in self._plain
                ]
            )
        except Exception as exc:
            raise LockKeyError(
                f"key={self._template!r} can't be rendered from the arguments: {exc!r}"
            ) from exc

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        first, *steps = re.split(r"[.\[]", field_name.replace("]", ""))
        value = self.get_value(first, args, kwargs)
        for step in steps:
            value = _step_into(value, step)
        return value, first

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return super().convert_field(_ordered(value), conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        if value.__class__ in _ORDERED:
            value = _ordered(value)
        if self._escapes:
            return format(value, format_spec).translate(self._escapes)
        return format(value, format_spec)


def _literals(pieces: Sequence[Any]) -> list[str]:
    """A template's own text before, between and after its placeholders."""
    literals = [""]
    for literal, field, _, _ in pieces:  # an escaped brace ends a piece, too
        literals[-1] += literal
        if field is not None:
            literals.append("")
    return literals


def _escapes(literals: Sequence[str]) -> dict[int, str]:
    """The escape in a value for each character of the template's own text.

    A value ends where a separator begins. So no separator may begin with the character that begins
    escapes, and no escape may be a prefix of another one: "!" is 21 and an arrow is 2192.
    """
    begins = {separator[0] for separator in literals[1:-1]}
    lead = next(c for c in map(chr, itertools.count(ord("%"))) if c not in begins)
    escaped = {lead, *"".join(literals)}
    codes = {f"{ord(c):02X}" for c in escaped}
    is_ambiguous = any(one != other and other.startswith(one) for one in codes for other in codes)
    digits = 6 if is_ambiguous else 2
    return {ord(c): f"{lead}{ord(c):0{digits}X}" for c in escaped}


def _plain_pieces(pieces: Sequence[Any]) -> tuple[tuple[str, str | None], ...] | None:
    """Literals, each with the name of the argument behind it.

    Of a template of bare names: ``string.Formatter`` reads its template anew at each call, which is
    half of what a key costs. None where a placeholder says more than a name.
    """
    if any(
        field and (spec or conversion or not field.isidentifier())
        for _, field, spec, conversion in pieces
    ):
        return None
    return tuple((literal, field) for literal, field, _, _ in pieces)


# The types of plain data that are, or may contain, a dict or a set.
_ORDERED: Final[frozenset[type]] = frozenset({dict, set, frozenset, list, tuple})


def _ordered(value: Any) -> Any:
    """``value`` with the items of its dicts and sets sorted, so that equal values render alike.

    A dict has the order in which its caller wrote it; the order of a set of strings differs between
    processes.
    """
    kind = type(value)
    if kind is list or kind is tuple:
        return kind(map(_ordered, value))
    if kind is dict:
        items = [(_ordered(key), _ordered(item)) for key, item in value.items()]
        items.sort(key=lambda pair: _rank(pair[0]))
        return _Verbatim(f"{{{', '.join(f'{key!r}: {item!r}' for key, item in items)}}}")
    if (kind is set or kind is frozenset) and value:
        text = f"{{{', '.join(map(repr, sorted(map(_ordered, value), key=_rank)))}}}"
        return _Verbatim(text if kind is set else f"frozenset({text})")
    return value


def _rank(value: Any) -> tuple[int, int, str]:
    """Sort key: integers by value, then all others by text, because unlike types don't compare."""
    return (0, value, "") if type(value) is int else (1, 0, repr(value))


class _Verbatim(str):
    """A string that renders without quotes inside a list."""

    __slots__ = ()
    __repr__ = str.__str__


def _step_into(value: Any, step: str) -> Any:
    if isinstance(value, Mapping):
        return value[step]
    if isinstance(value, (list, tuple)) and step.isdigit():
        return value[int(step)]
    return getattr(value, step)
