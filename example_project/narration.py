"""The journal in words: a line for each entry that people want to hear of."""

from collections.abc import Iterator, Sequence

from example_project.journal import Entry, What


def told(entries: Sequence[Entry]) -> Iterator[tuple[Entry, str]]:
    """The entries worth a line, and the line."""
    running: dict[str, dict[str, str]] = {}  # lane: body: worker
    sent: set[str] = set()
    for entry in entries:
        lane = running.setdefault(entry.lane, {})
        others = ", ".join(lane.values())
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
            case What.SENT if entry.job in sent:
                yield entry, words.format("put back")
            case What.SENT:
                sent.add(entry.job)
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


def _bury(worker: str, running: dict[str, dict[str, str]]) -> None:
    for bodies in running.values():
        for body in [body for body, name in bodies.items() if name == worker]:
            del bodies[body]
