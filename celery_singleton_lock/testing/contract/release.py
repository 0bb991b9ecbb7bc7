"""What a release gives back, and what it leaves alone."""

from __future__ import annotations

from celery_singleton_lock.core.lease import Kind
from celery_singleton_lock.core.store import Relation, Store
from celery_singleton_lock.testing.contract.calls import (
    LEASE_KINDS,
    LONG,
    Part,
    become,
    give,
    new_key,
    new_token,
    record_of,
    take,
)

__all__ = ["ReleaseContract"]


class ReleaseContract(Part):
    """See StoreContract."""

    def test_a_released_key_is_free_and_a_second_release_harmless(self, store: Store) -> None:
        key = new_key()
        token = take(store, key)
        assert give(store, key, token) is Relation.OURS
        assert store.inspect(key) is None
        assert give(store, key, token) is Relation.NOT_OURS
        other = take(store, key)
        assert give(store, key, token) is Relation.NOT_OURS
        assert record_of(store, key).token == str(other)

    def test_a_release_never_touches_anothers_key_of_any_kind(self, store: Store) -> None:
        for kind in LEASE_KINDS:
            key = new_key()
            holder = take(store, key, new_token(retries=1))
            if kind is not Kind.LEASE:
                become(store, key, holder, kind)
            before = record_of(store, key)
            for other in (new_token(), new_token(holder.task_id), new_token(holder.task_id + "x")):
                give(store, key, other)
                give(store, key, other, become=Kind.COOLING, become_ttl=self.SHORT)
            after = record_of(store, key)
            assert (after.kind, after.token, after.fence) == (kind, before.token, before.fence)
            assert after.ttl > LONG - 60

    def test_a_release_sent_again_leaves_the_reservation_and_the_cooling(
        self, store: Store
    ) -> None:
        for kind in (Kind.RESERVED, Kind.COOLING):
            key = new_key()
            token = take(store, key)
            become(store, key, token, kind)
            give(store, key, token)
            assert record_of(store, key).kind is kind

    def test_a_twin_that_lets_go_hears_of_the_other(self, store: Store) -> None:
        key = new_key()
        token = take(store, key)
        assert give(store, key, new_token(token.task_id)) is Relation.TWIN
        assert give(store, key, new_token(token.task_id, retries=1)) is Relation.NOT_OURS
