"""Contract of asynchronous releases, for stores that implement them."""

from __future__ import annotations

from typing import Any, TypeAlias

import pytest

from celery_singleton_lock.core.lease import Kind, Token
from celery_singleton_lock.core.store import (
    Acquire,
    Granted,
    MarkerState,
    Relation,
    Release,
    Store,
)
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.testing.contract import steps as do
from celery_singleton_lock.testing.contract.steps import HOLDER, LONG, TIMEOUT, Part

__all__ = ["AsyncReleaseContract"]

Replies: TypeAlias = list[Relation | StoreError]


class AsyncReleaseContract(Part):
    """See StoreContract."""

    @pytest.fixture
    def releasing(self, store: Store) -> Store:
        if not store.capabilities.releases_async:
            pytest.skip("this store has no asynchronous release")
        for _ in range(16):  # A client may send its first releases synchronously.
            key = do.new_key()
            do.give(store, key, do.take(store, key))
        return store

    def test_the_next_request_finds_the_release_carried_out(self, releasing: Store) -> None:
        for _ in range(20):
            key = do.new_key()
            for _ in range(6):
                release_async(releasing, key, do.take(releasing, key))
            # A request with another timeout may use another connection.
            request = Acquire(slots=(key,), token=do.new_token(), holder=HOLDER, ttl=LONG)
            reply = releasing.acquire(request, timeout=TIMEOUT / 2)
            assert isinstance(reply, Granted), reply

    def test_an_asynchronous_release_is_reported_once(self, releasing: Store) -> None:
        key = do.new_key()
        replies = release_async(releasing, key, do.take(releasing, key))
        do.take(releasing, do.new_key())
        releasing.drain(timeout=TIMEOUT)
        releasing.drain(timeout=TIMEOUT)
        assert replies == [Relation.OURS]

    def test_draining_reports_all_pending_releases(self, releasing: Store) -> None:
        held = [(key, do.take(releasing, key)) for key in (do.new_key() for _ in range(4))]
        replies = [release_async(releasing, key, token) for key, token in held]
        releasing.drain(timeout=TIMEOUT)
        assert replies == [[Relation.OURS]] * 4
        assert [releasing.inspect(key) for key, _ in held] == [None] * 4

    def test_an_asynchronous_release_never_touches_anothers_key(self, releasing: Store) -> None:
        key, holder = do.held(releasing)
        replies = release_async(releasing, key, do.new_token())
        releasing.drain(timeout=TIMEOUT)
        assert replies == [Relation.NOT_OURS], "a loss would be taken for a release"
        assert do.record_of(releasing, key).token == str(holder)

    def test_reservation_and_marker_are_written_with_it(self, releasing: Store) -> None:
        key, token = do.held(releasing)
        reserved = {"become": Kind.RESERVED, "become_ttl": LONG, "next_token": token.next_attempt()}
        done = {"marker": MarkerState.DONE, "marker_ttl": LONG}
        release_async(releasing, key, token, **reserved, **done)
        assert do.refused(releasing, key, token) is Relation.DONE
        assert do.refused(releasing, key) is Relation.OTHER
        do.take(releasing, key, token.next_attempt())

    def test_its_claim_is_free_for_the_next_publisher(self, releasing: Store) -> None:
        key, claim, token = do.published(releasing)
        do.take(releasing, key, token)
        release_async(releasing, key, token, claim=do.freed(claim))
        assert do.admit(releasing, claim, do.new_token()) is None


def release_async(store: Store, key: str, token: Token, **options: Any) -> Replies:
    """Release asynchronously, or synchronously if the store requires it; return the replies."""
    replies: Replies = []

    def on_reply(reply: Relation | StoreError, is_unsure: bool) -> None:
        assert not is_unsure, "each try had a reply"
        replies.append(reply)

    request = Release(keys=(key,), token=token, **options)
    if not store.release_async(request, timeout=TIMEOUT, on_reply=on_reply):
        replies.append(store.release(request, timeout=TIMEOUT))
    return replies
