"""What becomes of a message's claim when its lease is granted or refused."""

from __future__ import annotations

from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.lease import Kind, Phase
from celery_singleton_lock.core.store import Granted, MarkerState, Refused, Relation, Store
from celery_singleton_lock.testing.contract.calls import (
    HOLDER,
    LONG,
    PUBLISHER,
    Part,
    ask,
    become,
    freed,
    is_as_published,
    mark,
    new_claim,
    new_key,
    new_token,
    publish,
    record_of,
    relation_of,
    running,
    take,
)

__all__ = ["ClaimedAcquireContract"]


class ClaimedAcquireContract(Part):
    """See StoreContract."""

    # --- acquire ---------------------------------------------------------------------------------

    def test_a_grant_frees_the_claim_that_was_until_the_start(self, store: Store) -> None:
        key, claim = new_claim()
        token = publish(store, claim)
        take(store, key, token, claim=freed(claim))
        assert store.inspect(claim) is None
        following = publish(store, claim)  # one runs, one waits
        take(store, key, token, claim=freed(claim))  # sent again
        assert is_as_published(store, claim, following)

    def test_a_grant_promotes_the_claim_to_the_ttl_of_its_lease(self, store: Store) -> None:
        for ttl in (LONG, 3 * LONG):
            key, claim = new_claim()
            token = publish(store, claim, ttl=2 * LONG)
            for _ in range(2):  # sent again
                take(store, key, token, ttl=ttl, claim=running(claim))
                record = record_of(store, claim)
                assert (record.token, record.phase) == (token.task, Phase.RUNNING)
                assert record.holder == PUBLISHER
                assert ttl - 60 < record.ttl <= ttl

    def test_a_grant_makes_a_claim_that_has_vanished_anew(self, store: Store) -> None:
        key, claim = new_claim()
        token = take(store, key, claim=running(claim))
        record = record_of(store, claim)
        assert (record.kind, record.token, record.phase) == (
            Kind.CLAIM,
            token.task,
            Phase.RUNNING,
        )
        assert record.holder == HOLDER
        assert LONG - 60 < record.ttl <= LONG

    def test_a_grant_makes_no_claim_that_it_would_free(self, store: Store) -> None:
        key, claim = new_claim()
        take(store, key, claim=freed(claim))
        assert store.inspect(claim) is None

    def test_a_grant_leaves_anothers_claim_and_a_lease_in_its_place_alone(
        self, store: Store
    ) -> None:
        for change in (freed, running):
            key, claim = new_claim()
            other = publish(store, claim)
            take(store, key, new_token(f"{other.task_id}d"), claim=change(claim))
            assert is_as_published(store, claim, other)
            key, taken = new_key(), new_key()
            holder = take(store, taken)
            take(store, key, new_token(holder.task_id), claim=change(taken))
            assert record_of(store, taken).token == str(holder)

    def test_a_grant_of_a_slot_changes_the_claim_too(self, store: Store) -> None:
        key, claim = new_claim()
        slots = Keyspace.slots(key, 3)
        ask(store, slots, new_token())
        token = publish(store, claim)
        assert ask(store, slots, token, claim=running(claim)) == Granted(key=slots[1], fence=None)
        assert record_of(store, claim).phase is Phase.RUNNING
        assert store.inspect(slots[2]) is None

    def test_a_refusal_leaves_the_claim_alone(self, store: Store) -> None:
        key, claim = new_claim()
        token = publish(store, claim)
        take(store, key)
        for change in (freed, running):
            assert relation_of(ask(store, key, token, claim=change(claim))) is Relation.OTHER
            assert is_as_published(store, claim, token)

    def test_a_refusal_that_ends_the_message_frees_its_claim(self, store: Store) -> None:
        for change in (freed, running):
            key, claim = new_claim()
            token = publish(store, claim)
            holder = take(store, key)
            reply = ask(store, key, token, claim=change(claim), frees_claim=True)
            assert isinstance(reply, Refused)
            assert reply.relation is Relation.OTHER
            assert reply.record is not None
            assert (reply.record.key, reply.record.token) == (key, str(holder))
            assert store.inspect(claim) is None

    def test_a_refusal_by_ones_own_task_ends_no_message_and_frees_no_claim(
        self, store: Store
    ) -> None:
        held = new_token(retries=1)
        for arriving, relation in (
            (new_token(held.task_id, retries=0), Relation.LATER),
            (new_token(held.task_id, retries=1), Relation.TWIN),
            (new_token(held.task_id, retries=2), Relation.EARLIER),
        ):
            key, claim = new_claim()
            publish(store, claim, held)
            take(store, key, held)
            reply = ask(store, key, arriving, claim=running(claim), frees_claim=True)
            assert relation_of(reply) is relation
            assert is_as_published(store, claim, held)

    def test_a_refusal_by_a_marker_frees_no_claim(self, store: Store) -> None:
        for state, relation in (
            (MarkerState.WAITING, Relation.SUPERSEDED),
            (MarkerState.FINISHING, Relation.TWIN),
            (MarkerState.DONE, Relation.DONE),
        ):
            key, claim = new_claim()
            token = publish(store, claim)
            mark(store, key, token, state, 5)
            reply = ask(store, key, token, claim=running(claim), frees_claim=True)
            assert relation_of(reply) is relation
            assert is_as_published(store, claim, token)

    def test_a_refusal_never_frees_anothers_claim(self, store: Store) -> None:
        key, claim = new_claim()
        other = publish(store, claim)
        take(store, key)
        reply = ask(store, key, new_token(), claim=running(claim), frees_claim=True)
        assert relation_of(reply) is Relation.OTHER
        assert is_as_published(store, claim, other)

    def test_a_grant_is_the_same_whatever_a_refusal_would_do(self, store: Store) -> None:
        key, claim = new_claim()
        token = publish(store, claim)
        take(store, key, token, claim=running(claim), frees_claim=True, yields=True)
        assert record_of(store, claim).phase is Phase.RUNNING

    def test_without_a_claim_there_is_none_to_free_or_to_yield_to(self, store: Store) -> None:
        key = new_key()
        take(store, key, frees_claim=True, yields=True)
        reply = ask(store, key, new_token(), frees_claim=True, yields=True)
        assert relation_of(reply) is Relation.OTHER

    # --- yielding to another's claim -------------------------------------------------------------

    def test_a_message_that_yields_is_refused_while_anothers_claim_stands(
        self, store: Store
    ) -> None:
        for phase in Phase:
            key, claim = new_claim()
            other = publish(store, claim, phase=phase)
            token = new_token(f"{other.task_id}d")
            for ends in (False, True):
                change = running(claim)
                reply = ask(store, key, token, claim=change, yields=True, frees_claim=ends)
                assert isinstance(reply, Refused)
                assert reply.relation is Relation.OTHER
                assert reply.record is not None
                assert (reply.record.key, reply.record.kind) == (claim, Kind.CLAIM)
                assert (reply.record.token, reply.record.phase) == (other.task, phase)
                assert reply.holder == PUBLISHER
                assert LONG - 60 < reply.record.ttl <= LONG
                assert store.inspect(key) is None
                assert is_as_published(store, claim, other, phase)
            assert store.free(claim, other.task) is True
            take(store, key, token, claim=running(claim), yields=True)

    def test_a_message_that_yields_is_granted_once_the_claim_has_expired(
        self, store: Store
    ) -> None:
        key, claim = new_claim()
        publish(store, claim, ttl=self.SHORT)
        self.elapse(self.LONGER_THAN_SHORT)
        token = take(store, key, claim=running(claim), yields=True)
        assert record_of(store, claim).token == token.task

    def test_a_message_does_not_yield_to_its_own_claim_nor_to_what_is_none(
        self, store: Store
    ) -> None:
        key, claim = new_claim()
        token = publish(store, claim)
        take(store, key, token, claim=running(claim), yields=True)
        key, taken = new_key(), new_key()
        take(store, taken)
        take(store, key, claim=running(taken), yields=True)

    def test_a_message_that_yields_hears_first_of_who_has_the_lease(self, store: Store) -> None:
        key, claim = new_claim()
        publish(store, claim)
        held = take(store, key)
        for arriving, relation in (
            (new_token(), Relation.OTHER),
            (new_token(held.task_id), Relation.TWIN),
        ):
            reply = ask(store, key, arriving, claim=running(claim), yields=True)
            assert isinstance(reply, Refused)
            assert reply.relation is relation
            assert reply.record is not None
            assert (reply.record.key, reply.record.token) == (key, str(held))

    def test_what_is_ones_own_already_is_granted_beside_anothers_claim(self, store: Store) -> None:
        # The reply to the first acquire was lost, and the claim was given meanwhile: a refusal now
        # would leave a lease that nobody knows of.
        key, claim = new_claim()
        token = take(store, key, claim=freed(claim), yields=True)
        publish(store, claim)
        take(store, key, token, claim=freed(claim), yields=True)
        # And a retry has the key reserved: each would wait for the other.
        become(store, key, token, Kind.RESERVED)
        take(
            store,
            key,
            new_token(token.task_id, retries=1),
            claim=freed(claim),
            yields=True,
        )
