"""Contract of markers: the state of an attempt, kept beside its lease."""

from __future__ import annotations

from celery_singleton_lock.core.store import MarkerState, Relation, Store
from celery_singleton_lock.testing.contract import steps as do
from celery_singleton_lock.testing.contract.steps import LONG, Part

__all__ = ["MarkerContract"]


class MarkerContract(Part):
    """See StoreContract."""

    def test_an_attempt_that_is_done_is_refused_whatever_holds_the_key(self, store: Store) -> None:
        key, token = do.new_key(), do.new_token()
        do.mark(store, key, token, MarkerState.DONE)
        assert do.refused(store, key, token) is Relation.DONE
        assert do.refused(store, key, do.new_token(token.task_id)) is Relation.DONE
        do.take(store, key, do.new_token(token.task_id, retries=1))
        assert do.refused(store, key, token) is Relation.DONE

    def test_an_attempt_that_is_finishing_has_a_twin(self, store: Store) -> None:
        key, token = do.new_key(), do.new_token()
        do.mark(store, key, token, MarkerState.FINISHING)
        assert do.refused(store, key, do.new_token(token.task_id)) is Relation.TWIN
        do.take(store, key)

    def test_only_the_newest_copy_of_a_message_is_granted(self, store: Store) -> None:
        key, token = do.new_key(), do.new_token()
        do.mark(store, key, token, MarkerState.WAITING, 2)
        assert do.refused(store, key, token, sequence=1) is Relation.SUPERSEDED
        do.take(store, key, token, sequence=2)
        do.take(store, key, token, sequence=3)

    def test_a_marker_never_goes_back(self, store: Store) -> None:
        key, token = do.new_key(), do.new_token()
        do.mark(store, key, token, MarkerState.WAITING, 5)
        do.mark(store, key, token, MarkerState.WAITING, 3)
        assert do.refused(store, key, token, sequence=4) is Relation.SUPERSEDED
        do.mark(store, key, token, MarkerState.FINISHING, 0)
        do.mark(store, key, token, MarkerState.WAITING, 7)
        assert do.refused(store, key, token, sequence=9) is Relation.TWIN
        do.mark(store, key, token, MarkerState.DONE, 0)
        do.mark(store, key, token, MarkerState.FINISHING, 9)
        do.mark(store, key, token, MarkerState.WAITING, 9)
        assert do.refused(store, key, token, sequence=9) is Relation.DONE

    def test_a_marker_is_of_one_attempt_and_ends_in_the_store(self, store: Store) -> None:
        key, token = do.new_key(), do.new_token()
        do.mark(store, key, token, MarkerState.DONE, ttl=self.SHORT)
        other_attempt = do.new_token(token.task_id, retries=1)
        do.take(store, key, other_attempt)
        do.give(store, key, other_attempt)
        self.elapse(self.LONGER_THAN_SHORT)
        do.take(store, key, token)

    def test_marking_again_never_shortens_a_done_marker(self, store: Store) -> None:
        key, token = do.new_key(), do.new_token()
        do.mark(store, key, token, MarkerState.DONE, ttl=LONG)
        do.mark(store, key, token, MarkerState.WAITING, ttl=self.SHORT)
        do.mark(store, key, token, MarkerState.FINISHING, ttl=self.SHORT)
        do.mark(store, key, token, MarkerState.DONE, ttl=self.SHORT)
        self.elapse(self.LONGER_THAN_SHORT)
        assert do.refused(store, key, token) is Relation.DONE

    def test_putting_back_does_not_prolong_a_finishing_marker(self, store: Store) -> None:
        # The holder may have died while it sent callbacks. In that case the copy must run soon.
        key, token = do.new_key(), do.new_token()
        do.mark(store, key, token, MarkerState.FINISHING, ttl=self.SHORT)
        do.mark(store, key, token, MarkerState.WAITING, 1, ttl=LONG)
        self.elapse(self.LONGER_THAN_SHORT)
        do.take(store, key, token)

    def test_a_release_writes_the_marker(self, store: Store) -> None:
        key, token = do.held(store)
        do.give(store, key, token, marker=MarkerState.DONE, marker_ttl=LONG)
        assert do.refused(store, key, do.new_token(token.task_id)) is Relation.DONE

    def test_a_release_writes_the_marker_where_the_lease_is_gone(self, store: Store) -> None:
        key, token = do.new_key(), do.new_token()
        reply = do.give(store, key, token, marker=MarkerState.DONE, marker_ttl=LONG)
        assert reply is Relation.NOT_OURS
        assert do.refused(store, key, do.new_token(token.task_id)) is Relation.DONE

    def test_a_release_writes_no_marker_where_a_twin_has_the_key(self, store: Store) -> None:
        key, winner = do.held(store)
        loser = do.new_token(winner.task_id)
        reply = do.give(store, key, loser, marker=MarkerState.DONE, marker_ttl=LONG)
        assert reply is Relation.TWIN
        assert do.record_of(store, key).token == str(winner)
        do.take(store, key, winner)

    def test_a_release_after_ones_twin_has_finished_says_so(self, store: Store) -> None:
        key, winner = do.held(store)
        loser = do.new_token(winner.task_id)
        do.give(store, key, winner, marker=MarkerState.DONE, marker_ttl=LONG)
        assert do.give(store, key, loser) is Relation.DONE
        assert do.give(store, key, winner) is Relation.NOT_OURS

    def test_a_release_never_takes_a_done_marker_back(self, store: Store) -> None:
        key, token = do.new_key(), do.new_token()
        do.mark(store, key, token, MarkerState.DONE)
        do.give(store, key, token, marker=MarkerState.FINISHING, marker_ttl=self.SHORT)
        self.elapse(self.LONGER_THAN_SHORT)
        assert do.refused(store, key, token) is Relation.DONE
