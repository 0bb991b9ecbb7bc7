"""What becomes of a message's claim while its lease is renewed, and when it is given back."""

from __future__ import annotations

from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.lease import Kind, LossReason, Phase
from celery_singleton_lock.core.store import RENEWED, MarkerState, Relation, Store
from celery_singleton_lock.testing.contract.calls import (
    HOLDER,
    LONG,
    PUBLISHER,
    Part,
    ask,
    becomes,
    freed,
    give,
    is_as_published,
    lease_of,
    mark,
    new_claim,
    new_key,
    new_token,
    publish,
    record_of,
    renew,
    running,
    settle,
    take,
)

__all__ = ["ClaimedReleaseContract"]


class ClaimedReleaseContract(Part):
    """See StoreContract."""

    # --- renew -----------------------------------------------------------------------------------

    def test_a_renewal_prolongs_the_claim_with_its_lease(self, store: Store) -> None:
        key, claim = new_claim()
        token = publish(store, claim)
        take(store, key, token, claim=running(claim))
        assert renew(store, [lease_of(key, token, 2 * LONG, claim)]) == [RENEWED]
        for name in (key, claim):
            assert 2 * LONG - 60 < record_of(store, name).ttl <= 2 * LONG
        record = record_of(store, claim)
        assert (record.token, record.phase, record.holder) == (
            token.task,
            Phase.RUNNING,
            PUBLISHER,
        )

    def test_a_renewal_prolongs_no_claim_that_its_lease_does_not_name(self, store: Store) -> None:
        key, claim = new_claim()
        token = publish(store, claim)
        take(store, key, token)
        assert renew(store, [lease_of(key, token, 2 * LONG)]) == [RENEWED]
        assert is_as_published(store, claim, token)

    def test_a_renewal_never_shortens_a_claim(self, store: Store) -> None:
        # It may be on its way while the body ends, and its claim waits for a retry far ahead.
        key, claim = new_claim()
        token = publish(store, claim)
        take(store, key, token, claim=running(claim))
        change = becomes(claim, Phase.RETRYING, LONG)
        give(store, key, token, claim=change)
        assert renew(store, [lease_of(key, token, self.SHORT, claim)]) == [LossReason.GONE]
        assert is_as_published(store, claim, token, Phase.RETRYING)

    def test_a_renewal_leaves_anothers_claim_and_a_lease_in_its_place_alone(
        self, store: Store
    ) -> None:
        key, claim = new_claim()
        other = publish(store, claim)
        token = take(store, key, new_token(f"{other.task_id}d"))
        assert renew(store, [lease_of(key, token, 2 * LONG, claim)]) == [RENEWED]
        assert is_as_published(store, claim, other)
        taken = new_key()
        take(store, taken, token)
        assert renew(store, [lease_of(key, token, 2 * LONG, taken)]) == [RENEWED]
        assert record_of(store, taken).ttl <= LONG

    def test_a_renewal_makes_no_claim_anew(self, store: Store) -> None:
        key, claim = new_claim()
        token = take(store, key, claim=running(claim))
        settle(store, token, claim, Phase.RUNNING, self.SHORT)
        self.elapse(self.LONGER_THAN_SHORT)
        assert renew(store, [lease_of(key, token, LONG, claim)]) == [RENEWED]
        assert store.inspect(claim) is None

    def test_renewals_with_and_without_claims_are_answered_in_the_order_given(
        self, store: Store
    ) -> None:
        found = [RENEWED, RENEWED, LossReason.REPLACED, LossReason.GONE]
        claimants = [None, "itself", "another", "nobody"]
        leases, published = [], {}
        for number in range(600):
            key, claim = new_claim()
            token = new_token()
            if found[number % 4] is not LossReason.GONE:
                take(store, key, token if found[number % 4] is RENEWED else None)
            claimant = claimants[number // 4 % 4]
            if claimant in ("itself", "another"):
                published[claim] = publish(store, claim, token if claimant == "itself" else None)
            leases.append(lease_of(key, token, 2 * LONG, claim if claimant else ""))
        assert renew(store, leases) == found * 150
        for number, lease in enumerate(leases):
            if lease.claim_key in published:
                record = record_of(store, lease.claim_key)
                assert record.token == published[lease.claim_key].task
                if found[number % 4] is RENEWED:
                    is_its_own = record.token == lease.token.task
                    assert (record.ttl > 2 * LONG - 60) == is_its_own, number
            elif lease.claim_key:
                assert store.inspect(lease.claim_key) is None

    # --- release ---------------------------------------------------------------------------------

    def test_a_release_frees_the_claim_of_its_task(self, store: Store) -> None:
        key, claim = new_claim()
        token = publish(store, claim)
        take(store, key, token, claim=running(claim))
        assert give(store, key, token, claim=freed(claim)) is Relation.OURS
        assert store.inspect(claim) is None
        following = publish(store, claim)
        give(store, key, token, claim=freed(claim))  # sent again
        assert is_as_published(store, claim, following)

    def test_a_release_requeues_the_claim_or_has_it_wait_for_a_retry(self, store: Store) -> None:
        for kind in (None, Kind.RESERVED, Kind.COOLING):
            for phase in Phase:
                key, claim = new_claim()
                token = publish(store, claim)
                take(store, key, token, claim=running(claim))
                for reply in (Relation.OURS, None):  # sent again, whatever is heard then
                    heard = give(
                        store,
                        key,
                        token,
                        become=kind,
                        become_ttl=LONG,
                        next_token=token.next_attempt() if kind is Kind.RESERVED else None,
                        claim=becomes(claim, phase),
                    )
                    assert reply in (heard, None)
                    record = record_of(store, claim)
                    assert (record.token, record.phase) == (token.task, phase)
                    assert record.holder == PUBLISHER
                    assert 2 * LONG - 60 < record.ttl <= 2 * LONG

    def test_a_release_makes_a_claim_that_has_vanished_anew(self, store: Store) -> None:
        key, claim = new_claim()
        token = take(store, key)
        give(store, key, token, claim=becomes(claim, Phase.RETRYING))
        record = record_of(store, claim)
        assert (record.token, record.phase, record.holder) == (token.task, Phase.RETRYING, HOLDER)

    def test_a_release_leaves_anothers_claim_alone(self, store: Store) -> None:
        for phase in (None, *Phase):
            key, claim = new_claim()
            other = publish(store, claim)
            token = take(store, key, new_token(f"{other.task_id}d"))
            assert give(store, key, token, claim=becomes(claim, phase)) is Relation.OURS
            assert is_as_published(store, claim, other)

    def test_a_release_changes_no_claim_where_a_twin_has_the_key(self, store: Store) -> None:
        for phase in (None, *Phase):
            key, claim = new_claim()
            winner = publish(store, claim, phase=Phase.RUNNING)
            take(store, key, winner)
            loser = new_token(winner.task_id)
            assert give(store, key, loser, claim=becomes(claim, phase)) is Relation.TWIN
            assert is_as_published(store, claim, winner, Phase.RUNNING)

    def test_where_the_key_was_lost_a_claim_is_only_freed(self, store: Store) -> None:
        for has_other in (False, True):
            key, claim = new_claim()
            token = publish(store, claim, phase=Phase.RUNNING)
            if has_other:
                take(store, key)
            for phase in Phase:
                reply = give(store, key, token, claim=becomes(claim, phase))
                assert reply is Relation.NOT_OURS
                assert is_as_published(store, claim, token, Phase.RUNNING)
            assert give(store, key, token, claim=freed(claim)) is Relation.NOT_OURS
            assert store.inspect(claim) is None
            give(store, key, token, claim=becomes(claim, Phase.QUEUED))
            assert store.inspect(claim) is None

    def test_a_claim_is_freed_where_ones_twin_has_finished(self, store: Store) -> None:
        key, claim = new_claim()
        token = publish(store, claim)
        mark(store, key, new_token(token.task_id), MarkerState.DONE)
        reply = give(store, key, token, claim=becomes(claim, Phase.QUEUED))
        assert reply is Relation.DONE
        assert is_as_published(store, claim, token)
        assert give(store, key, token, claim=freed(claim)) is Relation.DONE
        assert store.inspect(claim) is None

    def test_a_release_that_names_no_claim_leaves_it_alone(self, store: Store) -> None:
        key, claim = new_claim()
        token = publish(store, claim)
        take(store, key, token)
        give(store, key, token, marker=MarkerState.DONE, marker_ttl=LONG)
        assert is_as_published(store, claim, token)

    def test_a_release_of_all_slots_changes_the_claim_once(self, store: Store) -> None:
        key, claim = new_claim()
        slots = Keyspace.slots(key, 3)
        token = publish(store, claim)
        ask(store, slots, new_token())
        ask(store, slots, token, claim=running(claim))
        assert give(store, slots, token, claim=freed(claim)) is Relation.OURS
        assert store.inspect(claim) is None
        assert store.inspect(slots[0]) is not None

    # --- mark ------------------------------------------------------------------------------------

    def test_a_put_back_message_has_its_claim_requeued(self, store: Store) -> None:
        for state in (MarkerState.WAITING, MarkerState.FINISHING):
            for before in Phase:
                key, claim = new_claim()
                token = publish(store, claim, phase=before)
                mark(store, key, token, state, 1, claim=becomes(claim, Phase.QUEUED))
                record = record_of(store, claim)
                assert (record.token, record.phase) == (token.task, Phase.QUEUED)
                assert record.holder == PUBLISHER
                assert 2 * LONG - 60 < record.ttl <= 2 * LONG

    def test_a_put_back_message_whose_claim_has_vanished_does_not_get_it_anew(
        self, store: Store
    ) -> None:
        """The copy may have run, and freed it, before the mark arrives."""
        key, claim = new_claim()
        mark(store, key, new_token(), MarkerState.WAITING, 1, claim=becomes(claim, Phase.QUEUED))
        assert store.inspect(claim) is None

    def test_a_mark_may_free_the_claim(self, store: Store) -> None:
        key, claim = new_claim()
        token = publish(store, claim)
        mark(store, key, token, MarkerState.WAITING, 1, claim=freed(claim))
        assert store.inspect(claim) is None

    def test_an_attempt_that_is_done_has_no_claim_changed(self, store: Store) -> None:
        for phase in (None, *Phase):
            for finished_before in (False, True):
                key, claim = new_claim()
                token = publish(store, claim)
                if finished_before:
                    mark(store, key, token, MarkerState.DONE)
                state = MarkerState.WAITING if finished_before else MarkerState.DONE
                mark(store, key, token, state, 1, claim=becomes(claim, phase))
                assert is_as_published(store, claim, token)

    def test_a_mark_leaves_anothers_claim_and_a_lease_in_its_place_alone(
        self, store: Store
    ) -> None:
        for phase in (None, *Phase):
            key, claim = new_claim()
            other = publish(store, claim)
            token = new_token(f"{other.task_id}d")
            mark(store, key, token, MarkerState.WAITING, 1, claim=becomes(claim, phase))
            assert is_as_published(store, claim, other)
            holder = take(store, key)
            token = new_token(holder.task_id)
            mark(store, key, token, MarkerState.WAITING, 1, claim=becomes(key, phase))
            assert record_of(store, key).token == str(holder)
