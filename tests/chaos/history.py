"""What a campaign leaves behind: a journal per process, merged by the one clock of the host.

    publishing  a message is about to be sent; ``copy`` (attempt, and how often that was requeued)
    called      a call returned to its caller: ``call`` (its number), the job that does its work
    returned    a call for a queue returned to its caller, who had ``entered`` it then; whether it
                is ``placed``, or takes its place when a worker receives it
    unsent      such a call raised; ``known``, whether it is known that it has no place
    damaged     a call is about to be published whose message no worker runs
    answered    a call, made at ``entered``, was not published: the earlier call that it was
                answered with
    discarded   a worker's parent discards a message, and frees its claim next; ``reason``
    published   it was sent; ``task``. ``publishing``, just before it, has its ``copy``: the
                attempt, and how often that was requeued
    received    a worker's parent got a message; ``worker``, ``copy``
    traced      what the broker's file says of a job that does not end: the ``place`` of the newest
                copy of its message, and the ``steps`` that led there
    start       a body began: ``asked`` (when its lock was asked for, at the latest), ``worker``,
                ``task``, ``late`` (acknowledged late), ``attempt``,
                ``planned`` (seconds), ``lease`` (of a ``hold()``: its id, by which ``lost``,
                ``released`` and ``release-failed`` name it)
    check       the body asked whether it may go on, and it may: it trusts the lock from here to
                ``until``
    step        the guarded step that the check covers is over: ``sure_until`` (the body asked again
                at this time and it may; else None), ``accepted`` (by the resource)
    end         the body ended, ``error`` names what left it
    lost        a loss was reported, by the signal lease_lost; ``reason``, and of which grant: its
                ``fence``
    released    a release was reported, by the signal lease_released; ``fence``
    release-failed
                a release that was given up was reported in the log; ``fence``, ``error``
    revoked     the campaign has asked the workers to revoke a call
    refused     the lock raised LockConflict, whether or not Celery could store that
    parked      its key was paused, or above its rate, and the store keeps its message from now on
    pause       a key (``key``; empty: all) of ``scope`` was paused, from ``at`` to ``until``
    resumed     that pause was ended; ``since``: when this was first asked for
    skip        the call ended without having run, because its key was held
    taken, left the task was entered by a pool process (``worker``, ``copy``; whether its release is
                ``observed``); ended, with its
                ``state`` (None: by SystemExit or the like, also after its body had returned)
    tick        a beat sent a tick: ``due``, ``beat`` (its process)
    death       a process was killed here, or had died before
    stopped, continued
                a process was stopped (SIGSTOP) from the one to the other
    fault       something was broken from ``at`` to ``end``: ``name``, ``target``
    loss        the store lost what it had acknowledged, or its leases: fences up to ``fence_to``
                were granted before, from ``fence_from`` on afterwards; ``lost_from`` (what
                was written from then on is lost); of a store with several members, ``since`` (from
                then on two of them may have granted)
    stalled-leader
                a former leader of etcd went on after it had stood still, and another led: leases
                that are held may have been revoked, until ``until``
    emptied     the store has just answered for the first time since its restart without data;
                ``killed`` (when)
    late        the machine kept a thread that was ready to run waiting for ``seconds`` in all, from
                ``at`` to ``until``
    cut-off     what the broker sent to a host may be lost, between ``at`` and ``until``; ``worker``
    down        a worker (or the broker) was ended on purpose between ``at`` and ``until``:
                ``worker``, ``how``
    broken      a worker ended that no fault had ended: ``worker``, ``until``, ``text``; or a fault
                could not be done
    never-ends  what came to no end: ``text``
    key-left    what was left in the store after the drain: ``key``, ``text``

Times are CLOCK_MONOTONIC, seconds.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tests.harness.journal import Journal, Record

#: The environment variable by which processes find the directory of their campaign.
VARIABLE = "CHAOS_HISTORY"
#: The environment variable by which processes of a host find the number of its boot, from 1 on.
BOOT = "CHAOS_BOOT"
#: PIDs are unique in one boot of one host only. The number of a process, which the records have as
#: its pid, is its PID plus this many for each boot; more than Linux has PIDs.
PIDS_PER_BOOT = 10_000_000


class History:
    """The journals of one campaign.

    Args:
        directory: Where they are; each process has a file of its own there, so that a process that
            is stopped in the midst of a line holds up no other.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._offsets: dict[Path, int] = {}
        self._known: list[Record] = []

    @classmethod
    def from_env(cls) -> History:
        """The history of the campaign that started this process."""
        return cls(Path(os.environ[VARIABLE]))

    def mine(self) -> Journal:
        """The journal of this process; not the one of a parent that was forked."""
        return _OwnJournal(self.directory / f"{own_number()}.jsonl")

    def write(self, event: str, **fields: Any) -> None:
        """Append one record; fields as of `Journal.write`."""
        self.mine().write(event, **fields)

    def news(self) -> list[Record]:
        """The records that were written since the last call of this or of `records`, by time."""
        new: list[Record] = []
        for path in self.directory.glob("*.jsonl"):
            offset = self._offsets.get(path, 0)
            # Looked at first: most files of a long campaign are those of dead processes.
            if path.stat().st_size > offset:
                self._offsets[path], found = Journal(path).records_from(offset)
                new += found
        self._known += new
        return sorted(new, key=_time)

    def records(self) -> list[Record]:
        """All records until now, by time: with each record everything that led to it.

        The files are read one after the other while processes write to them. Without the cut, the
        second of two bodies could be there, and not the end of the first, which was written before.
        """
        moment = time.monotonic()
        self.news()
        self._known.sort(key=_time)
        return [record for record in self._known if record.at <= moment]


def span(loss: Record) -> tuple[float, float]:
    """From when to when the store lost what it acknowledged; two servers may have granted then."""
    return loss.data.get("since", loss.at), loss.at


def own_number() -> int:
    """The number of this process, unique over all hosts and their restarts."""
    return int(os.environ.get(BOOT, "0")) * PIDS_PER_BOOT + os.getpid()


class _OwnJournal(Journal):
    """Names its process by its number."""

    def write(self, event: str, *, pid: int | None = None, **fields: Any) -> None:
        super().write(event, pid=own_number() if pid is None else pid, **fields)


def _time(record: Record) -> float:
    return record.at
