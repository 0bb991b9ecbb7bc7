"""What single nodes' answers mean together, as tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_singleton_lock.core.lease import Holder, Kind, LossReason, Phase, Record
from celery_singleton_lock.core.store_requests import (
    RENEWED,
    Authorization,
    Granted,
    Refused,
    Relation,
    ReleaseReply,
    Renewal,
)
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.stores.redlock import votes
from celery_singleton_lock.stores.redlock.votes import Poll

YES = Granted(key="k", fence=7)
PENDING = object()
VOTELESS = Granted(key="k", fence=None, ttl=0.0)
DOWN = StoreUnavailable("down")


def record(token: str, ttl: float = 10.0) -> Record:
    return Record(key="k", kind=Kind.LEASE, token=token, fence=3, holder=Holder(), ttl=ttl)


def no(token: str = "a", relation: Relation = Relation.OTHER) -> Refused:
    return Refused(relation=relation, record=record(token))


def poll(*answers: object) -> Poll[object]:
    """What nodes answered; PENDING: one that has not answered yet."""
    found: Poll[object] = Poll(len(answers), len(answers) // 2 + 1)
    for answer in answers:
        if answer is not PENDING:
            found.add(answer)
    return found


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([YES, YES, YES, PENDING, PENDING], "granted"),
        ([YES, YES, PENDING, PENDING, PENDING], None),
        ([YES, YES, no(), DOWN, PENDING], None),
        ([YES, YES, no(), no(), DOWN], None),
        ([no(), no(), no(), PENDING, PENDING], Relation.OTHER),
        ([no("a"), no("a"), no("b"), no("b"), YES], None),
        ([no("a"), no("a"), no("b"), no("a"), PENDING], Relation.OTHER),
        ([YES, YES, YES, YES, no(relation=Relation.DONE)], Relation.DONE),
        (
            [no(relation=Relation.DUPLICATE), no(relation=Relation.SUPERSEDED)] + [YES] * 3,
            "superseded",
        ),
        ([YES, YES, YES, no(relation=Relation.EARLIER), PENDING], "granted"),
        ([no(), no(), no(relation=Relation.EARLIER), YES, YES], Relation.EARLIER),
        ([no("a"), no("a"), no("a"), no(relation=Relation.EARLIER), YES], Relation.EARLIER),
    ],
)
def test_an_acquire(answers: list[object], expected: object) -> None:
    verdict = votes.acquired(("k",), poll(*answers))
    if expected is None:
        assert verdict is None
    elif expected == "granted":
        assert verdict == Granted(key="k", fence=None)
    else:
        assert isinstance(verdict, Refused)
        assert verdict.relation == expected


def test_a_node_without_a_vote_grants_nothing_and_may_have_forgotten_a_lease() -> None:
    answers = poll(YES, YES, VOTELESS, no(), no())
    assert votes.acquired(("k",), answers) is None
    suspect = votes.suspect(answers)
    assert suspect is not None
    assert suspect.relation is Relation.OTHER
    assert votes.suspect(poll(YES, YES, YES, no(), no())) is None


def test_a_refusal_has_no_fence() -> None:
    for refused in (votes.refusal(Relation.DUPLICATE, record("a")), votes.answer("k", record("a"))):
        assert isinstance(refused, Refused)
        assert refused.record == replace(record("a"), fence=None)
    assert votes.refusal(Relation.DONE, None).record is None


def test_votes_for_several_slots_make_no_majority_together() -> None:
    other = Granted(key="k#1", fence=None)
    assert votes.acquired(("k", "k#1"), poll(YES, YES, other, other, other)) == other
    assert votes.acquired(("k", "k#1"), poll(YES, YES, other, other, DOWN)) is None


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ("rrr", RENEWED),
        ("rrree", RENEWED),
        ("rr", LossReason.UNREACHABLE),
        ("rre", LossReason.UNREACHABLE),
        ("rree", LossReason.UNREACHABLE),
        ("rreee", LossReason.GONE),
        ("eee", LossReason.GONE),
        ("eepr", LossReason.REPLACED),
        ("rrrd", LossReason.DYING),
    ],
)
def test_a_renewal(replies: str, expected: Renewal) -> None:
    words = {
        "r": RENEWED,
        "e": LossReason.GONE,
        "p": LossReason.REPLACED,
        "d": LossReason.DYING,
    }
    answers = [[words[letter]] for letter in replies]
    assert votes.renewed(Poll(5, 3, answers), 1) == [expected]


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ("rrr__", ReleaseReply.OURS),
        ("rrrt_", ReleaseReply.OURS),
        ("rr___", None),
        ("rrn__", None),
        ("nnn__", ReleaseReply.NOT_OURS),
        ("nntd_", ReleaseReply.DONE),
        ("rrtnn", ReleaseReply.DUPLICATE),
    ],
)
def test_a_release(replies: str, expected: ReleaseReply | None) -> None:
    words: dict[str, object] = {
        "r": ReleaseReply.OURS,
        "n": ReleaseReply.NOT_OURS,
        "t": ReleaseReply.DUPLICATE,
        "d": ReleaseReply.DONE,
        "_": PENDING,
    }
    assert votes.released(poll(*(words[letter] for letter in replies))) is expected


def test_what_stands_is_reported_with_the_time_that_a_majority_has_it() -> None:
    a = [record("a", ttl) for ttl in (9.0, 1.0, 5.0, 7.0)]
    a_has, b_has, free = [votes.answer("k", one) for one in (a[0], record("b"), None)]
    found = votes.standing(poll(*(votes.answer("k", one) for one in a), b_has))
    assert found is not None
    assert (found.token, found.ttl, found.fence) == ("a", 5.0, None)
    assert votes.standing(poll(a_has, a_has, free, free, free)) is None
    assert votes.standing(poll(a_has, a_has, free, free, DOWN)) is not None


def test_an_admission() -> None:
    free, taken = votes.answer("k", None), votes.answer("k", record("a"))
    assert votes.acquired(("k",), poll(free, free, free, PENDING, PENDING)) == Granted(
        key="k", fence=None
    )
    split = poll(free, free, taken, taken, DOWN)
    assert votes.acquired(("k",), split) is None
    suspected = votes.suspect(split)
    assert suspected is not None
    assert votes.holder(suspected) == "a"


def test_a_claim_has_the_phase_that_most_nodes_name() -> None:
    phases = (Phase.QUEUED, Phase.RUNNING, Phase.RUNNING)
    claims = [replace(record("a"), kind=Kind.CLAIM, phase=phase) for phase in phases]
    refused = votes.acquired(("k",), poll(*(votes.answer("k", claim) for claim in claims)))
    assert isinstance(refused, Refused)
    assert refused.record is not None
    assert refused.record.phase is Phase.RUNNING


def test_no_majority_is_a_refusal_only_where_a_majority_refuses() -> None:
    refusal = StoreError("wrong password")
    for answers, kind in (
        ([refusal, refusal, refusal, None, None], StoreError),
        ([refusal, refusal, DOWN, None, None], StoreUnavailable),
        ([PENDING, DOWN, DOWN, None, None], StoreUnavailable),
    ):
        with pytest.raises(StoreError, match="2 of 5 nodes answered") as caught:
            poll(*answers).check()
        assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ("ppp__", Authorization.AUTHORIZED),
        ("pppcd", Authorization.AUTHORIZED),
        ("ddd__", Authorization.DEPOSED),
        ("ppdd_", None),
        ("ppcc_", None),
        ("ccccc", None),
    ],
)
def test_an_authorization(answers: str, expected: Authorization | None) -> None:
    words: dict[str, object] = {
        "p": Authorization.AUTHORIZED,
        "d": Authorization.DEPOSED,
        "c": Authorization.CHANGED,
        "_": PENDING,
    }
    assert votes.authorized(poll(*(words[letter] for letter in answers))) is expected


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([None, None, None], None),
        (["9.5 x", "1.5 a", "1.5 a", "1.5 a", None], "1.5 a"),  # never authorized, on one node
        (["1.5 a", "10.5 b", "9.5 x"], "10.5 b"),
        ([None, None, None, "1.5 a"], "1.5 a"),
        (["nan a", "no time", "1.5 a"], "1.5 a"),
    ],
)
def test_the_last_run_that_counts(texts: list[str | None], expected: str | None) -> None:
    assert votes.last_run(texts, 3) == expected
