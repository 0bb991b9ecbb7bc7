"""What one leader among many may do, and what it leaves to the next."""

from __future__ import annotations

from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.lease import Kind, Token
from celery_singleton_lock.core.store import Authorization, AuthorizeTick, Store
from celery_singleton_lock.testing.contract.calls import (
    KEYSPACE,
    LONG,
    TIMEOUT,
    Part,
    become,
    give,
    new_key,
    new_token,
    take,
)

__all__ = ["TickContract"]


def authorize_tick(
    store: Store,
    leader: str,
    token: Token,
    entry: str,
    expected: str | None,
    new: str,
    ttl: float = LONG,
) -> Authorization:
    call = AuthorizeTick(
        leader=leader,
        token=token,
        entry=Keyspace.last_run(leader, entry),
        expected=expected,
        new=new,
        ttl=ttl,
    )
    return store.authorize_tick(call, timeout=TIMEOUT)


def last_runs(store: Store, leader: str, *entries: str) -> list[str | None]:
    keys = [Keyspace.last_run(leader, entry) for entry in entries]
    return store.last_runs(keys, timeout=TIMEOUT)


class TickContract(Part):
    """See StoreContract."""

    def test_a_leader_is_permitted_and_its_last_run_is_read_back(self, store: Store) -> None:
        leader, entry = new_key(), "every äß | minute"
        token = take(store, leader)
        assert last_runs(store, leader, entry) == [None]
        assert (
            authorize_tick(store, leader, token, entry, None, "1.5 a") is Authorization.AUTHORIZED
        )
        assert (
            authorize_tick(store, leader, token, entry, "1.5 a", "2.5 b")
            is Authorization.AUTHORIZED
        )
        assert last_runs(store, leader, entry) == ["2.5 b"]

    def test_many_last_runs_are_read_in_the_order_asked(self, store: Store) -> None:
        leader = new_key()
        token = take(store, leader)
        for name in ("a", "b", "c"):
            authorize_tick(store, leader, token, name, None, f"1 {name}")
        assert last_runs(store, leader, "c", "none", "a", "b") == ["1 c", None, "1 a", "1 b"]
        assert last_runs(store, leader) == []

    def test_a_permit_sent_again_is_given_again(self, store: Store) -> None:
        leader = new_key()
        token = take(store, leader)
        for _ in range(2):
            assert (
                authorize_tick(store, leader, token, "e", None, "1 a") is Authorization.AUTHORIZED
            )
        assert last_runs(store, leader, "e") == ["1 a"]

    def test_whoever_does_not_lead_is_refused_and_changes_nothing(self, store: Store) -> None:
        leader = new_key()
        token = new_token()
        assert authorize_tick(store, leader, token, "e", None, "1 a") is Authorization.DEPOSED
        take(store, leader, token)
        twin = new_token(token.task_id)
        for other in (new_token(), twin):
            assert authorize_tick(store, leader, other, "e", None, "1 a") is Authorization.DEPOSED
        give(store, leader, token)
        assert authorize_tick(store, leader, token, "e", None, "1 a") is Authorization.DEPOSED
        assert last_runs(store, leader, "e") == [None]

    def test_a_leader_whose_lease_ran_out_is_refused(self, store: Store) -> None:
        leader = new_key()
        token = take(store, leader, ttl=self.SHORT)
        self.elapse(self.LONGER_THAN_SHORT)
        assert authorize_tick(store, leader, token, "e", None, "1 a") is Authorization.DEPOSED

    def test_only_a_lease_permits(self, store: Store) -> None:
        for kind in (Kind.RESERVED, Kind.COOLING, Kind.DYING):
            leader = new_key()
            token = take(store, leader)
            become(store, leader, token, kind)
            assert authorize_tick(store, leader, token, "e", None, "1 a") is Authorization.DEPOSED

    def test_a_last_run_that_is_another_than_expected_stands(self, store: Store) -> None:
        leader = new_key()
        token = take(store, leader)
        assert authorize_tick(store, leader, token, "e", "1 a", "2 b") is Authorization.CHANGED
        authorize_tick(store, leader, token, "e", None, "1 a")
        assert authorize_tick(store, leader, token, "e", None, "2 b") is Authorization.CHANGED
        assert authorize_tick(store, leader, token, "e", "0 x", "2 b") is Authorization.CHANGED
        assert last_runs(store, leader, "e") == ["1 a"]

    def test_a_last_run_outlives_its_leader_and_ends_in_the_store(self, store: Store) -> None:
        leader = new_key()
        token = take(store, leader)
        authorize_tick(store, leader, token, "e", None, "1 a", self.SHORT)
        authorize_tick(store, leader, token, "f", None, "1 a")
        give(store, leader, token)
        self.elapse(self.LONGER_THAN_SHORT)
        assert last_runs(store, leader, "e", "f") == [None, "1 a"]

    def test_last_runs_are_of_one_leader_and_no_records(self, store: Store) -> None:
        leader, other = new_key(), new_key()
        token = take(store, leader)
        authorize_tick(store, leader, token, "e", None, "1 a")
        assert last_runs(store, other, "e") == [None]
        found = {record.key for record in store.scan(KEYSPACE.match_all())}
        assert leader in found
        assert not any("last|" in key for key in found)
