"""Bodies that began while their key, or its scope, was paused: pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tests.chaos.bodies import Body
from tests.chaos.history import span
from tests.chaos.verdict import Kind, Violation
from tests.harness.journal import Record, events

#: The scopes of the tasks that have not the others'.
_SCOPES = {
    "limited": "chaos-limit",
    "queued": "chaos-queue",
    "queued_early": "chaos-queue",
    "queued_several": "chaos-several",
    "rated": "chaos-rate",
}
_LOST = "bodies that began during a pause which the store had lost"


def begun_while_paused(
    records: Sequence[Record], found: Iterable[Body], excused: Counter[str]
) -> list[Violation]:
    """Bodies that asked for their lease after a pause had returned, and began before its end."""
    losses = [span(loss) for loss in events(records, "loss")]
    pauses = events(records, "pause")
    violations = []
    for body in found:
        for one in pauses:
            at, until = one.at, one.data["until"]
            is_paused = _scope_of(body) == one.data["scope"] and one.key in ("", body.key)
            if not (is_paused and at < body.asked and body.begin < until):
                continue
            if any(begin <= body.begin and end >= at for begin, end in losses):
                excused[_LOST] += 1
                continue
            text = f"{body.name} began {body.begin - at:.2f} s after {one.data['scope']} was paused"
            runs = (body.run,)
            violations.append(
                Violation(kind=Kind.PAUSED, key=body.key, at=body.begin, runs=runs, text=text)
            )
    return violations


def _scope_of(body: Body) -> str:
    task = body.task.rpartition(".")[2]
    return _SCOPES.get(task, "chaos")
