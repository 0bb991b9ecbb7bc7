"""The journal in words: a line for each entry that is of interest."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from example_project.beats import by_beat, doubled, scheduled_runs
from example_project.journal import Entry, What


def narrated(entries: Sequence[Entry]) -> Iterator[tuple[Entry, str]]:
    """The entries worth a line, and the line."""
    running: dict[str, dict[str, str]] = {}  # lane: body: worker
    sent: set[str] = set()
    waiting: set[str] = set()
    published: set[str] = set()  # lanes
    unsent: dict[str, int] = {}  # lane: calls since the last message
    twice = doubled(scheduled_runs(entries))
    for entry in entries:
        lane = running.setdefault(entry.lane, {})
        others = ", ".join(_counted(lane.values()))
        words = f"{entry.worker:9} {{:9}} {entry.lane:20}"
        match entry.what:
            case What.START:
                lane[entry.body] = entry.worker
                fence = f" fence {entry.fence}" if entry.fence else ""
                warning = f" OVERLAP with {others}" if others else ""
                yield entry, words.format("runs") + fence + warning
            case What.END:
                lane.pop(entry.body, None)
                yield entry, words.format("finishes" if entry.detail == "done" else "gives up")
            case What.SKIP:
                yield entry, words.format("skips") + (f" runs on {others}" if others else "")
            case What.CALL:
                unsent[entry.lane] = unsent.get(entry.lane, 0) + 1
            case What.SENT if entry.job in sent:
                # It is requeued until the key is free: one line is enough.
                if entry.job not in waiting:
                    waiting.add(entry.job)
                    yield entry, words.format("requeued") + " waits for its turn"
            case What.SENT:
                sent.add(entry.job)
                if by_beat(entry):
                    yield entry, words.format("sends") + (" SENT TWICE" if entry in twice else "")
                elif entry.lane in unsent:
                    calls = unsent[entry.lane]
                    # Without a claim every call publishes: one line is enough.
                    if calls > 1 or entry.lane not in published:
                        yield entry, words.format("publishes") + _answered(calls)
                    published.add(entry.lane)
                    unsent[entry.lane] = 0
            case What.LEADS if entry.worker:
                yield entry, f"{entry.worker:9} leads     and sends the scheduled runs"
            case What.KILL:
                _bury(entry.worker, running)
                yield entry, f"{entry.worker:9} KILLED    by SIGKILL, with all its processes"
            case What.READY:
                yield entry, f"{entry.worker:9} ready"


def heartbeats(entries: Sequence[Entry]) -> dict[str, int]:
    """Renewals seen so far, by job."""
    seen: dict[str, int] = {}
    for entry in entries:
        if entry.what is What.HEARTBEAT:
            seen[entry.job] = seen.get(entry.job, 0) + 1
    return seen


def _answered(calls: int) -> str:
    """How many calls came since the last message, and were answered with that one."""
    return f" after {calls - 1} calls that published nothing" if calls > 1 else ""


def _counted(names: Iterable[str]) -> list[str]:
    return [f"{name} x{n}" if n > 1 else name for name, n in Counter(names).items()]


def _bury(worker: str, running: dict[str, dict[str, str]]) -> None:
    for bodies in running.values():
        for body in [body for body, name in bodies.items() if name == worker]:
            del bodies[body]
