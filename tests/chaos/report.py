"""What a campaign showed, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from tests.chaos.bodies import bodies
from tests.chaos.campaign import Outcome
from tests.chaos.story import story
from tests.chaos.usage import changes, usages
from tests.chaos.verdict import Kind
from tests.harness.journal import Record, events

#: Violations that are printed in full; a broken lock has thousands.
_MOST_PRINTED = 10


def last_traces(records: Sequence[Record]) -> dict[str, Record]:
    """What the broker's file says of each job of which nothing was seen afterwards, by job.

    It is read when a drain seems to stand still; the job may go on after that.
    """
    last = {record.task_id: record for record in records if record.task_id}
    return {job: record for job, record in last.items() if record.event == "traced"}


def report(outcome: Outcome) -> str:
    """All of it, ending with a newline."""
    return "\n".join(_lines(outcome)) + "\n"


def _lines(outcome: Outcome) -> Iterator[str]:
    campaign, verdict = outcome.campaign, outcome.verdict
    plan = campaign.plan
    broken = f", broken: {plan.broken}" if plan.broken else ""
    hosts = f" on {plan.hosts} hosts" if plan.hosts else ""
    beside = f" and one of {plan.concurrency} {plan.beside}" if plan.beside else ""
    processes = f"{plan.concurrency} processes{beside}{hosts}, {plan.store}"
    yield (
        f"seed {campaign.seed}: {campaign.seconds:g} s of faults, {outcome.seconds:.0f} s in all;"
        f" {plan.workers} workers of {processes}, ttl {plan.ttl:g} s{broken}"
    )
    for what, count in verdict.counts.items():
        yield f"  {count:7d}  {what}"
    struck = Counter(record.data["name"] for record in events(outcome.records, "fault"))
    yield "  faults: " + ", ".join(f"{name} {count}" for name, count in sorted(struck.items()))
    for line in changes(usages(outcome.directory)):
        yield f"  {line}"
    for reason, count in sorted(verdict.excused.items()):
        yield f"  not promised: {count} {reason}"
    for job, trace in sorted(last_traces(outcome.records).items()):
        place, steps = trace.data["place"], trace.data["steps"]
        yield f"  the broker's file: {job} is {place} ({steps})"
    for kind in Kind:
        yield f"  {len(verdict.of(kind)):7d}  violations: {kind}"
    found = bodies(outcome.records)
    for violation in verdict.violations[:_MOST_PRINTED]:
        yield f"  ! {violation.kind}: {violation.text}"
        for line in story(violation, found, outcome.records):
            yield f"      {line}"
