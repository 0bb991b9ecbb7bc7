"""The arguments of a queued message: replaced while it is queued, returned by its grant.

On Redis and Valkey, behind Sentinels and in a cluster.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Phase, Token
from celery_singleton_lock.core.pauses import Pause
from celery_singleton_lock.core.store_requests import (
    ARGUMENTS_FOR,
    ClaimChange,
    CompletionState,
    Granted,
    GrantedArguments,
    Refused,
    Relation,
    ReplaceArguments,
    Replaced,
)
from celery_singleton_lock.stores import open_store
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.testing.contract import TIMEOUT, ask, new_key, new_token
from celery_singleton_lock.testing.contract.steps import (
    LONG,
    change,
    freed,
    give,
    granted,
    mark,
    record_of,
    relation_of,
    take,
    take_claim,
)


@pytest.fixture(params=["server", "valkey", "sentinels", "cluster"])
def store(request: pytest.FixtureRequest) -> Iterator[RedisStore]:
    place: Any = request.getfixturevalue(request.param)
    url = place.url if isinstance(place.url, str) else place.url()
    with closing(open_store(url)) as store:
        assert isinstance(store, RedisStore)
        yield store


class Message:
    """A queued message whose arguments can be replaced."""

    def __init__(self, store: RedisStore, key: str = "", due_in: float = 0.0) -> None:
        self.store, self.key, self.token = store, key or new_key(), new_token()
        self.claim = Keyspace.claim("app.sync", self.key)
        self.arguments = Keyspace.arguments(self.claim, self.token.call_id)
        self.change = ClaimChange(key=self.claim, phase=None, arguments=self.arguments)
        options: Any = {"arguments": self.arguments, "due_in": due_in}
        assert take_claim(store, self.claim, self.token, **options) is None

    def replace(self, arguments: bytes, **due: float) -> Replaced:
        request = ReplaceArguments(
            claim=self.claim,
            call_id=self.token.call_id,
            key=self.arguments,
            arguments=arguments,
            ttl=LONG,
            **due,
        )
        return self.store.arguments.replace(request, timeout=TIMEOUT)

    @property
    def ttl(self) -> float:
        """Seconds that the arguments are kept; negative: there are none."""
        (ttl_ms,) = self.store.runner.connections.run([("PTTL", self.arguments)], TIMEOUT)
        return float(ttl_ms / 1000)

    def start(self, token: Token | None = None) -> bytes | None:
        reply = granted(self.store, self.key, token or self.token, claim=self.change)
        assert isinstance(reply, GrantedArguments)
        return reply.arguments

    def end(self) -> None:
        give(self.store, self.key, self.token, claim=self.change)


def test_a_grant_returns_the_last_arguments(store: RedisStore) -> None:
    message = Message(store)
    for arguments in (b"first", b"\x00\xff last"):
        assert message.replace(arguments) is Replaced.YES
    assert message.start() == b"\x00\xff last"
    assert message.start() == b"\x00\xff last", "also after a lost reply"


def test_arguments_that_no_call_replaced_are_empty(store: RedisStore) -> None:
    assert Message(store).start() == b""


def test_a_client_that_waited_gets_them(store: RedisStore) -> None:
    message = Message(store)
    other = take(store, message.key)
    waiting = {"claim": message.change, "wait_ttl": LONG}
    assert isinstance(ask(store, message.key, message.token, **waiting), Refused)
    message.replace(b"newest")
    give(store, message.key, other)
    reply = granted(store, message.key, message.token, **waiting, handoff=other.nonce)
    assert isinstance(reply, GrantedArguments)
    assert reply.arguments == b"newest"


def test_lost_arguments_are_none(store: RedisStore) -> None:
    message = Message(store)
    store.operators.free(message.arguments, None)
    assert message.start() is None


def test_after_the_grant_no_call_replaces_them(store: RedisStore) -> None:
    message = Message(store)
    message.start()
    assert message.replace(b"late") is Replaced.NOT_QUEUED
    assert message.start() == b""


def test_a_refusal_returns_no_arguments_and_leaves_them_replaceable(store: RedisStore) -> None:
    message = Message(store)
    other = take(store, message.key)
    reply = ask(store, message.key, message.token, claim=message.change)
    assert isinstance(reply, Refused)
    assert reply.relation is Relation.OTHER
    assert message.replace(b"newest") is Replaced.YES
    give(store, message.key, other)
    assert message.start() == b"newest"


def test_they_are_kept_while_the_key_is_paused(store: RedisStore) -> None:
    message = Message(store, new_key())
    message.replace(b"newest")
    pause = Pause(name=message.key, user="anna", host="web1")
    store.pauses.pause(pause, timeout=TIMEOUT)
    store.runner.connections.run([("PEXPIRE", message.arguments, "60000")], TIMEOUT)
    assert relation_of(ask(store, message.key, message.token, claim=message.change)) == "paused"
    assert message.ttl > ARGUMENTS_FOR - LONG, "as long as the message may come back"
    store.pauses.resume(message.key, timeout=TIMEOUT)
    assert message.start() == b"newest"


def test_a_redelivery_gets_them_again_until_the_message_is_done(store: RedisStore) -> None:
    message = Message(store)
    message.replace(b"newest")
    message.start()
    give(store, message.key, message.token)  # its worker was killed
    redelivered = Token(message.token.task_id, 0, 0, "another")
    assert message.start(redelivered) == b"newest"
    message.token = redelivered
    message.end()
    assert store.leases.inspect(message.arguments) is None
    assert message.start() is None


def test_each_end_of_a_message_deletes_them(store: RedisStore) -> None:
    def end_by_refusal(message: Message) -> None:
        other = take(store, message.key)
        refused = ask(store, message.key, message.token, claim=message.change, frees_claim=True)
        assert relation_of(refused) is Relation.OTHER
        give(store, message.key, other)

    def end_by_marker(message: Message) -> None:
        message.start()
        give(store, message.key, message.token, claim=freed(message.claim))
        mark(store, message.key, message.token, CompletionState.DONE, claim=message.change)

    def end_after_a_loss(message: Message) -> None:
        message.start()
        store.operators.free(message.key, None)
        message.end()

    def end_without_a_lease(message: Message) -> None:
        store.claims.change(message.token, message.change, timeout=TIMEOUT)

    def end_after_its_claim(message: Message) -> None:
        store.operators.free(message.claim, None)
        take_claim(store, message.claim, new_token())
        end_without_a_lease(message)

    for end in (
        Message.end,
        end_by_refusal,
        end_by_marker,
        end_after_a_loss,
        end_without_a_lease,
        end_after_its_claim,
    ):
        message = Message(store)
        message.replace(b"newest")
        assert message.ttl > 0
        end(message)
        assert message.ttl < 0, end.__name__


def test_a_duplicate_that_is_discarded_leaves_them_to_the_running_one(store: RedisStore) -> None:
    message = Message(store)
    message.replace(b"newest")
    running = ClaimChange(
        key=message.claim, phase=Phase.RUNNING, ttl=LONG, arguments=message.arguments
    )
    granted(store, message.key, message.token, claim=running)
    store.claims.change(message.token, message.change, timeout=TIMEOUT)
    assert message.start() == b"newest"


def test_those_of_a_message_that_was_never_published_expire_with_its_claim(
    store: RedisStore,
) -> None:
    message = Message(store, due_in=LONG)
    for again in (False, True):
        if again:  # published again after a lost reply, with a later end
            take_claim(
                store, message.claim, message.token, ttl=2 * LONG, arguments=message.arguments
            )
        assert 0 < message.ttl <= record_of(store, message.claim).ttl + 1
    due_in(message)
    assert message.ttl > ARGUMENTS_FOR, "it has arrived"


def test_a_message_that_arrives_after_its_claim_has_replaceable_ones_again(
    store: RedisStore,
) -> None:
    message = Message(store)
    for key in (message.claim, message.arguments):
        store.operators.free(key, None)
    other = take(store, message.key)
    assert isinstance(ask(store, message.key, message.token, claim=message.change), Refused)
    take_claim(store, message.claim, message.token)
    assert message.replace(b"newest") is Replaced.YES
    give(store, message.key, other)
    assert message.start() == b"newest"


def test_the_next_message_of_a_key_does_not_get_them(store: RedisStore) -> None:
    started = Message(store)
    started.replace(b"of the first")
    started.start()
    following = Message(store, started.key)
    assert following.replace(b"of the second") is Replaced.YES
    assert started.start() == b"of the first"
    started.end()
    assert following.start() == b"of the second"


def test_a_message_that_is_admitted_again_keeps_them(store: RedisStore) -> None:
    message = Message(store)
    message.replace(b"newest")
    assert take_claim(store, message.claim, message.token, arguments=message.arguments) is None
    assert message.start() == b"newest"


def test_a_retry_that_waits_takes_them(store: RedisStore) -> None:
    message = Message(store)
    message.start()
    give(store, message.key, message.token, claim=freed(message.claim))
    take_claim(store, message.claim, message.token)
    change(store, message.token, message.claim, Phase.RETRYING)
    assert message.replace(b"newest") is Replaced.YES
    change(store, message.token, message.claim, Phase.RUNNING)
    assert message.replace(b"late") is Replaced.NOT_QUEUED


def test_the_arguments_of_another_message_are_fixed(store: RedisStore) -> None:
    message = Message(store)
    store.operators.free(message.arguments, None)
    assert message.replace(b"newest") is Replaced.FIXED
    store.operators.free(message.claim, None)
    take_claim(store, message.claim, new_token())
    assert message.replace(b"newest") is Replaced.NOT_QUEUED


def test_a_message_that_is_done_gets_none(store: RedisStore) -> None:
    message = Message(store)
    message.replace(b"newest")
    message.start()
    give(store, message.key, message.token, completion=CompletionState.DONE, completion_ttl=LONG)
    reply = ask(store, message.key, message.token, claim=message.change)
    assert isinstance(reply, Refused)
    assert reply.relation is Relation.DONE


def due_in(message: Message, sequence: int = 0) -> float:
    """The seconds until the message may start; 0: its acquire had another reply."""
    reply = ask(message.store, message.key, message.token, claim=message.change, sequence=sequence)
    if isinstance(reply, Granted) or reply.relation is not Relation.NOT_DUE:
        return 0.0
    return reply.due_in


def test_a_message_starts_when_it_is_due(store: RedisStore) -> None:
    message = Message(store, due_in=LONG)
    assert LONG - 1 < due_in(message) <= LONG
    assert message.replace(b"", due_in=2 * LONG) is Replaced.YES
    assert 2 * LONG - 1 < due_in(message) <= 2 * LONG
    assert message.replace(b"newest", due_in=2 * LONG, due_max=LONG / 2) is Replaced.YES
    assert LONG / 2 - 1 < due_in(message) <= LONG / 2, "from the claim"
    assert message.replace(b"newest") is Replaced.YES
    assert message.start() == b"newest"


def test_a_clock_that_is_set_back_does_not_postpone_a_message(store: RedisStore) -> None:
    message, start = Message(store, due_in=LONG), time.time() * 1000 + 2 * LONG * 1000
    value = f"{start:.0f} {start + LONG * 1000:.0f} newest"
    store.runner.connections.run([("SET", message.arguments, value)], TIMEOUT)
    assert due_in(message) == 0
    message = Message(store, due_in=LONG)
    store.runner.connections.run([("SET", message.arguments, value)], TIMEOUT)
    assert message.replace(b"newest", due_in=LONG / 2) is Replaced.YES
    assert LONG / 2 - 1 < due_in(message) <= LONG / 2


def test_arguments_are_kept_until_a_late_due_time(store: RedisStore) -> None:
    message = Message(store)
    assert message.replace(b"newest", due_in=2 * ARGUMENTS_FOR) is Replaced.YES
    assert due_in(message) > ARGUMENTS_FOR
    assert message.ttl > 2 * ARGUMENTS_FOR


def test_an_old_copy_of_a_message_that_is_not_due_is_dropped(store: RedisStore) -> None:
    message = Message(store, due_in=LONG)
    mark(store, message.key, message.token, CompletionState.WAITING, 1)
    reply = ask(store, message.key, message.token, claim=message.change, sequence=0)
    assert isinstance(reply, Refused)
    assert reply.relation is Relation.SUPERSEDED
    assert due_in(message, sequence=1) > 0


def test_a_message_that_is_due_and_refused_is_in_conflict(store: RedisStore) -> None:
    message = Message(store)
    take(store, message.key)
    reply = ask(store, message.key, message.token, claim=message.change)
    assert isinstance(reply, Refused)
    assert reply.relation is Relation.OTHER
