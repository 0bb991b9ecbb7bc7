"""Replies are read from whatever pieces they come in."""

from __future__ import annotations

from enum import StrEnum

import pytest

from celery_singleton_lock.stores.redis.resp import ErrorReply, ProtocolError, Replies, pack

STREAM = (
    b"+OK\r\n:-1\r\n$-1\r\n$4\r\na\r\nb\r\n-NOSCRIPT no\r\n*3\r\n$1\r\nx\r\n*0\r\n:5\r\n$0\r\n\r\n"
)
REPLIES = [b"OK", -1, None, b"a\r\nb", ErrorReply("NOSCRIPT no"), [b"x", [], 5], b""]


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
def test_replies_are_whole_however_they_are_cut(size: int) -> None:
    replies, found = Replies(), []
    for start in range(0, len(STREAM), size):
        found += replies.feed(STREAM[start : start + size])
    assert found == REPLIES
    assert isinstance(found[4], ErrorReply)


def test_commands_are_packed_as_redis_reads_them() -> None:
    packed = pack([("GET", "ü"), ("SET", b"\x00", 15)])
    assert packed == (
        b"*2\r\n$3\r\nGET\r\n$2\r\n\xc3\xbc\r\n*3\r\n$3\r\nSET\r\n$1\r\n\x00\r\n$2\r\n15\r\n"
    )


@pytest.mark.parametrize(
    "word", ["", "a\r\nb", "x" * 511, "x" * 512, "ü" * 511, StrEnum("E", ["A"]).A]
)
def test_words_of_any_length_and_letters_are_packed_alike(word: str) -> None:
    data = word.encode()
    packed = b"*3\r\n$4\r\nECHO\r\n$2\r\nto\r\n$%d\r\n%b\r\n" % (len(data), data)
    assert pack([("ECHO to", word)]) == pack([("ECHO", "to", word)]) == packed


@pytest.mark.parametrize("data", [b"HTTP/1.1 400 Bad\r\n", b":x\r\n", b"$-7\r\n", b"*1\r\n" * 20])
def test_what_is_no_redis_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Replies().feed(data)
