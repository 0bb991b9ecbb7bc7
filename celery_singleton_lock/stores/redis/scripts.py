"""Commands of Redis, and the Lua scripts of this package that run by them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

__all__ = ["Call", "Command", "Script", "milliseconds"]

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
