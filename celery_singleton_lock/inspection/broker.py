"""A message in a Redis broker: in a queue, or taken by a worker that has not acknowledged it.

Other brokers can't be searched. kombu keeps each queue as a list for each priority, and the
messages that workers have taken in one hash, with the time in one sorted set.

Non-guarantees
    A message that moves while its broker is searched may be missed, and so may one behind the first
    `_MOST_MESSAGES` of a queue, or a queue behind the first `_MOST_PAGES` pages of keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from celery import Celery

from ..celery_compat import driver_of, limit_broker_timeouts

# Seconds to wait for one reply of the broker.
_TIMEOUT: Final = 2.0
_PAGE: Final = 1000
_MOST_PAGES: Final = 200
_AT_ONCE: Final = 500
_MOST_MESSAGES: Final = 20_000
# kombu's separator of the name of a queue and a priority.
_SEPARATOR: Final = "\x06\x16"


@dataclass(frozen=True, slots=True, kw_only=True)
class InBroker:
    """What the broker has of a message.

    Attributes:
        is_complete: Whether the whole broker was searched, so that what was not found is not there.
        queue: The queue in which it waits; empty: it is in none that was searched.
        length: The number of messages in that queue.
        taken_at: When a worker took it that has not acknowledged it; None: none has.
    """

    is_complete: bool = False
    queue: str = ""
    length: int = 0
    taken_at: datetime | None = None


def search_broker(app: Celery, task_id: str) -> InBroker:
    """Look for the message of ``task_id``.

    Raises:
        Exception: The broker refuses a request, or does not answer.
    """
    connection: Any = app.connection_for_read(transport_options={"max_retries": 1})
    limit_broker_timeouts(connection, _TIMEOUT)
    with connection:
        if driver_of(app) != "redis":
            return InBroker()
        import redis

        channel = connection.default_channel
        # kombu's own client puts the prefix before the keys of some commands only.
        client = redis.Redis(connection_pool=channel.client.connection_pool)
        return _search(client, channel, task_id.encode())


def _search(client: Any, channel: Any, task_id: bytes) -> InBroker:
    prefix = channel.global_keyprefix or ""
    for tag, message in client.hscan_iter(f"{prefix}{channel.unacked_key}", count=_AT_ONCE):
        if task_id in message:
            taken = client.zscore(f"{prefix}{channel.unacked_index_key}", tag)
            at = None if taken is None else datetime.fromtimestamp(taken, UTC)
            return InBroker(is_complete=True, taken_at=at)
    lengths: dict[str, int] = {}
    queue, is_complete = "", True
    for name in _lists(client, prefix):
        if name is None:
            is_complete = False
            continue
        owner = name.removeprefix(prefix).partition(_SEPARATOR)[0]
        length = client.llen(name)
        lengths[owner] = lengths.get(owner, 0) + length
        is_complete = is_complete and length <= _MOST_MESSAGES
        if not queue and _has(client, name, task_id):
            queue = owner
    return InBroker(is_complete=is_complete, queue=queue, length=lengths.get(queue, 0))


def _lists(client: Any, prefix: str) -> Iterator[str | None]:
    """The names of the lists in the broker's database; None: there may be more."""
    cursor, pattern = 0, f"{_quoted(prefix)}*"
    for _ in range(_MOST_PAGES):
        cursor, names = client.scan(cursor, match=pattern, count=_PAGE, _type="list")
        yield from (name.decode(errors="replace") for name in names)
        if not cursor:
            return
    yield None


def _has(client: Any, name: str, task_id: bytes) -> bool:
    """Whether a message of ``task_id`` is in a list; workers take messages from its end."""
    for end in range(-1, -_MOST_MESSAGES, -_AT_ONCE):
        messages = client.lrange(name, end - _AT_ONCE + 1, end)
        if any(task_id in message for message in messages):
            return True
        if len(messages) < _AT_ONCE:
            return False
    return False


def _quoted(text: str) -> str:
    """``text`` in a glob pattern."""
    return "".join(f"\\{one}" if one in "*?[]\\" else one for one in text)
