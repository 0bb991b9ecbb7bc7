"""What a history proves: pure functions from records and writes to violations.

The lock promises exclusion "unless the holder stalls longer than ttl without noticing, the store
loses acknowledged writes, or an operator forces a release". The first is in what a section is
(tests.chaos.bodies); the second is in the history, as ``loss``: two bodies whose leases were
granted on different sides of a loss may overlap, and a job may run again whose success was recorded
before. Nothing else is excused there: fences rise, no stale write is accepted, and each loss is
reported by the process that had the lease.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations

from tests.chaos.beats import wrong_ticks
from tests.chaos.bodies import Body, bodies, by_key
from tests.chaos.celerys_own import BROKER_AWAY, OFF_BROKER, reason_for_crash, reason_for_hang
from tests.chaos.ends import Ends
from tests.chaos.history import span
from tests.chaos.jobs import UNIQUE_FOR, jobs_lost, vanished
from tests.chaos.losses import unreported_losses
from tests.chaos.newest import older_arguments
from tests.chaos.order import out_of_order
from tests.chaos.pauses import begun_while_paused
from tests.chaos.promises import PROMISES, Promise
from tests.chaos.queues import wrong_turns
from tests.chaos.rates import too_fast
from tests.chaos.resource import Write
from tests.chaos.restarts import Holder, holders, notified_late
from tests.chaos.verdict import Kind, Verdict, Violation
from tests.harness.journal import Record, events

_NOTED = {"key-left": Kind.KEY_LEFT, "never-ends": Kind.NEVER_ENDS, "broken": Kind.BROKEN}
# The claim of a message that no worker has taken, as drain.py writes it.
_PAUSED = re.compile(r": has pauses: (?P<names>.+)$")
_QUEUED = re.compile(r": held: q (?P<job>[^ +]+)\S* queued .*?(, for (?P<seconds>[\d.]+|ever))?$")
# What sets the time again for which the claim of a message stays.
_PROLONGS = ("publishing", "published", "taken")
#: Seconds: the ``unique_for`` of most claims, a campaign's steps of the server's clock and a delay.
_UNIQUE_FOR, _STEPS = 3600.0, 90.0
#: Seconds before a hang is written down in which its shutdown has begun.
_SHUTDOWN = 60.0
_CELERYS_OWN = {Kind.NEVER_ENDS: reason_for_hang, Kind.BROKEN: reason_for_crash}


def judge(
    records: Sequence[Record],
    writes: Mapping[str, Sequence[Write]],
    ttl: float,
    *,
    drained: bool = True,
    observer: float = 0.0,
    promise: Promise = PROMISES["redis"],
) -> Verdict:
    """Everything that can be said of a campaign.

    Args:
        records: Its history.
        writes: The decisions of each key's resource, in their order.
        ttl: The ttl of the leases, in seconds.
        drained: Whether every job had its time to end.
        observer: Seconds by which a slow observer delays the report of a loss.
        promise: That of its store.
    """
    found = bodies(records)
    concerned = holders(records, found)
    losses = events(records, "loss")
    excused: Counter[str] = Counter()
    violations = [
        *overlaps(found, losses if promise.forgets else [], _revoked(records, found, ttl), excused),
        *unreported_losses(records, found, ttl + observer, excused),
        *notified_late(concerned),
        *falling_fences(found),
        *(missing_fences(found) if promise.fences else ()),
        *stale_writes(writes),
        *jobs_lost(records, found, ttl, excused, drained=drained),
        *run_again(records, found, losses, excused, keeps_markers=promise.keeps_markers),
        *out_of_order(records, found, excused),
        *wrong_ticks(records),
        *older_arguments(records, found, excused),
        *wrong_turns(records, found, excused),
        *begun_while_paused(records, found, excused),
        *too_fast(records, found, excused),
        *answered_with_discarded(records, excused),
        *reported(records, vanished(records, found, ttl), excused),
    ]
    return Verdict(
        violations=tuple(sorted(violations, key=lambda violation: violation.at)),
        counts=_counts(records, found, concerned, writes),
        excused=dict(excused),
    )


def _revoked(
    records: Sequence[Record], found: Iterable[Body], ttl: float
) -> dict[str, list[tuple[float, float]]]:
    """From when to when etcd may have revoked leases although they were kept alive, by their runs.

    Until 3.4.30 and 3.5.12, a leader that has stood still has the leases revoked that it did not
    see renewed (etcd issue 15247). Such a body finds its lease gone at the next renewal, or the key
    taken by another one.
    """
    stalls = events(records, "stalled-leader")
    gone = {
        (record.task_id, record.fence): record.at
        for record in events(records, "lost")
        if record.data.get("reason") in ("gone", "replaced")
    }
    return {
        body.run: [
            (stall.at - ttl, stall.data["until"] + ttl)
            for stall in stalls
            if body.begin <= stall.data["until"] and stall.at - ttl <= lost_at
        ]
        for body in found
        if (lost_at := gone.get((body.lease, body.fence))) is not None
    }


def overlaps(
    found: Iterable[Body],
    losses: Sequence[Record],
    revoked: Mapping[str, Sequence[tuple[float, float]]],
    excused: Counter[str],
) -> list[Violation]:
    """More bodies of one key with sections at the same time than may be; each group once."""
    violations = []
    for key, of_key in by_key(found).items():
        limit = min(body.limit for body in of_key)
        for group, begin, end in _at_once(of_key, limit + 1):
            if any(_straddle(*pair, losses) for pair in combinations(group, 2)):
                excused["overlaps across a loss of the store"] += 1
                continue
            times = revoked.get(min(group, key=lambda body: body.begin).run, ())
            if any(earliest <= begin <= latest for earliest, latest in times):
                excused[
                    "overlaps after etcd revoked a lease that was renewed (its issue 15247)"
                ] += 1
                continue
            together = "both" if limit == 1 else "all"
            violations.append(
                Violation(
                    kind=Kind.OVERLAP,
                    key=key,
                    at=begin,
                    runs=tuple(body.run for body in group),
                    text=(
                        f"{' and '.join(body.name for body in group)} {together} had the word of"
                        f" the lock for {key!r}, for {end - begin:.3f} s"
                    ),
                )
            )
    return violations


def _at_once(of_key: Iterable[Body], count: int) -> Iterator[tuple[tuple[Body, ...], float, float]]:
    """Groups of ``count`` bodies with sections at the same time, each once; from when to when."""
    sections = sorted(
        ((section, body) for body in of_key for section in body.sections),
        key=lambda pair: pair[0].begin,
    )
    seen: set[frozenset[str]] = set()
    open_: list[tuple[float, Body]] = []  # (end, body) of what may still go on
    for section, body in sections:
        open_ = [other for other in open_ if other[0] > section.begin]
        others = {other.run: (end, other) for end, other in open_ if other.run != body.run}
        for group in combinations(others.values(), count - 1):
            runs = frozenset({body.run, *(other.run for _, other in group)})
            if runs not in seen:
                seen.add(runs)
                end = min(section.end, *(end for end, _ in group))
                yield (*(other for _, other in group), body), section.begin, end
        open_.append((section.end, body))


def falling_fences(found: Iterable[Body]) -> list[Violation]:
    """Bodies whose fence is not above that of one which had begun before theirs was asked for."""
    violations = []
    for key, of_key in by_key(found).items():
        fenced = [body for body in of_key if body.fence is not None]  # by begin
        begins = [body.begin for body in fenced]
        highest: list[Body] = []  # of the first 1, 2, 3 ... bodies, the one with the highest fence
        for body in fenced:
            best = highest[-1] if highest else body
            highest.append(body if (body.fence or 0) > (best.fence or 0) else best)
        for body in fenced:
            count = bisect_left(begins, body.asked)
            if not count or highest[count - 1] is body:
                continue
            before = highest[count - 1]
            if (before.fence or 0) >= (body.fence or 0):
                text = f"{before.name} had begun when {body.name} asked for {key!r}"
                runs = (before.run, body.run)
                violations.append(
                    Violation(kind=Kind.FENCE, key=key, at=body.begin, runs=runs, text=text)
                )
    return violations


def missing_fences(found: Iterable[Body]) -> list[Violation]:
    """Bodies under this lock that have no fence."""
    return [
        Violation(kind=Kind.FENCE, key=body.key, at=body.begin, runs=(body.run,), text=body.name)
        for body in found
        if body.task.startswith("tests.chaos.app.") and body.limit == 1 and body.fence is None
    ]


def stale_writes(writes: Mapping[str, Sequence[Write]]) -> list[Violation]:
    """Writes that were accepted although the resource had seen a higher fence."""
    violations = []
    for key, of_key in writes.items():
        highest = 0
        for number, write in enumerate(of_key):
            if write.fence is None:
                continue
            if write.accepted and write.fence < highest:
                text = (
                    f"write {number} of {key!r} showed fence {write.fence} and was accepted after"
                    f" fence {highest}"
                )
                violations.append(
                    Violation(kind=Kind.STALE_WRITE, key=key, runs=(write.run,), text=text)
                )
            highest = max(highest, write.fence)
    return violations


def run_again(
    records: Sequence[Record],
    found: Iterable[Body],
    losses: Sequence[Record],
    excused: Counter[str],
    *,
    keeps_markers: bool = True,
) -> list[Violation]:
    """Bodies of late jobs whose lock was asked for after the job's success was recorded.

    It is recorded when the store has acknowledged the release of a body that succeeded and whose
    task ended as SUCCESS: from then on it has a done completion record. It must be recorded if the
    process has lived on and reached the store (see `ends`). (A body whose lease was past its
    deadline at the end writes the completion record in a request of its own. If that is given up,
    an event says that the job may run twice.)
    """
    of_job: dict[str, list[Body]] = defaultdict(list)
    for body in found:
        if body.late:
            of_job[body.job].append(body)
    recorded = _successes(records, of_job)
    not_marked = {(record.pid, record.task_id) for record in events(records, "not-marked")}
    violations = []
    for job, (at, first) in recorded.items():
        for body in of_job[job]:
            # An earlier attempt has a completion record of its own, and may not have written it.
            if body.asked <= at or body.run == first.run or body.attempt != first.attempt:
                continue
            lost_marker = not keeps_markers and any(
                at <= loss.at and loss.data["since"] <= body.asked for loss in losses
            )
            if lost_marker or _straddle(first, body, losses):
                excused["run again after a loss of the store"] += 1
                continue
            if (first.pid, job) in not_marked:
                excused["run again, as the store did not take the end (not-recorded)"] += 1
                continue
            text = f"{body.name} began, though {first.name} had done the job"
            runs = (first.run, body.run)
            violations.append(
                Violation(kind=Kind.RUN_AGAIN, key=body.key, at=body.begin, runs=runs, text=text)
            )
    return violations


def _successes(
    records: Sequence[Record], of_job: Mapping[str, Sequence[Body]]
) -> dict[str, tuple[float, Body]]:
    """When each late job's success was recorded, or must have been, and by which body."""
    ends = Ends(records)
    released: dict[tuple[int, str], float] = {}
    recorded: dict[str, tuple[float, Body]] = {}
    for record in records:
        of_this = (record.pid, record.task_id)
        if record.event == "taken":
            released.pop(of_this, None)
        elif record.event == "released":
            released[of_this] = record.at
        elif record.event == "left" and record.data.get("state") == "SUCCESS":
            at = released.get(of_this)
            if at is None:
                at = ends.known_at(*of_this, record.at)
            done = [
                body
                for body in of_job.get(record.task_id, ())
                if body.succeeded and body.pid == record.pid and body.end <= record.at
            ]
            if at is not None and done and done[-1].end <= at:
                recorded.setdefault(record.task_id, (at, done[-1]))
    return recorded


def reported(
    records: Iterable[Record], gone: Collection[str], excused: Counter[str]
) -> list[Violation]:
    """What the campaign itself wrote down: what was left after the drain, what had ended.

    Args:
        records: The history.
        gone: The jobs whose message vanished.
        excused: Counts what is excused.
    """
    records = list(records)
    lost_ends = {
        record.task_id
        for record in records
        if record.event in ("taken", "start", "left") and _is_lost(records, record.at, record.at)
    }
    freed, lost = _discards(records)
    lost_ends |= lost
    unfreed = {record.task_id for record in events(records, "discarded")} - freed.keys() - lost
    violations = []
    for record in records:
        if record.event not in _NOTED:
            continue
        kind, text = _NOTED[record.event], str(record.data.get("text", ""))
        reason = _CELERYS_OWN[kind](text) if kind in _CELERYS_OWN else ""
        if reason == BROKER_AWAY and not _was_off_broker(records, record.at):
            reason = ""
        claim = _QUEUED.search(text) if kind is Kind.KEY_LEFT else None
        paused = _PAUSED.search(text) if kind is Kind.KEY_LEFT else None
        if paused and all(_has_lost_end(records, name) for name in paused["names"].split()):
            reason = "ends of a pause that the store lost"
        elif claim and claim["job"] in gone and not _is_overdue(records, record, claim):
            reason = "claims of messages that vanished"
        elif claim and claim["job"] in lost_ends:
            reason = "claims whose end the store lost"
        elif claim and claim["job"] in unfreed:
            reason = "claims of messages whose worker died when it had discarded them"
        if reason:
            excused[reason] += 1
        else:
            violations.append(Violation(kind=kind, key=record.key, at=record.at, text=text))
    return violations


def _has_lost_end(records: Sequence[Record], paused: str) -> bool:
    """Whether the store may have lost the end of the last pause of a key or a scope."""
    ended = [
        record
        for record in events(records, "resumed")
        if paused == ":".join(filter(None, (str(record.data["scope"]), record.key)))
    ]
    return bool(ended) and _is_lost(records, ended[-1].data["since"], ended[-1].at)


def _was_off_broker(records: Sequence[Record], at: float) -> bool:
    return any(
        fault.at <= at <= fault.data["end"] + _SHUTDOWN
        for fault in events(records, "fault")
        if fault.data["name"] in OFF_BROKER
    )


def _is_overdue(records: Sequence[Record], left: Record, claim: re.Match[str]) -> bool:
    """Whether the claim of a message that vanished was prolonged by something unknown."""
    seconds = claim["seconds"]
    if seconds is None:
        return False  # its store says nothing of that
    mine = [r for r in records if r.task_id == claim["job"] and r.event in _PROLONGS]
    task = next(str(r.data["task"]) for r in mine if r.event == "published")
    unique_for = UNIQUE_FOR.get(task.rpartition(".")[2], _UNIQUE_FOR)
    return left.at + float(seconds.replace("ever", "inf")) > mine[-1].at + unique_for + _STEPS


def answered_with_discarded(
    records: Sequence[Record], excused: Counter[str]
) -> Iterator[Violation]:
    """Calls that were answered with a message whose claim its worker must have freed by then.

    A claim is freed when the message is discarded, which is repeated until the store answers (see
    `ends`). Then an equal call is published, and runs.
    """
    freed, lost = _discards(records)
    for call in events(records, "answered"):
        entered = call.data["entered"]
        if entered <= freed.get(call.task_id, entered):
            continue
        if call.task_id in lost:
            excused["answers with a discarded message whose end the store lost"] += 1
            continue
        late = entered - freed[call.task_id]
        text = f"{call.task_id} was discarded; its claim should have been free for {late:.3f} s"
        yield Violation(kind=Kind.DISCARDED, at=call.at, job=call.task_id, text=text)


def _discards(records: Sequence[Record]) -> tuple[dict[str, float], set[str]]:
    """When claims of discarded messages must be free, by job; and those whose end may be lost."""
    ends = Ends(records)
    freed: dict[str, float] = {}
    lost = set()
    for record in events(records, "discarded"):
        at = ends.known_at(record.pid, record.task_id, record.at)
        if at is not None:
            freed[record.task_id] = min(at, freed.get(record.task_id, at))
        if _is_lost(records, record.at, record.at if at is None else at):
            lost.add(record.task_id)
    return freed, lost


def _is_lost(records: Sequence[Record], since: float, until: float) -> bool:
    """Whether the store may have lost what was written at some time between these."""
    return any(
        loss.data.get("lost_from", span(loss)[0]) <= until and since <= loss.at
        for loss in events(records, "loss")
    )


def _straddle(first: Body, second: Body, losses: Iterable[Record]) -> bool:
    """Whether the two grants are on different sides of a loss, by their fences.

    Without fences by their times: each was granted between its request and its beginning.
    """
    if first.fence is None or second.fence is None:
        earlier, later = sorted((first, second), key=lambda body: body.begin)
        return any(earlier.asked <= loss.at and span(loss)[0] <= later.begin for loss in losses)
    lower, higher = sorted((first.fence, second.fence))
    return any(
        lower <= loss.data["fence_to"] and higher >= loss.data["fence_from"] for loss in losses
    )


def _counts(
    records: Sequence[Record],
    found: Sequence[Body],
    concerned: Sequence[Holder],
    writes: Mapping[str, Sequence[Write]],
) -> dict[str, int]:
    all_writes = [write for of_key in writes.values() for write in of_key]
    happened = Counter(record.event for record in records)
    return {
        "jobs published": len({r.task_id for r in events(records, "published")}),
        "messages published": happened["published"],
        "deliveries": happened["received"],
        "bodies": len(found),
        "critical sections": sum(1 for body in found if body.sections),
        "bodies at once, of which a limit permits two": sum(
            1
            for of_key in by_key(body for body in found if body.limit == 2).values()
            for _ in _at_once(of_key, 2)
        ),
        "guarded steps": sum(len(body.sections) for body in found),
        "bodies killed": sum(1 for body in found if not body.finished),
        "bodies that lost their lease": happened["lost"],
        "leases taken by a restart of the store": len(concerned),
        "calls cancelled": happened["cancelled"],
        "messages that were made to be discarded": happened["damaged"],
        "calls with newest arguments": happened["called"],
        "writes accepted": sum(1 for write in all_writes if write.accepted),
        "stale writes refused": sum(1 for write in all_writes if not write.accepted),
        "ticks": happened["tick"],
        "faults": happened["fault"],
    }
