"""Contract of claims without a lease: admission, take-over and settlement."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from math import isnan

from celery_singleton_lock.core.lease import Holder, Kind, LossReason, Phase, Record, Token
from celery_singleton_lock.core.store import Relation, Store
from celery_singleton_lock.testing.contract import steps as do
from celery_singleton_lock.testing.contract.steps import KEYSPACE, LONG, PUBLISHER, Part

__all__ = ["ClaimContract"]

_THREADS = 16


class ClaimContract(Part):
    """See StoreContract."""

    # --- admit -----------------------------------------------------------------------------------

    def test_a_free_claim_is_given_and_its_record_names_the_publisher(self, store: Store) -> None:
        for tells_ttl in (True, False):
            _, claim = do.new_claim()
            token = do.new_token(retries=2)
            assert do.admit(store, claim, token, tells_ttl=tells_ttl) is None
            assert do.is_claimed(store, claim, token)
            record = do.record_of(store, claim)
            assert (record.key, record.fence) == (claim, None)

    def test_another_message_is_refused_with_the_record_of_the_claim(self, store: Store) -> None:
        for phase, tells_ttl in product(Phase, (True, False)):
            _, claim, token = do.published(store, phase=phase)
            options = {"ttl": 2 * LONG, "holder": Holder(task_id="m-2"), "tells_ttl": tells_ttl}
            record = do.admit(store, claim, do.new_token(), **options)
            assert record is not None
            assert (record.key, record.kind, record.token) == (claim, Kind.CLAIM, token.task)
            assert (record.phase, record.holder) == (phase, PUBLISHER)
            if tells_ttl or not isnan(record.ttl):
                assert do.ttl_of(record) == LONG
            assert do.is_claimed(store, claim, token, phase)

    def test_one_of_many_threads_gets_the_claim_and_the_others_its_record(
        self, store: Store
    ) -> None:
        _, claim = do.new_claim()
        ready = threading.Barrier(_THREADS)

        def try_thrice(number: int) -> list[tuple[Token, Record | None]]:
            tokens = [do.new_token() for _ in range(3)]
            ready.wait(30)
            tells_ttl = bool(number % 2)
            return [(token, do.admit(store, claim, token, tells_ttl=tells_ttl)) for token in tokens]

        with ThreadPoolExecutor(_THREADS) as pool:
            tries = [one for some in pool.map(try_thrice, range(_THREADS)) for one in some]
        [winner] = [token for token, record in tries if record is None]
        refused = {record.token for _, record in tries if record is not None}
        assert refused == {winner.task} == {do.record_of(store, claim).token}

    def test_ones_own_claim_is_no_obstacle_and_its_phase_is_kept(self, store: Store) -> None:
        for phase in Phase:
            _, claim, token = do.published(store, phase=phase)
            task_id, later = token.task_id, Holder(task_id="later")
            others = [do.new_token(task_id, retries=3), do.new_token(task_id, nesting=1)]
            for again, tells_ttl in product((token, do.new_token(task_id), *others), (True, False)):
                assert do.admit(store, claim, again, holder=later, tells_ttl=tells_ttl) is None
            assert do.is_claimed(store, claim, token, phase)

    def test_ones_own_claim_is_prolonged_and_never_shortened(self, store: Store) -> None:
        for tells_ttl in (True, False):
            _, claim, token = do.published(store, ttl=LONG)
            assert do.admit(store, claim, token, ttl=self.SHORT, tells_ttl=tells_ttl) is None
            assert do.is_claimed(store, claim, token)
            assert do.admit(store, claim, token, ttl=2 * LONG, tells_ttl=tells_ttl) is None
            assert do.record_of(store, claim).ttl > 2 * LONG - 60

    def test_a_message_whose_task_is_named_alike_is_another(self, store: Store) -> None:
        for held, arriving in (("abc", "abcd"), ("abcd", "abc"), ("a.c", "abc"), ("%", "abc")):
            _, claim, _ = do.published(store, do.new_token(held))
            for tells_ttl in (True, False):
                record = do.admit(store, claim, do.new_token(arriving), tells_ttl=tells_ttl)
                assert record is not None, (held, arriving)

    def test_a_second_call_with_the_same_task_id_has_no_such_claim(self, store: Store) -> None:
        first, second, unnamed = (Token("t", 0, 0, "n", call) for call in ("a", "b", ""))
        _, claim, _ = do.published(store, first)
        for other in (second, unnamed):
            assert do.admit(store, claim, other) is not None
            do.settle(store, other, claim, None)
        assert do.record_of(store, claim).token == first.task

    def test_claims_do_not_exclude_each_other_nor_the_lease_beside_them(self, store: Store) -> None:
        token = do.new_token()
        key, _, _ = do.published(store, token)
        do.publish(store, KEYSPACE.claim("app.other", key), do.new_token())
        do.publish(store, do.new_claim()[1], token)
        do.take(store, key)

    def test_a_claim_that_is_not_prolonged_ends_in_the_store(self, store: Store) -> None:
        _, claim, _ = do.published(store, ttl=self.SHORT)
        self.elapse(self.LONGER_THAN_SHORT)
        assert store.inspect(claim) is None
        do.publish(store, claim)

    def test_task_ids_of_any_characters_have_claims(self, store: Store) -> None:
        for task_id in do.ODD_TASK_IDS:
            for call, tells_ttl in product(("", "a1"), (True, False)):
                _, claim = do.new_claim()
                token = Token(task_id, 0, 0, "n", call)
                assert do.admit(store, claim, token, tells_ttl=tells_ttl) is None
                assert do.record_of(store, claim).token == token.task
                assert do.admit(store, claim, token, tells_ttl=tells_ttl) is None
                other = Token(task_id + "x", 0, 0, "n", call)
                refused = do.admit(store, claim, other, tells_ttl=tells_ttl)
                assert refused is not None
                assert refused.token == token.task
                do.settle(store, token, claim, Phase.RETRYING)
                assert do.record_of(store, claim).phase is Phase.RETRYING
                assert do.admit(store, claim, other, instead_of=token.task) is None
                do.settle(store, other, claim, None)
                assert store.inspect(claim) is None

    def test_publishers_of_any_characters_come_back(self, store: Store) -> None:
        holder = Holder(task='a "b" \\', task_id="x\ny", worker="w|1.2| q {}", pid=1, since=0.5)
        for tells_ttl in (True, False):
            _, claim = do.new_claim()
            token = do.new_token()
            do.admit(store, claim, token, holder=holder, tells_ttl=tells_ttl)
            do.settle(store, token, claim, Phase.RETRYING)
            assert do.record_of(store, claim).holder == holder
            record = do.admit(store, claim, do.new_token(), tells_ttl=tells_ttl)
            assert record is not None
            assert record.holder == holder

    # --- taking over -----------------------------------------------------------------------------

    def test_a_stale_claim_is_taken_over_whatever_its_phase(self, store: Store) -> None:
        for phase in Phase:
            _, claim, stale = do.published(store, ttl=2 * LONG, phase=phase)
            token, holder = do.new_token(), Holder(task_id="m-2")
            assert do.admit(store, claim, token, holder=holder, instead_of=stale.task) is None
            assert do.found(store, claim) == (Kind.CLAIM, token.task, Phase.QUEUED, holder, LONG)
            assert do.admit(store, claim, stale) is not None

    def test_a_claim_is_taken_over_from_the_task_that_is_named_alone(self, store: Store) -> None:
        _, claim, token = do.published(store, do.new_token("abc"))
        for instead_of in ("", "ab", "abcd", "a.c", "abc+1", "abc|0.0", str(token), "%S+", "{}"):
            record = do.admit(store, claim, do.new_token(), instead_of=instead_of)
            assert record is not None, instead_of
        assert do.record_of(store, claim).token == token.task

    def test_ones_own_claim_is_not_replaced_by_a_take_over(self, store: Store) -> None:
        _, claim, token = do.published(store, phase=Phase.RUNNING)
        assert do.admit(store, claim, token, instead_of=token.task) is None
        assert do.record_of(store, claim).phase is Phase.RUNNING

    def test_a_claim_that_was_stale_and_is_gone_is_given(self, store: Store) -> None:
        _, claim = do.new_claim()
        assert do.admit(store, claim, do.new_token(), instead_of="gone") is None

    # --- claims are no leases --------------------------------------------------------------------

    def test_a_lease_in_the_claims_key_is_reported_and_left_alone(self, store: Store) -> None:
        key, _ = do.new_claim()
        token = do.take(store, key)
        record = do.admit(store, key, token)
        assert record is not None
        assert (record.kind, record.token) == (Kind.LEASE, str(token))
        assert do.admit(store, key, do.new_token(), instead_of=token.task) is not None
        for phase in (None, *Phase):
            do.settle(store, token, key, phase, self.SHORT)
        assert do.is_held(store, key, token)

    def test_a_claim_in_the_leases_key_is_reported_and_left_alone(self, store: Store) -> None:
        _, claim, token = do.published(store)
        for arriving in (token, do.new_token(), token.next_attempt()):
            record = do.refused_by(store, claim, arriving)
            assert (record.kind, record.token) == (Kind.CLAIM, token.task)
            assert do.renew_one(store, claim, arriving, self.SHORT) is LossReason.REPLACED
            assert do.give(store, claim, arriving) is Relation.NOT_OURS
            kind = Kind.COOLING
            assert do.give(store, claim, arriving, become=kind, become_ttl=1) is Relation.NOT_OURS
        assert do.is_claimed(store, claim, token)

    # --- settle_claim ----------------------------------------------------------------------------

    def test_a_claim_is_settled_by_any_delivery_of_its_task(self, store: Store) -> None:
        for before in (Phase.QUEUED, Phase.RETRYING):
            for after in Phase:
                _, claim, token = do.published(store, phase=before)
                other_delivery = do.new_token(token.task_id, retries=1)
                do.settle(store, other_delivery, claim, after, 2 * LONG)
                assert do.is_claimed(store, claim, token, after, 2 * LONG)
            do.settle(store, token, claim, Phase.QUEUED)

    def test_a_settled_claim_may_end_sooner_or_at_once(self, store: Store) -> None:
        _, claim, token = do.published(store, ttl=2 * LONG)
        do.settle(store, token, claim, Phase.RETRYING, LONG)
        assert do.record_of(store, claim).ttl <= LONG
        do.settle(store, token, claim, None)
        assert store.inspect(claim) is None

    def test_a_running_tasks_claim_is_left_to_its_lease(self, store: Store) -> None:
        _, claim, token = do.published(store, phase=Phase.RUNNING)
        for phase in (None, Phase.QUEUED, Phase.RETRYING):
            do.settle(store, token, claim, phase, self.SHORT)
            assert do.is_claimed(store, claim, token, Phase.RUNNING)

    def test_a_running_tasks_claim_is_changed_by_a_change_to_running(self, store: Store) -> None:
        _, claim, token = do.published(store, phase=Phase.RUNNING)
        do.settle(store, token, claim, Phase.RUNNING, 2 * LONG)
        assert do.is_claimed(store, claim, token, Phase.RUNNING, 2 * LONG)

    def test_anothers_claim_is_never_settled(self, store: Store) -> None:
        for held in Phase:
            _, claim, token = do.published(store, do.new_token("abc"), phase=held)
            for other in ("abcd", "ab", "a.c"):
                for phase in (None, *Phase):
                    do.settle(store, do.new_token(other), claim, phase, self.SHORT)
            assert do.is_claimed(store, claim, token, held)

    def test_a_claim_that_is_gone_is_not_settled_into_being(self, store: Store) -> None:
        for phase in (None, *Phase):
            _, claim = do.new_claim()
            do.settle(store, do.new_token(), claim, phase)
            assert store.inspect(claim) is None
