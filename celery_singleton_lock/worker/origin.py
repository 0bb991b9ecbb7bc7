"""Lookup of the queue that a message came from, in the app's configuration.

A message has the exchange and routing key with which it was published, but not its queue. So the
queue is looked up by these two among the queues that this worker consumes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from celery import Celery
from kombu import Queue

# Celery's native delayed delivery (quorum queues) prefixes the routing key with 28 bits of delay.
# The routing key of the delivered message still has the prefix.
_DELAY_BITS: Final = re.compile(r"^(?:[01]\.){28}")


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a message.

    Attributes:
        queue: Name of the queue.
        is_shared: Whether the broker has routed the same message to other queues too.
    """

    queue: str
    is_shared: bool


def find_origin(app: Celery, exchange: str, routing_key: str) -> Origin | None:
    """The queue of a message that this worker received; None if the configuration has none.

    Args:
        app: The worker's app.
        exchange: The exchange, except the default one, whose routing keys are names of queues.
        routing_key: The routing key of the delivered message.
    """
    queues = app.amqp.queues
    reached = {queue.name: queue for queue in _reached(queues.values(), exchange, routing_key)}
    # Names of the queues, not the dictionary's keys: before Celery 5.7 the keys are the arguments
    # of -Q, such as the alias of a Broadcast.
    consumed = [queue.name for queue in queues.consume_from.values()]
    if len(consumed) > 1:
        consumed = [name for name in consumed if name in reached]
    if not consumed:
        return None
    name = consumed[0]
    # If this worker consumes two such queues, each has a copy, and the copies are
    # indistinguishable.
    is_shared = len(consumed) == 1 and (
        len(reached) > 1 or (name in reached and reached[name].exchange.type == "fanout")
    )
    return Origin(name, is_shared)


def reached_with_delay(app: Celery, routing_key: str) -> list[str]:
    """Names of the queues to which native delayed delivery takes ``routing_key``.

    Celery binds every exchange that is not direct to the exchange at the end of the delay.
    """
    words = without_delay(routing_key).split(".")
    return [queue.name for queue in app.amqp.queues.values() if _gets_delayed(queue, words)]


def without_delay(routing_key: str) -> str:
    """The routing key without the prefix of native delayed delivery."""
    return _DELAY_BITS.sub("", routing_key)


def _reached(queues: Iterable[Queue], exchange: str, routing_key: str) -> list[Queue]:
    words = routing_key.split(".")
    if without_delay(routing_key) != routing_key:
        return [queue for queue in queues if _gets_delayed(queue, words)]
    return [
        queue
        for queue in queues
        for bound, key in _bindings(queue)
        if bound.name == exchange and _lets_pass(bound.type, key, words)
    ]


def _gets_delayed(queue: Queue, words: Sequence[str]) -> bool:
    return any(
        bound.type != "direct" and _matches(["#", *key.split(".")], words)
        for bound, key in _bindings(queue)
    )


def _bindings(queue: Any) -> list[tuple[Any, str]]:
    own = [(queue.exchange, queue.routing_key)] if queue.exchange else []
    more = [(binding.exchange, binding.routing_key) for binding in queue.bindings or ()]
    return [(exchange, key or "") for exchange, key in own + more]


def _lets_pass(exchange_type: str, key: str, words: Sequence[str]) -> bool:
    if exchange_type == "direct":
        return key.split(".") == list(words)
    if exchange_type == "topic":
        return _matches(key.split("."), words)
    return True  # fanout, or a type such as headers, which does not route by the key


def _matches(pattern: Sequence[str], words: Sequence[str]) -> bool:
    """Whether a topic exchange passes ``words``: ``*`` is one word, ``#`` any number of words."""
    if not pattern:
        return not words
    if pattern[0] == "#":
        return any(_matches(pattern[1:], words[start:]) for start in range(len(words) + 1))
    return bool(words) and pattern[0] in ("*", words[0]) and _matches(pattern[1:], words[1:])
