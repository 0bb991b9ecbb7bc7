"""The arguments of bodies whose message answers several calls: pure functions.

A call that was answered with a job has replaced the arguments of its message. So each body of the
job that asked for its lease after that has the arguments of this call or of a later one. This is
not promised across a loss of the store, in which the newest arguments are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from tests.chaos.bodies import Body
from tests.chaos.history import span
from tests.chaos.verdict import Kind, Violation
from tests.harness.journal import Record, events


def older_arguments(
    records: Sequence[Record], found: Iterable[Body], excused: Counter[str]
) -> list[Violation]:
    """Bodies that ran with older arguments than they had to, each once."""
    calls: dict[str, list[Record]] = defaultdict(list)
    for record in events(records, "called"):
        calls[record.task_id].append(record)
    losses = [span(loss) for loss in events(records, "loss")]
    violations = []
    for body in found:
        newer = [c for c in calls[body.job] if c.at < body.asked and c.data["call"] > body.call]
        if not newer:
            continue
        answered = max(newer, key=lambda record: record.at)
        if any(newer[0].at <= at and since <= body.begin for since, at in losses):
            excused["older arguments after a loss of the store"] += 1
            continue
        text = f"{body.name} ran with call {body.call}, and had answered {answered.data['call']}"
        violations.append(
            Violation(kind=Kind.NEWEST, key=body.key, at=body.begin, runs=(body.run,), text=text)
        )
    return violations
