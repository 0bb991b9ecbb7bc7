"""Contract of fences and of the requests of operators."""

from __future__ import annotations

from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.lease import Holder, Kind, LossReason, Phase
from celery_singleton_lock.core.store import Granted, MarkerState, Relation, Store
from celery_singleton_lock.testing.contract import steps as do
from celery_singleton_lock.testing.contract.steps import (
    HOLDER,
    KEYSPACE,
    LEASE_KINDS,
    LONG,
    PUBLISHER,
    Part,
)

__all__ = ["OperatorContract"]


class OperatorContract(Part):
    """See StoreContract."""

    # --- fences ----------------------------------------------------------------------------------

    def test_fences_rise_over_a_release_an_expiry_and_a_free(self, store: Store) -> None:
        if not store.capabilities.fence:
            return
        key, fences = do.new_key(), []
        for number in range(50):
            token = do.new_token()
            fences.append(do.fence_of(store, key, token))
            fences.append(do.fence_of(store, key, token))
            if number % 2:
                do.give(store, key, token)
            else:
                store.free(key, None)
        do.take(store, key, ttl=self.SHORT)
        self.elapse(self.LONGER_THAN_SHORT)
        fences.append(do.fence_of(store, key, do.new_token()))
        assert fences == sorted(set(fences))

    def test_a_store_without_fences_grants_none(self, store: Store) -> None:
        reply = do.ask(store, do.new_key(), do.new_token())
        assert isinstance(reply, Granted)
        assert (reply.fence is not None) == store.capabilities.fence

    # --- for operators ---------------------------------------------------------------------------

    def test_nothing_is_found_at_a_free_key(self, store: Store) -> None:
        key = do.new_key()
        assert store.inspect(key) is None
        assert store.free(key, None) is False

    def test_a_scan_finds_what_is_held_of_every_kind_and_nothing_else(self, store: Store) -> None:
        expected = {}
        for kind in LEASE_KINDS:
            key, token = do.held(store)
            if kind is not Kind.LEASE:
                do.become(store, key, token, kind)
            expected[key] = kind
        released = do.new_key()
        token = do.take(store, released)
        do.give(store, released, token, marker=MarkerState.DONE, marker_ttl=LONG)
        records = list(store.scan(KEYSPACE.match_all()))
        found = {record.key: record.kind for record in records}
        assert expected.items() <= found.items()
        assert released not in found
        assert list(found) == sorted(found)
        assert all(":contract:" in key or KEYSPACE.is_claim(key) for key in found)
        assert not list(store.scan(Keyspace("contract-2").match_all()))

    def test_a_key_is_freed_if_the_token_stands(self, store: Store) -> None:
        key, token = do.held(store)
        assert store.free(key, str(do.new_token())) is False
        assert store.free(key, str(do.new_token(token.task_id))) is False
        assert do.record_of(store, key).token == str(token)
        assert store.free(key, str(token)) is True
        assert store.inspect(key) is None
        assert do.renew(store, [do.lease_of(key, token)]) == [LossReason.GONE]

    def test_a_key_of_any_kind_is_freed_whatever_stands(self, store: Store) -> None:
        for kind in LEASE_KINDS:
            key, token = do.held(store)
            if kind is not Kind.LEASE:
                do.become(store, key, token, kind)
            assert store.free(key, None) is True
            assert store.inspect(key) is None

    # --- claims ----------------------------------------------------------------------------------

    def test_a_scan_finds_claims_beside_leases(self, store: Store) -> None:
        expected: dict[str, tuple[Kind, str, Phase | None, Holder]] = {}
        for phase in Phase:
            key, claim, token = do.published(store, phase=phase)
            do.take(store, key, token)
            expected[claim] = (Kind.CLAIM, token.task, phase, PUBLISHER)
            expected[key] = (Kind.LEASE, str(token), None, HOLDER)
        found = {
            record.key: (record.kind, record.token, record.phase, record.holder)
            for record in store.scan(KEYSPACE.match_all())
        }
        assert expected.items() <= found.items()

    def test_a_claim_is_freed_if_its_task_stands(self, store: Store) -> None:
        key, claim, token = do.published(store, phase=Phase.RUNNING)
        do.take(store, key, token)
        for other in (do.new_token().task, str(token), token.task + "x", token.task[:-1]):
            assert store.free(claim, other) is False
        assert do.record_of(store, claim).token == token.task
        assert store.free(claim, token.task) is True
        assert store.inspect(claim) is None
        assert store.free(claim, token.task) is False
        assert do.record_of(store, key).token == str(token)
        do.publish(store, claim)

    def test_a_claim_is_freed_whatever_stands_and_its_lease_stays(self, store: Store) -> None:
        for phase in Phase:
            key, claim, token = do.published(store, phase=phase)
            do.take(store, key, token)
            assert store.free(claim, None) is True
            assert store.inspect(claim) is None
            assert do.refused(store, key) is Relation.OTHER
