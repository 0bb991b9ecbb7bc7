"""A call's arguments: as a worker gets them, the key they make, their copy in the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kombu import serialization
from kombu.exceptions import KombuError

from ..core.key import SCALARS, KeyMaker
from ..errors import LockKeyError

#: The most bytes of serialized arguments that the store keeps for a queued message.
MAX_ARGUMENTS: Final = 64 * 1024

_TEXT: Final = frozenset({str})
# The types that may be iterated. Iterating another type may exhaust it.
_SEQUENCES: Final = frozenset({list, tuple})


def as_sent(args: Any, kwargs: Any, serializer: str = "json") -> tuple[Any, Any]:
    """The arguments as a worker gets them: serialization converts tuples to lists, and so on.

    They are returned as given if the serializer can't write them, because publishing raises then.
    Also if it can't read what it has written, as msgpack with integers as keys: the message is
    published, and the worker that discards it frees its claim (`worker.discarded`).

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        serializer: kombu's name of the message's serializer.
    """
    if serializer == "json" and _are_scalars(args, kwargs):
        return args, kwargs
    arguments = [list(args), dict(kwargs)]
    try:
        content_type, encoding, data = serialization.dumps(arguments, serializer)
        sent, named = serialization.loads(data, content_type, encoding, accept={content_type})
    except (TypeError, ValueError, KombuError):
        return args, kwargs
    return sent, named


def _are_scalars(args: Any, kwargs: Any) -> bool:
    """Whether JSON keeps the arguments unchanged. A JSON round trip is half of a claim's cost."""
    if type(args) not in _SEQUENCES or not SCALARS.issuperset(map(type, args)):
        return False
    return not kwargs or (
        type(kwargs) is dict
        and SCALARS.issuperset(map(type, kwargs.values()))
        and _TEXT.issuperset(map(type, kwargs))
    )


def stable_key_suffix(key_maker: KeyMaker, args: Any, kwargs: Any, serializer: str) -> str | None:
    """The key's text for a call as a worker gets it, checked to be stable.

    Raises:
        LockKeyError: Reading one message twice yields two keys, so no duplicate would be found.
    """
    seen = as_sent(args, kwargs, serializer)
    suffix = key_maker.key_suffix(*seen)
    if serializer == "json" and not callable(key_maker.spec):
        return suffix  # templates and digests of plain data are stable
    seen_again = as_sent(args, kwargs, serializer)
    again = key_maker.key_suffix(*seen_again)
    if again == suffix:
        return suffix
    raise LockKeyError(
        f"the key of this call is not stable: read twice from its message, it was {suffix!r} and "
        f"{again!r}. {_culprit(key_maker, seen, seen_again)}"
    )


def _culprit(key_maker: KeyMaker, seen: Any, seen_again: Any) -> str:
    one, other = key_maker.bind(*seen), key_maker.bind(*seen_again)
    for name, value in one.items():
        if str(value) != str(other[name]):
            return (
                f"Argument {name!r} ({type(value).__name__}) has another text each time: give it a "
                "__str__, or make the key of other arguments"
            )
    spec = key_maker.spec
    name = getattr(spec, "__name__", repr(spec))
    return f"The arguments are the same each time: make {name} depend on nothing else"


def pack_arguments(
    call: str, args: Any, kwargs: Any, serializer: str, options: Mapping[str, Any]
) -> bytes:
    """The arguments of a call for the store; :func:`unpack_arguments` reads them.

    Args:
        call: The name of the call.
        args, kwargs: The arguments.
        serializer: kombu's name of the call's serializer.
        options: Celery's options; the representations of the arguments are kept.

    Raises:
        EncodeError: The serializer can't write them.
        ValueError: They are too large.
    """
    shown = {name: options[name] for name in ("argsrepr", "kwargsrepr") if options.get(name)}
    content = [list(args or ()), dict(kwargs or {}), shown]
    dumped: Any = serialization.dumps(content, serializer)
    content_type, encoding, text = dumped
    data = text.encode() if isinstance(text, str) else text
    if len(data) > MAX_ARGUMENTS:
        raise ValueError(
            f"the arguments are {len(data)} bytes long as {content_type}, and "
            f'on_duplicate="replace" keeps at most {MAX_ARGUMENTS} in the lock store. Pass the id '
            "of the data, or choose another on_duplicate"
        )
    return b"%b %b %b %b" % (call.encode(), content_type.encode(), encoding.encode(), data)


def call_of_arguments(packed: bytes) -> str:
    """The name of the call that the arguments are from."""
    return packed.partition(b" ")[0].decode()


def unpack_arguments(packed: bytes, accept_content: Any) -> tuple[list[Any], dict[str, Any], Any]:
    """Arguments, keyword arguments, and their representations by name.

    Raises:
        ContentDisallowed: The app does not accept messages of their content type.
        DecodeError: They can't be read.
    """
    _, content_type, encoding, data = packed.split(b" ", 3)
    accept = serialization.prepare_accept_content(accept_content)
    args, kwargs, shown = serialization.loads(
        data, content_type.decode(), encoding.decode(), accept=accept
    )
    return list(args), kwargs, shown
