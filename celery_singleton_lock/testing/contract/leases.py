"""Contract of leases: grants, refusals, slots, renewals, releases, and completion records."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import pytest

from ...core.keyspace import Keyspace
from ...core.lease import Holder, Kind, LossReason, Token
from ...core.store import Store
from ...core.store_requests import (
    RENEWED,
    Acquire,
    CompletionState,
    Granted,
    Refused,
    Relation,
    Release,
    ReleaseReply,
)
from ...errors import StoreError
from . import steps as do
from .steps import HOLDER, LONG, TIMEOUT, Part

Replies: TypeAlias = list[ReleaseReply | StoreError]


class LeaseContract(Part):
    """See StoreContract."""

    # --- acquire --------------------------------------------------------------------------------

    def test_a_free_key_is_granted_and_its_record_names_the_holder(self, store: Store) -> None:
        key, token = do.new_key(), do.new_token()
        reply = do.granted(store, key, token)
        assert reply.key == key
        assert do.is_held(store, key, token)
        assert do.record_of(store, key).fence == reply.fence

    def test_a_held_key_is_refused_with_the_record_of_its_holder(self, store: Store) -> None:
        key, token = do.held(store)
        record = do.refused_by(store, key)
        assert (record.key, record.token, record.holder) == (key, str(token), HOLDER)
        assert do.ttl_of(record) == LONG

    def test_a_refusal_changes_nothing(self, store: Store) -> None:
        key, token = do.held(store)
        do.ask(store, key, do.new_token(), ttl=LONG * 2)
        assert do.is_held(store, key, token)

    def test_an_acquire_sent_again_is_granted_again(self, store: Store) -> None:
        key, token = do.held(store)
        reply = do.granted(store, key, token, ttl=LONG * 2)
        assert do.is_held(store, key, token, 2 * LONG)
        assert do.record_of(store, key).fence == reply.fence

    def test_a_lease_that_is_not_renewed_ends_in_the_store(self, store: Store) -> None:
        key, _ = do.held(store, ttl=self.SHORT)
        self.elapse(self.LONGER_THAN_SHORT)
        assert store.leases.inspect(key) is None
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

    def test_another_delivery_of_the_same_attempt_is_a_duplicate(self, store: Store) -> None:
        key, token = do.held(store)
        assert do.refused(store, key, do.new_token(token.task_id)) is Relation.DUPLICATE

    def test_an_attempt_is_refused_by_an_older_or_younger_one(self, store: Store) -> None:
        for older, younger in (
            (do.new_token("t", retries=0), do.new_token("t", retries=1)),
            (do.new_token("t", nesting=0, retries=3), do.new_token("t", nesting=1, retries=0)),
            (do.new_token("t", retries=2_000_000), do.new_token("t", nesting=1)),
        ):
            key, _ = do.held(store, older)
            assert do.refused(store, key, younger) is Relation.EARLIER, (older, younger)
            key, _ = do.held(store, younger)
            assert do.refused(store, key, older) is Relation.LATER, (younger, older)

    def test_a_task_whose_id_begins_alike_is_another_task(self, store: Store) -> None:
        for held, arriving in (("abc", "abcd"), ("abcd", "abc"), ("a.c", "abc"), ("%", "abc")):
            key, _ = do.held(store, do.new_token(held))
            assert do.refused(store, key, do.new_token(arriving)) is Relation.OTHER

    def test_a_second_call_with_the_same_task_id_is_another_task(self, store: Store) -> None:
        first, second, unnamed = (Token("t", 0, 0, "n", call) for call in ("a", "b", ""))
        key, _ = do.held(store, first)
        assert do.refused(store, key, second) is Relation.OTHER
        assert do.refused(store, key, unnamed) is Relation.OTHER
        assert do.refused(store, key, Token("t", 0, 0, "m", "a")) is Relation.DUPLICATE
        assert do.renew_one(store, key, second) is LossReason.REPLACED
        assert Token.parse(do.record_of(store, key).token) == first
        do.give(store, key, first, completion=CompletionState.DONE, completion_ttl=LONG)
        assert do.refused(store, key, first) is Relation.DONE
        do.take(store, key, second)

    def test_task_ids_of_any_characters_are_told_apart_and_come_back(self, store: Store) -> None:
        for task_id in do.ODD_TASK_IDS:
            key, token = do.held(store, do.new_token(task_id))
            assert Token.parse(do.record_of(store, key).token) == token
            assert do.refused(store, key, do.new_token(task_id)) is Relation.DUPLICATE
            assert do.refused(store, key, do.new_token(task_id, retries=1)) is Relation.EARLIER
            assert do.refused(store, key, do.new_token(task_id + "x")) is Relation.OTHER
            assert do.renew_one(store, key, token) is RENEWED
            assert do.give(store, key, token) is ReleaseReply.OURS
            assert store.leases.inspect(key) is None

    def test_holders_and_keys_of_any_characters_come_back(self, store: Store) -> None:
        holder = Holder(task='a "b" \\', task_id="x\ny", worker="w|1.2| l {}", pid=1, since=0.5)
        key = do.new_key("日本 [x]*?")
        do.ask(store, key, do.new_token(), holder=holder)
        assert (do.record_of(store, key).key, do.record_of(store, key).holder) == (key, holder)

    # --- reserved, cooling, dying ----------------------------------------------------------------

    def test_a_reserved_key_is_taken_by_any_delivery_of_the_attempt(self, store: Store) -> None:
        key, token = do.held_as(store, Kind.RESERVED)
        assert do.record_of(store, key).kind is Kind.RESERVED
        following = do.take(store, key, do.new_token(token.task_id, retries=1))
        assert do.found(store, key)[:2] == (Kind.LEASE, str(following))
        assert do.refused(store, key, do.new_token(token.task_id, retries=1)) is Relation.DUPLICATE

    def test_a_reserved_key_is_refused_to_all_others(self, store: Store) -> None:
        key, token = do.held_as(store, Kind.RESERVED)
        assert do.refused(store, key) is Relation.OTHER
        assert do.refused(store, key, do.new_token(token.task_id)) is Relation.LATER
        assert do.refused(store, key, token) is Relation.LATER
        assert do.refused(store, key, do.new_token(token.task_id, retries=2)) is Relation.EARLIER

    def test_a_cooling_key_is_refused_to_all_and_ends_by_itself(self, store: Store) -> None:
        key, token = do.held_as(store, Kind.COOLING)
        assert do.record_of(store, key).kind is Kind.COOLING
        for other in (do.new_token(), token, do.new_token(token.task_id, retries=1)):
            assert do.refused(store, key, other) is Relation.OTHER
        # Another key: a key with a short ttl may expire before all tokens have requested it.
        key, _ = do.held_as(store, Kind.COOLING, self.SHORT)
        self.elapse(self.LONGER_THAN_SHORT)
        do.take(store, key)

    def test_a_dying_holder_keeps_the_key_until_its_token_releases_it(self, store: Store) -> None:
        key, token = do.held_as(store, Kind.DYING)
        assert do.refused(store, key) is Relation.OTHER
        assert do.refused(store, key, do.new_token(token.task_id)) is Relation.DUPLICATE
        assert do.refused(store, key, token) is Relation.DUPLICATE
        assert do.give(store, key, token) is ReleaseReply.OURS
        assert store.leases.inspect(key) is None

    # --- renew -----------------------------------------------------------------------------------

    def test_a_renewal_prolongs_to_the_ttl_of_the_lease(self, store: Store) -> None:
        key, token = do.held(store)
        assert do.renew_one(store, key, token, 2 * LONG) is RENEWED
        assert do.ttl_of(do.record_of(store, key)) == 2 * LONG

    def test_a_renewal_never_writes_a_lost_key_back(self, store: Store) -> None:
        key, token = do.held(store, ttl=self.SHORT)
        self.elapse(self.LONGER_THAN_SHORT)
        assert do.renew_one(store, key, token) is LossReason.GONE
        assert store.leases.inspect(key) is None

    def test_a_renewal_leaves_anothers_lease_alone(self, store: Store) -> None:
        key, holder = do.held(store)
        following = do.new_token(holder.task_id, retries=1)
        for other in (do.new_token(), do.new_token(holder.task_id), following):
            assert do.renew_one(store, key, other, 2 * LONG) is LossReason.REPLACED
        assert do.is_held(store, key, holder)

    def test_a_renewal_changes_no_reserved_cooling_or_dying_key(self, store: Store) -> None:
        for kind in (Kind.RESERVED, Kind.COOLING, Kind.DYING):
            key, token = do.held_as(store, kind)
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
        assert do.give(store, key, token) is ReleaseReply.OURS
        assert store.leases.inspect(key) is None
        assert do.give(store, key, token) is ReleaseReply.NOT_OURS
        other = do.take(store, key)
        assert do.give(store, key, token) is ReleaseReply.NOT_OURS
        assert do.record_of(store, key).token == str(other)

    def test_a_release_never_touches_anothers_key_of_any_kind(self, store: Store) -> None:
        for kind in do.LEASE_KINDS:
            key, holder = do.held_as(store, kind, token=do.new_token(retries=1))
            before = do.record_of(store, key)
            for task_id in (None, holder.task_id, holder.task_id + "x"):
                other = do.new_token(task_id)
                do.give(store, key, other)
                do.give(store, key, other, become=Kind.COOLING, become_ttl=self.SHORT)
            after = do.record_of(store, key)
            assert (after.kind, after.token, after.fence) == (kind, before.token, before.fence)
            assert do.ttl_of(after) == LONG

    def test_a_release_sent_again_keeps_the_new_kind(self, store: Store) -> None:
        for kind in (Kind.RESERVED, Kind.COOLING):
            key, token = do.held_as(store, kind)
            do.give(store, key, token)
            assert do.record_of(store, key).kind is kind

    def test_a_duplicates_release_is_answered_with_the_duplicate(self, store: Store) -> None:
        key, token = do.held(store)
        assert do.give(store, key, do.new_token(token.task_id)) is ReleaseReply.DUPLICATE
        assert do.give(store, key, do.new_token(token.task_id, retries=1)) is ReleaseReply.NOT_OURS

    # --- slots -----------------------------------------------------------------------------------

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

    def test_a_refusal_names_the_holders_of_all_slots(self, store: Store) -> None:
        """Any of them may be dead, and proven to be."""
        slots, first, second = self.two_of_three(store)
        third = do.new_token()
        do.ask(store, slots, third)
        refusal = do.ask(store, slots, do.new_token())
        assert isinstance(refusal, Refused)
        records = [record for record in (refusal.record, *refusal.others) if record]
        tokens = [*map(str, (first, second, third))]
        found = sorted((record.key, record.token, record.holder) for record in records)
        assert found == [
            (slot, token, do.HOLDER) for slot, token in zip(slots, tokens, strict=True)
        ]

    def test_a_slot_of_ones_own_is_found_though_a_lower_one_is_free(self, store: Store) -> None:
        slots, first, second = self.two_of_three(store)
        do.give(store, slots[0], first)
        assert do.ask(store, slots, second) == Granted(key=slots[1], fence=None)
        assert store.leases.inspect(slots[0]) is None

    def test_a_duplicate_and_another_attempt_take_no_second_slot(self, store: Store) -> None:
        slots = Keyspace.slots(do.new_key(), 3)
        token = do.new_token(retries=1)
        do.ask(store, slots, do.new_token())
        do.ask(store, slots, token)
        for retries, relation in (
            (0, Relation.LATER),
            (1, Relation.DUPLICATE),
            (2, Relation.EARLIER),
        ):
            arriving = do.new_token(token.task_id, retries=retries)
            assert do.refused(store, slots, arriving) is relation
        assert store.leases.inspect(slots[2]) is None

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
        assert do.give(store, slots, second) is ReleaseReply.OURS
        assert do.record_of(store, slots[0]).token == str(first)
        assert store.leases.inspect(slots[1]) is None

    # --- completion records of attempts
    # ---------------------------------------------------------------------

    def test_an_attempt_that_is_done_is_refused_whatever_holds_the_key(self, store: Store) -> None:
        key, token = do.marked(store, CompletionState.DONE)
        assert do.refused(store, key, token) is Relation.DONE
        assert do.refused(store, key, do.new_token(token.task_id)) is Relation.DONE
        do.take(store, key, do.new_token(token.task_id, retries=1))
        assert do.refused(store, key, token) is Relation.DONE

    def test_an_attempt_that_is_finishing_has_a_duplicate(self, store: Store) -> None:
        key, token = do.marked(store, CompletionState.FINISHING)
        assert do.refused(store, key, do.new_token(token.task_id)) is Relation.DUPLICATE
        do.take(store, key)

    def test_only_the_newest_copy_of_a_message_is_granted(self, store: Store) -> None:
        key, token = do.marked(store, CompletionState.WAITING, 2)
        assert do.refused(store, key, token, sequence=1) is Relation.SUPERSEDED
        do.take(store, key, token, sequence=2)
        do.take(store, key, token, sequence=3)

    def test_a_completion_record_never_goes_back(self, store: Store) -> None:
        key, token = do.marked(store, CompletionState.WAITING, 5)
        do.mark(store, key, token, CompletionState.WAITING, 3)
        assert do.refused(store, key, token, sequence=4) is Relation.SUPERSEDED
        do.mark(store, key, token, CompletionState.FINISHING, 0)
        do.mark(store, key, token, CompletionState.WAITING, 7)
        assert do.refused(store, key, token, sequence=9) is Relation.DUPLICATE
        do.mark(store, key, token, CompletionState.DONE, 0)
        do.mark(store, key, token, CompletionState.FINISHING, 9)
        do.mark(store, key, token, CompletionState.WAITING, 9)
        assert do.refused(store, key, token, sequence=9) is Relation.DONE

    def test_a_completion_record_is_of_one_attempt_and_ends_in_the_store(
        self, store: Store
    ) -> None:
        key, token = do.marked(store, CompletionState.DONE, ttl=self.SHORT)
        other_attempt = do.new_token(token.task_id, retries=1)
        do.take(store, key, other_attempt)
        do.give(store, key, other_attempt)
        self.elapse(self.LONGER_THAN_SHORT)
        do.take(store, key, token)

    def test_marking_again_never_shortens_a_done_completion_record(self, store: Store) -> None:
        key, token = do.marked(store, CompletionState.DONE, ttl=LONG)
        do.mark(store, key, token, CompletionState.WAITING, ttl=self.SHORT)
        do.mark(store, key, token, CompletionState.FINISHING, ttl=self.SHORT)
        do.mark(store, key, token, CompletionState.DONE, ttl=self.SHORT)
        self.elapse(self.LONGER_THAN_SHORT)
        assert do.refused(store, key, token) is Relation.DONE

    def test_putting_back_does_not_prolong_a_finishing_completion_record(
        self, store: Store
    ) -> None:
        # The holder may have died while it sent callbacks. In that case the copy must run soon.
        key, token = do.marked(store, CompletionState.FINISHING, ttl=self.SHORT)
        do.mark(store, key, token, CompletionState.WAITING, 1, ttl=LONG)
        self.elapse(self.LONGER_THAN_SHORT)
        do.take(store, key, token)

    def test_a_release_writes_the_completion_record(self, store: Store) -> None:
        key, token = do.held(store)
        do.give(store, key, token, completion=CompletionState.DONE, completion_ttl=LONG)
        assert do.refused(store, key, do.new_token(token.task_id)) is Relation.DONE

    def test_a_release_writes_the_completion_record_where_the_lease_is_gone(
        self, store: Store
    ) -> None:
        key, token = do.new_key(), do.new_token()
        reply = do.give(store, key, token, completion=CompletionState.DONE, completion_ttl=LONG)
        assert reply is ReleaseReply.NOT_OURS
        assert do.refused(store, key, do.new_token(token.task_id)) is Relation.DONE

    def test_a_release_before_the_outcome_leaves_the_completion_record_to_a_duplicate(
        self, store: Store
    ) -> None:
        key, winner = do.held(store)
        loser = do.new_token(winner.task_id)
        reply = do.give(
            store, key, loser, completion=CompletionState.FINISHING, completion_ttl=LONG
        )
        assert reply is ReleaseReply.DUPLICATE
        assert do.record_of(store, key).token == str(winner)
        do.take(store, key, winner)

    def test_an_attempt_with_an_outcome_is_done_also_where_a_duplicate_has_the_key(
        self, store: Store
    ) -> None:
        # The release got no reply, and was sent again after the lease had ended.
        key, duplicate = do.held(store)
        first = do.new_token(duplicate.task_id)
        reply = do.give(store, key, first, completion=CompletionState.DONE, completion_ttl=LONG)
        assert reply is ReleaseReply.DUPLICATE
        assert do.record_of(store, key).token == str(duplicate)
        assert do.give(store, key, duplicate) is ReleaseReply.OURS
        assert do.refused(store, key, do.new_token(duplicate.task_id)) is Relation.DONE

    def test_a_release_after_ones_duplicate_has_finished_says_so(self, store: Store) -> None:
        key, winner = do.held(store)
        loser = do.new_token(winner.task_id)
        do.give(store, key, winner, completion=CompletionState.DONE, completion_ttl=LONG)
        assert do.give(store, key, loser) is ReleaseReply.DONE
        assert do.give(store, key, winner) is ReleaseReply.NOT_OURS

    def test_a_release_never_takes_a_done_completion_record_back(self, store: Store) -> None:
        key, token = do.marked(store, CompletionState.DONE)
        do.give(store, key, token, completion=CompletionState.FINISHING, completion_ttl=self.SHORT)
        self.elapse(self.LONGER_THAN_SHORT)
        assert do.refused(store, key, token) is Relation.DONE

    # --- asynchronous releases -------------------------------------------------------------------

    @pytest.fixture
    def releasing(self, store: Store) -> Store:
        if store.async_releases is None:
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
            reply = releasing.leases.acquire(request, timeout=TIMEOUT / 2)
            assert isinstance(reply, Granted), reply

    def test_an_asynchronous_release_is_reported_once(self, releasing: Store) -> None:
        key = do.new_key()
        replies = release_async(releasing, key, do.take(releasing, key))
        do.take(releasing, do.new_key())
        drain(releasing)
        drain(releasing)
        assert replies == [ReleaseReply.OURS]

    def test_draining_reports_all_pending_releases(self, releasing: Store) -> None:
        held = [(key, do.take(releasing, key)) for key in (do.new_key() for _ in range(4))]
        replies = [release_async(releasing, key, token) for key, token in held]
        drain(releasing)
        assert replies == [[ReleaseReply.OURS]] * 4
        assert [releasing.leases.inspect(key) for key, _ in held] == [None] * 4

    def test_an_asynchronous_release_never_touches_anothers_key(self, releasing: Store) -> None:
        key, holder = do.held(releasing)
        replies = release_async(releasing, key, do.new_token())
        drain(releasing)
        assert replies == [ReleaseReply.NOT_OURS], "a loss would be taken for a release"
        assert do.record_of(releasing, key).token == str(holder)

    def test_reservation_and_completion_record_are_written_with_it(self, releasing: Store) -> None:
        key, token = do.held(releasing)
        reserved = do.becoming(Kind.RESERVED, token)
        done = {"completion": CompletionState.DONE, "completion_ttl": LONG}
        release_async(releasing, key, token, **reserved, **done)
        assert do.refused(releasing, key, token) is Relation.DONE
        assert do.refused(releasing, key) is Relation.OTHER
        do.take(releasing, key, token.next_attempt())

    def test_its_claim_is_free_for_the_next_publisher(self, releasing: Store) -> None:
        key, claim, token = do.published(releasing)
        do.take(releasing, key, token)
        release_async(releasing, key, token, claim=do.freed(claim))
        assert do.take_claim(releasing, claim, do.new_token()) is None


def release_async(store: Store, key: str, token: Token, **options: Any) -> Replies:
    """Release asynchronously, or synchronously if the store requires it; return the replies."""
    replies: Replies = []

    def on_reply(reply: ReleaseReply | StoreError, is_unsure: bool) -> None:
        assert not is_unsure, "each try had a reply"
        replies.append(reply)

    request = Release(keys=(key,), token=token, **options)
    assert store.async_releases is not None
    if not store.async_releases.send(request, timeout=TIMEOUT, on_reply=on_reply):
        replies.append(store.leases.release(request, timeout=TIMEOUT))
    return replies


def drain(store: Store) -> None:
    assert store.async_releases is not None
    store.async_releases.drain(timeout=TIMEOUT)
