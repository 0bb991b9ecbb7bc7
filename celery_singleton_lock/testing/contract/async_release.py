"""A release that nobody waits for does what one does that is waited for. Not every store has it."""

from __future__ import annotations

import pytest

from celery_singleton_lock.core.lease import Kind
from celery_singleton_lock.core.store import (
    Acquire,
    Granted,
    MarkerState,
    Refused,
    Relation,
    Release,
    Store,
)
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.testing.contract.calls import (
    HOLDER,
    LONG,
    TIMEOUT,
    Part,
    admit,
    ask,
    freed,
    give,
    new_claim,
    new_key,
    new_token,
    publish,
    record_of,
    relation_of,
    take,
)

__all__ = ["AsyncReleaseContract"]


class AsyncReleaseContract(Part):
    """See StoreContract."""

    @pytest.fixture
    def posting(self, store: Store) -> Store:
        if not store.capabilities.releases_async:
            pytest.skip("this store's releases are waited for")
        self._taught(store)
        return store

    @staticmethod
    def _taught(store: Store) -> None:
        """What a store's server learns from its first release, it knows."""
        for _ in range(16):
            key = new_key()
            give(store, key, take(store, key))

    def test_who_asks_next_finds_a_posted_release_carried_out(self, posting: Store) -> None:
        for _ in range(20):
            key = new_key()
            for _ in range(5):
                post(posting, Release(keys=(key,), token=take(posting, key)))
            post(posting, Release(keys=(key,), token=take(posting, key)))
            # Another timeout, so it may be another connection.
            reply = ask_within(posting, key, TIMEOUT / 2)
            assert isinstance(reply, Granted), reply

    def test_a_posted_release_is_heard_of_once(self, posting: Store) -> None:
        heard: list[Relation | StoreError] = []
        key, other = new_key(), new_key()
        post(posting, Release(keys=(key,), token=take(posting, key)), heard)
        take(posting, other)
        posting.drain(timeout=TIMEOUT)
        posting.drain(timeout=TIMEOUT)
        assert heard == [Relation.OURS]

    def test_collecting_hears_of_all_that_was_posted(self, posting: Store) -> None:
        heard: list[Relation | StoreError] = []
        keys = [new_key() for _ in range(4)]
        for key, token in [(key, take(posting, key)) for key in keys]:
            post(posting, Release(keys=(key,), token=token), heard)
        posting.drain(timeout=TIMEOUT)
        assert heard == [Relation.OURS] * 4
        assert [posting.inspect(key) for key in keys] == [None] * 4

    def test_a_posted_release_never_touches_anothers_key(self, posting: Store) -> None:
        key, holder = new_key(), new_token()
        take(posting, key, holder)
        heard: list[Relation | StoreError] = []
        post(posting, Release(keys=(key,), token=new_token()), heard)
        posting.drain(timeout=TIMEOUT)
        assert heard == [Relation.NOT_OURS], "its holder would take a loss for a release"
        assert record_of(posting, key).token == str(holder)

    def test_reservation_and_marker_are_posted_with_it(self, posting: Store) -> None:
        key = new_key()
        token = take(posting, key)
        next_token = token.next_attempt()
        call = Release(
            keys=(key,),
            token=token,
            become=Kind.RESERVED,
            become_ttl=LONG,
            next_token=next_token,
            marker=MarkerState.DONE,
            marker_ttl=LONG,
        )
        post(posting, call)
        assert relation_of(ask(posting, key, token)) is Relation.DONE
        assert relation_of(ask(posting, key, new_token())) is Relation.OTHER
        assert isinstance(ask(posting, key, next_token), Granted)

    def test_a_claim_is_free_for_who_publishes_next(self, posting: Store) -> None:
        key, claim = new_claim()
        token = publish(posting, claim)
        take(posting, key, token)
        post(posting, Release(keys=(key,), token=token, claim=freed(claim)))
        assert admit(posting, claim, new_token()) is None


def post(store: Store, call: Release, heard: list[Relation | StoreError] | None = None) -> None:
    """Post where that can be done; else as its caller does."""
    replies: list[Relation | StoreError] = [] if heard is None else heard

    def hear(outcome: Relation | StoreError, unheard: bool) -> None:
        assert not unheard, "each try had a reply"
        replies.append(outcome)

    if not store.release_async(call, timeout=TIMEOUT, on_reply=hear):
        replies.append(store.release(call, timeout=TIMEOUT))


def ask_within(store: Store, key: str, timeout: float) -> Granted | Refused:
    call = Acquire(slots=(key,), token=new_token(), holder=HOLDER, ttl=LONG)
    return store.acquire(call, timeout=timeout)
