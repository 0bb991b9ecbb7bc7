"""What the beats sent, and which of it was sent twice."""

from collections.abc import Sequence

from example_project.journal import Entry, What

BEATS = ("beat-1", "beat-2")

#: Seconds between two scheduled runs of the "nightly" report. Shorter than the report takes, so
#: that some of them find it running.
NIGHT = 1.0

#: Seconds from the due moment of a scheduled run until it's in the journal, at most.
SENDING = 0.1


def by_beat(entry: Entry) -> bool:
    return entry.worker in BEATS


def scheduled_runs(entries: Sequence[Entry]) -> list[Entry]:
    """All scheduled runs that were sent, by time."""
    return [entry for entry in entries if entry.what is What.SENT and by_beat(entry)]


def doubled(sent: Sequence[Entry], every: float = NIGHT) -> set[Entry]:
    """The runs for which there is no night of their own; a night is `every` seconds long.

    The journal doesn't say when nights begin: each beat counts from its own start, and what a
    beat says of its runs is just what is in question. So of all grids that begin with one of
    the runs the one that doubles the fewest counts: these are doubled on every grid.
    """
    grids = (_without_night(sent, run.at, every) for run in sent)
    return min(grids, key=len, default=set())


def _without_night(sent: Sequence[Entry], begin: float, every: float) -> set[Entry]:
    taken: set[int] = set()
    found = set()
    first = _night(sent[0].at - begin, every)
    for run in sent:
        own = _night(run.at - begin, every)
        # A run of the night before that was sent in its last moment: a new leader does that.
        before = max(first, _night(run.at - begin - SENDING, every))
        night = next((night for night in (own, before) if night not in taken), None)
        if night is None:
            found.add(run)
        else:
            taken.add(night)
    return found


def _night(seconds: float, every: float) -> int:
    return int((seconds + 1e-6) // every)  # a run doesn't fall out of the night that it begins


def killed_beat(entries: Sequence[Entry]) -> Entry | None:
    return next((entry for entry in entries if entry.what is What.KILL and by_beat(entry)), None)


def runs_of_the_other(entries: Sequence[Entry]) -> int:
    """How many scheduled runs came from the other beat after one was killed."""
    kill = killed_beat(entries)
    if kill is None:
        return 0
    return sum(run.at > kill.at and run.worker != kill.worker for run in scheduled_runs(entries))
