"""Contract of claims: take, take over, change, and changes by requests of a lease."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from math import isnan
from typing import Any

from ...core.keyspace import Keyspace
from ...core.lease import Holder, Kind, LossReason, Phase, Record, Token
from ...core.store import Store, operators_of
from ...core.store_requests import RENEWED, CompletionState, Granted, Relation, ReleaseReply
from . import steps as do
from .steps import HOLDER, KEYSPACE, LONG, PUBLISHER, Part

_THREADS = 16


class ClaimContract(Part):
    """See StoreContract."""

    # --- take_claim
    # -----------------------------------------------------------------------------------

    def test_a_free_claim_is_given_and_its_record_names_the_publisher(self, store: Store) -> None:
        for wants_ttl in (True, False):
            _, claim = do.new_claim()
            token = do.new_token(retries=2)
            assert do.take_claim(store, claim, token, wants_ttl=wants_ttl) is None
            assert do.is_claimed(store, claim, token)
            record = do.record_of(store, claim)
            assert (record.key, record.fence) == (claim, None)

    def test_another_message_is_refused_with_the_record_of_the_claim(self, store: Store) -> None:
        for phase, wants_ttl in product(Phase, (True, False)):
            _, claim, token = do.published(store, phase=phase)
            other, ttl = Holder(task_id="m-2"), 2 * LONG
            record = do.not_admitted(store, claim, ttl=ttl, holder=other, wants_ttl=wants_ttl)
            assert (record.key, record.kind, record.token) == (claim, Kind.CLAIM, token.call_id)
            assert (record.phase, record.holder) == (phase, PUBLISHER)
            if wants_ttl or not isnan(record.ttl):
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
            wants_ttl = bool(number % 2)
            return [
                (token, do.take_claim(store, claim, token, wants_ttl=wants_ttl)) for token in tokens
            ]

        with ThreadPoolExecutor(_THREADS) as pool:
            tries = [one for some in pool.map(try_thrice, range(_THREADS)) for one in some]
        [winner] = [token for token, record in tries if record is None]
        refused = {record.token for _, record in tries if record is not None}
        assert refused == {winner.call_id} == {do.record_of(store, claim).token}

    def test_ones_own_claim_is_no_obstacle_and_its_phase_is_kept(self, store: Store) -> None:
        for phase in Phase:
            _, claim, token = do.published(store, phase=phase)
            task_id, later = token.task_id, Holder(task_id="later")
            others = [do.new_token(task_id, retries=3), do.new_token(task_id, nesting=1)]
            for again, wants_ttl in product((token, do.new_token(task_id), *others), (True, False)):
                assert do.take_claim(store, claim, again, holder=later, wants_ttl=wants_ttl) is None
            assert do.is_claimed(store, claim, token, phase)

    def test_ones_own_claim_is_prolonged_and_never_shortened(self, store: Store) -> None:
        for wants_ttl in (True, False):
            _, claim, token = do.published(store, ttl=LONG)
            assert do.take_claim(store, claim, token, ttl=self.SHORT, wants_ttl=wants_ttl) is None
            assert do.is_claimed(store, claim, token)
            assert do.take_claim(store, claim, token, ttl=2 * LONG, wants_ttl=wants_ttl) is None
            assert do.record_of(store, claim).ttl > 2 * LONG - 60

    def test_ones_own_claim_of_a_period_keeps_its_end(self, store: Store) -> None:
        for instead_of, wants_ttl in product(("", "stale"), (True, False)):
            _, claim, token = do.published(store, ttl=LONG)
            options: dict[str, Any] = {"instead_of": instead_of, "wants_ttl": wants_ttl}
            options["prolongs"] = False
            for again in (token, do.new_token(token.task_id, retries=1)):
                assert do.take_claim(store, claim, again, ttl=3 * LONG, **options) is None
                assert do.is_claimed(store, claim, token)
            other = do.not_admitted(store, claim, **options)
            assert other.token == token.call_id
            _, free = do.new_claim()
            assert do.take_claim(store, free, token, ttl=LONG, **options) is None
            assert do.is_claimed(store, free, token)

    def test_a_message_whose_task_is_named_alike_is_another(self, store: Store) -> None:
        for held, arriving in (("abc", "abcd"), ("abcd", "abc"), ("a.c", "abc"), ("%", "abc")):
            _, claim, _ = do.published(store, do.new_token(held))
            for wants_ttl in (True, False):
                record = do.take_claim(store, claim, do.new_token(arriving), wants_ttl=wants_ttl)
                assert record is not None, (held, arriving)

    def test_a_second_call_with_the_same_task_id_has_no_such_claim(self, store: Store) -> None:
        first, second, unnamed = (Token("t", 0, 0, "n", call) for call in ("a", "b", ""))
        _, claim, _ = do.published(store, first)
        for other in (second, unnamed):
            assert do.take_claim(store, claim, other) is not None
            do.change(store, other, claim, None)
        assert do.record_of(store, claim).token == first.call_id

    def test_claims_do_not_exclude_each_other_nor_the_lease_beside_them(self, store: Store) -> None:
        token = do.new_token()
        key, _, _ = do.published(store, token)
        do.publish(store, KEYSPACE.claim("app.other", key), do.new_token())
        do.publish(store, do.new_claim()[1], token)
        do.take(store, key)

    def test_a_claim_that_is_not_prolonged_ends_in_the_store(self, store: Store) -> None:
        _, claim, _ = do.published(store, ttl=self.SHORT)
        self.elapse(self.LONGER_THAN_SHORT)
        assert store.leases.inspect(claim) is None
        do.publish(store, claim)

    def test_task_ids_of_any_characters_have_claims(self, store: Store) -> None:
        for task_id in do.ODD_TASK_IDS:
            for call, wants_ttl in product(("", "a1"), (True, False)):
                _, claim = do.new_claim()
                token = Token(task_id, 0, 0, "n", call)
                assert do.take_claim(store, claim, token, wants_ttl=wants_ttl) is None
                assert do.record_of(store, claim).token == token.call_id
                assert do.take_claim(store, claim, token, wants_ttl=wants_ttl) is None
                other = Token(task_id + "x", 0, 0, "n", call)
                refused = do.not_admitted(store, claim, other, wants_ttl=wants_ttl)
                assert refused.token == token.call_id
                do.change(store, token, claim, Phase.RETRYING)
                assert do.record_of(store, claim).phase is Phase.RETRYING
                assert do.take_claim(store, claim, other, instead_of=token.call_id) is None
                do.change(store, other, claim, None)
                assert store.leases.inspect(claim) is None

    def test_publishers_of_any_characters_come_back(self, store: Store) -> None:
        holder = Holder(task='a "b" \\', task_id="x\ny", worker="w|1.2| q {}", pid=1, since=0.5)
        for wants_ttl in (True, False):
            _, claim = do.new_claim()
            token = do.new_token()
            do.take_claim(store, claim, token, holder=holder, wants_ttl=wants_ttl)
            do.change(store, token, claim, Phase.RETRYING)
            assert do.record_of(store, claim).holder == holder
            record = do.not_admitted(store, claim, wants_ttl=wants_ttl)
            assert record.holder == holder

    # --- taking over -----------------------------------------------------------------------------

    def test_a_stale_claim_is_taken_over_whatever_its_phase(self, store: Store) -> None:
        for phase in Phase:
            _, claim, stale = do.published(store, ttl=2 * LONG, phase=phase)
            token, holder = do.new_token(), Holder(task_id="m-2")
            assert (
                do.take_claim(store, claim, token, holder=holder, instead_of=stale.call_id) is None
            )
            assert do.found(store, claim) == (Kind.CLAIM, token.call_id, Phase.QUEUED, holder, LONG)
            assert do.take_claim(store, claim, stale) is not None

    def test_a_claim_is_taken_over_from_the_task_that_is_named_alone(self, store: Store) -> None:
        _, claim, token = do.published(store, do.new_token("abc"))
        for instead_of in ("", "ab", "abcd", "a.c", "abc+1", "abc|0.0", str(token), "%S+", "{}"):
            record = do.take_claim(store, claim, do.new_token(), instead_of=instead_of)
            assert record is not None, instead_of
        assert do.record_of(store, claim).token == token.call_id

    def test_ones_own_claim_is_not_replaced_by_a_take_over(self, store: Store) -> None:
        _, claim, token = do.published(store, phase=Phase.RUNNING)
        assert do.take_claim(store, claim, token, instead_of=token.call_id) is None
        assert do.record_of(store, claim).phase is Phase.RUNNING

    def test_a_claim_that_was_stale_and_is_gone_is_given(self, store: Store) -> None:
        _, claim = do.new_claim()
        assert do.take_claim(store, claim, do.new_token(), instead_of="gone") is None

    # --- claims are no leases --------------------------------------------------------------------

    def test_a_lease_in_the_claims_key_is_reported_and_left_alone(self, store: Store) -> None:
        key, _ = do.new_claim()
        token = do.take(store, key)
        record = do.not_admitted(store, key, token)
        assert (record.kind, record.token) == (Kind.LEASE, str(token))
        assert do.take_claim(store, key, do.new_token(), instead_of=token.call_id) is not None
        for phase in (None, *Phase):
            do.change(store, token, key, phase, self.SHORT)
        assert do.is_held(store, key, token)

    def test_a_claim_in_the_leases_key_is_reported_and_left_alone(self, store: Store) -> None:
        _, claim, token = do.published(store)
        for arriving in (token, do.new_token(), token.next_attempt()):
            record = do.refused_by(store, claim, arriving)
            assert (record.kind, record.token) == (Kind.CLAIM, token.call_id)
            assert do.renew_one(store, claim, arriving, self.SHORT) is LossReason.REPLACED
            assert do.give(store, claim, arriving) is ReleaseReply.NOT_OURS
            reply = do.give(store, claim, arriving, become=Kind.COOLING, become_ttl=1)
            assert reply is ReleaseReply.NOT_OURS
        assert do.is_claimed(store, claim, token)

    # --- change_claim ----------------------------------------------------------------------------

    def test_a_claim_is_changed_by_any_delivery_of_its_task(self, store: Store) -> None:
        for before in (Phase.QUEUED, Phase.RETRYING):
            for after in Phase:
                _, claim, token = do.published(store, phase=before)
                other_delivery = do.new_token(token.task_id, retries=1)
                do.change(store, other_delivery, claim, after, 2 * LONG)
                assert do.is_claimed(store, claim, token, after, 2 * LONG)
            do.change(store, token, claim, Phase.QUEUED)

    def test_a_changed_claim_may_end_sooner_or_at_once(self, store: Store) -> None:
        _, claim, token = do.published(store, ttl=2 * LONG)
        do.change(store, token, claim, Phase.RETRYING, LONG)
        assert do.record_of(store, claim).ttl <= LONG
        do.change(store, token, claim, None)
        assert store.leases.inspect(claim) is None

    def test_a_running_tasks_claim_is_left_to_its_lease(self, store: Store) -> None:
        _, claim, token = do.published(store, phase=Phase.RUNNING)
        for phase in (None, Phase.QUEUED, Phase.RETRYING):
            do.change(store, token, claim, phase, self.SHORT)
            assert do.is_claimed(store, claim, token, Phase.RUNNING)

    def test_a_running_tasks_claim_is_changed_by_a_change_to_running(self, store: Store) -> None:
        _, claim, token = do.published(store, phase=Phase.RUNNING)
        do.change(store, token, claim, Phase.RUNNING, 2 * LONG)
        assert do.is_claimed(store, claim, token, Phase.RUNNING, 2 * LONG)

    def test_anothers_claim_is_never_changed(self, store: Store) -> None:
        for held in Phase:
            _, claim, token = do.published(store, do.new_token("abc"), phase=held)
            for other in ("abcd", "ab", "a.c"):
                for phase in (None, *Phase):
                    do.change(store, do.new_token(other), claim, phase, self.SHORT)
            assert do.is_claimed(store, claim, token, held)

    def test_a_claim_that_is_gone_is_not_changed_into_being(self, store: Store) -> None:
        for phase in (None, *Phase):
            _, claim = do.new_claim()
            do.change(store, do.new_token(), claim, phase)
            assert store.leases.inspect(claim) is None

    # --- acquire ---------------------------------------------------------------------------------

    def test_a_grant_frees_the_claim_that_was_until_the_start(self, store: Store) -> None:
        key, claim, token = do.published(store)
        do.take(store, key, token, claim=do.freed(claim))
        assert store.leases.inspect(claim) is None
        following = do.publish(store, claim)
        do.take(store, key, token, claim=do.freed(claim))  # Sent again.
        assert do.is_claimed(store, claim, following)

    def test_a_grant_promotes_the_claim_to_the_ttl_of_its_lease(self, store: Store) -> None:
        for ttl in (LONG, 3 * LONG):
            key, claim, token = do.published(store, ttl=2 * LONG)
            for _ in range(2):  # Sent again.
                do.take(store, key, token, ttl=ttl, claim=do.running(claim))
                assert do.is_claimed(store, claim, token, Phase.RUNNING, ttl)

    def test_a_grant_recreates_a_claim_that_has_vanished(self, store: Store) -> None:
        key, claim = do.new_claim()
        token = do.take(store, key, claim=do.running(claim))
        assert do.found(store, claim) == (Kind.CLAIM, token.call_id, Phase.RUNNING, HOLDER, LONG)

    def test_a_grant_makes_no_claim_that_it_would_free(self, store: Store) -> None:
        key, claim = do.new_claim()
        do.take(store, key, claim=do.freed(claim))
        assert store.leases.inspect(claim) is None

    def test_a_grant_leaves_anothers_claim_or_lease_alone(self, store: Store) -> None:
        for change in (do.freed, do.running):
            key, claim, other = do.published(store)
            do.take(store, key, do.new_token(f"{other.task_id}d"), claim=change(claim))
            assert do.is_claimed(store, claim, other)
            key, taken = do.new_key(), do.new_key()
            holder = do.take(store, taken)
            do.take(store, key, do.new_token(holder.task_id), claim=change(taken))
            assert do.record_of(store, taken).token == str(holder)

    def test_a_grant_of_a_slot_changes_the_claim_too(self, store: Store) -> None:
        key, claim = do.new_claim()
        slots = Keyspace.slots(key, 3)
        do.ask(store, slots, do.new_token())
        reply = do.ask(store, slots, do.publish(store, claim), claim=do.running(claim))
        assert reply == Granted(key=slots[1], fence=None)
        assert do.record_of(store, claim).phase is Phase.RUNNING
        assert store.leases.inspect(slots[2]) is None

    def test_a_refusal_leaves_the_claim_alone(self, store: Store) -> None:
        key, claim, token = do.published(store)
        do.take(store, key)
        for change in (do.freed, do.running):
            assert do.refused(store, key, token, claim=change(claim)) is Relation.OTHER
            assert do.is_claimed(store, claim, token)

    def test_a_refusal_that_ends_the_message_frees_its_claim(self, store: Store) -> None:
        for change in (do.freed, do.running):
            key, claim, token = do.published(store)
            holder = do.take(store, key)
            record = do.refused_by(store, key, token, claim=change(claim), frees_claim=True)
            assert (record.key, record.token) == (key, str(holder))
            assert store.leases.inspect(claim) is None

    def test_a_refusal_by_ones_own_task_frees_no_claim(self, store: Store) -> None:
        held = do.new_token(retries=1)
        for retries, relation in (
            (0, Relation.LATER),
            (1, Relation.DUPLICATE),
            (2, Relation.EARLIER),
        ):
            key, claim, _ = do.published(store, held)
            do.take(store, key, held)
            arriving = do.new_token(held.task_id, retries=retries)
            assert do.refused(store, key, arriving, **do.ending(claim)) is relation
            assert do.is_claimed(store, claim, held)

    def test_a_refusal_by_a_completion_record_frees_no_claim(self, store: Store) -> None:
        relations = (Relation.SUPERSEDED, Relation.DUPLICATE, Relation.DONE)
        for state, relation in zip(CompletionState, relations, strict=True):
            key, claim, token = do.published(store)
            do.mark(store, key, token, state, 5)
            assert do.refused(store, key, token, **do.ending(claim)) is relation
            assert do.is_claimed(store, claim, token)

    def test_a_refusal_never_frees_anothers_claim(self, store: Store) -> None:
        key, claim, other = do.published(store)
        do.take(store, key)
        assert do.refused(store, key, **do.ending(claim)) is Relation.OTHER
        assert do.is_claimed(store, claim, other)

    def test_a_grant_is_the_same_whatever_a_refusal_would_do(self, store: Store) -> None:
        key, claim, token = do.published(store)
        do.take(
            store, key, token, claim=do.running(claim), frees_claim=True, refused_if_claimed=True
        )
        assert do.record_of(store, claim).phase is Phase.RUNNING

    def test_without_a_claim_there_is_none_to_free_or_to_yield_to(self, store: Store) -> None:
        key = do.new_key()
        do.take(store, key, frees_claim=True, refused_if_claimed=True)
        assert do.refused(store, key, frees_claim=True, refused_if_claimed=True) is Relation.OTHER

    # --- yielding to another's claim -------------------------------------------------------------

    def test_yielding_is_refused_while_anothers_claim_stands(self, store: Store) -> None:
        for phase in Phase:
            key, claim, other = do.published(store, phase=phase)
            token = do.new_token(f"{other.task_id}d")
            for ends in (False, True):
                options: dict[str, Any] = {"claim": do.running(claim), "frees_claim": ends}
                record = do.refused_by(store, key, token, refused_if_claimed=True, **options)
                assert (record.key, record.kind, record.token) == (claim, Kind.CLAIM, other.call_id)
                assert (record.phase, record.holder) == (phase, PUBLISHER)
                assert do.ttl_of(record) == LONG
                assert store.leases.inspect(key) is None
                assert do.is_claimed(store, claim, other, phase)
            assert operators_of(store).free(claim, other.call_id) is True
            do.take(store, key, token, claim=do.running(claim), refused_if_claimed=True)

    def test_yielding_is_granted_once_the_claim_has_expired(self, store: Store) -> None:
        key, claim, _ = do.published(store, ttl=self.SHORT)
        self.elapse(self.LONGER_THAN_SHORT)
        token = do.take(store, key, claim=do.running(claim), refused_if_claimed=True)
        assert do.record_of(store, claim).token == token.call_id

    def test_a_message_is_refused_neither_for_its_own_claim_nor_for_a_lease(
        self, store: Store
    ) -> None:
        key, claim, token = do.published(store)
        do.take(store, key, token, claim=do.running(claim), refused_if_claimed=True)
        key, taken = do.new_key(), do.new_key()
        do.take(store, taken)
        do.take(store, key, claim=do.running(taken), refused_if_claimed=True)

    def test_a_refusal_names_the_leases_holder_before_the_claims(self, store: Store) -> None:
        key, claim, _ = do.published(store)
        held = do.take(store, key)
        duplicate = do.new_token(held.task_id)
        for arriving, relation in (
            (do.new_token(), Relation.OTHER),
            (duplicate, Relation.DUPLICATE),
        ):
            options: dict[str, Any] = {"claim": do.running(claim), "refused_if_claimed": True}
            record = do.refused_by(store, key, arriving, relation=relation, **options)
            assert (record.key, record.token) == (key, str(held))

    def test_what_is_ones_own_already_is_granted_beside_anothers_claim(self, store: Store) -> None:
        # The reply to the first acquire was lost, and another message has the claim meanwhile. A
        # refusal would leave a lease that no process knows.
        key, claim = do.new_claim()
        token = do.take(store, key, claim=do.freed(claim), refused_if_claimed=True)
        do.publish(store, claim)
        do.take(store, key, token, claim=do.freed(claim), refused_if_claimed=True)
        # A retry has reserved the key. If the retry yielded, both messages would wait for each
        # other.
        do.become(store, key, token, Kind.RESERVED)
        following = do.new_token(token.task_id, retries=1)
        do.take(store, key, following, claim=do.freed(claim), refused_if_claimed=True)

    # --- renew -----------------------------------------------------------------------------------

    def test_a_renewal_prolongs_the_claim_with_its_lease(self, store: Store) -> None:
        key, claim, token = do.started(store)
        assert do.renew_one(store, key, token, 2 * LONG, claim) is RENEWED
        assert do.ttl_of(do.record_of(store, key)) == 2 * LONG
        assert do.is_claimed(store, claim, token, Phase.RUNNING, 2 * LONG)

    def test_a_renewal_prolongs_no_claim_that_its_lease_does_not_name(self, store: Store) -> None:
        key, claim, token = do.published_and_held(store)
        assert do.renew_one(store, key, token, 2 * LONG) is RENEWED
        assert do.is_claimed(store, claim, token)

    def test_a_renewal_never_shortens_a_claim(self, store: Store) -> None:
        # The renewal may arrive after the body's end, while the claim waits for a later retry.
        key, claim, token = do.started(store)
        do.give(store, key, token, claim=do.becomes(claim, Phase.RETRYING, LONG))
        assert do.renew_one(store, key, token, self.SHORT, claim) is LossReason.GONE
        assert do.is_claimed(store, claim, token, Phase.RETRYING)

    def test_a_renewal_leaves_anothers_claim_or_lease_alone(self, store: Store) -> None:
        key, claim, other = do.published(store)
        token = do.take(store, key, do.new_token(f"{other.task_id}d"))
        assert do.renew_one(store, key, token, 2 * LONG, claim) is RENEWED
        assert do.is_claimed(store, claim, other)
        taken = do.new_key()
        do.take(store, taken, token)
        assert do.renew_one(store, key, token, 2 * LONG, taken) is RENEWED
        assert do.ttl_of(do.record_of(store, taken)) == LONG

    def test_a_renewal_recreates_no_claim(self, store: Store) -> None:
        key, claim = do.new_claim()
        token = do.take(store, key, claim=do.running(claim))
        do.change(store, token, claim, Phase.RUNNING, self.SHORT)
        self.elapse(self.LONGER_THAN_SHORT)
        assert do.renew_one(store, key, token, LONG, claim) is RENEWED
        assert store.leases.inspect(claim) is None

    def test_renewals_with_and_without_claims_are_answered_in_order(self, store: Store) -> None:
        replies = [RENEWED, RENEWED, LossReason.REPLACED, LossReason.GONE]
        claimants = [None, "itself", "another", "none"]
        leases, published = [], {}
        for number in range(600):
            key, claim = do.new_claim()
            token = do.new_token()
            if replies[number % 4] is not LossReason.GONE:
                do.take(store, key, token if replies[number % 4] is RENEWED else None)
            claimant = claimants[number // 4 % 4]
            if claimant in ("itself", "another"):
                published[claim] = do.publish(store, claim, token if claimant == "itself" else None)
            leases.append(do.lease_of(key, token, 2 * LONG, claim if claimant else ""))
        assert do.renew(store, leases) == replies * 150
        for number, lease in enumerate(leases):
            if lease.claim_key in published:
                record = do.record_of(store, lease.claim_key)
                assert record.token == published[lease.claim_key].call_id
                if replies[number % 4] is RENEWED:
                    is_its_own = record.token == lease.token.call_id
                    assert (record.ttl > 2 * LONG - 60) == is_its_own, number
            elif lease.claim_key:
                assert store.leases.inspect(lease.claim_key) is None

    # --- release ---------------------------------------------------------------------------------

    def test_a_release_frees_the_claim_of_its_task(self, store: Store) -> None:
        key, claim, token = do.started(store)
        assert do.give(store, key, token, claim=do.freed(claim)) is ReleaseReply.OURS
        assert store.leases.inspect(claim) is None
        following = do.publish(store, claim)
        do.give(store, key, token, claim=do.freed(claim))  # Sent again.
        assert do.is_claimed(store, claim, following)

    def test_a_release_requeues_the_claim_or_has_it_wait_for_a_retry(self, store: Store) -> None:
        for kind in (None, Kind.RESERVED, Kind.COOLING):
            for phase in Phase:
                key, claim, token = do.started(store)
                options = do.becoming(kind, token)
                for is_first in (True, False):  # Sent again, with any reply.
                    reply = do.give(store, key, token, claim=do.becomes(claim, phase), **options)
                    assert reply is ReleaseReply.OURS or not is_first
                    assert do.is_claimed(store, claim, token, phase, 2 * LONG)

    def test_a_release_recreates_a_claim_that_has_vanished(self, store: Store) -> None:
        key, claim = do.new_claim()
        token = do.take(store, key)
        do.give(store, key, token, claim=do.becomes(claim, Phase.RETRYING))
        assert do.found(store, claim) == (
            Kind.CLAIM,
            token.call_id,
            Phase.RETRYING,
            HOLDER,
            2 * LONG,
        )

    def test_a_release_leaves_anothers_claim_alone(self, store: Store) -> None:
        for phase in (None, *Phase):
            key, claim, other = do.published(store)
            token = do.take(store, key, do.new_token(f"{other.task_id}d"))
            assert do.give(store, key, token, claim=do.becomes(claim, phase)) is ReleaseReply.OURS
            assert do.is_claimed(store, claim, other)

    def test_a_release_changes_no_claim_where_a_duplicate_has_the_key(self, store: Store) -> None:
        for phase in (None, *Phase):
            key, claim, winner = do.published(store, phase=Phase.RUNNING)
            do.take(store, key, winner)
            loser = do.new_token(winner.task_id)
            assert (
                do.give(store, key, loser, claim=do.becomes(claim, phase)) is ReleaseReply.DUPLICATE
            )
            assert do.is_claimed(store, claim, winner, Phase.RUNNING)

    def test_where_the_key_was_lost_a_claim_is_only_freed(self, store: Store) -> None:
        for has_other in (False, True):
            key, claim, token = do.published(store, phase=Phase.RUNNING)
            if has_other:
                do.take(store, key)
            for phase in Phase:
                reply = do.give(store, key, token, claim=do.becomes(claim, phase))
                assert reply is ReleaseReply.NOT_OURS
                assert do.is_claimed(store, claim, token, Phase.RUNNING)
            assert do.give(store, key, token, claim=do.freed(claim)) is ReleaseReply.NOT_OURS
            assert store.leases.inspect(claim) is None
            do.give(store, key, token, claim=do.becomes(claim, Phase.QUEUED))
            assert store.leases.inspect(claim) is None

    def test_the_claim_of_a_dying_holder_is_only_freed(self, store: Store) -> None:
        # The worker parent has reported the end of its message, and what becomes of the claim.
        for phase in Phase:
            for kept in (False, True):
                key, claim, token = do.published_and_held(store)
                change = do.becomes(claim, Phase.RUNNING) if kept else do.freed(claim)
                options = do.becoming(Kind.DYING, token)
                do.give(store, key, token, claim=change, **options)
                before = store.leases.inspect(claim)
                assert (before is not None) is kept
                reply = do.give(store, key, token, claim=do.becomes(claim, phase))
                assert reply is ReleaseReply.OURS
                after = store.leases.inspect(claim)
                assert (after and after.phase) == (before and before.phase)
        key, claim, token = do.published_and_held(store)
        do.give(store, key, token, **do.becoming(Kind.DYING, token))
        assert do.give(store, key, token, claim=do.freed(claim)) is ReleaseReply.OURS
        assert store.leases.inspect(claim) is None

    def test_a_claim_is_freed_where_ones_duplicate_has_finished(self, store: Store) -> None:
        key, claim, token = do.published(store)
        do.mark(store, key, do.new_token(token.task_id), CompletionState.DONE)
        queued = do.becomes(claim, Phase.QUEUED)
        assert do.give(store, key, token, claim=queued) is ReleaseReply.DONE
        assert do.is_claimed(store, claim, token)
        assert do.give(store, key, token, claim=do.freed(claim)) is ReleaseReply.DONE
        assert store.leases.inspect(claim) is None

    def test_a_release_that_names_no_claim_leaves_it_alone(self, store: Store) -> None:
        key, claim, token = do.published_and_held(store)
        do.give(store, key, token, completion=CompletionState.DONE, completion_ttl=LONG)
        assert do.is_claimed(store, claim, token)

    def test_a_release_of_all_slots_changes_the_claim_once(self, store: Store) -> None:
        key, claim = do.new_claim()
        slots = Keyspace.slots(key, 3)
        token = do.publish(store, claim)
        do.ask(store, slots, do.new_token())
        do.ask(store, slots, token, claim=do.running(claim))
        assert do.give(store, slots, token, claim=do.freed(claim)) is ReleaseReply.OURS
        assert store.leases.inspect(claim) is None
        assert store.leases.inspect(slots[0]) is not None

    # --- mark ------------------------------------------------------------------------------------

    def test_a_message_that_is_requeued_keeps_a_queued_claim(self, store: Store) -> None:
        for state in (CompletionState.WAITING, CompletionState.FINISHING):
            for before in Phase:
                key, claim, token = do.published(store, phase=before)
                do.mark(store, key, token, state, 1, claim=do.becomes(claim, Phase.QUEUED))
                assert do.is_claimed(store, claim, token, Phase.QUEUED, 2 * LONG)

    def test_putting_back_recreates_no_claim_that_has_vanished(self, store: Store) -> None:
        """The copy may have run, and freed the claim, before the mark arrives."""
        key, claim = do.new_claim()
        claimed = do.becomes(claim, Phase.QUEUED)
        do.mark(store, key, do.new_token(), CompletionState.WAITING, 1, claim=claimed)
        assert store.leases.inspect(claim) is None

    def test_a_mark_may_free_the_claim(self, store: Store) -> None:
        key, claim, token = do.published(store)
        do.mark(store, key, token, CompletionState.WAITING, 1, claim=do.freed(claim))
        assert store.leases.inspect(claim) is None

    def test_an_attempt_that_is_done_has_no_claim_changed(self, store: Store) -> None:
        for phase in (None, *Phase):
            for finished_before in (False, True):
                key, claim, token = do.published(store)
                if finished_before:
                    do.mark(store, key, token, CompletionState.DONE)
                state = CompletionState.WAITING if finished_before else CompletionState.DONE
                do.mark(store, key, token, state, 1, claim=do.becomes(claim, phase))
                assert do.is_claimed(store, claim, token)

    def test_a_mark_leaves_anothers_claim_or_lease_alone(self, store: Store) -> None:
        for phase in (None, *Phase):
            key, claim, other = do.published(store)
            token = do.new_token(f"{other.task_id}d")
            do.mark(store, key, token, CompletionState.WAITING, 1, claim=do.becomes(claim, phase))
            assert do.is_claimed(store, claim, other)
            holder = do.take(store, key)
            token = do.new_token(holder.task_id)
            do.mark(store, key, token, CompletionState.WAITING, 1, claim=do.becomes(key, phase))
            assert do.record_of(store, key).token == str(holder)
