"""One run of the demo: duplicates, a burst, a worker and a beat that are killed, and the rest.

The run is driven by a loop of short steps. Each step does what is due, reads the journal and the
store, and hands a snapshot to the display.
"""

import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import after_task_publish

from celery_singleton_lock import claim_and_send
from example_project import journal as records
from example_project import unlocked
from example_project.bank import Bank, StaleFence
from example_project.beats import BEATS, runs_of_the_other
from example_project.consumers import Consumers
from example_project.journal import Entry, Journal, What, lane_of
from example_project.kills import Kill, are_ready, has_sent, worker_in_an_import
from example_project.live import LeaseView, Look
from example_project.plan import PAYING_ACCOUNT, Call, calls
from example_project.processes import WORKERS, Processes, started
from example_project.snapshot import Outcome, Snapshot

PAYING_LANE = lane_of("pay", [PAYING_ACCOUNT], {})

#: Seconds between two steps: ten looks per second catch every renewal.
STEP = 0.1

#: Seconds for workers to start and, at the end, for all jobs to finish. Far above what it takes; a
#: bound, not a wait.
START_BOUND, DRAIN_BOUND = 30.0, 30.0

#: The worker is killed after this part of the run, the beat after that one.
KILL_WORKER, KILL_BEAT = 1 / 3, 1 / 2

#: Ticks by which the other beat has shown that it took over, and the seconds that a run waits for
#: them where beats start slowly.
TAKEOVER_RUNS, TAKEOVER_BOUND = 2, 15.0


class Scenario:
    def __init__(
        self,
        *,
        redis_url: str,
        directory: Path,
        locked: bool,
        seconds: float,
        show: Callable[[Snapshot], None],
    ) -> None:
        self._journal = Journal(directory / "journal.jsonl")
        self._bank = Bank(directory / "bank.sqlite3")
        # Of this run alone: a server that REDIS_URL names may hold anything else.
        prefix = f"demo-{uuid.uuid4().hex[:12]}"
        self._processes = Processes(
            redis_url=redis_url, prefix=prefix, directory=directory, locked=locked
        )
        self._leases = LeaseView(redis_url, prefix)
        # The sender knows names only, as another service would: the worker takes the lock however a
        # message was sent.
        self._sender = Celery("sender", broker=redis_url, backend=redis_url, set_as_current=False)
        self._sender.conf.broker_transport_options = {"global_keyprefix": f"{prefix}:"}
        self._sender.conf.result_backend_transport_options = {"global_keyprefix": f"{prefix}:"}
        self._sender.conf.singleton_lock_prefix = prefix  # as in app.py: the workers' claims
        self._directory = directory
        self._locked = locked
        self._seconds = seconds
        self._show = show
        self._zero = time.monotonic()
        self._phase = "starting"
        self._leader = ""
        self._consumers = Consumers(redis_url, prefix)
        self._worker_kill = Kill(self._processes, worker_in_an_import, self._consumers.cut_off)
        self._beat_kill = Kill(self._processes, self._beat_to_kill)

    def run(self) -> Outcome:
        with started(self._processes) as processes:
            if not self._until(self._workers_are_ready, START_BOUND):
                raise RuntimeError(
                    f"no worker after {START_BOUND:.0f} s: read {self._directory}/*.log"
                )
            self._zero = time.monotonic()
            self._phase = "running"
            for beat in BEATS:
                processes.start(beat)
            after_task_publish.connect(self._sent)
            self._send(calls(self._seconds))
            after_task_publish.disconnect(self._sent)
            processes.stop(*BEATS)
            self._phase = "finishing"
            # What is missing when the bound is over, the verdict calls lost.
            self._until(self._all_is_settled, DRAIN_BOUND)
            seconds = self._now()
        missing = self._bank.settled(PAYING_ACCOUNT) - self._bank.balance(PAYING_ACCOUNT)
        late_write = self._late_write()
        self._leases.sweep()
        self._leases.close()
        self._consumers.close()
        self._sender.close()
        return Outcome(
            locked=self._locked,
            zero=self._zero,
            seconds=seconds,
            entries=self._journal.read(),
            late_write=late_write,
            money_missing=missing,
        )

    def _send(self, plan: list[Call]) -> None:
        while plan or self._now() < self._seconds or self._waits_for_takeover():
            while plan and plan[0].at <= self._now():
                self._make(plan.pop(0))
            self._step()

    def _make(self, call: Call) -> None:
        if not call.claim:
            self._sender.send_task(call.task, call.args, call.kwargs)
            return
        # Written first: a run that begins after this line begins after the call.
        self._journal.write(What.CALL, lane=lane_of(call.task, call.args, call.kwargs))
        send = claim_and_send if self._locked else unlocked.claim_and_send
        send(
            self._sender,
            call.task,
            call.args,
            singleton={"unique": "until_start"},
            key=call.claim,
        )

    def _sent(self, headers: dict[str, Any], body: Sequence[Any], **_: object) -> None:
        """Celery's word for it that a message was published; a duplicate's call publishes none."""
        lane = lane_of(headers["task"], body[0], body[1])
        self._journal.write(What.SENT, lane=lane, job=headers["id"], worker="sender")

    def _step(self) -> list[Entry]:
        look = self._leases.look()
        self._write_down(look)
        entries = self._journal.read()
        now, running = self._now(), self._phase == "running"
        self._worker_kill.step(entries, may_begin=running and now > self._seconds * KILL_WORKER)
        if running:  # later, a beat that is started again would send runs forever
            self._beat_kill.step(entries, may_begin=now > self._seconds * KILL_BEAT)
        self._show(
            Snapshot(
                locked=self._locked,
                now=self._now(),
                zero=self._zero,
                phase=self._phase,
                entries=entries,
                leases=look.leases,
                alive={name: self._processes.alive(name) for name in (*WORKERS, *BEATS)},
                leader=self._leader,
                leads_for=look.leader.remaining if look.leader else 0.0,
            )
        )
        time.sleep(STEP)
        return entries

    def _write_down(self, look: Look) -> None:
        for lease in look.renewed:
            self._journal.write(What.HEARTBEAT, job=lease.job)
        leader = self._processes.name_of(look.leader.pid) if look.leader else ""
        if leader != self._leader:
            self._leader = leader
            self._journal.write(What.LEADS, worker=leader)

    def _beat_to_kill(self, entries: Sequence[Entry]) -> str | None:
        """The one that leads, once the other stands by; without the lock, one of two that send."""
        if self._locked:
            standby = are_ready(BEATS, entries)
            return self._leader if standby and has_sent(self._leader, entries) else None
        return BEATS[0] if all(has_sent(beat, entries) for beat in BEATS) else None

    def _waits_for_takeover(self) -> bool:
        sent = runs_of_the_other(self._journal.read()) >= TAKEOVER_RUNS
        return not sent and self._now() < self._seconds + TAKEOVER_BOUND

    def _late_write(self) -> str:
        """The write of a worker that was frozen after its check and wakes when its lease is lost.

        No lock can stop it. It is made here with what the first payment knew: the balance zero, and
        its fence.
        """
        paid = [run for run in records.runs(self._journal.read()) if run.lane == PAYING_LANE]
        if len(paid) < 2:
            return "not tried: fewer than two payments"
        try:
            self._bank.settle(
                "late-payment", PAYING_ACCOUNT, balance=100, cents=100, fence=paid[0].fence
            )
        except StaleFence:
            return "refused"
        return "accepted"

    def _workers_are_ready(self, entries: list[Entry]) -> bool:
        return are_ready(WORKERS, entries)

    def _all_is_settled(self, entries: list[Entry]) -> bool:
        return not records.unsettled(entries) and all(
            run.outcome != "running" for run in records.runs(entries)
        )

    def _until(self, condition: Callable[[list[Entry]], bool], bound: float) -> bool:
        """Step until the condition holds; False when so many seconds were not enough."""
        deadline = time.monotonic() + bound
        while time.monotonic() < deadline:
            if condition(self._step()):
                return True
        return False

    def _now(self) -> float:
        return time.monotonic() - self._zero
