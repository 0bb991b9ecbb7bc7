"""The queue that a message came from, and whether other queues have a copy of it.

A message has the exchange and the routing key with which it was published, but not its queue. So
the queue is looked up by these two in the app's configuration, among the queues that this worker
consumes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from celery import Celery
from kombu import Queue

# Celery's native delayed delivery (quorum queues) prefixes the routing key with 28 bits of delay.
# The routing key of the delivered message still has the prefix.
_DELAY_BITS: Final = re.compile(r"^(?:[01]\.){28}")


def find_origin(app: Celery, exchange: str, routing_key: str) -> tuple[str, bool] | None:
    """The queue of a message that this worker received; None if the configuration has none.

    Args:
        app: The worker's app.
        exchange: The exchange, except the default one, whose routing keys are names of queues.
        routing_key: The routing key of the delivered message.

    Returns:
        The name of the queue, and whether the broker has routed the message to other queues too.
    """
    is_delayed = without_delay(routing_key) != routing_key
    reached = _reached(app, routing_key, None if is_delayed else exchange)
    # Names of the queues, not the dictionary's keys: before Celery 5.7 the keys are the arguments
    # of -Q, such as the alias of a Broadcast.
    consumed = [queue.name for queue in app.amqp.queues.consume_from.values()]
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
    return name, is_shared


def reached_with_delay(app: Celery, routing_key: str) -> list[str]:
    """Names of the queues to which native delayed delivery takes ``routing_key``."""
    return list(_reached(app, without_delay(routing_key), None))


def without_delay(routing_key: str) -> str:
    """The routing key without the prefix of native delayed delivery."""
    return _DELAY_BITS.sub("", routing_key)


def _reached(app: Celery, routing_key: str, exchange: str | None) -> dict[str, Queue]:
    """The queues that a message reaches, by name; ``exchange`` None: by native delayed delivery."""
    words = routing_key.split(".")
    return {
        queue.name: queue
        for queue in app.amqp.queues.values()
        for bound, key in _bindings(queue)
        if _lets_pass(bound, key or "", exchange, words)
    }


def _bindings(queue: Any) -> list[tuple[Any, str | None]]:
    own = [(queue.exchange, queue.routing_key)] if queue.exchange else []
    return own + [(binding.exchange, binding.routing_key) for binding in queue.bindings or ()]


def _lets_pass(bound: Any, key: str, exchange: str | None, words: Sequence[str]) -> bool:
    """Whether a binding with ``key`` to the exchange ``bound`` passes a message."""
    pattern = key.split(".")
    if exchange is None:
        # Celery binds every exchange that is not direct to the exchange at the end of the delay.
        return bound.type != "direct" and _matches(["#", *pattern], words)
    if bound.name != exchange:
        return False
    if bound.type == "direct":
        return pattern == words
    # A fanout exchange passes all messages. Other types, such as headers, do not route by the key.
    return bound.type != "topic" or _matches(pattern, words)


def _matches(pattern: Sequence[str], words: Sequence[str]) -> bool:
    """Whether a topic exchange passes ``words``: ``*`` is one word, ``#`` any number of words."""
    if not pattern:
        return not words
    if pattern[0] == "#":
        return any(_matches(pattern[1:], words[start:]) for start in range(len(words) + 1))
    return bool(words) and pattern[0] in ("*", words[0]) and _matches(pattern[1:], words[1:])
