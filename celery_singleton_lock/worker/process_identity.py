"""Process start time. PID plus start time identifies a process, because PIDs are reused."""

from __future__ import annotations

# Fields of /proc/<pid>/stat behind the program's name, by their numbers in proc(5). The name has
# number 2 and may contain blanks and parentheses.
_STATE = 3 - 3
_STARTTIME = 22 - 3
# A zombie runs no code any more, though its parent has not yet read its exit status.
_DEAD = b"ZXx"


def start_time_of(pid: int) -> int:
    """Clock ticks from the machine's boot to the start of ``pid``; 0 if it is dead or unknown.

    It is unknown where there is no ``/proc`` in Linux's format, as on macOS.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        return 0 if fields[_STATE] in _DEAD else int(fields[_STARTTIME])
    except (OSError, ValueError, IndexError):
        return 0


def lives(pid: int, start_time: int) -> bool:
    """Whether the process that started at ``start_time`` runs, or is merely stopped."""
    return start_time != 0 and start_time_of(pid) == start_time
