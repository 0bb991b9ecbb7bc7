"""Whether each lost lease was reported as lost: pure functions.

Another body of the key has a higher fence, and began after this body's lease was requested and
before this body ended. So this lease was lost before its release could be sent, for whatever
reason. That includes a loss of the store's data, and a body that never checked its lease. The
process that had the lease has to report exactly one loss, and no release. Three cases are
excused, and counted:

* the store did not answer the release, and the lease could still be trusted when the body ended:
  the process cannot know, and has reported that the release failed;
* an old master, which had not been demoted yet, executed the release and answered;
* the process died before it could report: it ran for less than a ttl after the other body began.
  After a ttl at most its lease has ended by its own clock, whatever the store answers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from tests.chaos.bodies import Body, by_key
from tests.chaos.history import span
from tests.chaos.verdict import Kind, Violation
from tests.harness.journal import Record, events

#: What a process reports of the end of a lease.
_REPORTS = ("lost", "released", "release-failed")
#: What the campaign writes down of a process.
_OF_OTHERS = ("death", "stopped", "continued")
#: Seconds that a busy machine may take to report a loss.
_SLOW = 1.0


def unreported_losses(
    records: Sequence[Record], found: Iterable[Body], ttl: float, excused: Counter[str]
) -> list[Violation]:
    """The leases that were lost and not reported so, each once.

    Args:
        records: The history, by time.
        found: The bodies in it.
        ttl: The ttl of the leases, in seconds; a slow observer may delay a report beyond it.
        excused: Counts what is excused.
    """
    reports: dict[tuple[str, int | None], list[str]] = defaultdict(list)
    for record in records:
        if record.event in _REPORTS:
            reports[record.task_id, record.fence].append(record.event)
    lives = _Lives(records)
    splits = [span(loss) for loss in events(records, "loss")]
    taken = events(records, "taken")
    unobserved = {(each.pid, each.task_id) for each in taken if not each.data.get("observed", True)}
    violations = []
    for key, of_key in by_key(found).items():
        for body, successor in _lost(of_key):
            reported = reports[body.lease, body.fence]
            if reported.count("lost") == 1 and "released" not in reported:
                continue
            # The second one, where there is one, is of the completion record that a done attempt
            # leaves.
            if reported in (["release-failed"], ["release-failed"] * 2):
                excused["losses unknown to a process whose release the store did not answer"] += 1
            elif (
                reported == ["released"] or (not reported and (body.pid, body.job) in unobserved)
            ) and any(since <= body.end and body.begin <= at for since, at in splits):
                excused["losses unknown to a process whose release an old master executed"] += 1
            elif not reported and lives.awake(body, successor.begin) < ttl + _SLOW:
                excused["losses that a process did not live to report"] += 1
            else:
                violations.append(
                    Violation(
                        kind=Kind.RELEASED if "released" in reported else Kind.UNREPORTED,
                        key=key,
                        at=successor.begin,
                        runs=(body.run, successor.run),
                        text=(
                            f"{body.name} had not ended when {successor.name} began on {key!r};"
                            f" reported: {', '.join(reported) or 'nothing'}"
                        ),
                    )
                )
    return violations


def _lost(of_key: Iterable[Body]) -> Iterable[tuple[Body, Body]]:
    """The bodies that had lost their lease when they ended, each with the first that proves it."""
    fenced = [(body, body.fence) for body in of_key if body.fence is not None]  # by begin
    for body, fence in fenced:
        proofs = (
            other
            for other, higher in fenced
            if higher > fence and body.asked < other.begin < body.end
        )
        if proof := next(proofs, None):
            yield body, proof


class _Lives:
    """How long processes ran, by what they and the campaign wrote down."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._of: dict[int, list[Record]] = defaultdict(list)
        for record in records:
            self._of[record.pid].append(record)
        self._last = max((record.at for record in records), default=0.0)

    def awake(self, body: Body, since: float) -> float:
        """Seconds that the process of ``body`` ran after ``since``, at least."""
        until = self._end(body)
        seconds = until - since
        for record in self._of[body.pid]:
            rest = until - min(max(record.at, since), until)
            if record.event == "stopped":
                seconds -= rest
            elif record.event == "continued":
                seconds += rest
        return seconds

    def _end(self, body: Body) -> float:
        """When its process had died, at the earliest; or when the records end."""
        known = self._of[body.pid]
        for death in events(known, "death"):
            until: float = death.data.get("until", death.at)
            if until >= body.begin:  # process ids are reused
                signs = (r.at for r in known if r.event not in _OF_OTHERS and r.at <= until)
                return max(death.at, *signs)
        return self._last
