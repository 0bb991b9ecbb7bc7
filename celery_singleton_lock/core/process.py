"""Which process this is: in its own memory, on its host, and the proof that one no longer exists.

Overview
    An identity is the host and the start time of a process. The host part is a digest of the
    machine's boot id, the PID and time namespaces, and the host's name. A holder writes its PID and
    its identity into its lease. A process with the same host part can look for the holder, and free
    its lease at once if the holder is dead, instead of after the ttl.

Guarantees
    :func:`is_proven_dead` is true only if no process with that PID and start time exists in the
    holder's PID namespace, or only its zombie. A holder counts as alive in all other cases: its
    host, boot, namespace or host name is another one; ``/proc`` is missing, restricted or of
    another namespace; the operating system is not Linux; the holder is stopped, or a zombie with
    living threads.

    Two PID namespaces that exist at the same time never have the same inode number, but the number
    may be used again after a namespace ended. That is harmless: a namespace ends after its last
    process, so a holder whose namespace has ended is dead, and to call it dead is right. If a
    process of the new namespace has its PID and start time, the holder counts as alive. The same
    holds for time namespaces, to which start times relate.

Non-guarantees
    A death in another container, or in the same container before its restart, is not proven: each
    start of a container is a new PID namespace. A subprocess that the holder started is not the
    holder. Copies of one running machine (a virtual machine resumed twice from a snapshot) have the
    same boot id: only their host names tell them apart, if they differ.
"""

from __future__ import annotations

import os
from base64 import urlsafe_b64encode
from collections import defaultdict
from contextlib import suppress
from hashlib import blake2b
from typing import Final

_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
# Fields of /proc/<pid>/stat, as proc(5) numbers them. The program's name is field 2; it may contain
# blanks and parentheses, so the fields are counted from the third.
_FIRST_FIELD, _STATE, _THREADS, _START_TIME = 3, 3, 20, 22
# Characters of an identity, which is stored with each lease: 54 bits of the digest, then the start
# time in hexadecimal without its highest digits. If a PID is used again exactly a multiple of 2.9
# hours later, its former process counts as alive.
_HOST, _START = 9, 5
# Zombie, or about to disappear.
_ENDED: Final = (b"Z", b"X", b"x")


class Process:
    """A process, in its own memory and in the copies of it that its forks have.

    Compare it by identity. The id of a process is given again after its end: a fork may have the
    id of an ancestor, and would take what that has left in memory for its own.
    """


#: The calling process, by its id; what `this_process` returns, for what each task asks. A fork
#: finds none of its ancestors here: Python empties it there, and where a program in C forks without
#: Python's hooks, the id is another one.
processes: Final[defaultdict[int, Process]] = defaultdict(Process)
os.register_at_fork(after_in_child=processes.clear)


def this_process() -> Process:
    """The calling process, and not its forks."""
    return processes[os.getpid()]


def identity_of_this_process() -> str:
    """The identity of the calling process, for one process and not for its forks.

    Returns:
        Empty if it can't be known: then no other process can prove the death of this one.
    """
    try:
        with open("/proc/self/status", "rb") as status:
            lines = status.read().splitlines()
        # The process's PIDs in the namespace of this /proc and in the nested ones. With several, a
        # lookup by PID in this /proc would find another process.
        [numbers] = [line.split()[1:] for line in lines if line.startswith(b"NSpid:")]
        fields = _stat_of(os.getpid())
        if len(numbers) != 1 or fields is None:
            return ""
        with open(_BOOT_ID) as boot_id:
            facts = [boot_id.read(), os.readlink("/proc/self/ns/pid"), os.uname().nodename]
        with suppress(FileNotFoundError):  # before Linux 5.6 there are no time namespaces
            facts.append(os.readlink("/proc/self/ns/time"))
    except (OSError, ValueError):
        return ""
    host = urlsafe_b64encode(blake2b(os.fsencode("\0".join(facts)), digest_size=9).digest())
    return f"{host.decode()[:_HOST]}{_start_of(fields)}"


def is_proven_dead(identity: str, pid: int, own: str) -> bool:
    """Whether a process is dead beyond doubt. Sends nothing, and never raises.

    Args:
        identity: The identity in the process's record. May be empty, or any text.
        pid: The PID in that record.
        own: The identity of the calling process; empty: nothing can be proven.
    """
    if not own or identity[:_HOST] != own[:_HOST] or len(identity) != len(own):
        return False
    if pid <= 0 or _may_exist(pid, identity[_HOST:]):
        return False
    # A fork of the process that computed ``own`` may be in another namespace.
    return identity_of_this_process() == own


def _may_exist(pid: int, start: str) -> bool:
    try:
        os.kill(pid, 0)  # checks only; unlike /proc, it is not affected by the mount option hidepid
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass  # another user's process, or a number that is no PID
    fields = _stat_of(pid)
    if fields is None:
        return True
    if _start_of(fields) != start:
        return False  # the PID was given to another process
    # A process whose main thread has ended is a zombie too, but its other threads run on.
    has_ended = fields[_STATE - _FIRST_FIELD] in _ENDED
    return not (has_ended and fields[_THREADS - _FIRST_FIELD] == b"1")


def _start_of(fields: list[bytes]) -> str:
    return f"{int(fields[_START_TIME - _FIRST_FIELD]):0{_START}x}"[-_START:]


def start_time_of(pid: int) -> int:
    """Clock ticks from the machine's boot to the start of ``pid``; 0 if it is dead or unknown.

    It is unknown on systems without Linux's ``/proc``, such as macOS.
    """
    fields = _stat_of(pid)
    if fields is None or fields[_STATE - _FIRST_FIELD] in _ENDED:
        return 0
    return int(fields[_START_TIME - _FIRST_FIELD])


def lives(pid: int, start_time: int) -> bool:
    """Whether the process that started at ``start_time`` is alive, running or stopped."""
    return start_time != 0 and start_time_of(pid) == start_time


def _stat_of(pid: int) -> list[bytes] | None:
    """The fields of ``/proc/<pid>/stat`` from the third on; None if they can't be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields if len(fields) > _START_TIME - _FIRST_FIELD else None
