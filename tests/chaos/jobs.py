"""What became of each job: pure functions.

A job is lost if it was published and neither succeeded nor ended in a way that its task promises:

* skipped, and no body of it had begun by then: that is its result, and the message is acknowledged.
  (Another delivery of the same message may begin later and die with its process: to kombu's Redis
  transport it is the message that the first one has acknowledged. Nor does a body count whose
  message had been requeued before it asked: its copy is the job now, and it left before the body
  began);
* refused with LockConflict, and no body of it had begun by then, as with a skip (the FAILURE may be
  nowhere to be read, if the result backend is away);
* revoked: a worker discards its message, or ends its body, and does not run it again;
* cancelled by a newer call: one of `latest` that was published later (or earlier, if the server's
  clock was stepped);
* FAILURE with LeaseLost, and its bodies met a fault: one for ``on_lost="fail"``, and one for
  ``"continue"`` whose own check raised it; four for ``"retry"``. A lock that loses leases
  while nothing is broken gets no such excuse;
* acknowledged early, which the broker's own file shows (`broker_log`), and in the hands of a worker
  when that worker or its child was killed;
* the newest copy of its message was popped from its queue, and no worker noted it: so says that
  file, and broker, worker or the way between them ended since it was sent. Kombu's Redis transport
  pops a message and notes it in two steps. Nothing of the lock runs between them. A call in the
  queue of a key has no such excuse: it is in the store, and is published again. A call with a
  countdown gets its place when a worker takes it up;
* the store has lost the call, which waited in the queue of its key: it has lost all that it had, or
  what it acknowledged at that time;
* discarded, if its message was made so that no worker runs it. A worker that is killed between the
  acknowledgement and its note of that takes the note along.

Each of these but success, skip and a newer call is counted, so that a report shows how often it
was needed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from tests.chaos.bodies import Body
from tests.chaos.broker_log import Place
from tests.chaos.order import CallOrder
from tests.chaos.queues import QUEUED
from tests.chaos.verdict import Kind, Violation
from tests.harness.journal import Record, events

#: Tasks whose message is acknowledged before the body.
EARLY = frozenset({"early", "plain", "queued_early"})
#: Seconds for which the claim of a message that vanished stays, by task; else an hour.
UNIQUE_FOR = {"claimed": 7200.0}
#: How many bodies of a job lose their lease before it is given up, by task; else four.
_LOSSES = {"plain": 1, "heedless": 1, "queued_early": 1}
_MOST_LOSSES = 4
#: Seconds in which a killed process on a busy machine still has its connections, and the broker
#: hands it a message that no process will note.
_SLOW_DEATH = 0.5
#: Seconds after which a replica has what the master has acknowledged, on a busy machine.
_LAG = 0.5
_SKIPPED = "jobs skipped, of which another delivery of that message was killed"
_VANISHED = "messages that vanished between broker and worker when one was killed"


@dataclass(slots=True)
class _Job:
    task: str
    records: list[Record]
    bodies: list[Body]
    #: What the broker's file says of it.
    trace: Record | None = None

    def last(self, event: str) -> float:
        return max((record.at for record in events(self.records, event)), default=0.0)

    def newest_sent_at(self) -> float:
        """When the message was sent that replaced those before it."""
        sent = events(self.records, "publishing")
        return max(sent, key=lambda record: record.data["copy"]).at

    def is_at(self, place: Place) -> bool:
        """Whether the broker's file says so, and nothing was seen of it afterwards."""
        trace = self.trace
        if trace is None or trace.data["place"] != place:
            return False
        return all(record.at <= trace.at for record in self.records)

    def last_sign_of_life(self) -> Record:
        """The last record, but for the end of a copy that another had replaced by then."""
        newest = max(record.data["copy"] for record in self.records if "copy" in record.data)
        return max(
            (r for r in self.records if r.event != "left" or self._copy_of(r.pid, r.at) == newest),
            key=lambda record: record.at,
        )

    def ended_before_it_began(self, event: str) -> bool:
        """Whether it was skipped or refused (``event``), and no body of it had begun by then."""
        return any(
            all(body.begin > end.at or self._replaced(body, end) for body in self.bodies)
            for end in events(self.records, event)
        )

    def _replaced(self, body: Body, end: Record) -> bool:
        """Whether the copy that ended so had left before ``body`` of an older one began."""
        ended = self._copy_of(end.pid, end.at)
        if ended <= self._copy_of(body.pid, body.begin):
            return False
        return any(
            record.data["copy"] == ended and record.at < body.asked
            for record in events(self.records, "publishing")
        )

    def _copy_of(self, pid: int, at: float) -> list[int]:
        """Which copy of its message a process had at that time."""
        taken = (r for r in events(self.records, "taken") if r.pid == pid and r.at <= at)
        newest: Record = max(taken, key=lambda record: record.at)
        copy: list[int] = newest.data["copy"]
        return copy

    def may_have_a_place(self) -> bool:
        """Whether it was placed in the queue of its key when it was called, or by a worker."""
        placed = [record.data["placed"] for record in events(self.records, "returned")]
        return placed != [False] or bool(events(self.records, "taken"))

    def failed_for_good(self) -> bool:
        """Whether its last sign of life is that it ended as FAILURE."""
        last = max(self.records, key=lambda record: record.at)
        return last.event == "left" and last.data.get("state") == "FAILURE"

    def failed_with(self, error: str) -> bool:
        return any(
            record.data.get("state") == "FAILURE" and record.data.get("error") == error
            for record in events(self.records, "left")
        )


def under_way(records: Sequence[Record], found: Iterable[Body], ttl: float) -> set[str]:
    """Jobs that may still come to an end."""
    return {
        name for name, job in _open(records, found, ttl, Counter()) if not job.failed_for_good()
    }


def vanished(records: Sequence[Record], found: Iterable[Body], ttl: float) -> set[str]:
    """Jobs whose message vanished; their claims stay for ``unique_for``."""
    return {name for name, _, reason in _unfinished(records, found, ttl) if reason == _VANISHED}


def jobs_lost(
    records: Sequence[Record],
    found: Iterable[Body],
    ttl: float,
    excused: Counter[str],
    *,
    drained: bool = True,
) -> list[Violation]:
    """The jobs that were lost, by the time of their last sign of life.

    Args:
        records: The history.
        found: The bodies in it.
        ttl: The ttl of the leases, in seconds.
        excused: Counts what is excused.
        drained: Whether every job had its time to end. If not, only those are lost that have failed
            for good.
    """
    lost = []
    for name, job in _open(records, found, ttl, excused):
        if not (drained or job.failed_for_good()):
            continue
        last = max(record.at for record in job.records)
        did = Counter(record.event for record in job.records)
        lost.append(
            Violation(
                kind=Kind.JOB_LOST,
                job=name,
                key=job.bodies[0].key if job.bodies else "",
                at=last,
                runs=tuple(body.run for body in job.bodies),
                text=f"{job.task}[{name}] did not succeed: {dict(did)}",
            )
        )
    return sorted(lost, key=lambda each: each.at)


def _jobs(records: Iterable[Record], found: Iterable[Body]) -> dict[str, _Job]:
    jobs: dict[str, _Job] = {}
    for record in records:
        if record.event == "published" and record.task_id not in jobs:
            name = str(record.data.get("task", "")).rpartition(".")[2]
            jobs[record.task_id] = _Job(name, [], [])
    for record in records:
        if record.task_id in jobs:
            if record.event == "traced":
                jobs[record.task_id].trace = record
            else:
                jobs[record.task_id].records.append(record)
    for body in found:
        if body.job in jobs:
            jobs[body.job].bodies.append(body)
    return jobs


def _open(
    records: Sequence[Record], found: Iterable[Body], ttl: float, excused: Counter[str]
) -> Iterable[tuple[str, _Job]]:
    for name, job, reason in _unfinished(records, found, ttl):
        if reason:
            excused[reason] += 1
        else:
            yield name, job


def _unfinished(
    records: Sequence[Record], found: Iterable[Body], ttl: float
) -> Iterable[tuple[str, _Job, str]]:
    """The jobs without a success or a promised end, each with its excuse; empty: none."""
    ends, order = _Ends(records), CallOrder(records)
    faults, losses = events(records, "fault"), events(records, "loss")
    for name, job in _jobs(records, found).items():
        if any(body.succeeded for body in job.bodies):
            continue
        if order.is_cancelled(job.records):
            continue
        if job.ended_before_it_began("skip"):
            if job.bodies:
                yield name, job, _SKIPPED
            continue
        if events(job.records, "unsent"):
            continue
        if events(job.records, "discarded") and events(job.records, "damaged"):
            continue
        reason = _excuse(job, ends, faults, losses, ttl)
        if not reason and events(job.records, "revoked"):
            reason = "jobs revoked"
        yield name, job, reason


def _excuse(
    job: _Job, ends: _Ends, faults: Sequence[Record], losses: Sequence[Record], ttl: float
) -> str:
    if job.ended_before_it_began("refused"):
        return "jobs refused before they began (LockConflict)"
    if job.failed_with("LeaseLost"):
        met = [body for body in job.bodies if _met_a_fault(body, faults, ttl)]
        if len(met) >= _LOSSES.get(job.task, _MOST_LOSSES):
            return "jobs given up after their leases were lost to faults (LeaseLost)"
    if job.task in EARLY and job.is_at(Place.ACKNOWLEDGED) and ends.took_with_it(job):
        return "jobs acknowledged early that died with their process"
    is_queued = job.task in QUEUED and job.may_have_a_place()
    if is_queued or events(job.records, "parked"):
        is_gone = any(_takes(loss, job.last_sign_of_life().at) for loss in losses)
        if is_gone:
            return "calls that waited in a store that has lost its data"
        if is_queued:
            return ""
    if events(job.records, "damaged") and job.is_at(Place.ACKNOWLEDGED):
        sent = job.newest_sent_at()
        if ends.any_since(sent, until=sent + ttl):
            return "messages that a worker had acknowledged, to discard them, when it was killed"
    if job.is_at(Place.POPPED) and ends.any_since(job.newest_sent_at()):
        return _VANISHED
    return ""


def _takes(loss: Record, written: float) -> bool:
    """Whether a loss may have taken what the store had, and was changed last at that time."""
    # Without a beginning: all that the store had.
    since = loss.data.get("lost_from", loss.data.get("since", written))
    return bool(since - _LAG <= written <= loss.at)


def _met_a_fault(body: Body, faults: Iterable[Record], ttl: float) -> bool:
    # What a fault does to a lease shows up to a ttl later.
    return any(
        fault.at <= body.end and fault.data["end"] + 2 * ttl >= body.asked for fault in faults
    )


class _Ends:
    """When processes were killed, shut down or cut off, at the latest."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._of_worker: dict[str, list[float]] = defaultdict(list)
        self._of_process = {record.pid: record.at for record in events(records, "death")}
        #: The ends of what may have had a message that had left its queue: a worker, the broker,
        #: the way between them.
        self._of_carriers: list[float] = []
        parents: dict[str, set[int]] = defaultdict(set)
        for record in events(records, "received"):
            parents[str(record.data["worker"])].add(record.pid)
        for record in records:
            worker = str(record.data.get("worker", ""))
            until = max(record.at, record.data.get("until", record.at))
            if record.event == "cut-off":
                self._of_carriers.append(until)
            elif record.event in ("death", "down", "broken"):
                self._of_worker[worker].append(until)
                # A pool process reads no messages from the broker.
                is_parent = not parents[worker] or record.pid in parents[worker]
                if record.event != "death" or is_parent:
                    self._of_carriers.append(until)

    def took_with_it(self, job: _Job) -> bool:
        """Whether a worker that had the job was hurt after the job's last sign of life.

        Or the process of a body of it was killed, and another delivery of its message was dropped
        later.
        """
        if any(
            not body.finished and self._of_process.get(body.pid, 0.0) >= body.begin
            for body in job.bodies
        ):
            return True
        last = job.last_sign_of_life()
        if last.event == "left" and last.data.get("state") is not None:
            return False  # the task had ended, so the message was in no worker's hands any more
        workers = {record.data.get("worker") for record in job.records} - {None}
        return any(end >= last.at for worker in workers for end in self._of_worker[str(worker)])

    def any_since(self, sent: float, until: float = inf) -> bool:
        """Whether something ended until then that may have had a message sent at that time."""
        # The kernel may take a while to end a process.
        return any(sent <= end + _SLOW_DEATH <= until + _SLOW_DEATH for end in self._of_carriers)
