"""What every store promises, as tests: the one suite that all of them pass.

A store of your own passes it like this::

    from celery_singleton_lock.testing.contract import StoreContract

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self):
            store = MyStore(...)
            yield store
            store.close()

pytest finds the tests in the subclass. They use keys of their own, so the server may be shared. Say
``pytest.register_assert_rewrite("celery_singleton_lock.testing.contract")`` before the import, and
a failure shows the values.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.lease import Holder, Kind, Lease, Record, Token
from celery_singleton_lock.core.store import (
    Acquire,
    Granted,
    MarkerState,
    Refused,
    Relation,
    Release,
    Released,
    Renewal,
    Store,
)

__all__ = ["StoreContract", "ask", "lease_of", "new_key", "new_token"]

#: Seconds to wait for one reply.
TIMEOUT = 5.0
#: Seconds that no test lasts: a lease that stands.
LONG = 600.0
#: Seconds of a lease that shall expire, and that let it.
SHORT, LONGER_THAN_SHORT = 0.05, 0.1

_KEYSPACE = Keyspace("contract")
_HOLDER = Holder(task="app.sync", task_id="t-1", worker="celery@höst one", pid=4711, since=17e8)
_ODD_TASK_IDS = (
    "with some blanks",
    "a|b|0.0|c",
    "a+b",
    "line\nbreak\ttab",
    "ünïcode → 日本",
    "100%25[a-z]*.+-^$",
    "-",
    "i" * 1024,
)


def new_key(rest: str = "") -> str:
    """A key that no other test has."""
    return _KEYSPACE.lock("contract", f"{rest}{secrets.token_hex(8)}")


def new_token(
    task_id: str | None = None, *, nesting: int = 0, retries: int = 0, nonce: str = ""
) -> Token:
    """The token of a delivery that no other test has, but for what is given."""
    return Token(
        task_id or f"task-{secrets.token_hex(4)}", nesting, retries, nonce or secrets.token_hex(4)
    )


def ask(
    store: Store,
    key: str | tuple[str, ...],
    token: Token,
    *,
    ttl: float = LONG,
    sequence: int = 0,
    holder: Holder = _HOLDER,
) -> Granted | Refused:
    """Acquire once."""
    slots = (key,) if isinstance(key, str) else key
    call = Acquire(slots=slots, token=token, holder=holder, ttl=ttl, sequence=sequence)
    return store.acquire(call, timeout=TIMEOUT)


def lease_of(key: str, token: Token, ttl: float = LONG) -> Lease:
    """What a process that was granted ``key`` renews."""
    clock = SystemClock()
    return Lease(
        key=key,
        token=token,
        ttl=ttl,
        holder=_HOLDER,
        valid_until=clock.now() + ttl,
        acquired_at=clock.now(),
        clock=clock,
    )


def _take(store: Store, key: str, token: Token | None = None, *, ttl: float = LONG) -> Token:
    token = token or new_token()
    reply = ask(store, key, token, ttl=ttl)
    assert isinstance(reply, Granted), reply
    return token


def _give(store: Store, key: str | tuple[str, ...], token: Token, **options: Any) -> Released:
    keys = (key,) if isinstance(key, str) else key
    return store.release(Release(keys=keys, token=token, **options), timeout=TIMEOUT)


def _become(store: Store, key: str, token: Token, kind: Kind, ttl: float = LONG) -> None:
    next_token = token.next_attempt() if kind is Kind.RESERVED else None
    reply = _give(store, key, token, become=kind, become_ttl=ttl, next_token=next_token)
    assert reply is Released.RELEASED


def _renew(store: Store, leases: Sequence[Lease]) -> list[Renewal]:
    return store.renew(leases, timeout=TIMEOUT)


def _mark(
    store: Store, key: str, token: Token, state: MarkerState, sequence: int = 0, ttl: float = LONG
) -> None:
    store.mark(key, token, state, sequence, ttl, timeout=TIMEOUT)


def _relation(reply: Granted | Refused) -> Relation | None:
    return reply.relation if isinstance(reply, Refused) else None


def _record(store: Store, key: str) -> Record:
    record = store.inspect(key)
    assert record is not None, f"{key} is free"
    return record


def _fence(store: Store, key: str, token: Token) -> int:
    reply = ask(store, key, token)
    assert isinstance(reply, Granted), reply
    assert reply.fence is not None
    return reply.fence


class StoreContract:
    """The contract. A subclass gives the fixture ``store``, open and with any other data in it.

    Where the store's clock is manual, override :meth:`elapse`.
    """

    def elapse(self, seconds: float) -> None:
        """Let ``seconds`` pass on the store's clock."""
        SystemClock().sleep(seconds)

    # --- acquire ---------------------------------------------------------------------------------

    def test_a_free_key_is_granted_and_its_record_names_the_holder(self, store: Store) -> None:
        key, token = new_key(), new_token()
        reply = ask(store, key, token)
        assert isinstance(reply, Granted)
        assert reply.key == key
        record = _record(store, key)
        assert (record.kind, record.token, record.holder) == (Kind.LEASE, str(token), _HOLDER)
        assert record.fence == reply.fence
        assert LONG - 60 < record.ttl <= LONG

    def test_a_held_key_is_refused_with_the_record_of_its_holder(self, store: Store) -> None:
        key = new_key()
        token = _take(store, key)
        reply = ask(store, key, new_token())
        assert isinstance(reply, Refused)
        assert reply.relation is Relation.OTHER
        assert reply.record is not None
        assert (reply.record.key, reply.record.token) == (key, str(token))
        assert reply.record.holder == _HOLDER
        assert LONG - 60 < reply.record.ttl <= LONG

    def test_a_refusal_changes_nothing(self, store: Store) -> None:
        key = new_key()
        token = _take(store, key, ttl=LONG)
        ask(store, key, new_token(), ttl=LONG * 2)
        record = _record(store, key)
        assert record.token == str(token)
        assert record.ttl <= LONG

    def test_an_acquire_sent_again_is_granted_again(self, store: Store) -> None:
        key, token = new_key(), new_token()
        _take(store, key, token, ttl=LONG)
        reply = ask(store, key, token, ttl=LONG * 2)
        assert isinstance(reply, Granted)
        record = _record(store, key)
        assert (record.token, record.fence) == (str(token), reply.fence)
        assert record.ttl > LONG

    def test_a_lease_that_nobody_renews_ends_in_the_store(self, store: Store) -> None:
        key = new_key()
        _take(store, key, ttl=SHORT)
        self.elapse(LONGER_THAN_SHORT)
        assert store.inspect(key) is None
        _take(store, key)

    def test_keys_do_not_exclude_each_other(self, store: Store) -> None:
        token = new_token()
        _take(store, new_key(), token)
        _take(store, new_key(), token)

    def test_of_many_threads_one_is_granted(self, store: Store) -> None:
        key = new_key()
        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(lambda _: ask(store, key, new_token()), range(40)))
        assert sum(isinstance(reply, Granted) for reply in replies) == 1

    # --- how an arriving delivery relates to what it finds ---------------------------------------

    def test_another_delivery_of_the_same_attempt_is_a_twin(self, store: Store) -> None:
        key = new_key()
        token = _take(store, key)
        twin = new_token(token.task_id)
        assert _relation(ask(store, key, twin)) is Relation.TWIN

    def test_an_attempt_that_meets_an_older_one_of_its_task_hears_earlier(
        self, store: Store
    ) -> None:
        for held, arriving in (
            (new_token("t", retries=0), new_token("t", retries=1)),
            (new_token("t", nesting=0, retries=3), new_token("t", nesting=1, retries=0)),
            (new_token("t", retries=2_000_000), new_token("t", nesting=1)),
        ):
            key = new_key()
            _take(store, key, held)
            assert _relation(ask(store, key, arriving)) is Relation.EARLIER, (held, arriving)

    def test_an_attempt_that_meets_a_younger_one_of_its_task_hears_later(
        self, store: Store
    ) -> None:
        for held, arriving in (
            (new_token("t", retries=1), new_token("t", retries=0)),
            (new_token("t", nesting=1, retries=0), new_token("t", nesting=0, retries=3)),
            (new_token("t", nesting=1), new_token("t", retries=2_000_000)),
        ):
            key = new_key()
            _take(store, key, held)
            assert _relation(ask(store, key, arriving)) is Relation.LATER, (held, arriving)

    def test_a_task_whose_id_begins_alike_is_another_task(self, store: Store) -> None:
        for held, arriving in (("abc", "abcd"), ("abcd", "abc"), ("a.c", "abc"), ("%", "abc")):
            key = new_key()
            _take(store, key, new_token(held))
            assert _relation(ask(store, key, new_token(arriving))) is Relation.OTHER

    def test_a_second_call_with_the_same_task_id_is_another_task(self, store: Store) -> None:
        key = new_key()
        first, second = (Token("t", 0, 0, "n", call) for call in ("a", "b"))
        unnamed = Token("t", 0, 0, "n")
        _take(store, key, first)
        assert _relation(ask(store, key, second)) is Relation.OTHER
        assert _relation(ask(store, key, unnamed)) is Relation.OTHER
        assert _relation(ask(store, key, Token("t", 0, 0, "m", "a"))) is Relation.TWIN
        assert _renew(store, [lease_of(key, second)]) == [Renewal.REPLACED]
        assert Token.parse(_record(store, key).token) == first
        _give(store, key, first, marker=MarkerState.DONE, marker_ttl=LONG)
        assert _relation(ask(store, key, first)) is Relation.DONE
        assert isinstance(ask(store, key, second), Granted)

    def test_task_ids_of_any_characters_are_told_apart_and_come_back(self, store: Store) -> None:
        for task_id in _ODD_TASK_IDS:
            key, token = new_key(), new_token(task_id)
            _take(store, key, token)
            assert Token.parse(_record(store, key).token) == token
            assert _relation(ask(store, key, new_token(task_id))) is Relation.TWIN
            assert _relation(ask(store, key, new_token(task_id, retries=1))) is Relation.EARLIER
            assert _relation(ask(store, key, new_token(task_id + "x"))) is Relation.OTHER
            assert _renew(store, [lease_of(key, token)]) == [Renewal.RENEWED]
            assert _give(store, key, token) is Released.RELEASED
            assert store.inspect(key) is None

    def test_holders_and_keys_of_any_characters_come_back(self, store: Store) -> None:
        holder = Holder(task='a "b" \\', task_id="x\ny", worker="w|1.2| l {}", pid=1, since=0.5)
        key = new_key("日本 [x]*?")
        ask(store, key, new_token(), holder=holder)
        assert _record(store, key).holder == holder
        assert _record(store, key).key == key

    # --- reserved, cooling, dying ----------------------------------------------------------------

    def test_a_reserved_key_is_swapped_by_any_delivery_of_the_next_attempt(
        self, store: Store
    ) -> None:
        key = new_key()
        token = _take(store, key)
        _become(store, key, token, Kind.RESERVED)
        assert _record(store, key).kind is Kind.RESERVED
        following = new_token(token.task_id, retries=1)
        reply = ask(store, key, following)
        assert isinstance(reply, Granted)
        record = _record(store, key)
        assert (record.kind, record.token) == (Kind.LEASE, str(following))
        twin = new_token(token.task_id, retries=1)
        assert _relation(ask(store, key, twin)) is Relation.TWIN

    def test_a_reserved_key_is_refused_to_everybody_else(self, store: Store) -> None:
        key = new_key()
        token = _take(store, key)
        _become(store, key, token, Kind.RESERVED)
        again, after_next = new_token(token.task_id), new_token(token.task_id, retries=2)
        assert _relation(ask(store, key, new_token())) is Relation.OTHER
        assert _relation(ask(store, key, again)) is Relation.LATER
        assert _relation(ask(store, key, token)) is Relation.LATER
        assert _relation(ask(store, key, after_next)) is Relation.EARLIER

    def test_a_cooling_key_is_refused_to_all_and_ends_by_itself(self, store: Store) -> None:
        key = new_key()
        token = _take(store, key)
        _become(store, key, token, Kind.COOLING, SHORT + LONGER_THAN_SHORT)
        assert _record(store, key).kind is Kind.COOLING
        for other in (new_token(), token, new_token(token.task_id, retries=1)):
            assert _relation(ask(store, key, other)) is Relation.OTHER
        self.elapse(SHORT + 2 * LONGER_THAN_SHORT)
        _take(store, key)

    def test_a_dying_holder_keeps_the_key_until_its_token_releases_it(self, store: Store) -> None:
        key = new_key()
        token = _take(store, key)
        _become(store, key, token, Kind.DYING)
        assert _relation(ask(store, key, new_token())) is Relation.OTHER
        assert _relation(ask(store, key, new_token(token.task_id))) is Relation.TWIN
        assert _relation(ask(store, key, token)) is Relation.TWIN
        assert _give(store, key, token) is Released.RELEASED
        assert store.inspect(key) is None

    # --- markers ---------------------------------------------------------------------------------

    def test_an_attempt_that_is_done_is_refused_whoever_holds_the_key(self, store: Store) -> None:
        key, token = new_key(), new_token()
        _mark(store, key, token, MarkerState.DONE)
        assert _relation(ask(store, key, token)) is Relation.DONE
        assert _relation(ask(store, key, new_token(token.task_id))) is Relation.DONE
        _take(store, key, new_token(token.task_id, retries=1))
        assert _relation(ask(store, key, token)) is Relation.DONE

    def test_an_attempt_that_is_finishing_has_a_twin(self, store: Store) -> None:
        key, token = new_key(), new_token()
        _mark(store, key, token, MarkerState.FINISHING)
        assert _relation(ask(store, key, new_token(token.task_id))) is Relation.TWIN
        _take(store, key)

    def test_only_the_newest_copy_of_a_message_is_granted(self, store: Store) -> None:
        key, token = new_key(), new_token()
        _mark(store, key, token, MarkerState.WAITING, 2)
        assert _relation(ask(store, key, token, sequence=1)) is Relation.SUPERSEDED
        assert isinstance(ask(store, key, token, sequence=2), Granted)
        assert isinstance(ask(store, key, token, sequence=3), Granted)

    def test_a_marker_never_goes_back(self, store: Store) -> None:
        key, token = new_key(), new_token()
        _mark(store, key, token, MarkerState.WAITING, 5)
        _mark(store, key, token, MarkerState.WAITING, 3)
        assert _relation(ask(store, key, token, sequence=4)) is Relation.SUPERSEDED
        _mark(store, key, token, MarkerState.FINISHING, 0)
        _mark(store, key, token, MarkerState.WAITING, 7)
        assert _relation(ask(store, key, token, sequence=9)) is Relation.TWIN
        _mark(store, key, token, MarkerState.DONE, 0)
        _mark(store, key, token, MarkerState.FINISHING, 9)
        _mark(store, key, token, MarkerState.WAITING, 9)
        assert _relation(ask(store, key, token, sequence=9)) is Relation.DONE

    def test_a_marker_is_of_one_attempt_and_ends_in_the_store(self, store: Store) -> None:
        key, token = new_key(), new_token()
        _mark(store, key, token, MarkerState.DONE, ttl=SHORT)
        other_attempt = new_token(token.task_id, retries=1)
        _take(store, key, other_attempt)
        _give(store, key, other_attempt)
        self.elapse(LONGER_THAN_SHORT)
        _take(store, key, token)

    def test_marking_again_never_shortens_a_done_marker(self, store: Store) -> None:
        key, token = new_key(), new_token()
        _mark(store, key, token, MarkerState.DONE, ttl=LONG)
        _mark(store, key, token, MarkerState.WAITING, ttl=SHORT)
        _mark(store, key, token, MarkerState.FINISHING, ttl=SHORT)
        _mark(store, key, token, MarkerState.DONE, ttl=SHORT)
        self.elapse(LONGER_THAN_SHORT)
        assert _relation(ask(store, key, token)) is Relation.DONE

    def test_putting_back_does_not_prolong_a_finishing_marker(self, store: Store) -> None:
        # Its holder may have died while it sent callbacks: then the copy must run soon.
        key, token = new_key(), new_token()
        _mark(store, key, token, MarkerState.FINISHING, ttl=SHORT)
        _mark(store, key, token, MarkerState.WAITING, 1, ttl=LONG)
        self.elapse(LONGER_THAN_SHORT)
        _take(store, key, token)

    def test_a_release_writes_the_marker(self, store: Store) -> None:
        key = new_key()
        token = _take(store, key)
        _give(store, key, token, marker=MarkerState.DONE, marker_ttl=LONG)
        assert _relation(ask(store, key, new_token(token.task_id))) is Relation.DONE

    def test_a_release_writes_the_marker_where_the_lease_is_gone(self, store: Store) -> None:
        key, token = new_key(), new_token()
        reply = _give(store, key, token, marker=MarkerState.DONE, marker_ttl=LONG)
        assert reply is Released.NOT_OURS
        assert _relation(ask(store, key, new_token(token.task_id))) is Relation.DONE

    def test_a_release_writes_no_marker_where_a_twin_has_the_key(self, store: Store) -> None:
        key = new_key()
        winner = _take(store, key)
        loser = new_token(winner.task_id)
        reply = _give(store, key, loser, marker=MarkerState.DONE, marker_ttl=LONG)
        assert reply is Released.TWIN
        assert _record(store, key).token == str(winner)
        assert isinstance(ask(store, key, winner), Granted)

    def test_a_release_after_ones_twin_has_finished_says_so(self, store: Store) -> None:
        key = new_key()
        winner = _take(store, key)
        loser = new_token(winner.task_id)
        _give(store, key, winner, marker=MarkerState.DONE, marker_ttl=LONG)
        assert _give(store, key, loser) is Released.DONE
        assert _give(store, key, winner) is Released.NOT_OURS

    def test_a_release_never_takes_a_done_marker_back(self, store: Store) -> None:
        key, token = new_key(), new_token()
        _mark(store, key, token, MarkerState.DONE)
        _give(store, key, token, marker=MarkerState.FINISHING, marker_ttl=SHORT)
        self.elapse(LONGER_THAN_SHORT)
        assert _relation(ask(store, key, token)) is Relation.DONE

    # --- limit -----------------------------------------------------------------------------------

    def test_of_limit_slots_as_many_are_granted_and_one_more_is_refused(self, store: Store) -> None:
        slots = Keyspace.slots(new_key(), 3)
        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(lambda _: ask(store, slots, new_token()), range(24)))
        granted = [reply for reply in replies if isinstance(reply, Granted)]
        assert {reply.key for reply in granted} == set(slots)
        assert len(granted) == 3
        assert {reply.fence for reply in granted} == {None}
        assert {_relation(reply) for reply in replies if isinstance(reply, Refused)} == {
            Relation.OTHER
        }

    def test_a_slot_of_ones_own_is_found_though_a_lower_one_is_free(self, store: Store) -> None:
        slots = Keyspace.slots(new_key(), 3)
        first, second = new_token(), new_token()
        ask(store, slots, first)
        ask(store, slots, second)
        _give(store, slots[0], first)
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
            assert _relation(ask(store, slots, arriving)) is relation
        assert store.inspect(slots[2]) is None

    def test_a_slot_reserved_for_ones_attempt_is_taken_before_a_free_one(
        self, store: Store
    ) -> None:
        slots = Keyspace.slots(new_key(), 3)
        first, second = new_token(), new_token()
        ask(store, slots, first)
        ask(store, slots, second)
        _become(store, slots[1], second, Kind.RESERVED)
        _give(store, slots[0], first)
        reply = ask(store, slots, new_token(second.task_id, retries=1))
        assert isinstance(reply, Granted)
        assert reply.key == slots[1]

    def test_ones_own_cooling_slot_leaves_the_other_slots_free(self, store: Store) -> None:
        slots = Keyspace.slots(new_key(), 2)
        token = new_token()
        ask(store, slots, token)
        _become(store, slots[0], token, Kind.COOLING)
        reply = ask(store, slots, new_token(token.task_id, retries=1))
        assert isinstance(reply, Granted)
        assert reply.key == slots[1]

    def test_a_release_of_all_slots_gives_back_ones_own_alone(self, store: Store) -> None:
        slots = Keyspace.slots(new_key(), 3)
        first, second = new_token(), new_token()
        ask(store, slots, first)
        ask(store, slots, second)
        assert _give(store, slots, second) is Released.RELEASED
        assert _record(store, slots[0]).token == str(first)
        assert store.inspect(slots[1]) is None

    # --- renew -----------------------------------------------------------------------------------

    def test_a_renewal_prolongs_to_the_ttl_of_the_lease(self, store: Store) -> None:
        key = new_key()
        token = _take(store, key, ttl=LONG)
        assert _renew(store, [lease_of(key, token, 2 * LONG)]) == [Renewal.RENEWED]
        assert _record(store, key).ttl > 2 * LONG - 60

    def test_a_renewal_never_writes_a_lost_key_back(self, store: Store) -> None:
        key = new_key()
        token = _take(store, key, ttl=SHORT)
        self.elapse(LONGER_THAN_SHORT)
        assert _renew(store, [lease_of(key, token)]) == [Renewal.EXPIRED]
        assert store.inspect(key) is None

    def test_a_renewal_leaves_anothers_lease_alone(self, store: Store) -> None:
        key = new_key()
        holder = _take(store, key, ttl=LONG)
        for other in (new_token(), new_token(holder.task_id), new_token(holder.task_id, retries=1)):
            assert _renew(store, [lease_of(key, other, 2 * LONG)]) == [Renewal.REPLACED]
        record = _record(store, key)
        assert record.token == str(holder)
        assert record.ttl <= LONG

    def test_a_renewal_touches_no_reservation_no_cooling_and_no_dying_key(
        self, store: Store
    ) -> None:
        for kind in (Kind.RESERVED, Kind.COOLING, Kind.DYING):
            key = new_key()
            token = _take(store, key)
            _become(store, key, token, kind, LONG)
            late = lease_of(key, token, SHORT)
            following = lease_of(key, token.next_attempt(), SHORT)
            # A process that is being killed hears so: it has nothing more to do.
            heard = Renewal.DYING if kind is Kind.DYING else Renewal.REPLACED
            assert _renew(store, [late, following]) == [heard, Renewal.REPLACED]
            record = _record(store, key)
            assert record.kind is kind
            assert record.ttl > LONG - 60

    def test_renewals_are_answered_in_the_order_given(self, store: Store) -> None:
        leases = [lease_of(new_key(), new_token(f"t{number}")) for number in range(600)]
        assert _renew(store, leases) == [Renewal.EXPIRED] * 600
        for lease in leases[::7]:
            _take(store, lease.key, lease.token)
        for lease in leases[3::7]:
            _take(store, lease.key)
        expected = [
            {0: Renewal.RENEWED, 3: Renewal.REPLACED}.get(number % 7, Renewal.EXPIRED)
            for number in range(600)
        ]
        assert _renew(store, leases) == expected

    def test_renewing_nothing_is_answered_with_nothing(self, store: Store) -> None:
        assert _renew(store, []) == []

    # --- release ---------------------------------------------------------------------------------

    def test_a_released_key_is_free_and_a_second_release_harmless(self, store: Store) -> None:
        key = new_key()
        token = _take(store, key)
        assert _give(store, key, token) is Released.RELEASED
        assert store.inspect(key) is None
        assert _give(store, key, token) is Released.NOT_OURS
        other = _take(store, key)
        assert _give(store, key, token) is Released.NOT_OURS
        assert _record(store, key).token == str(other)

    def test_a_release_never_touches_anothers_key_of_any_kind(self, store: Store) -> None:
        for kind in Kind:
            key = new_key()
            holder = _take(store, key, new_token(retries=1))
            if kind is not Kind.LEASE:
                _become(store, key, holder, kind)
            before = _record(store, key)
            for other in (new_token(), new_token(holder.task_id), new_token(holder.task_id + "x")):
                _give(store, key, other)
                _give(store, key, other, become=Kind.COOLING, become_ttl=SHORT)
            after = _record(store, key)
            assert (after.kind, after.token, after.fence) == (kind, before.token, before.fence)
            assert after.ttl > LONG - 60

    def test_a_release_sent_again_leaves_the_reservation_and_the_cooling(
        self, store: Store
    ) -> None:
        for kind in (Kind.RESERVED, Kind.COOLING):
            key = new_key()
            token = _take(store, key)
            _become(store, key, token, kind)
            _give(store, key, token)
            assert _record(store, key).kind is kind

    def test_a_twin_that_lets_go_hears_of_the_other(self, store: Store) -> None:
        key = new_key()
        token = _take(store, key)
        assert _give(store, key, new_token(token.task_id)) is Released.TWIN
        assert _give(store, key, new_token(token.task_id, retries=1)) is Released.NOT_OURS

    # --- fences ----------------------------------------------------------------------------------

    def test_fences_strictly_rise_also_over_a_release_an_expiry_and_a_free(
        self, store: Store
    ) -> None:
        if not store.capabilities.fence:
            return
        key, fences = new_key(), []
        for number in range(50):
            token = new_token()
            fences.append(_fence(store, key, token))
            fences.append(_fence(store, key, token))
            if number % 2:
                _give(store, key, token)
            else:
                store.free(key, None)
        _take(store, key, ttl=SHORT)
        self.elapse(LONGER_THAN_SHORT)
        fences.append(_fence(store, key, new_token()))
        assert fences == sorted(set(fences))

    def test_a_store_without_fences_grants_none(self, store: Store) -> None:
        reply = ask(store, new_key(), new_token())
        assert isinstance(reply, Granted)
        assert (reply.fence is not None) == store.capabilities.fence

    # --- for operators ---------------------------------------------------------------------------

    def test_nothing_is_found_at_a_free_key(self, store: Store) -> None:
        key = new_key()
        assert store.inspect(key) is None
        assert store.free(key, None) is False

    def test_a_scan_finds_what_is_held_of_every_kind_and_nothing_else(self, store: Store) -> None:
        expected = {}
        for kind in Kind:
            key = new_key()
            token = _take(store, key)
            if kind is not Kind.LEASE:
                _become(store, key, token, kind)
            expected[key] = kind
        released = new_key()
        token = _take(store, released)
        _give(store, released, token, marker=MarkerState.DONE, marker_ttl=LONG)
        records = list(store.scan(_KEYSPACE.match_all()))
        found = {record.key: record.kind for record in records}
        assert expected.items() <= found.items()
        assert released not in found
        assert all(":contract:" in key for key in found)
        assert not list(store.scan(Keyspace("contract-2").match_all()))

    def test_a_key_is_freed_if_the_token_stands(self, store: Store) -> None:
        key = new_key()
        token = _take(store, key)
        assert store.free(key, str(new_token())) is False
        assert store.free(key, str(new_token(token.task_id))) is False
        assert _record(store, key).token == str(token)
        assert store.free(key, str(token)) is True
        assert store.inspect(key) is None
        assert _renew(store, [lease_of(key, token)]) == [Renewal.EXPIRED]

    def test_a_key_of_any_kind_is_freed_whatever_stands(self, store: Store) -> None:
        for kind in Kind:
            key = new_key()
            token = _take(store, key)
            if kind is not Kind.LEASE:
                _become(store, key, token, kind)
            assert store.free(key, None) is True
            assert store.inspect(key) is None
