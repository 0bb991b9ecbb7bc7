"""What a worker received and requeued, and what a Redis broker still has."""

from __future__ import annotations

import gc
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

import redis

from celery_singleton_lock.core.events import EventName
from tests.harness.log import events_in
from tests.harness.processes import POLL, TIMEOUT, Process

Answer = TypeVar("Answer")

#: With the pause between two of them: 0.2 s.
_EMPTY_LOOKS = 20
_RECEIVED = re.compile(r"Task \S+\[(\S+)\] received")


def received(workers: Iterable[Process]) -> Counter[str]:
    """How often each task id arrived, by the workers' logs."""
    lines = [line for worker in workers for line in worker.lines]
    return Counter(match[1] for line in lines if (match := _RECEIVED.search(line)))


def reported(workers: Iterable[Process], event: EventName, *, reason: str = "") -> Counter[str]:
    """How often the lock reported ``event`` of each task id.

    Args:
        workers: Whose logs.
        event: Its name.
        reason: Only with one that begins so.
    """
    lines = [line for worker in workers for line in worker.lines]
    return Counter(each.task_id for each in events_in(lines, event, reason=reason))


def wait_until_settled(workers: Iterable[Process], task_ids: Iterable[str]) -> None:
    """Wait until every delivery of these tasks has ended: one ran, others were requeued or dropped.

    The broker doesn't know: a worker still has deliveries in its memory whose message another one
    has acknowledged.
    """
    workers, task_ids = list(workers), list(task_ids)

    def all_ended() -> bool:
        arrived, back, gone = (
            received(workers),
            reported(workers, EventName.REQUEUED),
            reported(workers, EventName.DROPPED),
        )
        return all(arrived[each] == 1 + back[each] + gone[each] for each in task_ids)

    wait_until(all_ended, "every delivery ended: one ran, the others were requeued or dropped")


def wait_until(condition: Callable[[], Answer], what: str, timeout: float = TIMEOUT) -> Answer:
    """Wait until ``condition()`` is true, which nothing announces; what it returned.

    Raises:
        AssertionError: It did not come true within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        late = time.monotonic() > deadline  # read first: the last look comes after the deadline
        if answer := condition():
            return answer
        assert not late, f"waited {timeout:g} s without success until {what}"
        time.sleep(POLL)


def wait_until_collected(condition: Callable[[], bool], what: str) -> None:
    """Collect garbage until ``condition()`` is true.

    One collection is not enough: `gc.collect` does nothing while another thread collects, which
    may be inside a finalizer.
    """
    wait_until(lambda: [gc.collect(), condition()][1], what)


class RedisBroker:
    """The messages of a Redis broker, queued or delivered and not acknowledged.

    Args:
        client: A client of the broker's database, decoding responses.
        queues: Their names.
    """

    def __init__(self, client: redis.Redis, queues: Iterable[str] = ("celery",)) -> None:
        self._client = client
        self._queues = list(queues)

    def messages(self) -> Counter[str]:
        """How many messages there are of each task id."""
        queued = [json.loads(m) for q in self._queues for m in self._client.lrange(q, 0, -1)]
        unacknowledged = [json.loads(entry)[0] for entry in self._client.hvals("unacked")]
        return Counter(message["headers"]["id"] for message in [*queued, *unacknowledged])

    def deliver_again(self, task_id: str) -> None:
        """Queue a copy of an unacknowledged message, as the sweep for too old ones does."""
        for entry in self._client.hvals("unacked"):
            message, _, routing_key = json.loads(entry)
            if message["headers"]["id"] == task_id:
                message["headers"]["redelivered"] = True
                message["properties"]["delivery_info"]["redelivered"] = True
                self._client.rpush(routing_key, json.dumps(message))
                return
        raise AssertionError(f"{task_id} is not waiting for its acknowledgement")

    def wait_until_empty(self, *, timeout: float = TIMEOUT) -> None:
        """Wait until nothing is queued nor waiting for its acknowledgement."""
        looks = 0

        def stays_empty() -> bool:
            # A message on its way from the queue to the worker is in neither place for a moment.
            nonlocal looks
            empty = not self.messages() and not self._client.zcard("unacked_index")
            looks = looks + 1 if empty else 0
            return looks >= _EMPTY_LOOKS

        wait_until(stays_empty, "the broker is empty and stays so", timeout=timeout)
