"""Process start time. PID plus start time identifies a process, because PIDs are reused."""

from __future__ import annotations

# Indexes of the fields of /proc/<pid>/stat after the program's name, from their numbers in proc(5).
# The name is field 2 and may contain blanks and parentheses.
_STATE = 3 - 3
_STARTTIME = 22 - 3
# The states of dead processes. A zombie runs no code any more, although its parent has not yet read
# its exit status.
_DEAD = b"ZXx"


def start_time_of(pid: int) -> int:
    """Clock ticks from the machine's boot to the start of ``pid``; 0 if it is dead or unknown.

    It is unknown on systems without Linux's ``/proc``, such as macOS.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        return 0 if fields[_STATE] in _DEAD else int(fields[_STARTTIME])
    except (OSError, ValueError, IndexError):
        return 0


def lives(pid: int, start_time: int) -> bool:
    """Whether the process that started at ``start_time`` is alive, running or stopped."""
    return start_time != 0 and start_time_of(pid) == start_time
