"""The checker finds each kind of violation in histories made by hand, and none in sound ones.

What excuses something is among the sound ones, and what is almost an excuse among the broken ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import celery_singleton_lock
from tests.chaos.bodies import Section, bodies
from tests.chaos.broker_log import Place
from tests.chaos.celerys_own import OFF_BROKER
from tests.chaos.checker import judge
from tests.chaos.promises import PROMISES, Promise
from tests.chaos.resource import Write
from tests.chaos.schedule import SORTS
from tests.chaos.stacks import HEAD
from tests.chaos.verdict import Kind, Verdict
from tests.harness.journal import Record

TTL = 2.0
APP = "tests.chaos.app"
REDIS = replace(PROMISES["redis"], fences=False)
ETCD = PROMISES["etcd"]


class Story:
    """A history made by hand; each call adds records. Times are seconds."""

    def __init__(self, promise: Promise = REDIS) -> None:
        self.records: list[Record] = []
        self.writes: list[Write] = []
        self.drained = True
        self.promise = promise

    def add(self, event: str, at: float, *, pid: int = 1, **fields: Any) -> Story:
        named = {
            name: fields.pop(name) for name in ("run", "task_id", "key", "fence") & fields.keys()
        }
        self.records.append(Record(event=event, at=at, pid=pid, data=fields, **named))
        return self

    def published(
        self, job: str = "j", task: str = "late", at: float = 0.0, copy: Sequence[int] = (0, 0)
    ) -> Story:
        self.add("publishing", at, task_id=job, copy=list(copy))
        return self.add("published", at, task_id=job, task=f"{APP}.{task}")

    def received(self, job: str, at: float) -> Story:
        return self.add("received", at, task_id=job, worker="w", copy=[0, 0])

    def taken(self, at: float, copy: Sequence[int] = (0, 0), pid: int = 1, job: str = "j") -> Story:
        return self.add("taken", at, task_id=job, worker="w", copy=list(copy), pid=pid)

    def body(
        self,
        run: str,
        begin: float,
        end: float | None,
        *,
        fence: int | None = None,
        job: str = "",
        pid: int = 1,
        until: float = 1e9,
        sure: bool = True,
        error: str | None = None,
        late: bool = True,
        asked: float | None = None,
        attempt: int = 0,
        task: str = "late",
        call: int = 0,
        lease: str = "",
    ) -> Story:
        """A body of one step, which takes all of it; ``end`` None: it doesn't end."""
        job = job or f"job-{run}"
        facts = {
            "asked": begin if asked is None else asked,
            "worker": "w-1@localhost",
            "task": f"{APP}.{task}",
            "late": late,
            "attempt": attempt,
            "call": call,
        }
        if lease:
            facts["lease"] = lease
        self.taken(begin, (attempt, 0), pid, job)
        self.add("start", begin, run=run, task_id=job, key="k", fence=fence, pid=pid, **facts)
        self.add("check", begin, run=run, key="k", until=until, pid=pid)
        if end is not None:
            sure_until = end if sure else None
            self.add("step", end, run=run, key="k", sure_until=sure_until, accepted=True, pid=pid)
            self.add("end", end, run=run, task_id=job, key="k", error=error, pid=pid)
        return self

    def killed(self, at: float, run: str = "a", **options: Any) -> Story:
        """A body of the job that dies with its process a second after it began."""
        return self.body(run, at, None, job="j", **options).add("death", at + 1, worker="w")

    def left(self, at: float, state: str | None, error: str | None = None) -> Story:
        return self.add("left", at, task_id="j", state=state, error=error)

    def skipped(self, at: float, copy: Sequence[int] = (0, 0)) -> Story:
        return self.taken(at, copy, pid=9).add("skip", at, task_id="j", pid=9)

    def traced(self, place: Place = Place.POPPED) -> Story:
        """The broker's file is read when the job does not end."""
        return self.add("traced", 9, task_id="j", place=str(place), steps="sent, popped")

    def lost(self, at: float, **fields: Any) -> Story:
        """The store loses data."""
        return self.add("loss", at, **{"fence_from": 5, "fence_to": 6, **fields})

    def wrote(self, *fences: int, accepted: bool = True) -> Story:
        self.writes += [Write(run="a", fence=one, accepted=True, highest=0) for one in fences[:-1]]
        self.writes.append(Write(run="a", fence=fences[-1], accepted=accepted, highest=0))
        return self

    def fault(self, at: float, end: float, name: str = "cut", target: str = "w") -> Story:
        return self.add("fault", at, end=end, name=name, target=target, pid=8)

    def before_the_drain(self) -> Story:
        self.drained = False
        return self

    def judge(self) -> Verdict:
        records = sorted(self.records, key=lambda record: record.at)
        return judge(records, {"k": self.writes}, TTL, drained=self.drained, promise=self.promise)


def two_bodies(*, error: str | None = None, **first: Any) -> Story:
    """Body b begins while a, with the lower fence, is not over; a never asks for its lease."""
    story = Story().body("a", 1, 6, fence=10, until=1.5, sure=False, error=error, **first)
    return story.body("b", 2, 3, fence=20, pid=2).add("skip", 60, task_id="other", pid=9)


def died_at(at: float) -> Story:
    """The same, but the process of a dies."""
    story = Story().body("a", 1, None, fence=10, until=1.5).body("b", 2, 3, fence=20, pid=2)
    return story.add("death", at).add("skip", 60, task_id="other", pid=9)


def told(*reports: str, fence: int = 10) -> Story:
    story = two_bodies()
    for report in reports:
        story.add(report, 6.1, task_id="job-a", fence=fence)
    return story


def limited(*times: tuple[float, float]) -> Story:
    """Bodies of a task with a limit of two, each from when to when."""
    story = Story()
    for pid, (begin, end) in enumerate(times):
        story.body("abcd"[pid], begin, end, pid=pid, task="limited")
    return story


def restarted(
    end: float, *, notified: bool = True, task: str = "lasting", begin: float = 1
) -> Story:
    """The store is killed at 3, answers at 5; the body ends at ``end``, by its loss if notified."""
    error = "LeaseInterrupt" if notified else None
    story = Story().body("a", begin, end, fence=10, task=task, sure=not notified, error=error)
    return story.add("emptied", 5, killed=3.0).add("skip", 60, task_id="other", pid=9)


def revoked_by_etcd(reason: str = "gone", stalled: float = 1.4, told: float = 2.1) -> Story:
    """A former leader of etcd goes on, and has a lease revoked; the next body begins."""
    story = Story(ETCD).body("a", 1, 2, fence=5, error="LeaseInterrupt", lease="x")
    story.add("lost", told, task_id="x", fence=5, reason=reason)
    story.body("b", 1.5, 1.8, fence=6, task="early")
    return story.add("stalled-leader", stalled, until=stalled + 0.3)


def failed_over(*, since: float, at: float) -> Story:
    """Two servers grant leases in a failover, and the older one executes a release."""
    story = Story().body("a", 1, 5, fence=100).body("b", 2, 3, fence=200, pid=2)
    story.lost(at, since=since, fence_from=90, fence_to=150)
    story.add("released", 5.1, task_id="job-a", fence=100)
    return story.add("lost", 2.5, task_id="job-b", fence=200)


def gives_up(times: int, fault: float = 0) -> Story:
    """A job fails when it has lost so many leases; something is broken for nine seconds."""
    story = Story().published().fault(fault, fault + 9)
    for number in range(times):
        story.body(f"a{number}", 1 + number, 1.5 + number, job="j", error="LeaseInterrupt")
    return story.left(9, "FAILURE", "LeaseLost")


def conflict(story: Story) -> Story:
    return story.add("refused", 4, task_id="j").left(5, "FAILURE", "LockConflict")


def requeued(copied: float) -> Story:
    """The message is taken up, requeued, delivered once more and killed; its copy is skipped."""
    story = Story().published(task="late_skip").taken(1, pid=2)
    story.published(task="late_skip", at=copied, copy=(0, 1))
    return story.killed(3).skipped(5, copy=(0, 1))


def hold_was_lost() -> Story:
    story = two_bodies(task="held", lease="h", error="LeaseLost", job="j").published(task="held")
    return story.add("lost", 6.1, task_id="h", fence=10).left(6.2, "RETRY")


def in_the_midst(task: str) -> Story:
    return Story().published(task=task).received("j", 0.5).killed(1)


def received_early(died: float) -> Story:
    """An early job that never began; its worker died."""
    story = Story().published(task="early").received("j", 0.5).traced(Place.ACKNOWLEDGED)
    return story.add("death", died, worker="w")


def sent(task: str = "late") -> Story:
    """A message that no worker received, and the end of a worker after it was sent."""
    return Story().published(task=task, at=2).add("death", 2.1, pid=7, worker="w")


def placed(is_placed: bool = True) -> Story:
    return sent("queued").add("returned", 2.2, task_id="j", entered=1.9, placed=is_placed)


def discarded() -> Story:
    """A worker's parent discards the message, and works on."""
    story = Story().published(task="claimed").add("damaged", 0, task_id="j")
    story.add("discarded", 1, task_id="j", pid=7)
    return story.add("received", 40, task_id="i", pid=7, worker="w", copy=[0, 0])


def acknowledged(died: float) -> Story:
    """A damaged message is acknowledged; its worker dies before it has noted that."""
    story = Story().published(task="claimed").add("damaged", 0, task_id="j")
    story.add("publishing", 0.1, task_id="j", copy=[0, 0]).traced(Place.ACKNOWLEDGED)
    story.add("received", 0.2, task_id="i", pid=7, worker="w", copy=[0, 0])
    return story.add("death", died, pid=7, worker="w")


def answered(story: Story, at: float) -> Story:
    return story.add("answered", at, task_id="j", entered=at - 0.1)


PAUSED = "csl:{x}:shard: has pauses: s:a"
CLAIM = "csl:{x}:claim|newest|k: held: q j+b4 queued {}"


def key_left(story: Story, text: str = CLAIM, at: float = 50) -> Story:
    return story.add("key-left", at, text=text)


def resumed(at: float) -> Story:
    return Story().add("resumed", at, key="a", scope="s", since=at - 0.1)


def done(**options: Any) -> Story:
    """A job that succeeded, with all that follows."""
    task = "late" if options.get("late", True) else "early"
    story = Story().published(task=task).body("a", 1, 2, job="j", **options)
    return story.add("released", 2.1, task_id="j").left(2.2, "SUCCESS")


def again(story: Story, begin: float = 5, **options: Any) -> Story:
    return story.body("again", begin, begin + 1, job="j", **{"pid": 8, **options})


def unacknowledged(lived_until: float) -> Story:
    """A job that is done while a fault lies between its process and the store, until 4."""
    story = Story().published().body("a", 1, 2, job="j").fault(1.5, 4, "freeze-server")
    return story.left(2.2, "SUCCESS").body("other", lived_until - 0.1, lived_until)


def completed(store: str) -> Story:
    """A job that runs again when the store has lost its completion record."""
    story = done(fence=1)
    story.promise = PROMISES[store]
    return again(story.lost(3.5, since=3, fence_from=50, fence_to=60), fence=2)


def cancelled(by_at: float) -> Story:
    story = Story().published("j", "latest", at=1).published("new", "latest", at=by_at)
    story.body("n", 3, 4, job="new", task="latest")
    return story.add("cancelled", 2.5, task_id="j", by="new")


def older_last(task: str = "latest", asked: float = 5) -> Story:
    story = Story().published("old", task, at=1).published("new", task, at=2)
    story.body("n", 3, 4, job="new", task=task)
    return story.body("o", 5, 6, job="old", task=task, asked=asked)


def in_queue(order: str, *, task: str = "queued", placed: bool = True, second: float = 2) -> Story:
    """The calls `a` and `b`, whose bodies begin in the order given."""
    story = Story()
    for job, entered in (("a", 1.0), ("b", second)):
        story.published(job, task, at=entered)
        story.add("returned", entered + 0.5, task_id=job, entered=entered, placed=placed)
    for begin, job in zip((3, 5), order, strict=True):
        story.body(str(begin), begin, begin + 1, job=job, task=task)
    return story


def several_in_queue(sequence: int) -> Story:
    """The older call of two that may run at a time begins later; its message was requeued."""
    story = in_queue("ba", task="queued_several")
    return story.add("publishing", 2, task_id="a", copy=[0, sequence])


def at_rate(*begins: float) -> Story:
    """Calls of a key that begin then; two may at once, and then four a second."""
    story = Story()
    for number, begin in enumerate(begins):
        story.published(f"{number}", "rated", at=begin - 0.5)
        story.add("returned", begin - 0.4, task_id=f"{number}", entered=begin - 0.5, placed=True)
        story.body(f"{number}", begin, begin + 0.05, job=f"{number}", task="rated", asked=begin)
    return story


def paused(key: str, scope: str, *, until: float = 4, asked: float = 2.5) -> Story:
    """A body that begins at 3, and a pause from 2 on."""
    story = Story().body("a", 3, 5, asked=asked)
    return story.add("pause", 2, key=key, scope=scope, until=until)


def refused(known: bool) -> Story:
    story = Story().published("a", "queued", at=1).add("unsent", 2, task_id="a", known=known)
    return story.body("1", 3, 4, job="a", task="queued")


def answers_two(call: int, asked: float = 4) -> Story:
    story = Story().published(task="newest", at=1)
    story.add("called", 1.5, task_id="j", call=1).add("called", 3, task_id="j", call=2)
    return story.body("a", 4, 5, job="j", task="newest", call=call, asked=asked)


def ticking(*moments: float) -> Story:
    """Ticks that were sent when they were due."""
    story = Story()
    for moment in moments:
        story.add("tick", moment + 0.01, due=moment, beat=1)
    return story


OURS = str(Path(celery_singleton_lock.__file__).parent / "worker/request.py")
WAITS = "x/process.py, in join\n  File x/popen_fork.py, in wait"
COUNTED = "billiard/pool.py in _ensure_messages_consumed"


def hangs(main: str, child: str = "") -> Story:
    """The stacks of a parent and its child, which a campaign wrote down of a shutdown."""
    dumps = f"{HEAD}1:\n{HEAD}2:\nThread 1:\n  File {child}\n  File x.py in workloop\n"
    stacks = f"MainThread\n{main}\n  File celery/utils/debug.py, in cry\n"
    return Story().add("never-ends", 45, text=stacks + (dumps if child else ""))


def cold(interrupted: str = "celery/x.py, in _recv_message", child: str = COUNTED) -> Story:
    handler = f"  File x.py, in _handle_request\n  File x.py, in on_cold_shutdown\n  File {WAITS}"
    return hangs(f"  File {interrupted}\n{handler}", child)


def warm(child: str, waits: str = WAITS) -> Story:
    return hangs(f"  File x, in _shutdown\n  File x, in on_stop\n  File {waits}", child)


def unreachable(fault: str = "host-unplugged", asks: str = "/x/kombu/transport/redis.py") -> Story:
    waits = '  File "/x/redis/connection.py", line 1601, in _connect\n    sock.connect()'
    story = hangs(f'  File x, in _shutdown\n  File "{asks}", line 5, in ack\n{waits}')
    return story.fault(1, 4, fault)


SOUND = {
    "a paused call that the store has lost": (
        Story().published("j").taken(1).add("parked", 1.1, task_id="j").add("loss", 2)
    ),
    "another key was paused": paused("k2", "chaos"),
    "at its rate": at_rate(1, 1.1, 1.26, 1.51, 3, 3.1),
    "faster than its rate across a loss": at_rate(1, 1.1, 1.2).lost(1.15),
    "faster than its rate, as the clock was stepped": at_rate(1, 1.1, 1.2).fault(
        1.15, 1.18, name="clock-step"
    ),
    "another scope was paused": paused("", "chaos-queue"),
    "it had asked before the pause": paused("k", "chaos", asked=1.9),
    "the pause had ended": paused("k", "chaos", until=2.9),
    "the store has lost the pause": paused("k", "chaos").add("loss", 2.5),
    # Exclusion.
    "bodies one after the other": Story().body("a", 1, 3).body("b", 3, 4),
    "beyond its deadline without an answer": (
        Story().body("a", 1, 9, until=3, sure=False).body("b", 3.1, 4)
    ),
    "as many at once as the limit permits": limited((1, 9), (2, 5), (5, 8), (8.5, 9)),
    "a third body across a loss": limited((1, 9), (2, 9), (4, 5)).lost(3.5),
    "revoked by etcd": revoked_by_etcd(),
    "revoked by etcd, and taken": revoked_by_etcd(reason="replaced"),
    "revoked by etcd, as its release found": revoked_by_etcd(reason="replaced", told=3.8),
    # Losses.
    "lost and told": told("lost"),
    "the store did not answer the release": told("release-failed", "release-failed"),
    "told, and the release failed": told("lost", "release-failed"),
    "died within a ttl of its loss": died_at(2 + TTL),
    "stood still until its death": died_at(9).add("stopped", 1.8).add("continued", 8),
    "a successor after the end": (
        Story()
        .body("a", 1, 2, fence=10)
        .add("released", 2.2, task_id="job-a", fence=10)
        .body("b", 2.1, 3, fence=20, pid=2)
    ),
    "a hold, told by its lease": (
        two_bodies(task="held", lease="h").add("lost", 6.1, task_id="h", fence=10)
    ),
    "released at an old master": failed_over(since=0.5, at=6),
    # Restarts without data.
    "notified within a second": restarted(5.9),
    "notified by the signal": (
        restarted(9, notified=False).add("lost", 5.5, task_id="job-a", fence=10)
    ),
    "over before the store answered": restarted(4.5, notified=False),
    "granted after the kill": restarted(9, notified=False, begin=3.5),
    "cut off meanwhile": restarted(9, notified=False).fault(2, 3.5, "stall"),
    "stopped meanwhile": restarted(9, notified=False).add("stopped", 5.5),
    "the machine was late": restarted(6.095).add("late", 5.5, until=5.6, seconds=0.1, pid=9),
    # Fences and writes.
    "grants in no order": (
        Story()
        .body("a", 1, 2, fence=10)
        .body("b", 3, 4, fence=9, asked=0.5)
        .add("lost", 3, task_id="job-b", fence=9)
    ),
    "a stale write is refused": Story().wrote(5, 7, 6, accepted=False),
    # Jobs.
    "not yet drained": Story().published().before_the_drain(),
    "done by a second delivery": again(Story().published().killed(1)),
    "skipped before it began": Story().published(task="late_skip").skipped(1),
    "skipped, and a second delivery dies": (
        Story().published(task="late_skip").skipped(1).killed(2)
    ),
    "requeued before its body": requeued(copied=2),
    "four leases lost": gives_up(4),
    "a conflict before it began": conflict(Story().published(task="waiting")),
    "an early job dies": in_the_midst("early").traced(Place.ACKNOWLEDGED),
    "an early job dies before its body": received_early(died=1),
    "vanished on its way": Story().published(at=2).traced().add("cut-off", 2.8, worker="w"),
    "popped, and its worker died": sent().traced(),
    "vanished with the broker": (
        Story().published(at=2).traced().add("down", 2.8, worker="broker")
    ),
    "vanished before it had a place": placed(False).traced(),
    "lost with the store": placed().lost(4, since=2.4),
    "revoked": Story().published().add("revoked", 1, task_id="j"),
    "gave way to a newer one": cancelled(by_at=2),
    "a plain task whose hold was lost": again(hold_was_lost(), 8, fence=30, task="held"),
    # Runs after the success.
    "granted before the success": again(done(), asked=2.05),
    "an earlier attempt": again(done(attempt=1), attempt=0),
    "the release was not acknowledged": again(
        Story().published().body("a", 1, 2, job="j").left(2.2, "SUCCESS")
    ),
    "before the store was reached": again(unacknowledged(lived_until=20), 30, asked=7.9),
    "died before it reached the store": again(unacknowledged(lived_until=3), 30),
    "the store refused its end": again(
        unacknowledged(lived_until=20).add(
            "release-failed", 2.1, task_id="j", error="refuses: OOM"
        ),
        30,
    ),
    "not marked as done": again(done().add("not-marked", 2.3, task_id="j")),
    "an early job again": again(done(late=False), late=False),
    "again after a loss": again(done(fence=1).lost(3), fence=10),
    "Redlock loses completion records": completed("redlock"),
    # Claims and discarded messages.
    "the claim of a vanished message": key_left(sent().traced()),
    "... for its unique_for": key_left(sent("claimed").traced(), f"{CLAIM}, for 7000.0", 9),
    "the end of a claim in a failover": key_left(
        Story().published().body("a", 1, 2, job="j", task="newest").lost(3, since=0.5)
    ),
    "the end of a pause in a failover": key_left(resumed(3).lost(3.2, since=2.8), PAUSED),
    "a discarded message": discarded(),
    "acknowledged, and its worker died": acknowledged(1),
    "its worker died then": key_left(discarded().add("death", 2, pid=7, worker="w")),
    "answered with it at first": answered(discarded(), 3),
    "answered while the store is away": answered(discarded().fault(0.5, 30), 9),
    "answered, and the store lost its end": answered(discarded().lost(5), 9),
    # Order.
    "the older asked before": older_last(asked=2.5),
    "older after a loss": older_last().lost(4.5),
    "no order is promised": older_last("late"),
    "in the order of the calls": in_queue("ab"),
    "its grant may have had no reply": several_in_queue(1),
    "without a place": in_queue("ba", placed=False),
    "called at one time": in_queue("ba", second=1.25),
    "perhaps refused": refused(known=False),
    "the newest arguments": answers_two(call=2),
    "asked before the call": answers_two(call=1, asked=2),
    "older arguments after a loss": answers_two(call=1).lost(3.5),
    # Ticks.
    "ticks on their grid": ticking(1, 1.5, 2, 7, 7.5),
    "twice after a loss": ticking(1, 1.5).lost(2).add("tick", 3.5, due=1.5, beat=2),
    "all beats were cut off": ticking(1, 9).fault(2, 3, "restart-kept", "store"),
    # What Celery does by itself.
    "kombu ends a worker": Story().add(
        "broken",
        1,
        text="Unrecoverable error: ...\nAttributeError: 'NoneType' object has no attribute"
        " 'hostname'",
    ),
    "the pool hangs": hangs("  File celery/asynpool.py, in _flush_outqueue"),
    "a child is not counted": cold(),
    "a child is not read": warm("billiard/queues.py in send_payload"),
    "the broker is out of reach": unreachable(),
}

BROKEN: list[tuple[str, Kind, Story]] = [
    ("two at once", Kind.OVERLAP, Story().body("a", 1, 3).body("b", 2, 4)),
    ("a job twice", Kind.OVERLAP, Story().body("a", 1, 3, job="j").body("b", 2, 4, job="j")),
    (
        "beside a hold",
        Kind.OVERLAP,
        Story().body("a", 1, 3, task="held", lease="h").body("b", 2, 4),
    ),
    ("one more than the limit", Kind.OVERLAP, limited((1, 9), (2, 5), (4.9, 8))),
    ("three, and a loss before", Kind.OVERLAP, limited((1, 9), (2, 9), (4, 5)).lost(0.5)),
    ("etcd without a stall", Kind.OVERLAP, revoked_by_etcd(stalled=60)),
    ("etcd long after a stall", Kind.OVERLAP, revoked_by_etcd(stalled=-0.9)),
    ("a lease that expired", Kind.OVERLAP, revoked_by_etcd(reason="expired")),
    ("not told", Kind.UNREPORTED, told()),
    ("told twice", Kind.UNREPORTED, told("lost", "lost")),
    ("told of another grant", Kind.UNREPORTED, told("lost", fence=9)),
    ("failed three times", Kind.UNREPORTED, told(*["release-failed"] * 3)),
    ("lived on", Kind.UNREPORTED, died_at(3.5 + TTL)),
    ("a hold, told by its job", Kind.UNREPORTED, two_bodies(task="held", lease="h")),
    ("released", Kind.RELEASED, told("lost", "released")),
    ("released at the new master", Kind.RELEASED, failed_over(since=-2, at=0.5)),
    ("notified late", Kind.REPORTED_LATE, restarted(6.1)),
    ("never notified", Kind.REPORTED_LATE, restarted(6.1, notified=False)),
    (
        "another worker was cut off",
        Kind.REPORTED_LATE,
        restarted(9, notified=False).fault(2, 9, "stall", "v"),
    ),
    (
        "the machine was less late",
        Kind.REPORTED_LATE,
        restarted(6.095).add("late", 5.5, until=5.6, seconds=0.09, pid=9),
    ),
    ("a fence falls", Kind.FENCE, Story().body("a", 1, 2, fence=10).body("b", 3, 4, fence=9)),
    ("no fence", Kind.FENCE, Story(ETCD).body("a", 1, 2)),
    ("a stale write", Kind.STALE_WRITE, Story().wrote(5, 7, 6)),
    ("never ran", Kind.JOB_LOST, Story().published()),
    ("a damaged message, and no death", Kind.JOB_LOST, acknowledged(8)),
    (
        "failed",
        Kind.JOB_LOST,
        Story().published().left(5, "FAILURE", "ValueError").before_the_drain(),
    ),
    (
        "skipped after it had begun",
        Kind.JOB_LOST,
        Story().published(task="late_skip").killed(1).skipped(3),
    ),
    ("copied after it had begun", Kind.JOB_LOST, requeued(copied=3.5)),
    ("three leases lost", Kind.JOB_LOST, gives_up(3)),
    ("given up without a fault", Kind.JOB_LOST, gives_up(4, fault=50)),
    ("a conflict after it began", Kind.JOB_LOST, conflict(Story().published().killed(1))),
    ("an early job not traced", Kind.JOB_LOST, in_the_midst("early")),
    ("an early job unacked", Kind.JOB_LOST, in_the_midst("early").traced(Place.UNACKED)),
    ("its worker died before", Kind.JOB_LOST, received_early(died=0.4)),
    ("a late job dies", Kind.JOB_LOST, in_the_midst("late").traced(Place.ACKNOWLEDGED)),
    ("not traced", Kind.JOB_LOST, sent()),
    ("still in its queue", Kind.JOB_LOST, sent().traced(Place.QUEUE)),
    ("received after all", Kind.JOB_LOST, sent().traced().received("j", 10)),
    ("nothing has ended", Kind.JOB_LOST, Story().published(at=2).traced()),
    ("vanished with its place", Kind.JOB_LOST, placed().traced()),
    ("lost with another part", Kind.JOB_LOST, placed().lost(4, lost_from=3.0)),
    ("another is revoked", Kind.JOB_LOST, Story().published().add("revoked", 1, task_id="i")),
    ("its hold was lost", Kind.JOB_LOST, hold_was_lost()),
    ("gave way to an older one", Kind.JOB_LOST, cancelled(by_at=0.5)),
    (
        "damaged, not discarded",
        Kind.JOB_LOST,
        Story().published(task="claimed").add("damaged", 0, task_id="j"),
    ),
    ("again", Kind.RUN_AGAIN, again(done())),
    ("its process lived on", Kind.RUN_AGAIN, again(unacknowledged(lived_until=20), 30, asked=8.1)),
    (
        "another did not mark it",
        Kind.RUN_AGAIN,
        again(done().add("not-marked", 2.3, task_id="j", pid=7)),
    ),
    ("etcd keeps completion records", Kind.RUN_AGAIN, completed("etcd")),
    (
        "an early call twice",
        Kind.RUN_AGAIN,
        in_queue("ab", task="queued_early").body("3", 7, 8, job="b", task="queued_early"),
    ),
    ("older after newer", Kind.ORDER, older_last()),
    ("out of turn", Kind.ORDER, in_queue("ba")),
    ("out of turn, and not requeued", Kind.ORDER, several_in_queue(0)),
    ("refused and run", Kind.ORDER, refused(known=True)),
    ("faster than its rate", Kind.RATE, at_rate(1, 1.1, 1.2)),
    ("paused", Kind.PAUSED, paused("k", "chaos")),
    ("its scope was paused", Kind.PAUSED, paused("", "chaos")),
    ("older arguments", Kind.NEWEST, answers_two(call=1)),
    ("answered with a discarded one", Kind.DISCARDED, answered(discarded(), 9)),
    (
        "... after the fault",
        Kind.DISCARDED,
        answered(discarded().fault(0.5, 30), 36),
    ),
    ("a tick twice", Kind.TICK_TWICE, ticking(1, 1.5, 1.5, 2)),
    ("off the grid", Kind.OFF_GRID, ticking(1, 1.5, 2.25)),
    ("silent", Kind.NO_TICK, ticking(1, 9)),
    (
        "silent though one beat is cut off",
        Kind.NO_TICK,
        ticking(1, 9).fault(2, 8, "cut-beat", "beat-1"),
    ),
    ("a key is left", Kind.KEY_LEFT, key_left(Story(), "a lease")),
    (
        "a running claim",
        Kind.KEY_LEFT,
        key_left(sent().traced(), CLAIM.replace("queued", "running")),
    ),
    (
        "a claim for too long",
        Kind.KEY_LEFT,
        key_left(sent("newest").traced(), f"{CLAIM}, for 3700.0", 9),
    ),
    (
        "ended before the failover",
        Kind.KEY_LEFT,
        key_left(Story().published().body("a", 1, 2, job="j", task="newest").lost(3, since=2.5)),
    ),
    ("of a discarded message", Kind.KEY_LEFT, key_left(discarded())),
    ("a pause before a failover", Kind.KEY_LEFT, key_left(resumed(2).lost(3.2, since=2.8), PAUSED)),
    ("a pause that nobody ended", Kind.KEY_LEFT, key_left(Story().lost(3), PAUSED)),
    (
        "another error",
        Kind.BROKEN,
        Story().add("broken", 1, text="Unrecoverable error: ...\nAttributeError: 'Lease'"),
    ),
    ("something hangs", Kind.NEVER_ENDS, hangs("  File x, in acquire")),
    ("a frame of ours", Kind.NEVER_ENDS, hangs(f"  File x, in _flush_outqueue\n  File {OURS}")),
    ("ours is interrupted", Kind.NEVER_ENDS, cold(interrupted=f"{OURS}, in _recv_message")),
    ("a child of ours", Kind.NEVER_ENDS, cold(child=f"{OURS} in close\n  File {COUNTED}")),
    ("a child in ours", Kind.NEVER_ENDS, warm(f"{OURS} in close\n  File x in send_payload")),
    ("a stop of ours", Kind.NEVER_ENDS, warm(COUNTED, f"{OURS}, in stop\n  File {WAITS}")),
    ("a broker within reach", Kind.NEVER_ENDS, unreachable("host-off-store")),
    ("not at the broker", Kind.NEVER_ENDS, unreachable(asks="/x/celery/backends/redis.py")),
]


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_history_has_no_violation(name: str) -> None:
    assert SOUND[name].judge().violations == ()


@pytest.mark.parametrize(
    ("kind", "story"),
    [pytest.param(kind, story, id=f"{kind.name}: {name}") for name, kind, story in BROKEN],
)
def test_a_broken_promise_is_found(kind: Kind, story: Story) -> None:
    assert [violation.kind for violation in story.judge().violations] == [kind]


def test_each_kind_of_violation_is_among_those_that_are_found() -> None:
    assert {kind for _, kind, _ in BROKEN} == set(Kind)


def test_a_violation_names_its_bodies_and_a_group_counts_once() -> None:
    story = limited((1, 9), (2, 9), (3, 9), (4, 9)).add("check", 5, run="a", key="k", until=1e9)
    found = story.judge().violations
    assert [(one.runs, one.key) for one in found] == [
        (("a", "b", "c"), "k"),
        *((runs, "k") for runs in (("a", "b", "d"), ("a", "c", "d"), ("b", "c", "d"))),
    ]


def test_what_is_excused_is_counted() -> None:
    assert sum(SOUND["a third body across a loss"].judge().excused.values()) == 1
    assert sum(SOUND["a child is not counted"].judge().excused.values()) == 1
    assert (
        SOUND["notified within a second"].judge().counts["leases taken by a restart of the store"]
    )


@pytest.mark.parametrize(
    ("options", "end"),
    [({}, 9), ({"sure": False}, 3)],  # the second question, answered or not
)
def test_a_step_is_exclusive_to_its_end_or_to_its_deadline(
    options: dict[str, Any], end: float
) -> None:
    [body] = bodies(Story().body("a", 1, 9, until=3, **options).records)
    assert body.sections == (Section(begin=1, end=end),)


@pytest.mark.parametrize(
    ("died", "until", "end"),
    [(2, 2, 2), (0.5, 0.5, 3), (0.5, 4.0, 1)],  # of an earlier process; by an earlier signal
)
def test_a_killed_body_is_exclusive_until_its_death_or_its_deadline(
    died: float, until: float, end: float
) -> None:
    story = Story().add("death", died, until=until).body("a", 1, None, until=3)
    records = sorted(story.records, key=lambda record: record.at)
    [body] = bodies(records)
    assert [section.end for section in body.sections] == ([end] if end > 1 else [])


@pytest.mark.parametrize("store", sorted(PROMISES))
def test_an_overlap_across_a_loss_is_promised_never_to_happen_by_some_stores(store: str) -> None:
    story = failed_over(since=0.5, at=1.5)
    story.promise = PROMISES[store]
    found = story.judge().of(Kind.OVERLAP)
    assert bool(found) is (store in ("redlock", "etcd", "zookeeper"))


def test_what_puts_the_broker_out_of_reach_is_a_fault() -> None:
    assert {sort.name for sort in SORTS} >= OFF_BROKER


def test_the_stacks_name_a_module_of_the_package() -> None:
    assert Path(OURS).is_file()
