"""The calls of tasks with ``on_conflict="queue"``: pure functions.

The calls of a key run one after another, in the order in which they were made: if ``apply_async``
of A had returned before that of B was entered, no body of A asks for its lease after the first body
of B has begun. If several may run at a time, this holds for A's first body, unless its worker got
no reply from the store. A call whose ``apply_async`` raised never begins, unless the error says
that this is unknown. A call that is acknowledged early begins once. Nothing of this is promised
across a loss of the store, which is where the calls wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import inf

from tests.chaos.bodies import Body, by_key
from tests.chaos.history import span
from tests.chaos.verdict import Kind, Violation
from tests.harness.journal import Record, events

#: The tasks; the second is acknowledged early.
QUEUED = frozenset({"queued", "queued_early", "queued_several", "rated"})
_EARLY = "queued_early"
_LOST = "calls in a queue across a loss of the store"


def wrong_turns(
    records: Sequence[Record], found: Iterable[Body], excused: Counter[str]
) -> list[Violation]:
    """Bodies that began out of turn, though they were refused, or twice; each once."""
    losses = [span(loss) for loss in events(records, "loss")]
    called = {record.task_id: record for record in events(records, "returned")}
    refused = {record.task_id for record in events(records, "unsent") if record.data["known"]}
    # The store may have granted the lease, and the message was requeued without a body.
    unanswered = {
        record.task_id: record.at
        for record in reversed(events(records, "publishing"))
        if record.data["copy"][1] > 0
    }
    violations = []

    def add(kind: Kind, bodies: Sequence[Body], since: float, text: str) -> None:
        last = bodies[-1]
        if any(since <= until and at <= last.begin for at, until in losses):
            excused[_LOST] += 1
            return
        runs = tuple(body.run for body in bodies)
        violations.append(Violation(kind=kind, key=last.key, at=last.begin, runs=runs, text=text))

    queued = [body for body in found if body.task.rpartition(".")[2] in QUEUED]
    for of_key in by_key(queued).values():
        first: dict[str, Body] = {}
        for body in of_key:  # by begin
            before = first.setdefault(body.job, body)
            since = called[body.job].data["entered"] if body.job in called else 0.0
            if body.job in refused:
                add(Kind.ORDER, [body], since, f"{body.name} began, and had been refused")
            if before is not body and body.task.endswith(f".{_EARLY}"):
                add(Kind.RUN_AGAIN, [before, body], since, f"{body.name} began twice")
            if body.limit > 1 and (
                before is not body or unanswered.get(body.job, inf) < body.begin
            ):
                continue
            later = _first_later(body, first.values(), called)
            if later is not None:
                text = f"{body.name} began after {later.name}, which was called later"
                add(Kind.ORDER, [later, body], since, text)
    return violations


def _first_later(body: Body, others: Iterable[Body], called: dict[str, Record]) -> Body | None:
    """A body that had begun when ``body`` asked, of a call that was made after its call."""
    if body.job not in called or not called[body.job].data["placed"]:
        return None
    returned = called[body.job].at
    begun = (other for other in others if other.job in called and other.begin < body.asked)
    return next((one for one in begun if returned < called[one.job].data["entered"]), None)
