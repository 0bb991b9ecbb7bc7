"""A body that lost its lease to its own duplicate, whose worker then dies.

With Redis as the broker every delivery of a message has the message's tag: what one acknowledges is
acknowledged for all. So a delivery that leaves the work to its duplicate must leave a copy.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import redis

from tests.harness.deliveries import RedisBroker, wait_until
from tests.harness.journal import Journal
from tests.harness.worker import CeleryWorker

CRASH = "tests.apps.crash"


@pytest.mark.slow
def test_work_that_was_left_to_a_duplicate_survives_its_worker(
    environment: dict[str, str],
    load_app: Callable[..., ModuleType],
    worker: Callable[..., CeleryWorker],
    journal: Journal,
    redis_client: redis.Redis,
    monkeypatch: Any,
) -> None:
    # No message gets that old before the worker is killed; what it had comes back afterwards.
    environment["VISIBILITY_TIMEOUT"] = "20"
    crash = load_app(CRASH)
    monkeypatch.setenv("JOURNAL", environment["JOURNAL"])
    broker = RedisBroker(redis_client)
    stalled = worker(CRASH, concurrency=1)
    result = crash.late.delay("k", "all")
    journal.wait_for_starts(1)
    [tag] = redis_client.hkeys("unacked")
    for pid in (stalled.pid, *stalled.children()):
        os.kill(pid, signal.SIGSTOP)
    broker.deliver_again(result.id)
    duplicate = worker(CRASH, concurrency=1)
    journal.wait_for_starts(2)  # the lease of the stalled one has expired
    for pid in (*stalled.children(), stalled.pid):
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not redis_client.hexists("unacked", tag), "the stalled one gave it up")
    duplicate.kill_group()
    assert broker.messages()[result.id], "the work was with the duplicate alone"
    crash.open_gate("all")
    assert result.get(timeout=90) == journal.runs("k")[-1].data["mark"]
