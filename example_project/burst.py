"""A burst of calls: what was published for them, how many waited, whether a run came after."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from example_project import journal as records
from example_project.journal import Entry, What

NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A message from its publication until a worker took it up and ran its body."""

    lane: str
    job: str
    since: float
    until: float  # for one that still waits: infinity


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    calls: int
    published: int
    bodies: int
    waiting: int  # at once, at most
    ran_after: bool  # a body began after the last call was made


def burst(entries: Sequence[Entry]) -> Burst:
    """What became of all calls that the journal has one by one; they are of one lane."""
    calls = [entry for entry in entries if entry.what is What.CALL]
    lanes = {call.lane for call in calls}
    task_runs = [run for run in records.runs(entries) if run.lane in lanes]
    last = max((call.at for call in calls), default=0.0)
    return Burst(
        calls=len(calls),
        published=sum(lane in lanes for lane in records.jobs(entries).values()),
        bodies=len(task_runs),
        waiting=_most_at_once([wait for wait in waits(entries) if wait.lane in lanes]),
        ran_after=any(run.started > last for run in task_runs),
    )


def unpublished(entries: Sequence[Entry]) -> dict[str, int]:
    """Calls for which nothing was published, by lane."""
    calls = Counter(entry.lane for entry in entries if entry.what is What.CALL)
    messages = Counter(records.jobs(entries).values())
    return {lane: count - messages[lane] for lane, count in calls.items()}


def waits(entries: Sequence[Entry]) -> list[Wait]:
    """How long each message waited, by publication; until its body ran for the first time.

    A message that is taken up and requeued goes on waiting. The wait ends when it was taken up for
    that run, not when the body wrote its start: in between it has the lock already, and another
    call may be published. A killed body's second run is no wait: it had begun. Neither is that of a
    message that a killed worker had taken up and not requeued: it may have had the lock already.
    """
    published: dict[str, Entry] = {}
    started: dict[str, float] = {}
    taken: dict[str, list[float]] = defaultdict(list)
    in_hand: dict[str, str] = {}
    for entry in entries:
        if entry.what is What.SENT:
            published.setdefault(entry.job, entry)
            in_hand.pop(entry.job, None)
        elif entry.what in (What.START, What.SKIP):
            started.setdefault(entry.job, entry.at)
        elif entry.what is What.TAKEN and entry.job not in started:
            taken[entry.job].append(entry.at)
            in_hand[entry.job] = entry.worker
        elif entry.what is What.KILL:
            for job in [job for job, worker in in_hand.items() if worker == entry.worker]:
                started.setdefault(job, entry.at)
    return [
        Wait(
            lane=entry.lane,
            job=job,
            since=entry.at,
            until=taken[job][-1] if job in started and taken[job] else started.get(job, NEVER),
        )
        for job, entry in published.items()
    ]


def _most_at_once(spans: Sequence[Wait]) -> int:
    # At one and the same time the end comes first: touching spans aren't at once.
    steps = sorted(step for span in spans if span.until > span.since for step in _steps(span))
    most = waiting = 0
    for _, step in steps:
        waiting += step
        most = max(most, waiting)
    return most


def _steps(span: Wait) -> tuple[tuple[float, int], tuple[float, int]]:
    return (span.since, 1), (span.until, -1)
