"""What is known of an attempt beyond its lease."""

from __future__ import annotations

from celery_singleton_lock.core.store import Granted, MarkerState, Relation, Store
from celery_singleton_lock.testing.contract.calls import (
    LONG,
    Part,
    ask,
    give,
    mark,
    new_key,
    new_token,
    record_of,
    relation_of,
    take,
)

__all__ = ["MarkerContract"]


class MarkerContract(Part):
    """See StoreContract."""

    def test_an_attempt_that_is_done_is_refused_whoever_holds_the_key(self, store: Store) -> None:
        key, token = new_key(), new_token()
        mark(store, key, token, MarkerState.DONE)
        assert relation_of(ask(store, key, token)) is Relation.DONE
        assert relation_of(ask(store, key, new_token(token.task_id))) is Relation.DONE
        take(store, key, new_token(token.task_id, retries=1))
        assert relation_of(ask(store, key, token)) is Relation.DONE

    def test_an_attempt_that_is_finishing_has_a_twin(self, store: Store) -> None:
        key, token = new_key(), new_token()
        mark(store, key, token, MarkerState.FINISHING)
        assert relation_of(ask(store, key, new_token(token.task_id))) is Relation.TWIN
        take(store, key)

    def test_only_the_newest_copy_of_a_message_is_granted(self, store: Store) -> None:
        key, token = new_key(), new_token()
        mark(store, key, token, MarkerState.WAITING, 2)
        assert relation_of(ask(store, key, token, sequence=1)) is Relation.SUPERSEDED
        assert isinstance(ask(store, key, token, sequence=2), Granted)
        assert isinstance(ask(store, key, token, sequence=3), Granted)

    def test_a_marker_never_goes_back(self, store: Store) -> None:
        key, token = new_key(), new_token()
        mark(store, key, token, MarkerState.WAITING, 5)
        mark(store, key, token, MarkerState.WAITING, 3)
        assert relation_of(ask(store, key, token, sequence=4)) is Relation.SUPERSEDED
        mark(store, key, token, MarkerState.FINISHING, 0)
        mark(store, key, token, MarkerState.WAITING, 7)
        assert relation_of(ask(store, key, token, sequence=9)) is Relation.TWIN
        mark(store, key, token, MarkerState.DONE, 0)
        mark(store, key, token, MarkerState.FINISHING, 9)
        mark(store, key, token, MarkerState.WAITING, 9)
        assert relation_of(ask(store, key, token, sequence=9)) is Relation.DONE

    def test_a_marker_is_of_one_attempt_and_ends_in_the_store(self, store: Store) -> None:
        key, token = new_key(), new_token()
        mark(store, key, token, MarkerState.DONE, ttl=self.SHORT)
        other_attempt = new_token(token.task_id, retries=1)
        take(store, key, other_attempt)
        give(store, key, other_attempt)
        self.elapse(self.LONGER_THAN_SHORT)
        take(store, key, token)

    def test_marking_again_never_shortens_a_done_marker(self, store: Store) -> None:
        key, token = new_key(), new_token()
        mark(store, key, token, MarkerState.DONE, ttl=LONG)
        mark(store, key, token, MarkerState.WAITING, ttl=self.SHORT)
        mark(store, key, token, MarkerState.FINISHING, ttl=self.SHORT)
        mark(store, key, token, MarkerState.DONE, ttl=self.SHORT)
        self.elapse(self.LONGER_THAN_SHORT)
        assert relation_of(ask(store, key, token)) is Relation.DONE

    def test_putting_back_does_not_prolong_a_finishing_marker(self, store: Store) -> None:
        # Its holder may have died while it sent callbacks: then the copy must run soon.
        key, token = new_key(), new_token()
        mark(store, key, token, MarkerState.FINISHING, ttl=self.SHORT)
        mark(store, key, token, MarkerState.WAITING, 1, ttl=LONG)
        self.elapse(self.LONGER_THAN_SHORT)
        take(store, key, token)

    def test_a_release_writes_the_marker(self, store: Store) -> None:
        key = new_key()
        token = take(store, key)
        give(store, key, token, marker=MarkerState.DONE, marker_ttl=LONG)
        assert relation_of(ask(store, key, new_token(token.task_id))) is Relation.DONE

    def test_a_release_writes_the_marker_where_the_lease_is_gone(self, store: Store) -> None:
        key, token = new_key(), new_token()
        reply = give(store, key, token, marker=MarkerState.DONE, marker_ttl=LONG)
        assert reply is Relation.NOT_OURS
        assert relation_of(ask(store, key, new_token(token.task_id))) is Relation.DONE

    def test_a_release_writes_no_marker_where_a_twin_has_the_key(self, store: Store) -> None:
        key = new_key()
        winner = take(store, key)
        loser = new_token(winner.task_id)
        reply = give(store, key, loser, marker=MarkerState.DONE, marker_ttl=LONG)
        assert reply is Relation.TWIN
        assert record_of(store, key).token == str(winner)
        assert isinstance(ask(store, key, winner), Granted)

    def test_a_release_after_ones_twin_has_finished_says_so(self, store: Store) -> None:
        key = new_key()
        winner = take(store, key)
        loser = new_token(winner.task_id)
        give(store, key, winner, marker=MarkerState.DONE, marker_ttl=LONG)
        assert give(store, key, loser) is Relation.DONE
        assert give(store, key, winner) is Relation.NOT_OURS

    def test_a_release_never_takes_a_done_marker_back(self, store: Store) -> None:
        key, token = new_key(), new_token()
        mark(store, key, token, MarkerState.DONE)
        give(store, key, token, marker=MarkerState.FINISHING, marker_ttl=self.SHORT)
        self.elapse(self.LONGER_THAN_SHORT)
        assert relation_of(ask(store, key, token)) is Relation.DONE
