"""What the broker did with each message: read from its own append-only file.

The file has every command that changed data, in order, and a kill loses none that was answered
(``appendfsync always``). Kombu's Redis transport takes a message in two steps: it pops it from the
queue, and then notes it in ``unacked``. If no note follows the last pop of a message, it was in a
reply that was never read: it is lost with the broker, the worker or the way between them, whatever
runs in the task. tests/integration/test_prefetch.py shows that loss with a plain task.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeAlias

from celery_singleton_lock.message.header import HEADER

#: Where kombu notes what a worker has and did not acknowledge yet.
_UNACKED = b"unacked"
#: The database of the broker in the campaigns.
_DATABASE = 0

#: A job's id, and which copy of its message.
_Copy: TypeAlias = tuple[str, tuple[int, int]]


class Place(StrEnum):
    """Where a message is."""

    NOWHERE = "the broker never had it"
    QUEUE = "in its queue"
    UNACKED = "noted as delivered, and not acknowledged"
    POPPED = "popped, and never noted: lost between broker and worker"
    ACKNOWLEDGED = "acknowledged by a worker"


@dataclass(slots=True)
class Message:
    """One copy of a job's message, which may be in the broker several times.

    Attributes:
        steps: What became of it, in order.
        queued, noted, popped: How often it is in that place now.
        acknowledged: How often a worker has acknowledged it.
    """

    steps: list[str] = field(default_factory=list)
    queued: int = 0
    noted: int = 0
    popped: int = 0
    acknowledged: int = 0

    @property
    def place(self) -> Place:
        """Where it is; of several places, the one from which a worker may still get it."""
        if self.queued:
            return Place.QUEUE
        if self.noted:
            return Place.UNACKED
        if self.acknowledged:
            return Place.ACKNOWLEDGED
        return Place.POPPED if self.popped else Place.NOWHERE


def copy_of(headers: Any) -> list[int]:
    """Which copy of its job a message is: attempt, and how often that was requeued."""
    retries = headers.get("retries") or 0
    ours = headers.get(HEADER) or (headers.get("headers") or {}).get(HEADER) or {}
    same_attempt = ours.get("attempt") == f"0.{retries}"
    return [retries, ours.get("sequence", 0) if same_attempt else 0]


def newest_copies(directory: Path) -> dict[str, Message]:
    """The newest copy of each job's message, by the job's id.

    Args:
        directory: The data directory of the broker, which may run.
    """
    log = _Log()
    for at, command in _commands(directory):
        log.read(at, command)
    newest: dict[str, Message] = {}
    for job, copy in sorted(log.messages):
        newest[job] = log.messages[job, copy]
    return newest


class _Log:
    """The state of the broker after each command."""

    def __init__(self) -> None:
        self.messages: dict[_Copy, Message] = defaultdict(Message)
        self._queues: dict[bytes, deque[_Copy | None]] = defaultdict(deque)
        self._noted: dict[bytes, _Copy] = {}
        #: What this transaction has taken out of `unacked`.
        self._taken: Counter[_Copy] = Counter()
        self._is_broker = True

    def read(self, at: str, command: list[bytes]) -> None:
        name, arguments = command[0].upper(), command[1:]
        if name == b"SELECT":
            self._is_broker = int(arguments[0]) == _DATABASE
        elif not self._is_broker:
            pass
        elif name in (b"LPUSH", b"RPUSH"):
            self._push(arguments[0], [_copy(each) for each in arguments[1:]], name[:1], at)
        elif name in (b"LPOP", b"RPOP"):
            self._pop(arguments[0], int(arguments[1]) if arguments[1:] else 1, name[:1], at)
        elif name == b"HSET" and arguments[0] == _UNACKED:
            copy = _copy(arguments[2])
            if copy is not None:
                self._noted[arguments[1]] = copy
                self._step(copy, f"noted{at}", noted=1, popped=-1)
        elif name == b"HDEL" and arguments[0] == _UNACKED:
            for tag in arguments[1:]:
                if copy := self._noted.pop(tag, None):
                    self._taken[copy] += 1
                    self._step(copy, f"acknowledged{at}", noted=-1, acknowledged=1)
        elif name == b"EXEC":
            self._taken.clear()
        elif name in (b"DEL", b"UNLINK"):
            for key in arguments:
                self._queues.pop(key, None)

    def _push(self, queue: bytes, copies: Sequence[_Copy | None], end: bytes, at: str) -> None:
        for copy in copies:
            entries = self._queues[queue]
            (entries.appendleft if end == b"L" else entries.append)(copy)
            if copy is None:
                continue
            if self._taken[copy]:  # it goes into its queue again
                self._taken[copy] -= 1
                self.messages[copy].steps.pop()
                self._step(copy, f"requeued{at}", acknowledged=-1, queued=1)
            else:
                self._step(copy, f"sent{at}", queued=1)

    def _pop(self, queue: bytes, count: int, end: bytes, at: str) -> None:
        for _ in range(count):
            entries = self._queues[queue]
            copy = entries.pop() if end == b"R" else entries.popleft()
            if copy is not None:
                self._step(copy, f"popped{at}", queued=-1, popped=1)

    def _step(self, copy: _Copy, step: str, **changes: int) -> None:
        message = self.messages[copy]
        message.steps.append(step)
        for name, by in changes.items():
            setattr(message, name, getattr(message, name) + by)


def _copy(payload: bytes) -> _Copy | None:
    """Of which job a message is, and which copy; None if it is another kind of message."""
    try:
        message: Any = json.loads(payload)
    except ValueError:
        return None
    if isinstance(message, list):  # with its exchange and routing key, as it is noted
        message = message[0]
    headers = message.get("headers") if isinstance(message, dict) else None
    if not headers or "id" not in headers:
        return None
    attempt, sequence = copy_of(headers)
    return str(headers["id"]), (attempt, sequence)


def _commands(directory: Path) -> Iterator[tuple[str, list[bytes]]]:
    """Each command, with the time at which it was written, as text, if the file has it."""
    at, first = "", 0
    for path in sorted(directory.rglob("*.aof"), key=lambda path: (len(path.name), path.name)):
        with path.open("rb") as file:
            while line := file.readline():
                if line.startswith(b"#TS:"):
                    seconds = int(line[4:])
                    first = first or seconds
                    at = f" at {seconds - first} s"
                elif line.startswith(b"*"):
                    words = []
                    for _ in range(int(line[1:])):
                        size = int(file.readline()[1:])
                        words.append(file.read(size))
                        file.read(2)
                    if len(words) != int(line[1:]):
                        return
                    yield at, words
