"""Contract of leases: grants and refusals, slots, renewals, releases."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.lease import Holder, Kind, LossReason, Token
from celery_singleton_lock.core.store import (
    RENEWED,
    Granted,
    MarkerState,
    Refused,
    Relation,
    Store,
)
from celery_singleton_lock.testing.contract import steps as do
from celery_singleton_lock.testing.contract.steps import (
    HOLDER,
    LEASE_KINDS,
    LONG,
    ODD_TASK_IDS,
    Part,
)

__all__ = ["LeaseContract", "SlotContract"]


class LeaseContract(Part):
    """See StoreContract."""

    # --- acquire ---------------------------------------------------------------------------------

    def test_a_free_key_is_granted_and_its_record_names_the_holder(self, store: Store) -> None:
        key, token = do.new_key(), do.new_token()
        reply = do.ask(store, key, token)
        assert isinstance(reply, Granted)
        assert reply.key == key
        assert do.found(store, key) == (Kind.LEASE, str(token), None, HOLDER, LONG)
        assert do.record_of(store, key).fence == reply.fence

    def test_a_held_key_is_refused_with_the_record_of_its_holder(self, store: Store) -> None:
        key, token = do.held(store)
        record = do.refused_by(store, key)
        assert (record.key, record.token, record.holder) == (key, str(token), HOLDER)
        assert do.ttl_of(record) == LONG

    def test_a_refusal_changes_nothing(self, store: Store) -> None:
        key, token = do.held(store)
        do.ask(store, key, do.new_token(), ttl=LONG * 2)
        assert do.found(store, key) == (Kind.LEASE, str(token), None, HOLDER, LONG)

    def test_an_acquire_sent_again_is_granted_again(self, store: Store) -> None:
        key, token = do.held(store)
        reply = do.ask(store, key, token, ttl=LONG * 2)
        assert isinstance(reply, Granted)
        assert do.found(store, key) == (Kind.LEASE, str(token), None, HOLDER, LONG * 2)
        assert do.record_of(store, key).fence == reply.fence

    def test_a_lease_that_is_not_renewed_ends_in_the_store(self, store: Store) -> None:
        key = do.new_key()
        do.take(store, key, ttl=self.SHORT)
        self.elapse(self.LONGER_THAN_SHORT)
        assert store.inspect(key) is None
        do.take(store, key)

    def test_keys_do_not_exclude_each_other(self, store: Store) -> None:
        token = do.new_token()
        do.take(store, do.new_key(), token)
        do.take(store, do.new_key(), token)

    def test_of_many_threads_one_is_granted(self, store: Store) -> None:
        key = do.new_key()
        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(lambda _: do.ask(store, key, do.new_token()), range(40)))
        assert sum(isinstance(reply, Granted) for reply in replies) == 1

    # --- how an arriving delivery relates to what it finds ---------------------------------------

    def test_another_delivery_of_the_same_attempt_is_a_twin(self, store: Store) -> None:
        key, token = do.held(store)
        assert do.refused(store, key, do.new_token(token.task_id)) is Relation.TWIN

    def test_an_attempt_is_refused_by_an_older_or_younger_one(self, store: Store) -> None:
        for older, younger in (
            (do.new_token("t", retries=0), do.new_token("t", retries=1)),
            (do.new_token("t", nesting=0, retries=3), do.new_token("t", nesting=1, retries=0)),
            (do.new_token("t", retries=2_000_000), do.new_token("t", nesting=1)),
        ):
            for held, arriving, relation in (
                (older, younger, Relation.EARLIER),
                (younger, older, Relation.LATER),
            ):
                key = do.new_key()
                do.take(store, key, held)
                assert do.refused(store, key, arriving) is relation, (held, arriving)

    def test_a_task_whose_id_begins_alike_is_another_task(self, store: Store) -> None:
        for held, arriving in (("abc", "abcd"), ("abcd", "abc"), ("a.c", "abc"), ("%", "abc")):
            key = do.new_key()
            do.take(store, key, do.new_token(held))
            assert do.refused(store, key, do.new_token(arriving)) is Relation.OTHER

    def test_a_second_call_with_the_same_task_id_is_another_task(self, store: Store) -> None:
        key = do.new_key()
        first, second, unnamed = (Token("t", 0, 0, "n", call) for call in ("a", "b", ""))
        do.take(store, key, first)
        assert do.refused(store, key, second) is Relation.OTHER
        assert do.refused(store, key, unnamed) is Relation.OTHER
        assert do.refused(store, key, Token("t", 0, 0, "m", "a")) is Relation.TWIN
        assert do.renew(store, [do.lease_of(key, second)]) == [LossReason.REPLACED]
        assert Token.parse(do.record_of(store, key).token) == first
        do.give(store, key, first, marker=MarkerState.DONE, marker_ttl=LONG)
        assert do.refused(store, key, first) is Relation.DONE
        do.take(store, key, second)

    def test_task_ids_of_any_characters_are_told_apart_and_come_back(self, store: Store) -> None:
        for task_id in ODD_TASK_IDS:
            key, token = do.new_key(), do.new_token(task_id)
            do.take(store, key, token)
            assert Token.parse(do.record_of(store, key).token) == token
            assert do.refused(store, key, do.new_token(task_id)) is Relation.TWIN
            assert do.refused(store, key, do.new_token(task_id, retries=1)) is Relation.EARLIER
            assert do.refused(store, key, do.new_token(task_id + "x")) is Relation.OTHER
            assert do.renew(store, [do.lease_of(key, token)]) == [RENEWED]
            assert do.give(store, key, token) is Relation.OURS
            assert store.inspect(key) is None

    def test_holders_and_keys_of_any_characters_come_back(self, store: Store) -> None:
        holder = Holder(task='a "b" \\', task_id="x\ny", worker="w|1.2| l {}", pid=1, since=0.5)
        key = do.new_key("日本 [x]*?")
        do.ask(store, key, do.new_token(), holder=holder)
        assert (do.record_of(store, key).key, do.record_of(store, key).holder) == (key, holder)

    # --- reserved, cooling, dying ----------------------------------------------------------------

    def test_a_reserved_key_is_taken_by_any_delivery_of_the_attempt(self, store: Store) -> None:
        key, token = do.held(store)
        do.become(store, key, token, Kind.RESERVED)
        assert do.record_of(store, key).kind is Kind.RESERVED
        following = do.take(store, key, do.new_token(token.task_id, retries=1))
        assert do.found(store, key)[:2] == (Kind.LEASE, str(following))
        assert do.refused(store, key, do.new_token(token.task_id, retries=1)) is Relation.TWIN

    def test_a_reserved_key_is_refused_to_all_others(self, store: Store) -> None:
        key, token = do.held(store)
        do.become(store, key, token, Kind.RESERVED)
        assert do.refused(store, key) is Relation.OTHER
        assert do.refused(store, key, do.new_token(token.task_id)) is Relation.LATER
        assert do.refused(store, key, token) is Relation.LATER
        assert do.refused(store, key, do.new_token(token.task_id, retries=2)) is Relation.EARLIER

    def test_a_cooling_key_is_refused_to_all_and_ends_by_itself(self, store: Store) -> None:
        key, token = do.held(store)
        do.become(store, key, token, Kind.COOLING)
        assert do.record_of(store, key).kind is Kind.COOLING
        for other in (do.new_token(), token, do.new_token(token.task_id, retries=1)):
            assert do.refused(store, key, other) is Relation.OTHER
        # Another key: a key with a short ttl may expire before all tokens have requested it.
        key = do.new_key()
        do.become(store, key, do.take(store, key), Kind.COOLING, self.SHORT)
        self.elapse(self.LONGER_THAN_SHORT)
        do.take(store, key)

    def test_a_dying_holder_keeps_the_key_until_its_token_releases_it(self, store: Store) -> None:
        key, token = do.held(store)
        do.become(store, key, token, Kind.DYING)
        assert do.refused(store, key) is Relation.OTHER
        assert do.refused(store, key, do.new_token(token.task_id)) is Relation.TWIN
        assert do.refused(store, key, token) is Relation.TWIN
        assert do.give(store, key, token) is Relation.OURS
        assert store.inspect(key) is None

    # --- renew -----------------------------------------------------------------------------------

    def test_a_renewal_prolongs_to_the_ttl_of_the_lease(self, store: Store) -> None:
        key, token = do.held(store)
        assert do.renew(store, [do.lease_of(key, token, 2 * LONG)]) == [RENEWED]
        assert do.ttl_of(do.record_of(store, key)) == 2 * LONG

    def test_a_renewal_never_writes_a_lost_key_back(self, store: Store) -> None:
        key, token = do.held(store, ttl=self.SHORT)
        self.elapse(self.LONGER_THAN_SHORT)
        assert do.renew(store, [do.lease_of(key, token)]) == [LossReason.GONE]
        assert store.inspect(key) is None

    def test_a_renewal_leaves_anothers_lease_alone(self, store: Store) -> None:
        key, holder = do.held(store)
        for other in (
            do.new_token(),
            do.new_token(holder.task_id),
            do.new_token(holder.task_id, retries=1),
        ):
            assert do.renew(store, [do.lease_of(key, other, 2 * LONG)]) == [LossReason.REPLACED]
        assert do.found(store, key) == (Kind.LEASE, str(holder), None, HOLDER, LONG)

    def test_a_renewal_changes_no_reserved_cooling_or_dying_key(self, store: Store) -> None:
        for kind in (Kind.RESERVED, Kind.COOLING, Kind.DYING):
            key, token = do.held(store)
            do.become(store, key, token, kind, LONG)
            late = do.lease_of(key, token, self.SHORT)
            following = do.lease_of(key, token.next_attempt(), self.SHORT)
            # The worker parent has announced the end of this process.
            reason = LossReason.DYING if kind is Kind.DYING else LossReason.REPLACED
            assert do.renew(store, [late, following]) == [reason, LossReason.REPLACED]
            record = do.record_of(store, key)
            assert (record.kind, do.ttl_of(record)) == (kind, LONG)

    def test_renewals_are_answered_in_the_order_given(self, store: Store) -> None:
        leases = [do.lease_of(do.new_key(), do.new_token(f"t{number}")) for number in range(600)]
        assert do.renew(store, leases) == [LossReason.GONE] * 600
        for lease in leases[::7]:
            do.take(store, lease.key, lease.token)
        for lease in leases[3::7]:
            do.take(store, lease.key)
        replies = {0: RENEWED, 3: LossReason.REPLACED}
        expected = [replies.get(number % 7, LossReason.GONE) for number in range(600)]
        assert do.renew(store, leases) == expected

    def test_renewing_nothing_is_answered_with_nothing(self, store: Store) -> None:
        assert do.renew(store, []) == []

    # --- release ---------------------------------------------------------------------------------

    def test_a_released_key_is_free_and_a_second_release_harmless(self, store: Store) -> None:
        key, token = do.held(store)
        assert do.give(store, key, token) is Relation.OURS
        assert store.inspect(key) is None
        assert do.give(store, key, token) is Relation.NOT_OURS
        other = do.take(store, key)
        assert do.give(store, key, token) is Relation.NOT_OURS
        assert do.record_of(store, key).token == str(other)

    def test_a_release_never_touches_anothers_key_of_any_kind(self, store: Store) -> None:
        for kind in LEASE_KINDS:
            key, holder = do.held(store, do.new_token(retries=1))
            if kind is not Kind.LEASE:
                do.become(store, key, holder, kind)
            before = do.record_of(store, key)
            for other in (
                do.new_token(),
                do.new_token(holder.task_id),
                do.new_token(holder.task_id + "x"),
            ):
                do.give(store, key, other)
                do.give(store, key, other, become=Kind.COOLING, become_ttl=self.SHORT)
            after = do.record_of(store, key)
            assert (after.kind, after.token, after.fence) == (kind, before.token, before.fence)
            assert do.ttl_of(after) == LONG

    def test_a_release_sent_again_keeps_the_new_kind(self, store: Store) -> None:
        for kind in (Kind.RESERVED, Kind.COOLING):
            key, token = do.held(store)
            do.become(store, key, token, kind)
            do.give(store, key, token)
            assert do.record_of(store, key).kind is kind

    def test_a_twins_release_is_answered_with_the_twin(self, store: Store) -> None:
        key, token = do.held(store)
        assert do.give(store, key, do.new_token(token.task_id)) is Relation.TWIN
        assert do.give(store, key, do.new_token(token.task_id, retries=1)) is Relation.NOT_OURS


class SlotContract(Part):
    """See StoreContract."""

    def two_of_three(self, store: Store) -> tuple[tuple[str, ...], Token, Token]:
        """Three slots, of which two tokens hold the first and the second."""
        slots = Keyspace.slots(do.new_key(), 3)
        first, second = do.new_token(), do.new_token()
        for token, slot in ((first, slots[0]), (second, slots[1])):
            assert do.ask(store, slots, token) == Granted(key=slot, fence=None)
        return slots, first, second

    def test_of_limit_slots_as_many_are_granted_and_one_more_is_refused(self, store: Store) -> None:
        slots = Keyspace.slots(do.new_key(), 3)
        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(lambda _: do.ask(store, slots, do.new_token()), range(24)))
        granted = [reply for reply in replies if isinstance(reply, Granted)]
        assert {reply.key for reply in granted} == set(slots)
        assert len(granted) == 3
        assert {reply.fence for reply in granted} == {None}
        refusals = [reply for reply in replies if isinstance(reply, Refused)]
        assert {reply.relation for reply in refusals} == {Relation.OTHER}

    def test_a_slot_of_ones_own_is_found_though_a_lower_one_is_free(self, store: Store) -> None:
        slots, first, second = self.two_of_three(store)
        do.give(store, slots[0], first)
        assert do.ask(store, slots, second) == Granted(key=slots[1], fence=None)
        assert store.inspect(slots[0]) is None

    def test_a_twin_and_another_attempt_take_no_second_slot(self, store: Store) -> None:
        slots = Keyspace.slots(do.new_key(), 3)
        token = do.new_token(retries=1)
        do.ask(store, slots, do.new_token())
        do.ask(store, slots, token)
        for retries, relation in ((0, Relation.LATER), (1, Relation.TWIN), (2, Relation.EARLIER)):
            arriving = do.new_token(token.task_id, retries=retries)
            assert do.relation_of(do.ask(store, slots, arriving)) is relation
        assert store.inspect(slots[2]) is None

    def test_a_slot_reserved_for_ones_attempt_is_taken_first(self, store: Store) -> None:
        slots, first, second = self.two_of_three(store)
        do.become(store, slots[1], second, Kind.RESERVED)
        do.give(store, slots[0], first)
        reply = do.ask(store, slots, do.new_token(second.task_id, retries=1))
        assert reply == Granted(key=slots[1], fence=None)

    def test_ones_own_cooling_slot_leaves_the_other_slots_free(self, store: Store) -> None:
        slots = Keyspace.slots(do.new_key(), 2)
        token = do.new_token()
        do.ask(store, slots, token)
        do.become(store, slots[0], token, Kind.COOLING)
        reply = do.ask(store, slots, do.new_token(token.task_id, retries=1))
        assert reply == Granted(key=slots[1], fence=None)

    def test_a_release_of_all_slots_gives_back_ones_own_alone(self, store: Store) -> None:
        slots, first, second = self.two_of_three(store)
        assert do.give(store, slots, second) is Relation.OURS
        assert do.record_of(store, slots[0]).token == str(first)
        assert store.inspect(slots[1]) is None
