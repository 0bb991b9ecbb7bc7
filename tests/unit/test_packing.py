"""Commands are packed as redis-py packs them."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import pytest
from redis.connection import Connection

from celery_singleton_lock.stores.redis.scripts import pack


def by_redis_py(command: tuple[Any, ...]) -> bytes:
    return b"".join(map(bytes, Connection(protocol=2).pack_commands([command])))


def test_commands_are_packed_as_redis_reads_them() -> None:
    for command, packed in (
        (("GET", "ü"), b"*2\r\n$3\r\nGET\r\n$2\r\n\xc3\xbc\r\n"),
        (("SET", b"\x00", 15), b"*3\r\n$3\r\nSET\r\n$1\r\n\x00\r\n$2\r\n15\r\n"),
    ):
        assert pack(command) == packed == by_redis_py(command)


@pytest.mark.parametrize(
    "word", ["", "a\r\nb", "x" * 511, "x" * 512, "ü" * 511, StrEnum("E", ["A"]).A]
)
def test_words_of_any_length_and_letters_are_packed_alike(word: str) -> None:
    data = word.encode()
    packed = b"*3\r\n$4\r\nECHO\r\n$2\r\nto\r\n$%d\r\n%b\r\n" % (len(data), data)
    assert pack(("ECHO", "to", word)) == packed
    assert packed == by_redis_py(("ECHO", "to", word))
