"""Who may publish: a claim by itself, which message has it, and who may change it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from math import isnan

from celery_singleton_lock.core.lease import Holder, Kind, LossReason, Phase, Record, Token
from celery_singleton_lock.core.store import Refused, Relation, Store
from celery_singleton_lock.testing.contract.calls import (
    KEYSPACE,
    LONG,
    ODD_TASK_IDS,
    PUBLISHER,
    Part,
    admit,
    ask,
    give,
    lease_of,
    new_claim,
    new_token,
    publish,
    record_of,
    renew,
    settle,
    take,
)

__all__ = ["ClaimContract"]

_THREADS = 16


class ClaimContract(Part):
    """See StoreContract."""

    # --- admit -----------------------------------------------------------------------------------

    def test_a_free_claim_is_given_and_its_record_names_the_publisher(self, store: Store) -> None:
        for tells_ttl in (True, False):
            _, claim = new_claim()
            token = new_token(retries=2)
            assert admit(store, claim, token, tells_ttl=tells_ttl) is None
            record = record_of(store, claim)
            assert (record.key, record.kind, record.token) == (claim, Kind.CLAIM, token.task)
            assert (record.phase, record.holder, record.fence) == (Phase.QUEUED, PUBLISHER, None)
            assert LONG - 60 < record.ttl <= LONG

    def test_another_message_is_refused_with_the_record_of_the_claim(self, store: Store) -> None:
        for phase, tells_ttl in product(Phase, (True, False)):
            _, claim = new_claim()
            token = publish(store, claim, phase=phase)
            other, ttl = Holder(task_id="m-2"), 2 * LONG
            record = admit(store, claim, new_token(), ttl=ttl, holder=other, tells_ttl=tells_ttl)
            assert record is not None
            assert (record.key, record.kind, record.token) == (claim, Kind.CLAIM, token.task)
            assert (record.phase, record.holder) == (phase, PUBLISHER)
            if tells_ttl or not isnan(record.ttl):
                assert LONG - 60 < record.ttl <= LONG
            after = record_of(store, claim)
            assert (after.token, after.phase, after.holder) == (token.task, phase, PUBLISHER)
            assert after.ttl <= LONG

    def test_of_many_threads_one_gets_the_claim_and_all_others_hear_of_it(
        self, store: Store
    ) -> None:
        _, claim = new_claim()
        ready = threading.Barrier(_THREADS)

        def try_thrice(number: int) -> list[tuple[Token, Record | None]]:
            tokens = [new_token() for _ in range(3)]
            ready.wait(30)
            tells_ttl = bool(number % 2)
            return [(token, admit(store, claim, token, tells_ttl=tells_ttl)) for token in tokens]

        with ThreadPoolExecutor(_THREADS) as pool:
            tries = [one for some in pool.map(try_thrice, range(_THREADS)) for one in some]
        [winner] = [token for token, record in tries if record is None]
        heard = {record.token for _, record in tries if record is not None}
        assert heard == {winner.task} == {record_of(store, claim).token}

    def test_ones_own_claim_is_no_obstacle_and_its_phase_is_kept(self, store: Store) -> None:
        for phase in Phase:
            _, claim = new_claim()
            token = publish(store, claim, phase=phase)
            for again, tells_ttl in product(
                (
                    token,
                    new_token(token.task_id),
                    new_token(token.task_id, retries=3),
                    new_token(token.task_id, nesting=1),
                ),
                (True, False),
            ):
                later = Holder(task_id="later")
                assert admit(store, claim, again, holder=later, tells_ttl=tells_ttl) is None
            record = record_of(store, claim)
            assert (record.token, record.phase, record.holder) == (token.task, phase, PUBLISHER)

    def test_ones_own_claim_is_prolonged_and_never_shortened(self, store: Store) -> None:
        for tells_ttl in (True, False):
            _, claim = new_claim()
            token = publish(store, claim, ttl=LONG)
            assert admit(store, claim, token, ttl=self.SHORT, tells_ttl=tells_ttl) is None
            assert record_of(store, claim).ttl > LONG - 60
            assert admit(store, claim, token, ttl=2 * LONG, tells_ttl=tells_ttl) is None
            assert record_of(store, claim).ttl > 2 * LONG - 60

    def test_a_message_whose_task_is_named_alike_is_another(self, store: Store) -> None:
        for held, arriving in (("abc", "abcd"), ("abcd", "abc"), ("a.c", "abc"), ("%", "abc")):
            _, claim = new_claim()
            publish(store, claim, new_token(held))
            for tells_ttl in (True, False):
                refused = admit(store, claim, new_token(arriving), tells_ttl=tells_ttl)
                assert refused is not None, (held, arriving)

    def test_a_second_call_with_the_same_task_id_has_no_part_in_the_claim(
        self, store: Store
    ) -> None:
        first, second, unnamed = (Token("t", 0, 0, "n", call) for call in ("a", "b", ""))
        _, claim = new_claim()
        publish(store, claim, first)
        for other in (second, unnamed):
            assert admit(store, claim, other) is not None
            settle(store, other, claim, None)
        assert record_of(store, claim).token == first.task

    def test_claims_do_not_exclude_each_other_nor_the_lease_beside_them(self, store: Store) -> None:
        token = new_token()
        key, claim = new_claim()
        publish(store, claim, token)
        publish(store, KEYSPACE.claim("app.other", key), new_token())
        publish(store, new_claim()[1], token)
        take(store, key)

    def test_a_claim_that_nobody_prolongs_ends_in_the_store(self, store: Store) -> None:
        _, claim = new_claim()
        publish(store, claim, ttl=self.SHORT)
        self.elapse(self.LONGER_THAN_SHORT)
        assert store.inspect(claim) is None
        publish(store, claim)

    def test_task_ids_of_any_characters_have_claims(self, store: Store) -> None:
        for task_id in ODD_TASK_IDS:
            for call, tells_ttl in product(("", "a1"), (True, False)):
                _, claim = new_claim()
                token = Token(task_id, 0, 0, "n", call)
                assert admit(store, claim, token, tells_ttl=tells_ttl) is None
                assert record_of(store, claim).token == token.task
                assert admit(store, claim, token, tells_ttl=tells_ttl) is None
                other = Token(task_id + "x", 0, 0, "n", call)
                refused = admit(store, claim, other, tells_ttl=tells_ttl)
                assert refused is not None
                assert refused.token == token.task
                settle(store, token, claim, Phase.RETRYING)
                assert record_of(store, claim).phase is Phase.RETRYING
                assert admit(store, claim, other, instead_of=token.task) is None
                settle(store, other, claim, None)
                assert store.inspect(claim) is None

    def test_publishers_of_any_characters_come_back(self, store: Store) -> None:
        holder = Holder(task='a "b" \\', task_id="x\ny", worker="w|1.2| q {}", pid=1, since=0.5)
        for tells_ttl in (True, False):
            _, claim = new_claim()
            token = new_token()
            admit(store, claim, token, holder=holder, tells_ttl=tells_ttl)
            settle(store, token, claim, Phase.RETRYING)
            assert record_of(store, claim).holder == holder
            found = admit(store, claim, new_token(), tells_ttl=tells_ttl)
            assert found is not None
            assert found.holder == holder

    # --- taking over -----------------------------------------------------------------------------

    def test_a_stale_claim_is_taken_over_whatever_its_phase(self, store: Store) -> None:
        for phase in Phase:
            _, claim = new_claim()
            stale = publish(store, claim, ttl=2 * LONG, phase=phase)
            token, holder = new_token(), Holder(task_id="m-2")
            assert admit(store, claim, token, holder=holder, instead_of=stale.task) is None
            record = record_of(store, claim)
            assert (record.token, record.phase) == (token.task, Phase.QUEUED)
            assert record.holder == holder
            assert record.ttl <= LONG
            assert admit(store, claim, stale) is not None

    def test_a_claim_is_taken_over_from_the_task_that_is_named_alone(self, store: Store) -> None:
        _, claim = new_claim()
        token = publish(store, claim, new_token("abc"))
        for instead_of in ("", "ab", "abcd", "a.c", "abc+1", "abc|0.0", str(token), "%S+", "{}"):
            assert admit(store, claim, new_token(), instead_of=instead_of) is not None, instead_of
        assert record_of(store, claim).token == token.task

    def test_ones_own_claim_is_not_made_anew_by_a_take_over(self, store: Store) -> None:
        _, claim = new_claim()
        token = publish(store, claim, phase=Phase.RUNNING)
        assert admit(store, claim, token, instead_of=token.task) is None
        assert record_of(store, claim).phase is Phase.RUNNING

    def test_a_claim_that_was_stale_and_is_gone_is_given(self, store: Store) -> None:
        _, claim = new_claim()
        assert admit(store, claim, new_token(), instead_of="gone") is None

    # --- claims are no leases --------------------------------------------------------------------

    def test_a_lease_in_the_claims_key_is_reported_and_left_alone(self, store: Store) -> None:
        key, _ = new_claim()
        token = take(store, key)
        record = admit(store, key, token)
        assert record is not None
        assert (record.kind, record.token) == (Kind.LEASE, str(token))
        assert admit(store, key, new_token(), instead_of=token.task) is not None
        for phase in (None, *Phase):
            settle(store, token, key, phase, self.SHORT)
        record = record_of(store, key)
        assert (record.kind, record.token, record.phase) == (Kind.LEASE, str(token), None)
        assert record.ttl > LONG - 60

    def test_a_claim_in_the_leases_key_is_reported_and_left_alone(self, store: Store) -> None:
        _, claim = new_claim()
        token = publish(store, claim)
        for arriving in (token, new_token(), token.next_attempt()):
            reply = ask(store, claim, arriving)
            assert isinstance(reply, Refused)
            assert reply.relation is Relation.OTHER
            assert reply.record is not None
            assert (reply.record.kind, reply.record.token) == (Kind.CLAIM, token.task)
            assert renew(store, [lease_of(claim, arriving, self.SHORT)]) == [LossReason.REPLACED]
            assert give(store, claim, arriving) is Relation.NOT_OURS
            kind = Kind.COOLING
            assert give(store, claim, arriving, become=kind, become_ttl=1) is Relation.NOT_OURS
        record = record_of(store, claim)
        assert (record.kind, record.token) == (Kind.CLAIM, token.task)
        assert record.ttl > LONG - 60

    # --- settle_claim ----------------------------------------------------------------------------

    def test_a_claim_is_settled_by_any_delivery_of_its_task(self, store: Store) -> None:
        for before in (Phase.QUEUED, Phase.RETRYING):
            for after in Phase:
                _, claim = new_claim()
                token = publish(store, claim, phase=before)
                other_delivery = new_token(token.task_id, retries=1)
                settle(store, other_delivery, claim, after, 2 * LONG)
                record = record_of(store, claim)
                assert (record.token, record.phase) == (token.task, after)
                assert record.holder == PUBLISHER
                assert 2 * LONG - 60 < record.ttl <= 2 * LONG
            settle(store, token, claim, Phase.QUEUED)

    def test_a_settled_claim_may_end_sooner_or_at_once(self, store: Store) -> None:
        _, claim = new_claim()
        token = publish(store, claim, ttl=2 * LONG)
        settle(store, token, claim, Phase.RETRYING, LONG)
        assert record_of(store, claim).ttl <= LONG
        settle(store, token, claim, None)
        assert store.inspect(claim) is None

    def test_a_running_tasks_claim_is_left_to_its_lease(self, store: Store) -> None:
        _, claim = new_claim()
        token = publish(store, claim, phase=Phase.RUNNING)
        for phase in (None, Phase.QUEUED, Phase.RETRYING):
            settle(store, token, claim, phase, self.SHORT)
            record = record_of(store, claim)
            assert record.phase is Phase.RUNNING
            assert record.ttl > LONG - 60

    def test_a_running_tasks_claim_is_changed_by_who_says_that_it_runs(self, store: Store) -> None:
        _, claim = new_claim()
        token = publish(store, claim, phase=Phase.RUNNING)
        settle(store, token, claim, Phase.RUNNING, 2 * LONG)
        record = record_of(store, claim)
        assert record.phase is Phase.RUNNING
        assert record.ttl > 2 * LONG - 60

    def test_anothers_claim_is_never_settled(self, store: Store) -> None:
        for held in Phase:
            _, claim = new_claim()
            token = publish(store, claim, new_token("abc"), phase=held)
            for other in ("abcd", "ab", "a.c"):
                for phase in (None, *Phase):
                    settle(store, new_token(other), claim, phase, self.SHORT)
            record = record_of(store, claim)
            assert (record.token, record.phase, record.holder) == (token.task, held, PUBLISHER)
            assert record.ttl > LONG - 60

    def test_a_claim_that_is_gone_is_not_settled_into_being(self, store: Store) -> None:
        for phase in (None, *Phase):
            _, claim = new_claim()
            settle(store, new_token(), claim, phase)
            assert store.inspect(claim) is None
