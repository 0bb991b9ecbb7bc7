"""What the journals of the two runs say: the table, and what went wrong."""

from collections.abc import Iterator
from dataclasses import dataclass

from example_project import journal as records
from example_project.journal import What
from example_project.snapshot import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    sent: int
    bodies: int
    skipped: int
    put_back: int
    killed: int
    run_again: int
    overlaps: int
    lost: int
    late_write: str
    money_missing: int  # cents
    seconds: float


def figures(outcome: Outcome) -> Figures:
    entries = outcome.entries
    executions = records.runs(entries)
    killed = {run.job for run in executions if run.outcome == "killed"}
    return Figures(
        sent=len(records.jobs(entries)),
        bodies=len(executions),
        skipped=sum(entry.what is What.SKIP for entry in entries),
        put_back=len(records.put_backs(entries)),
        killed=len(killed),
        run_again=len(killed & {run.job for run in executions if run.outcome == "done"}),
        overlaps=len(records.overlaps(executions)),
        lost=len(records.unsettled(entries)),
        late_write=outcome.late_write,
        money_missing=outcome.money_missing,
        seconds=outcome.seconds,
    )


def table(locked: Figures, unlocked: Figures) -> str:
    rows = [
        ("jobs sent", locked.sent, unlocked.sent),
        ("bodies run", locked.bodies, unlocked.bodies),
        ("calls skipped: a run was going on", locked.skipped, unlocked.skipped),
        ("times put back to wait for their turn", locked.put_back, unlocked.put_back),
        ("jobs killed with their worker", locked.killed, unlocked.killed),
        ("... that ran again to the end", locked.run_again, unlocked.run_again),
        ("late write with an old fence", locked.late_write, unlocked.late_write),
        (
            "money missing",
            f"{locked.money_missing / 100:.2f}",
            f"{unlocked.money_missing / 100:.2f}",
        ),
        ("jobs lost", locked.lost, unlocked.lost),
        ("overlaps", locked.overlaps, unlocked.overlaps),
    ]
    head = f"{'':40}{'with the lock':>16}{'without':>12}"
    return "\n".join([head, *(f"{name:40}{left:>16}{right:>12}" for name, left, right in rows)])


def faults(locked: Figures, unlocked: Figures) -> Iterator[str]:
    """Why the exit status is 1. A run that could not have failed is a fault too."""
    if locked.overlaps:
        yield f"with the lock, {locked.overlaps} pairs of bodies of one key ran at the same time"
    if locked.lost:
        yield f"with the lock, {locked.lost} jobs neither finished nor were skipped"
    if locked.money_missing:
        yield f"with the lock, {locked.money_missing} cents are missing"
    if locked.late_write != "refused":
        yield f"the late write with an old fence: {locked.late_write}"
    if not locked.killed:
        yield "no body was running on the worker that was killed"
    if not locked.skipped:
        yield "no duplicate met a running body"
    if not unlocked.overlaps:
        yield "without the lock nothing overlapped either, so the run with it proves nothing"
