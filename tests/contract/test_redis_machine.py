"""The Redis store lives as the store in memory does, also while time passes: step by step alike.

test_transitions.py compares what stands still. Here the keys of a real server grow old: what each
has left is cut by as much as the clock of the memory store goes on.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import redis
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Token
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.testing import ManualClock
from example_project.private_server import PrivateServer
from tests.contract.test_transitions import TOKENS, operations, outcome, state
from tests.harness.keys import grow_old
from tests.harness.machines import play


class SideBySide(RuleBasedStateMachine):
    """The same steps on both; `store` and `client` are set by the test."""

    store: RedisStore
    client: redis.Redis

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.clock = ManualClock()
        self.reference = MemoryStore(self.clock)
        self.keyspace = Keyspace("machine")

    def key_of(self, name: str) -> str:
        return self.keyspace.lock("rules", name)

    @initialize(tokens=st.lists(TOKENS, min_size=2, max_size=3))
    def deliveries_arrive(self, tokens: list[Token]) -> None:
        self.tokens = tokens

    @rule(data=st.data())
    def operate(self, data: Any) -> None:
        what, operation = data.draw(operations(self.tokens), label="operation")
        expected = outcome(self.reference, operation, self.key_of)
        assert outcome(self.store, operation, self.key_of) == expected, what

    # Multiples of 120 s, as the ttls are: so the real time that passes decides nothing, and
    # `comparable` rounds both sides to the same.
    @rule(seconds=st.sampled_from((360.0, 720.0, 1320.0)))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        grow_old(self.client, seconds)

    @invariant()
    def the_same_stands_there(self) -> None:
        assert state(self.store, self.key_of) == state(self.reference, self.key_of)


def run_side_by_side(machine: type[Any], server: PrivateServer, examples: int, steps: int) -> None:
    """Run a machine that has a ``store`` on the server, and a ``client`` of that."""
    with closing(RedisStore(server.url())) as store, redis.Redis.from_url(server.url()) as client:
        on_server = type("OnThisServer", (machine,), {"store": store, "client": client})
        play(on_server, examples, steps, shrinks=False)


@pytest.mark.parametrize(
    "examples",
    [
        pytest.param(30, id="some"),
        pytest.param(400, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_the_redis_store_grows_old_as_the_store_in_memory_does(
    server: PrivateServer, examples: int
) -> None:
    run_side_by_side(SideBySide, server, examples, 25)
