"""Several leases on one key, each in a slot of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.lease import Kind
from celery_singleton_lock.core.store import Granted, Refused, Relation, Store
from celery_singleton_lock.testing.contract.calls import (
    Part,
    ask,
    become,
    give,
    new_key,
    new_token,
    record_of,
    relation_of,
)

__all__ = ["SlotContract"]


class SlotContract(Part):
    """See StoreContract."""

    def test_of_limit_slots_as_many_are_granted_and_one_more_is_refused(self, store: Store) -> None:
        slots = Keyspace.slots(new_key(), 3)
        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(lambda _: ask(store, slots, new_token()), range(24)))
        granted = [reply for reply in replies if isinstance(reply, Granted)]
        assert {reply.key for reply in granted} == set(slots)
        assert len(granted) == 3
        assert {reply.fence for reply in granted} == {None}
        assert {relation_of(reply) for reply in replies if isinstance(reply, Refused)} == {
            Relation.OTHER
        }

    def test_a_slot_of_ones_own_is_found_though_a_lower_one_is_free(self, store: Store) -> None:
        slots = Keyspace.slots(new_key(), 3)
        first, second = new_token(), new_token()
        ask(store, slots, first)
        ask(store, slots, second)
        give(store, slots[0], first)
        reply = ask(store, slots, second)
        assert isinstance(reply, Granted)
        assert reply.key == slots[1]
        assert store.inspect(slots[0]) is None

    def test_a_twin_and_another_attempt_take_no_second_slot(self, store: Store) -> None:
        slots = Keyspace.slots(new_key(), 3)
        token = new_token(retries=1)
        ask(store, slots, new_token())
        ask(store, slots, token)
        for retries, relation in ((0, Relation.LATER), (1, Relation.TWIN), (2, Relation.EARLIER)):
            arriving = new_token(token.task_id, retries=retries)
            assert relation_of(ask(store, slots, arriving)) is relation
        assert store.inspect(slots[2]) is None

    def test_a_slot_reserved_for_ones_attempt_is_taken_before_a_free_one(
        self, store: Store
    ) -> None:
        slots = Keyspace.slots(new_key(), 3)
        first, second = new_token(), new_token()
        ask(store, slots, first)
        ask(store, slots, second)
        become(store, slots[1], second, Kind.RESERVED)
        give(store, slots[0], first)
        reply = ask(store, slots, new_token(second.task_id, retries=1))
        assert isinstance(reply, Granted)
        assert reply.key == slots[1]

    def test_ones_own_cooling_slot_leaves_the_other_slots_free(self, store: Store) -> None:
        slots = Keyspace.slots(new_key(), 2)
        token = new_token()
        ask(store, slots, token)
        become(store, slots[0], token, Kind.COOLING)
        reply = ask(store, slots, new_token(token.task_id, retries=1))
        assert isinstance(reply, Granted)
        assert reply.key == slots[1]

    def test_a_release_of_all_slots_gives_back_ones_own_alone(self, store: Store) -> None:
        slots = Keyspace.slots(new_key(), 3)
        first, second = new_token(), new_token()
        ask(store, slots, first)
        ask(store, slots, second)
        assert give(store, slots, second) is Relation.OURS
        assert record_of(store, slots[0]).token == str(first)
        assert store.inspect(slots[1]) is None
