"""The order of calls under ``cancel_running``: pure functions.

A call is older than another one if it was published before. An older call of `latest` must not
begin once a newer one of the same key has begun. The order is not promised across a loss of the
store, nor while the server's clock is stepped: a call that seems to come from the future counts as
made when it arrives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tests.chaos.bodies import Body, by_key
from tests.chaos.history import span
from tests.chaos.verdict import Kind, Violation
from tests.harness.journal import Record, events

_TASK = "latest"


class CallOrder:
    """When the jobs of a campaign were published first."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._published: dict[str, float] = {}
        for record in events(records, "publishing"):
            self._published.setdefault(record.task_id, record.at)
        faults = events(records, "fault")
        self.is_promised = not any(fault.data.get("name") == "clock-step" for fault in faults)

    def is_newer(self, job: str, other: str) -> bool:
        """Whether ``job`` was published after ``other``."""
        return self._published.get(job, 0.0) > self._published.get(other, 0.0)

    def is_cancelled(self, records: Iterable[Record]) -> bool:
        """Whether a job, of which these are the records, gave way to a newer one."""
        return any(
            self.is_newer(end.data["by"], end.task_id) or not self.is_promised
            for end in events(records, "cancelled")
        )


def out_of_order(
    records: Sequence[Record], found: Iterable[Body], excused: Counter[str]
) -> list[Violation]:
    """Bodies of older calls that began after the body of a newer one, each once."""
    order, losses = CallOrder(records), [span(loss) for loss in events(records, "loss")]
    violations = []
    for key, of_key in by_key(body for body in found if body.task.endswith(f".{_TASK}")).items():
        newest: Body | None = None
        for body in of_key:  # by begin
            if newest is None or order.is_newer(body.job, newest.job):
                newest = body
                continue
            if body.job == newest.job or body.asked < newest.begin:
                continue
            if not order.is_promised or any(
                newest.begin <= at and since <= body.begin for since, at in losses
            ):
                excused["older calls that began across a loss, or a step of the clock"] += 1
                continue
            text = f"{body.name} began although the newer {newest.name} had begun"
            runs = (newest.run, body.run)
            violations.append(
                Violation(kind=Kind.ORDER, key=key, at=body.begin, runs=runs, text=text)
            )
    return violations
