"""Contract of fences, of ticks, and of the requests of operators."""

from __future__ import annotations

from dataclasses import replace

from ...core.keyspace import Keyspace
from ...core.lease import Holder, Kind, LossReason, OperatorRelease, Phase, Token
from ...core.store import Store, operators_of
from ...core.store_requests import Authorization, AuthorizeRun, CompletionState, Relation
from . import steps as do
from .steps import HOLDER, KEYSPACE, LONG, TIMEOUT, Part


def tick(
    store: Store,
    leader: str,
    token: Token,
    entry: str,
    last_runs: tuple[str | None, str],
    ttl: float = LONG,
) -> Authorization:
    """Request that the first of ``last_runs`` is replaced by the second."""
    expected, new = last_runs
    name = Keyspace.last_run(leader, entry)
    request = AuthorizeRun(
        leader=leader, token=token, entry=name, expected=expected, new=new, ttl=ttl
    )
    assert store.schedule is not None
    return store.schedule.authorize(request, timeout=TIMEOUT)


def last_runs(store: Store, leader: str, *entries: str) -> list[str | None]:
    keys = [Keyspace.last_run(leader, entry) for entry in entries]
    assert store.schedule is not None
    return store.schedule.last_runs(keys, timeout=TIMEOUT)


class OperatorContract(Part):
    """See StoreContract."""

    # --- fences ----------------------------------------------------------------------------------

    def test_fences_rise_over_a_release_an_expiry_and_a_free(self, store: Store) -> None:
        if not store.capabilities.fence:
            return
        key, fences = do.new_key(), []
        for number in range(50):
            token = do.new_token()
            fences += [do.fence_of(store, key, token), do.fence_of(store, key, token)]
            if number % 2:
                do.give(store, key, token)
            else:
                operators_of(store).free(key, None)
        do.take(store, key, ttl=self.SHORT)
        self.elapse(self.LONGER_THAN_SHORT)
        fences.append(do.fence_of(store, key, do.new_token()))
        assert fences == sorted(set(fences))

    def test_a_store_without_fences_grants_none(self, store: Store) -> None:
        reply = do.granted(store, do.new_key(), do.new_token())
        assert (reply.fence is not None) == store.capabilities.fence

    # --- for operators ---------------------------------------------------------------------------

    def test_nothing_is_found_at_a_free_key(self, store: Store) -> None:
        key = do.new_key()
        assert store.leases.inspect(key) is None
        assert operators_of(store).free(key, None) is False

    def test_a_scan_finds_what_is_held_of_every_kind_and_nothing_else(self, store: Store) -> None:
        expected = {}
        for kind in do.LEASE_KINDS:
            key, token = do.held_as(store, kind)
            expected[key] = kind
        released = do.new_key()
        token = do.take(store, released)
        do.give(store, released, token, completion=CompletionState.DONE, completion_ttl=LONG)
        records = list(operators_of(store).scan(KEYSPACE.match_all()))
        found = {record.key: record.kind for record in records}
        assert expected.items() <= found.items()
        assert released not in found
        assert list(found) == sorted(found)
        assert all(":contract:" in key or KEYSPACE.is_claim(key) for key in found)
        assert not list(operators_of(store).scan(Keyspace("contract-2").match_all()))

    def test_a_key_is_freed_if_the_token_stands(self, store: Store) -> None:
        key, token = do.held(store)
        assert operators_of(store).free(key, str(do.new_token())) is False
        assert operators_of(store).free(key, str(do.new_token(token.task_id))) is False
        assert do.record_of(store, key).token == str(token)
        assert operators_of(store).free(key, str(token)) is True
        assert store.leases.inspect(key) is None
        assert do.renew_one(store, key, token) is LossReason.GONE

    def test_an_operator_s_note_is_kept_beside_a_key_that_it_freed(self, store: Store) -> None:
        by = OperatorRelease(user="ann", host="ops-1", reason="import stuck: ä", at=1.5)
        key, token = do.held(store)
        claim = Keyspace.claim("task", key)
        do.publish(store, claim, token)
        assert operators_of(store).free(key, str(do.new_token()), by) is False
        assert operators_of(store).release_notes([Keyspace.release_note(key)], timeout=TIMEOUT) == [
            None
        ]
        assert operators_of(store).free(key, str(token), by) is True
        assert operators_of(store).free(claim, None, by) is True
        notes = [Keyspace.release_note(name) for name in (key, claim)]
        texts = operators_of(store).release_notes(notes, timeout=TIMEOUT)
        owners = [str(token), token.call_id]
        assert texts == [f"{owner} {by.to_json()}" for owner in owners]
        assert OperatorRelease.parse(texts[0] or "") == replace(by, token=str(token))
        assert not {*notes} & {
            record.key for record in operators_of(store).scan(KEYSPACE.match_all())
        }

    def test_completion_records_and_notes_are_found_by_their_names(self, store: Store) -> None:
        key, token = do.held(store)
        completion, note = Keyspace.completion(key, token.attempt), Keyspace.release_note(key)
        do.mark(store, key, token, CompletionState.WAITING, 3)
        operators_of(store).free(key, None, OperatorRelease(user="ann", host="ops-1"))
        found = {name: text for name, text, _ in operators_of(store).texts(KEYSPACE.match_all())}
        if not found:
            return  # the store can't list them
        assert found[completion] == f"- 3 {token.nonce}"
        assert OperatorRelease.parse(found[note]) is not None
        assert key not in found
        on_the_way: dict[str, str] = {}
        for _ in operators_of(store).survey(
            KEYSPACE.match_all(), lambda *_: None, texts=on_the_way.__setitem__
        ):
            pass
        assert (on_the_way[completion], on_the_way[note]) == (found[completion], found[note])
        one = [
            (name, 0 < ttl <= LONG)
            for name, _, ttl in operators_of(store).texts(f"{completion[:-3]}*")
        ]
        assert one == [(completion, True)]

    def test_a_key_of_any_kind_is_freed_whatever_stands(self, store: Store) -> None:
        for kind in do.LEASE_KINDS:
            key, _ = do.held_as(store, kind)
            assert operators_of(store).free(key, None) is True
            assert store.leases.inspect(key) is None

    # --- claims ----------------------------------------------------------------------------------

    def test_a_scan_finds_claims_beside_leases(self, store: Store) -> None:
        expected: dict[str, tuple[Kind, str, Phase | None, Holder]] = {}
        for phase in Phase:
            key, claim, token = do.published_and_held(store, phase=phase)
            expected[claim] = (Kind.CLAIM, token.call_id, phase, do.PUBLISHER)
            expected[key] = (Kind.LEASE, str(token), None, HOLDER)
        found = {
            record.key: (record.kind, record.token, record.phase, record.holder)
            for record in operators_of(store).scan(KEYSPACE.match_all())
        }
        assert expected.items() <= found.items()

    def test_a_claim_is_freed_if_its_task_stands(self, store: Store) -> None:
        key, claim, token = do.published_and_held(store, phase=Phase.RUNNING)
        for other in (do.new_token().call_id, str(token), token.call_id + "x", token.call_id[:-1]):
            assert operators_of(store).free(claim, other) is False
        assert do.record_of(store, claim).token == token.call_id
        assert operators_of(store).free(claim, token.call_id) is True
        assert store.leases.inspect(claim) is None
        assert operators_of(store).free(claim, token.call_id) is False
        assert do.record_of(store, key).token == str(token)
        do.publish(store, claim)

    def test_a_claim_is_freed_whatever_stands_and_its_lease_stays(self, store: Store) -> None:
        for phase in Phase:
            key, claim, _ = do.published_and_held(store, phase=phase)
            assert operators_of(store).free(claim, None) is True
            assert store.leases.inspect(claim) is None
            assert do.refused(store, key) is Relation.OTHER

    # --- ticks -----------------------------------------------------------------------------------

    def test_a_leader_is_authorized_and_its_last_run_is_read_back(self, store: Store) -> None:
        leader, entry = do.new_key(), "every äß | minute"
        token = do.take(store, leader)
        assert last_runs(store, leader, entry) == [None]
        assert tick(store, leader, token, entry, (None, "1.5 a")) is Authorization.AUTHORIZED
        assert tick(store, leader, token, entry, ("1.5 a", "2.5 b")) is Authorization.AUTHORIZED
        assert last_runs(store, leader, entry) == ["2.5 b"]

    def test_many_last_runs_are_read_in_the_order_asked(self, store: Store) -> None:
        leader, token = do.held(store)
        for name in ("a", "b", "c"):
            tick(store, leader, token, name, (None, f"1 {name}"))
        assert last_runs(store, leader, "c", "none", "a", "b") == ["1 c", None, "1 a", "1 b"]
        assert last_runs(store, leader) == []

    def test_a_request_sent_again_is_authorized_again(self, store: Store) -> None:
        leader, token = do.held(store)
        for _ in range(2):
            assert tick(store, leader, token, "e", (None, "1 a")) is Authorization.AUTHORIZED
        assert last_runs(store, leader, "e") == ["1 a"]

    def test_a_token_that_does_not_lead_is_refused_and_changes_nothing(self, store: Store) -> None:
        leader = do.new_key()
        token = do.new_token()
        assert tick(store, leader, token, "e", (None, "1 a")) is Authorization.DEPOSED
        do.take(store, leader, token)
        duplicate = do.new_token(token.task_id)
        for other in (do.new_token(), duplicate):
            assert tick(store, leader, other, "e", (None, "1 a")) is Authorization.DEPOSED
        do.give(store, leader, token)
        assert tick(store, leader, token, "e", (None, "1 a")) is Authorization.DEPOSED
        assert last_runs(store, leader, "e") == [None]

    def test_a_leader_whose_lease_ran_out_is_refused(self, store: Store) -> None:
        leader, token = do.held(store, ttl=self.SHORT)
        self.elapse(self.LONGER_THAN_SHORT)
        assert tick(store, leader, token, "e", (None, "1 a")) is Authorization.DEPOSED

    def test_only_a_lease_authorizes(self, store: Store) -> None:
        for kind in (Kind.RESERVED, Kind.COOLING, Kind.DYING):
            leader, token = do.held_as(store, kind)
            assert tick(store, leader, token, "e", (None, "1 a")) is Authorization.DEPOSED

    def test_a_last_run_that_is_another_than_expected_stands(self, store: Store) -> None:
        leader, token = do.held(store)
        assert tick(store, leader, token, "e", ("1 a", "2 b")) is Authorization.CHANGED
        tick(store, leader, token, "e", (None, "1 a"))
        assert tick(store, leader, token, "e", (None, "2 b")) is Authorization.CHANGED
        assert tick(store, leader, token, "e", ("0 x", "2 b")) is Authorization.CHANGED
        assert last_runs(store, leader, "e") == ["1 a"]

    def test_a_last_run_outlives_its_leader_and_ends_in_the_store(self, store: Store) -> None:
        leader, token = do.held(store)
        tick(store, leader, token, "e", (None, "1 a"), self.SHORT)
        tick(store, leader, token, "f", (None, "1 a"))
        do.give(store, leader, token)
        self.elapse(self.LONGER_THAN_SHORT)
        assert last_runs(store, leader, "e", "f") == [None, "1 a"]

    def test_last_runs_are_of_one_leader_and_no_records(self, store: Store) -> None:
        leader, other = do.new_key(), do.new_key()
        token = do.take(store, leader)
        tick(store, leader, token, "e", (None, "1 a"))
        assert last_runs(store, other, "e") == [None]
        found = {record.key for record in operators_of(store).scan(KEYSPACE.match_all())}
        assert leader in found
        assert not any("last|" in key for key in found)
