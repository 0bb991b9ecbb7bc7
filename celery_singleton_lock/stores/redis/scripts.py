"""Commands of Redis as bytes, and the Lua scripts of this package as commands."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any, Final

__all__ = ["Call", "Command", "Packed", "Script", "milliseconds", "pack", "packed_word"]

#: Name and arguments. A name of two words, such as CLUSTER SLOTS, is one string.
Command = tuple[Any, ...]

#: KEYS and ARGV of one run. All keys are in one shard.
Call = tuple[Sequence[Any], Sequence[Any]]


class Script:
    """The files ``lua/<name>.lua``, concatenated."""

    __slots__ = ("sha", "source")

    def __init__(self, *names: str) -> None:
        folder = files("celery_singleton_lock.stores.redis") / "lua"
        self.source = b"".join((folder / f"{name}.lua").read_bytes() for name in names)
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest()

    def evalsha(self, call: Call) -> Command:
        """The command that runs it by its digest, if the server has the script."""
        keys, arguments = call
        return ("EVALSHA", self.sha, f"{len(keys)}", *keys, *arguments)

    def eval(self, call: Call) -> Command:
        """The command that runs it by its source, which the server keeps."""
        keys, arguments = call
        return ("EVAL", self.source, len(keys), *keys, *arguments)


def milliseconds(seconds: float) -> int:
    """``seconds`` for ARGV. At least 1: the server refuses a ttl of 0."""
    return max(1, round(seconds * 1000))


# The line before a word of each length: formatting a number costs as much as the rest of a word.
_LENGTHS: Final = tuple(f"${length}" for length in range(512))


class Packed(tuple[Any, ...]):
    """A command whose last item is all of it as bytes. The items before it name the command and
    its key.
    """

    __slots__ = ()


def pack(commands: Iterable[Sequence[Any]]) -> bytes:
    """The bytes of ``commands`` in RESP.

    Not redis-py's packing: an acquire and a release take 13 to 17 us more with it (interleaved in
    one process; Python 3.11, redis-py 8.1 without hiredis), of the 150 to 350 us that a task adds.

    Args:
        commands: Name (of one word or two) and arguments of each: text, bytes or numbers.
    """
    return b"".join(map(_packed, commands))


def _packed(command: Sequence[Any]) -> bytes:
    if type(command) is Packed:
        data: bytes = command[-1]
        return data
    name = command[0]
    words = [*name.split(" "), *command[1:]] if " " in name else command
    try:
        # Most words are short ASCII text. They are joined as text, without a step per word: half
        # the cost.
        parts = [""] * (2 * len(words))
        parts[::2] = map(_LENGTHS.__getitem__, map(len, words))
        parts[1::2] = words
        text = "\r\n".join(parts)
        if text.isascii():
            return f"*{len(words)}\r\n{text}\r\n".encode()
    except (TypeError, IndexError):
        pass  # a number or bytes among them; a long text
    return b"*%d\r\n" % len(words) + b"".join(map(packed_word, words))


def packed_word(value: Any) -> bytes:
    """One word of a command: text, bytes or a number."""
    data = value if isinstance(value, bytes) else str(value).encode()
    return b"$%d\r\n%b\r\n" % (len(data), data)
