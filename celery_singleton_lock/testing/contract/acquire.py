"""Who is granted a key, who is refused, and with which word."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from celery_singleton_lock.core.lease import Holder, Kind, LossReason, Token
from celery_singleton_lock.core.store import (
    RENEWED,
    Granted,
    MarkerState,
    Refused,
    Relation,
    Store,
)
from celery_singleton_lock.testing.contract.calls import (
    HOLDER,
    LONG,
    ODD_TASK_IDS,
    Part,
    ask,
    become,
    give,
    lease_of,
    new_key,
    new_token,
    record_of,
    relation_of,
    renew,
    take,
)

__all__ = ["AcquireContract"]


class AcquireContract(Part):
    """See StoreContract."""

    # --- acquire ---------------------------------------------------------------------------------

    def test_a_free_key_is_granted_and_its_record_names_the_holder(self, store: Store) -> None:
        key, token = new_key(), new_token()
        reply = ask(store, key, token)
        assert isinstance(reply, Granted)
        assert reply.key == key
        record = record_of(store, key)
        assert (record.kind, record.token, record.holder) == (Kind.LEASE, str(token), HOLDER)
        assert record.fence == reply.fence
        assert LONG - 60 < record.ttl <= LONG

    def test_a_held_key_is_refused_with_the_record_of_its_holder(self, store: Store) -> None:
        key = new_key()
        token = take(store, key)
        reply = ask(store, key, new_token())
        assert isinstance(reply, Refused)
        assert reply.relation is Relation.OTHER
        assert reply.record is not None
        assert (reply.record.key, reply.record.token) == (key, str(token))
        assert reply.record.holder == HOLDER
        assert LONG - 60 < reply.record.ttl <= LONG

    def test_a_refusal_changes_nothing(self, store: Store) -> None:
        key = new_key()
        token = take(store, key, ttl=LONG)
        ask(store, key, new_token(), ttl=LONG * 2)
        record = record_of(store, key)
        assert record.token == str(token)
        assert record.ttl <= LONG

    def test_an_acquire_sent_again_is_granted_again(self, store: Store) -> None:
        key, token = new_key(), new_token()
        take(store, key, token, ttl=LONG)
        reply = ask(store, key, token, ttl=LONG * 2)
        assert isinstance(reply, Granted)
        record = record_of(store, key)
        assert (record.token, record.fence) == (str(token), reply.fence)
        assert record.ttl > LONG

    def test_a_lease_that_nobody_renews_ends_in_the_store(self, store: Store) -> None:
        key = new_key()
        take(store, key, ttl=self.SHORT)
        self.elapse(self.LONGER_THAN_SHORT)
        assert store.inspect(key) is None
        take(store, key)

    def test_keys_do_not_exclude_each_other(self, store: Store) -> None:
        token = new_token()
        take(store, new_key(), token)
        take(store, new_key(), token)

    def test_of_many_threads_one_is_granted(self, store: Store) -> None:
        key = new_key()
        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(lambda _: ask(store, key, new_token()), range(40)))
        assert sum(isinstance(reply, Granted) for reply in replies) == 1

    # --- how an arriving delivery relates to what it finds ---------------------------------------

    def test_another_delivery_of_the_same_attempt_is_a_twin(self, store: Store) -> None:
        key = new_key()
        token = take(store, key)
        twin = new_token(token.task_id)
        assert relation_of(ask(store, key, twin)) is Relation.TWIN

    def test_an_attempt_that_meets_an_older_one_of_its_task_hears_earlier(
        self, store: Store
    ) -> None:
        for held, arriving in (
            (new_token("t", retries=0), new_token("t", retries=1)),
            (new_token("t", nesting=0, retries=3), new_token("t", nesting=1, retries=0)),
            (new_token("t", retries=2_000_000), new_token("t", nesting=1)),
        ):
            key = new_key()
            take(store, key, held)
            assert relation_of(ask(store, key, arriving)) is Relation.EARLIER, (held, arriving)

    def test_an_attempt_that_meets_a_younger_one_of_its_task_hears_later(
        self, store: Store
    ) -> None:
        for held, arriving in (
            (new_token("t", retries=1), new_token("t", retries=0)),
            (new_token("t", nesting=1, retries=0), new_token("t", nesting=0, retries=3)),
            (new_token("t", nesting=1), new_token("t", retries=2_000_000)),
        ):
            key = new_key()
            take(store, key, held)
            assert relation_of(ask(store, key, arriving)) is Relation.LATER, (held, arriving)

    def test_a_task_whose_id_begins_alike_is_another_task(self, store: Store) -> None:
        for held, arriving in (("abc", "abcd"), ("abcd", "abc"), ("a.c", "abc"), ("%", "abc")):
            key = new_key()
            take(store, key, new_token(held))
            assert relation_of(ask(store, key, new_token(arriving))) is Relation.OTHER

    def test_a_second_call_with_the_same_task_id_is_another_task(self, store: Store) -> None:
        key = new_key()
        first, second = (Token("t", 0, 0, "n", call) for call in ("a", "b"))
        unnamed = Token("t", 0, 0, "n")
        take(store, key, first)
        assert relation_of(ask(store, key, second)) is Relation.OTHER
        assert relation_of(ask(store, key, unnamed)) is Relation.OTHER
        assert relation_of(ask(store, key, Token("t", 0, 0, "m", "a"))) is Relation.TWIN
        assert renew(store, [lease_of(key, second)]) == [LossReason.REPLACED]
        assert Token.parse(record_of(store, key).token) == first
        give(store, key, first, marker=MarkerState.DONE, marker_ttl=LONG)
        assert relation_of(ask(store, key, first)) is Relation.DONE
        assert isinstance(ask(store, key, second), Granted)

    def test_task_ids_of_any_characters_are_told_apart_and_come_back(self, store: Store) -> None:
        for task_id in ODD_TASK_IDS:
            key, token = new_key(), new_token(task_id)
            take(store, key, token)
            assert Token.parse(record_of(store, key).token) == token
            assert relation_of(ask(store, key, new_token(task_id))) is Relation.TWIN
            assert relation_of(ask(store, key, new_token(task_id, retries=1))) is Relation.EARLIER
            assert relation_of(ask(store, key, new_token(task_id + "x"))) is Relation.OTHER
            assert renew(store, [lease_of(key, token)]) == [RENEWED]
            assert give(store, key, token) is Relation.OURS
            assert store.inspect(key) is None

    def test_holders_and_keys_of_any_characters_come_back(self, store: Store) -> None:
        holder = Holder(task='a "b" \\', task_id="x\ny", worker="w|1.2| l {}", pid=1, since=0.5)
        key = new_key("日本 [x]*?")
        ask(store, key, new_token(), holder=holder)
        assert record_of(store, key).holder == holder
        assert record_of(store, key).key == key

    # --- reserved, cooling, dying ----------------------------------------------------------------

    def test_a_reserved_key_is_swapped_by_any_delivery_of_the_next_attempt(
        self, store: Store
    ) -> None:
        key = new_key()
        token = take(store, key)
        become(store, key, token, Kind.RESERVED)
        assert record_of(store, key).kind is Kind.RESERVED
        following = new_token(token.task_id, retries=1)
        reply = ask(store, key, following)
        assert isinstance(reply, Granted)
        record = record_of(store, key)
        assert (record.kind, record.token) == (Kind.LEASE, str(following))
        twin = new_token(token.task_id, retries=1)
        assert relation_of(ask(store, key, twin)) is Relation.TWIN

    def test_a_reserved_key_is_refused_to_everybody_else(self, store: Store) -> None:
        key = new_key()
        token = take(store, key)
        become(store, key, token, Kind.RESERVED)
        again, after_next = new_token(token.task_id), new_token(token.task_id, retries=2)
        assert relation_of(ask(store, key, new_token())) is Relation.OTHER
        assert relation_of(ask(store, key, again)) is Relation.LATER
        assert relation_of(ask(store, key, token)) is Relation.LATER
        assert relation_of(ask(store, key, after_next)) is Relation.EARLIER

    def test_a_cooling_key_is_refused_to_all_and_ends_by_itself(self, store: Store) -> None:
        key = new_key()
        token = take(store, key)
        become(store, key, token, Kind.COOLING)
        assert record_of(store, key).kind is Kind.COOLING
        for other in (new_token(), token, new_token(token.task_id, retries=1)):
            assert relation_of(ask(store, key, other)) is Relation.OTHER
        # Another key: one whose end is near may be free before all have asked.
        key = new_key()
        become(store, key, take(store, key), Kind.COOLING, self.SHORT)
        self.elapse(self.LONGER_THAN_SHORT)
        take(store, key)

    def test_a_dying_holder_keeps_the_key_until_its_token_releases_it(self, store: Store) -> None:
        key = new_key()
        token = take(store, key)
        become(store, key, token, Kind.DYING)
        assert relation_of(ask(store, key, new_token())) is Relation.OTHER
        assert relation_of(ask(store, key, new_token(token.task_id))) is Relation.TWIN
        assert relation_of(ask(store, key, token)) is Relation.TWIN
        assert give(store, key, token) is Relation.OURS
        assert store.inspect(key) is None
