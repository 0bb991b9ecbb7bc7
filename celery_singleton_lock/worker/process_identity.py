"""When a process was born: with its id, that names it, for the system gives ids again."""

from __future__ import annotations

__all__ = ["lives", "start_time_of"]

# The fields of /proc/<pid>/stat behind the program's name, as proc(5) counts them: its own number
# is 2, and a name may have blanks and parentheses in it.
_STATE = 3 - 3
_STARTTIME = 22 - 3
# A zombie runs nothing any more, though its parent has not heard of its death yet.
_DEAD = b"ZXx"


def start_time_of(pid: int) -> int:
    """Clock ticks from the machine's boot to the start of ``pid``; 0: it is dead, or nobody knows.

    Nobody knows where there is no ``/proc`` of Linux's form, as on macOS.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        return 0 if fields[_STATE] in _DEAD else int(fields[_STARTTIME])
    except (OSError, ValueError, IndexError):
        return 0


def lives(pid: int, birth: int) -> bool:
    """Whether the very process ``pid`` that was born at ``birth`` runs, or is merely stopped."""
    return birth != 0 and start_time_of(pid) == birth
