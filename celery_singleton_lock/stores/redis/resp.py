"""Redis' wire protocol (RESP2): bytes to send, and replies out of the bytes that have come so far.

For sockets that never block. redis-py reads from a socket until a reply is whole; who asks several
servers at once reads what each has sent until now.
"""

from __future__ import annotations

from typing import Any, Final

from celery_singleton_lock.stores.redis.scripts import Packed, pack, packed_word

__all__ = ["ErrorReply", "Packed", "ProtocolError", "Replies", "pack", "packed_word"]

# A reply of ours has two levels at most; what is deeper is somebody else's.
_MAX_DEPTH: Final = 8
_TEXT, _ERROR, _NUMBER, _BULK, _ARRAY = b"+-:$*"


class ErrorReply(str):
    """A reply that is an error; its text begins with a code such as NOSCRIPT."""

    __slots__ = ()


class ProtocolError(Exception):
    """Whoever answers there isn't Redis."""


class _Incomplete(Exception):
    """The rest has not come yet."""


class Replies:
    """Takes bytes as they come, gives whole replies."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = b""

    def feed(self, data: bytes) -> list[Any]:
        """The replies that ``data`` completes: bytes, int, None, ErrorReply, or lists of these.

        Raises:
            ProtocolError: ``data`` is no such thing.
        """
        data = self._data + data
        replies, position = [], 0
        try:
            while position < len(data):
                reply, position = _parsed(data, position)
                replies.append(reply)
        except _Incomplete:
            pass
        self._data = data[position:]
        return replies


def _parsed(data: bytes, start: int, depth: int = 0) -> tuple[Any, int]:
    """The reply that begins at ``start``, and where the next one does."""
    end = data.find(b"\r\n", start)
    if end < 0:
        raise _Incomplete
    kind, line, after = data[start], data[start + 1 : end], end + 2
    if kind == _TEXT:
        return line, after
    if kind == _ERROR:
        return ErrorReply(line.decode(errors="replace")), after
    try:
        number = int(line)
    except ValueError:
        kind = number = 0
    if kind == _BULK and number >= 0:
        end = after + number
        if len(data) < end + 2:
            raise _Incomplete
        return data[after:end], end + 2
    if kind == _NUMBER:
        return number, after
    if kind not in (_BULK, _ARRAY) or number < -1 or depth > _MAX_DEPTH:
        raise ProtocolError(f"no reply of Redis: {data[start : start + 40]!r}")
    if number == -1:
        return None, after
    items = []
    for _ in range(number):
        item, after = _parsed(data, after, depth + 1)
        items.append(item)
    return items, after
