"""What the journals of the two runs say: the table, and what went wrong."""

from collections.abc import Iterator
from dataclasses import dataclass

from example_project import journal as records
from example_project.beats import doubled, runs_of_the_other, scheduled_runs
from example_project.burst import Burst, burst
from example_project.journal import What
from example_project.snapshot import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    sent: int
    bodies: int
    skipped: int
    requeue: int
    killed: int
    run_again: int
    overlaps: int
    lost: int
    burst: Burst
    scheduled: int
    runs_of_the_other: int
    doubled: int
    late_write: str
    money_missing: int  # cents
    seconds: float


def figures(outcome: Outcome) -> Figures:
    entries = outcome.entries
    task_runs = records.runs(entries)
    killed = {run.job for run in task_runs if run.outcome == "killed"}
    return Figures(
        sent=len(records.jobs(entries)),
        bodies=len(task_runs),
        skipped=sum(entry.what is What.SKIP for entry in entries),
        requeue=len(records.requeues(entries)),
        killed=len(killed),
        run_again=len(killed & {run.job for run in task_runs if run.outcome == "done"}),
        overlaps=len(records.overlaps(task_runs)),
        lost=len(records.unsettled(entries)),
        burst=burst(entries),
        scheduled=len(sent := scheduled_runs(entries)),
        runs_of_the_other=runs_of_the_other(entries),
        doubled=len(doubled(sent)),
        late_write=outcome.late_write,
        money_missing=outcome.money_missing,
        seconds=outcome.seconds,
    )


def table(locked: Figures, unlocked: Figures) -> str:
    """Both runs side by side; what ought to be zero stands last."""
    rows = zip(_rows(locked), _rows(unlocked), strict=True)
    head = f"{'':44}{'with the lock':>16}{'without':>12}"
    return "\n".join(
        [head, *(f"{name:44}{left:>16}{right:>12}" for (name, left), (_, right) in rows)]
    )


def summary(of: Figures) -> str:
    return (
        f"overlaps: {of.overlaps}   jobs lost: {of.lost}   scheduled runs sent twice: {of.doubled}"
        f"   messages for {of.burst.calls} calls: {of.burst.published}"
    )


def _rows(of: Figures) -> Iterator[tuple[str, object]]:
    yield "jobs sent", of.sent
    yield "runs", of.bodies
    yield "calls skipped: a run was going on", of.skipped
    yield "times requeued to wait for their turn", of.requeue
    yield "jobs killed with their worker", of.killed
    yield "... that ran again to the end", of.run_again
    yield f"messages for a burst of {of.burst.calls} calls", of.burst.published
    yield "... waiting at the same time, at most", of.burst.waiting
    yield "... a run began after the last call", "yes" if of.burst.ran_after else "no"
    yield "scheduled runs sent by the beats", of.scheduled
    yield "... by the other, after one was killed", of.runs_of_the_other
    yield "late write with an old fence", of.late_write
    yield "money missing", f"{of.money_missing / 100:.2f}"
    yield "jobs lost", of.lost
    yield "scheduled runs sent twice", of.doubled
    yield "overlaps", of.overlaps


def faults(locked: Figures, unlocked: Figures) -> Iterator[str]:
    """Why the exit status is 1. A run that could not have failed is a fault too."""
    if locked.overlaps:
        yield f"with the lock, {locked.overlaps} pairs of runs of one key overlapped"
    if locked.lost:
        yield f"with the lock, {locked.lost} jobs neither finished nor were skipped"
    if locked.money_missing:
        yield f"with the lock, {locked.money_missing} cents are missing"
    if locked.late_write != "refused":
        yield f"the late write with an old fence: {locked.late_write}"
    if not locked.killed:
        yield "nothing was running on the worker that was killed"
    if not locked.skipped:
        yield "no duplicate met a running task"
    yield from _burst_faults(locked.burst)
    if locked.doubled:
        yield f"with the lock, {locked.doubled} scheduled runs were sent twice"
    if not locked.runs_of_the_other:
        yield "no beat took over from the leader that was killed"
    if not unlocked.doubled:
        yield "without the lock no scheduled run was sent twice either, so the test proves nothing"
    if not unlocked.overlaps:
        yield "without the lock nothing overlapped either, so the test proves nothing"


def _burst_faults(found: Burst) -> Iterator[str]:
    if not found.ran_after:
        yield "no run of the burst's task began after its last call"
    if found.waiting > 1:
        yield f"{found.waiting} messages of the burst waited at the same time"
    if found.published >= found.calls:
        yield f"{found.published} messages were published for a burst of {found.calls} calls"
