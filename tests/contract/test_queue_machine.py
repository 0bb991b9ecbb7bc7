"""The queue of a key lives in Redis as in memory: random steps, whose replies and states are equal.

The limit changes on the way, another client holds one of the slots for a while, an operator pauses
the key or its scope, and in half of the runs a rate lets no more than a burst begin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from celery_singleton_lock.core.call_queue import Hint, Removal
from celery_singleton_lock.core.keyspace import CallQueueNames, Keyspace
from celery_singleton_lock.core.lease import Kind, Token
from celery_singleton_lock.core.pauses import Pause
from celery_singleton_lock.core.rate import Rate
from celery_singleton_lock.core.store_requests import Granted, GrantedInTurn, Refused
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.testing import ManualClock
from celery_singleton_lock.testing.contract import TIMEOUT, new_token
from celery_singleton_lock.testing.contract.steps import give, take
from example_project.private_server import PrivateServer
from tests.contract.test_redis_machine import run_side_by_side
from tests.harness.calls import Calls
from tests.harness.deliveries import wait_until

_MOST = 4
#: After the burst, nothing begins until the end of the run.
_RATE = Rate("1/d", burst=6)


def shown(reply: Any) -> Any:
    """A reply without times, and without what a refusal says of other slots."""
    if isinstance(reply, Hint):
        return reply.call_id, reply.copies, reply.begins, reply.message
    if isinstance(reply, Granted):
        return "granted", shown(reply.following) if isinstance(reply, GrantedInTurn) else None
    if isinstance(reply, Refused):
        return reply.relation
    return tuple(map(shown, reply)) if isinstance(reply, (list, tuple)) else reply


class QueueSideBySide(RuleBasedStateMachine):
    """The same steps on both; `store` and `client` are set by the test."""

    store: RedisStore
    client: redis.Redis

    @initialize(late=st.booleans(), limit=st.integers(1, 3), rate=st.sampled_from((None, _RATE)))
    def begin(self, late: bool, limit: int, rate: Rate | None) -> None:
        stores = self.store, MemoryStore(ManualClock())
        self.sides = [Calls(store, late=late, limit=limit, slots=_MOST) for store in stores]
        self.key = self.sides[1].key = self.sides[0].key
        self.tokens: dict[str, Token] = {}
        self.begun: set[str] = set()
        self.holder: Token | None = None
        self.rate, self.grants, self.paused = rate, 0, list[str]()

    def teardown(self) -> None:
        for name in getattr(self, "paused", ()):  # other runs have the same server
            self.pauses(self.sides[0]).resume(name, timeout=TIMEOUT)

    def pauses(self, calls: Calls) -> Any:
        return calls.store.pauses

    def both(self, step: Callable[[Calls], Any]) -> Any:
        on_server, in_memory = (shown(step(calls)) for calls in self.sides)
        assert on_server == in_memory
        return on_server

    def states(self, calls: Calls) -> list[Any]:
        found = calls.queue.calls(self.key, most=99, messages=False, timeout=TIMEOUT)
        return [(call.call_id, call.state, call.copies, call.begins) for call in found]

    @property
    def running(self) -> list[str]:
        return [call for call, token in self.tokens.items() if self.sides[0].is_running(token)]

    def one(self, data: Any, some: list[str]) -> str | None:
        return data.draw(st.sampled_from(some)) if some else None

    @rule()
    def join(self) -> None:
        token = new_token()
        self.tokens[token.call_id] = token
        self.both(lambda calls: calls.joins(token))

    @rule(data=st.data())
    def ask(self, data: Any) -> None:
        in_queue = [call for call, *_ in self.states(self.sides[0])]
        if (call := self.one(data, in_queue[:4])) is None:
            return
        before = [one for one in in_queue[: in_queue.index(call)] if one not in self.begun]
        leaving = {one for one, state, *_ in self.states(self.sides[0]) if state == "x"}
        was_running, token = call in self.running, self.tokens[call]
        again = new_token(token.task_id, retries=token.retries)
        if self.both(lambda calls: calls.ask(again, rate=self.rate))[0] == "granted":
            self.grants += 1
            assert not self.paused, "a pause lets nothing begin"
            assert not self.rate or self.grants <= self.rate.burst, "a start counts"
            assert not was_running, "a call runs once at a time"
            assert call in self.begun or set(before) <= leaving, "in order"
            self.begun.add(call)
            self.tokens[call] = again

    @rule(data=st.data(), what=st.sampled_from(["end", "end", "retry", "undo", "lose"]))
    def leave_body(self, data: Any, what: str) -> None:
        if (call := self.one(data, self.running)) is None:
            return
        token = self.tokens[call]
        if what == "end":
            self.both(lambda calls: calls.release(token))
        elif what == "undo":
            self.both(lambda calls: calls.release(token, goes_on=True, has_begun=False))
        elif what == "lose":
            self.both(lambda calls: calls.lose_lease(token))
        else:
            self.tokens[call] = new_token(token.task_id, retries=token.retries + 1)
            self.both(lambda calls: calls.joins(self.tokens[call]))
            retry: Any = {"become": Kind.RESERVED, "become_ttl": 60.0}
            retry |= {"next_token": self.tokens[call], "due_in": 5.0}
            self.both(lambda calls: calls.release(token, goes_on=True, **retry))

    @rule()
    def sweep(self) -> None:
        self.both(lambda calls: calls.queue.defer(self.key, seconds=0.0, timeout=TIMEOUT))
        if self.states(self.sides[0]):
            wait_until(self.sides[0].is_due, "its time has come")
        found = self.both(lambda calls: calls.queue.sweep(self.key, timeout=TIMEOUT))
        for call in (hint[0] for is_lost, hint in found if is_lost):
            self.both(lambda calls, call=call: calls.remove(self.tokens[call]))

    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        if (call := self.one(data, [one for one, *_ in self.states(self.sides[0])])) is None:
            return
        left = self.both(lambda calls: calls.queue.leave(self.key, call, timeout=TIMEOUT))
        if not isinstance(left, Removal):
            self.both(lambda calls: calls.remove(self.tokens[call]))

    @rule(is_scope=st.booleans())
    def pause(self, is_scope: bool) -> None:
        name = Keyspace.scope_of(self.key) if is_scope else self.key
        pause = Pause(name=name, user="anna", host="web1")
        self.both(lambda calls: self.pauses(calls).pause(pause, timeout=TIMEOUT) and None)
        if name not in self.paused:
            self.paused.append(name)

    @precondition(lambda self: self.paused)
    @rule()
    def resume(self) -> None:
        name = self.paused.pop()
        found = self.both(lambda calls: self.pauses(calls).resume(name, timeout=TIMEOUT) is None)
        assert not found, "it was paused"

    @rule(limit=st.integers(1, 3))
    def deploy(self, limit: int) -> None:
        for calls in self.sides:
            calls.limit = limit

    @precondition(lambda self: self.holder is None and not self.paused)
    @rule()
    def hold(self) -> None:
        if all(calls.store.leases.inspect(self.key) is None for calls in self.sides):
            self.holder = token = new_token()
            self.both(lambda calls: take(calls.store, self.key, token) and None)

    @precondition(lambda self: self.holder is not None)
    @rule()
    def release(self) -> None:
        token, self.holder = self.holder, None
        assert token is not None
        self.both(lambda calls: give(calls.store, self.key, token))

    @invariant()
    def the_same_stands_there(self) -> None:
        states = self.both(self.states)
        due = self.client.zscore(CallQueueNames.of(self.key).due, self.key)
        assert (due is not None) == bool(states), "a queue that is not empty is due"


@pytest.mark.parametrize(
    "examples",
    [
        pytest.param(40, id="some"),
        pytest.param(600, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
    ],
)
def test_a_queue_in_redis_goes_on_as_one_in_memory_does(
    server: PrivateServer, examples: int
) -> None:
    run_side_by_side(QueueSideBySide, server, examples, 30)
