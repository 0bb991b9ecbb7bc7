"""Contract of ticks: the authorization of leaders, and the stored last runs."""

from __future__ import annotations

from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.lease import Kind, Token
from celery_singleton_lock.core.store import Authorization, AuthorizeTick, Store
from celery_singleton_lock.testing.contract import steps as do
from celery_singleton_lock.testing.contract.steps import KEYSPACE, LONG, TIMEOUT, Part

__all__ = ["TickContract"]


def tick(
    store: Store,
    leader: str,
    token: Token,
    entry: str,
    last_runs: tuple[str | None, str],
    ttl: float = LONG,
) -> Authorization:
    """Request that the first of ``last_runs`` is replaced by the second."""
    expected, new = last_runs
    name = Keyspace.last_run(leader, entry)
    request = AuthorizeTick(
        leader=leader, token=token, entry=name, expected=expected, new=new, ttl=ttl
    )
    return store.authorize_tick(request, timeout=TIMEOUT)


def last_runs(store: Store, leader: str, *entries: str) -> list[str | None]:
    keys = [Keyspace.last_run(leader, entry) for entry in entries]
    return store.last_runs(keys, timeout=TIMEOUT)


class TickContract(Part):
    """See StoreContract."""

    def test_a_leader_is_authorized_and_its_last_run_is_read_back(self, store: Store) -> None:
        leader, entry = do.new_key(), "every äß | minute"
        token = do.take(store, leader)
        assert last_runs(store, leader, entry) == [None]
        assert tick(store, leader, token, entry, (None, "1.5 a")) is Authorization.AUTHORIZED
        assert tick(store, leader, token, entry, ("1.5 a", "2.5 b")) is Authorization.AUTHORIZED
        assert last_runs(store, leader, entry) == ["2.5 b"]

    def test_many_last_runs_are_read_in_the_order_asked(self, store: Store) -> None:
        leader, token = do.held(store)
        for name in ("a", "b", "c"):
            tick(store, leader, token, name, (None, f"1 {name}"))
        assert last_runs(store, leader, "c", "none", "a", "b") == ["1 c", None, "1 a", "1 b"]
        assert last_runs(store, leader) == []

    def test_a_request_sent_again_is_authorized_again(self, store: Store) -> None:
        leader, token = do.held(store)
        for _ in range(2):
            assert tick(store, leader, token, "e", (None, "1 a")) is Authorization.AUTHORIZED
        assert last_runs(store, leader, "e") == ["1 a"]

    def test_a_token_that_does_not_lead_is_refused_and_changes_nothing(self, store: Store) -> None:
        leader = do.new_key()
        token = do.new_token()
        assert tick(store, leader, token, "e", (None, "1 a")) is Authorization.DEPOSED
        do.take(store, leader, token)
        twin = do.new_token(token.task_id)
        for other in (do.new_token(), twin):
            assert tick(store, leader, other, "e", (None, "1 a")) is Authorization.DEPOSED
        do.give(store, leader, token)
        assert tick(store, leader, token, "e", (None, "1 a")) is Authorization.DEPOSED
        assert last_runs(store, leader, "e") == [None]

    def test_a_leader_whose_lease_ran_out_is_refused(self, store: Store) -> None:
        leader, token = do.held(store, ttl=self.SHORT)
        self.elapse(self.LONGER_THAN_SHORT)
        assert tick(store, leader, token, "e", (None, "1 a")) is Authorization.DEPOSED

    def test_only_a_lease_authorizes(self, store: Store) -> None:
        for kind in (Kind.RESERVED, Kind.COOLING, Kind.DYING):
            leader, token = do.held(store)
            do.become(store, leader, token, kind)
            assert tick(store, leader, token, "e", (None, "1 a")) is Authorization.DEPOSED

    def test_a_last_run_that_is_another_than_expected_stands(self, store: Store) -> None:
        leader, token = do.held(store)
        assert tick(store, leader, token, "e", ("1 a", "2 b")) is Authorization.CHANGED
        tick(store, leader, token, "e", (None, "1 a"))
        assert tick(store, leader, token, "e", (None, "2 b")) is Authorization.CHANGED
        assert tick(store, leader, token, "e", ("0 x", "2 b")) is Authorization.CHANGED
        assert last_runs(store, leader, "e") == ["1 a"]

    def test_a_last_run_outlives_its_leader_and_ends_in_the_store(self, store: Store) -> None:
        leader, token = do.held(store)
        tick(store, leader, token, "e", (None, "1 a"), self.SHORT)
        tick(store, leader, token, "f", (None, "1 a"))
        do.give(store, leader, token)
        self.elapse(self.LONGER_THAN_SHORT)
        assert last_runs(store, leader, "e", "f") == [None, "1 a"]

    def test_last_runs_are_of_one_leader_and_no_records(self, store: Store) -> None:
        leader, other = do.new_key(), do.new_key()
        token = do.take(store, leader)
        tick(store, leader, token, "e", (None, "1 a"))
        assert last_runs(store, other, "e") == [None]
        found = {record.key for record in store.scan(KEYSPACE.match_all())}
        assert leader in found
        assert not any("last|" in key for key in found)
