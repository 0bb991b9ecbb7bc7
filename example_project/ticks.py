"""What the beats sent, and which of it was sent twice."""

from collections.abc import Sequence

from example_project.journal import Entry, What

BEATS = ("beat-1", "beat-2")

#: Seconds between two ticks of the "nightly" report. Shorter than the report takes: ticks meet a
#: running one.
NIGHT = 1.0

#: Seconds that a tick may be on its way from its due moment into the journal.
SENDING = 0.1


def by_beat(entry: Entry) -> bool:
    return entry.worker in BEATS


def ticks(entries: Sequence[Entry]) -> list[Entry]:
    """All ticks that were sent, by time."""
    return [entry for entry in entries if entry.what is What.SENT and by_beat(entry)]


def doubled(sent: Sequence[Entry], every: float = NIGHT) -> set[Entry]:
    """The ticks for which there is no night of their own; a night is `every` seconds long.

    The journal doesn't say when nights begin: each beat counts from its own start, and what a
    beat says of its ticks is just what is in question. So of all grids that begin with one of
    the ticks the one that doubles the fewest counts: these are doubled on every grid.
    """
    grids = (_without_night(sent, tick.at, every) for tick in sent)
    return min(grids, key=len, default=set())


def _without_night(sent: Sequence[Entry], begin: float, every: float) -> set[Entry]:
    taken: set[int] = set()
    found = set()
    first = _night(sent[0].at - begin, every)
    for tick in sent:
        own = _night(tick.at - begin, every)
        # A tick of the night before that was sent in its last moment: a new leader does that.
        before = max(first, _night(tick.at - begin - SENDING, every))
        night = next((night for night in (own, before) if night not in taken), None)
        if night is None:
            found.add(tick)
        else:
            taken.add(night)
    return found


def _night(seconds: float, every: float) -> int:
    return int((seconds + 1e-6) // every)  # a tick doesn't fall out of the night that it begins


def killed_beat(entries: Sequence[Entry]) -> Entry | None:
    return next((entry for entry in entries if entry.what is What.KILL and by_beat(entry)), None)


def ticks_of_the_other(entries: Sequence[Entry]) -> int:
    """How many ticks came after one beat was killed, from the other one."""
    kill = killed_beat(entries)
    if kill is None:
        return 0
    return sum(tick.at > kill.at and tick.worker != kill.worker for tick in ticks(entries))
