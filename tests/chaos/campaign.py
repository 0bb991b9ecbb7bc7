"""One campaign: publish, break things as the timetable says, heal, drain, judge."""

from __future__ import annotations

import gc
import os
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos import host_faults, operator_faults, process_faults, store_faults
from tests.chaos.checker import judge
from tests.chaos.drain import PATIENCE, Drain
from tests.chaos.lateness import noting_lateness
from tests.chaos.promises import PROMISES
from tests.chaos.publisher import LENGTHS, MIX, Length, Publisher
from tests.chaos.resource import resources
from tests.chaos.schedule import Fault, Lane, sorts_for, timetable
from tests.chaos.site import Plan, Post, Site, now
from tests.chaos.usage import Recorder
from tests.chaos.verdict import Kind, Verdict
from tests.harness.app_module import fresh_module
from tests.harness.journal import Record
from tests.harness.processes import TIMEOUT

#: Seconds between two looks of the publisher, and between two at the workers.
_TICK = 0.02
_ROUND = 0.5
_STRIKES = {
    **store_faults.STRIKES,
    Lane.PROCESS: process_faults.strike,
    Lane.HOST: host_faults.strike,
    Lane.OPERATOR: operator_faults.strike,
}
#: Seconds after which a job is no longer counted as waiting: its early message may be lost.
_FORGOTTEN = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """What to do.

    Attributes:
        seconds: How long things are broken.
        seed: The seed of the timetable and of what is published.
        plan: The processes.
        faults: Names of the sorts of faults; all if empty, with ``calm`` none.
        calm: Nothing is broken.
        keys: How many.
        waiting: Jobs that wait or run at the same time, at most.
        mix: See the publisher.
        lengths: See the publisher.
        until: Ends early when this was seen.
        haste: How much sooner than usual one fault follows the other.
        drains: Whether all jobs are waited for at the end.
        patience: Seconds that they are waited for.
    """

    seconds: float
    seed: int
    plan: Plan = field(default_factory=Plan)
    faults: tuple[str, ...] = ()
    calm: bool = False
    keys: int = 8
    waiting: int = 24
    mix: dict[str, int] = field(default_factory=lambda: dict(MIX))
    lengths: Sequence[Length] = LENGTHS
    until: Kind | None = None
    haste: float = 1.0
    drains: bool = True
    patience: float = PATIENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of it.

    Attributes:
        seconds: How long it took, without the start of the processes.
        records: The history.
    """

    campaign: Campaign
    directory: Path
    seconds: float
    verdict: Verdict
    records: Sequence[Record]


def run(campaign: Campaign, directory: Path) -> Outcome:
    """Run one campaign in the empty ``directory``, which keeps history, resources and logs."""
    with ExitStack() as stack:
        site = stack.enter_context(Site(campaign.plan, directory, campaign.seed))
        # The apps of other locks take theirs from this one.
        module = stack.enter_context(fresh_module("tests.chaos.app", site.environment))
        if campaign.plan.app != module.__name__:
            module = stack.enter_context(fresh_module(campaign.plan.app, site.environment))
        for post in site.posts:
            site.start_worker(post)
        for post in site.posts:
            if post.worker is not None:
                post.worker.wait_until_ready(4 * TIMEOUT)
        began = now()
        with Recorder(site, campaign.seconds), noting_lateness(site.history):
            _Run(campaign, site, module).run()
        ended = now()
        # A result that is collected when its backend is gone tries for long to reach it.
        gc.collect()
        records = site.history.records()
    writes = resources(site.history.directory)
    plan = campaign.plan
    verdict = judge(
        records,
        writes,
        plan.ttl,
        drained=campaign.drains,
        observer=plan.observer,
        promise=PROMISES[plan.store],
    )
    return Outcome(
        campaign=campaign,
        directory=directory,
        seconds=ended - began,
        verdict=verdict,
        records=records,
    )


class _Run:
    def __init__(self, campaign: Campaign, site: Site, module: Any) -> None:
        self._campaign, self._site = campaign, site
        self._publisher = Publisher(
            module,
            keys=[f"k{number}" for number in range(campaign.keys)],
            mix={name: often for name, often in campaign.mix.items() if hasattr(module, name)},
            lengths=campaign.lengths,
            seed=campaign.seed,
        )
        self._over = threading.Event()
        self._waiting: dict[str, float] = {}  # job: when it was published
        self._looked = 0.0
        self._striking: set[Fault] = set()

    def run(self) -> None:
        lanes = self._start_lanes()
        end = now() + self._campaign.seconds
        while now() < end and not self._seen():
            self._look_after_workers()
            self._publish_until(min(now() + _ROUND, end))
        self._over.set()
        for lane in lanes:
            lane.join()
        if self._site.beats is not None:
            self._site.beats.end()
        self._write_ticks()
        if self._campaign.drains:
            Drain(self._site, self._look_after_workers, self._campaign.patience).run()

    def _write_ticks(self) -> None:
        if self._site.beats is not None:
            for tick in self._site.beats.new_ticks():
                self._site.history.write("tick", **tick)

    # --- breaking --------------------------------------------------------------------------------

    def _start_lanes(self) -> list[threading.Thread]:
        campaign = self._campaign
        if campaign.calm:
            return []
        plan = campaign.plan
        sorts = sorts_for(
            campaign.faults,
            clock=plan.clock,
            churn=plan.churn,
            hosts=plan.hosts > 0,
            store=plan.store,
        )
        lanes = timetable(
            sorts,
            seconds=campaign.seconds,
            seed=campaign.seed,
            ttl=campaign.plan.ttl,
            haste=campaign.haste,
        )
        began = now()
        threads = [
            threading.Thread(target=self._break, args=(lane, faults, began), daemon=True)
            for lane, faults in lanes.items()
            if faults
        ]
        for thread in threads:
            thread.start()
        return threads

    def _break(self, lane: Lane, faults: Sequence[Fault], began: float) -> None:
        for fault in faults:
            if self._over.wait(max(0.0, began + fault.at - now())):
                return
            at = now()
            self._striking.add(fault)
            strike = _STRIKES[lane]
            try:
                target = strike(self._site, fault)
            except Exception:
                target = "failed"
                text = f"the fault {fault.name} failed: {traceback.format_exc()}"
                self._site.history.write("broken", text=text)
            self._site.history.write("fault", at=at, end=now(), name=fault.name, target=target)
            self._striking.discard(fault)

    # --- publishing ------------------------------------------------------------------------------

    def _publish_until(self, end: float) -> None:
        while now() < end:
            self._take_news()
            if len(self._waiting) < self._campaign.waiting and self._publisher.publish():
                continue
            time.sleep(_TICK)  # the pause between two looks at the history

    def _take_news(self) -> None:
        for record in self._site.history.news():
            if record.event == "published" and record.pid == os.getpid():
                self._waiting[record.task_id] = record.at
            elif _is_over(record):
                self._waiting.pop(record.task_id, None)
        for job, at in list(self._waiting.items()):
            if at + _FORGOTTEN < now():
                del self._waiting[job]

    # --- looking ---------------------------------------------------------------------------------

    def _look_after_workers(self) -> None:
        for post in self._site.posts:
            _look_after(self._site, post)

    def _seen(self) -> bool:
        """Whether what the campaign waits for has been seen; asked every 2 s."""
        wanted = self._campaign.until
        if wanted is None or now() < self._looked + 2.0:
            return False
        self._looked = now()
        if not self._judge_now(wanted):
            return False
        # A fault that is still going on is not in the history yet, and may be the reason.
        going_on = self._striking.copy()
        while going_on & self._striking:
            time.sleep(_TICK)
        return self._judge_now(wanted)

    def _judge_now(self, wanted: Kind) -> bool:
        self._write_ticks()
        history = self._site.history
        verdict = judge(
            history.records(),
            resources(history.directory),
            self._campaign.plan.ttl,
            drained=False,
            observer=self._campaign.plan.observer,
            promise=PROMISES[self._campaign.plan.store],
        )
        return bool(verdict.of(wanted))


def _is_over(record: Record) -> bool:
    """Whether this is the end of a job, at first sight."""
    if record.event == "end":
        return record.data.get("error") is None
    return record.event in ("skip", "discarded") or (
        record.event == "left" and record.data.get("state") == "FAILURE"
    )


def last_words(log: list[str]) -> str:
    """The end of a worker's log, from the error that ended it: its children write on after that."""
    ended = (number for number, line in enumerate(log) if "Unrecoverable error: " in line)
    return "\n".join(log[min(next(ended, len(log)), max(0, len(log) - 200)) :])


def _look_after(site: Site, post: Post) -> None:
    """Start another worker where one ended by itself, and note it."""
    if not post.busy.acquire(blocking=False):
        return  # a fault is at it
    try:
        worker = post.worker
        if worker is None or worker.alive:
            return
        at, pids = now(), worker.group()
        worker.kill_group()
        site.write_deaths(worker, pids, at)
        status = worker.exit_status
        site.history.write(
            "broken",
            worker=worker.hostname,
            until=at,
            text=f"{worker.name} ended by itself with status {status}:\n{last_words(worker.lines)}",
        )
        site.start_worker(post)
    finally:
        post.busy.release()
