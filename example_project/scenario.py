"""One run of the demo: duplicates, a worker killed in the middle of an import, and the rest.

The run is driven by a loop of short steps. Each step does what is due, reads the journal and the
store, and hands a snapshot to whoever shows it.
"""

import time
import uuid
from collections.abc import Callable
from pathlib import Path

from celery import Celery

from example_project import journal as records
from example_project.bank import Bank, StaleFence
from example_project.journal import Entry, Journal, Run, What, lane_of
from example_project.live import LeaseView
from example_project.plan import PAYING_ACCOUNT, Call, calls
from example_project.processes import WORKERS, Processes, started
from example_project.snapshot import Outcome, Snapshot

PAYING_LANE = lane_of("pay", [PAYING_ACCOUNT], {})

#: Seconds between two steps: ten looks per second catch every renewal.
STEP = 0.1

#: Seconds for workers to start and, at the end, for all jobs to finish. Far above what it takes; a
#: bound, not a wait.
START_BOUND, DRAIN_BOUND = 30.0, 30.0

#: The kill waits for an import that is this many seconds old: in its middle, between two
#: heartbeats.
KILL_AGE = (0.6, 1.5)

#: Seconds from the kill to the new worker, as a supervisor would start it. By then the messages of
#: the dead one are old enough to be delivered again (see VISIBILITY_TIMEOUT).
RESTART_AFTER = 2.5


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
        self._directory = directory
        self._locked = locked
        self._seconds = seconds
        self._show = show
        self._zero = time.monotonic()
        self._phase = "starting"
        self._killed = ""
        self._killed_at = 0.0
        self._restarted = False

    def run(self) -> Outcome:
        with started(self._processes) as processes:
            if not self._until(self._workers_are_ready, START_BOUND):
                raise RuntimeError(
                    f"no worker after {START_BOUND:.0f} s: read {self._directory}/*.log"
                )
            self._zero = time.monotonic()
            self._phase = "running"
            processes.start_beat()
            self._send(calls(self._seconds))
            processes.stop("beat")
            self._phase = "finishing"
            # What is missing when the bound is over, the verdict calls lost.
            self._until(self._all_is_settled, DRAIN_BOUND)
            seconds = self._now()
        missing = self._bank.settled(PAYING_ACCOUNT) - self._bank.balance(PAYING_ACCOUNT)
        late_write = self._late_write()
        self._leases.sweep()
        self._leases.close()
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
        while plan or self._now() < self._seconds:
            while plan and plan[0].at <= self._now():
                call = plan.pop(0)
                result = self._sender.send_task(call.task, call.args, call.kwargs)
                lane = lane_of(call.task, call.args, call.kwargs)
                self._journal.write(What.SENT, lane=lane, job=str(result.id))
            self._step()

    def _step(self) -> list[Entry]:
        leases, renewed = self._leases.look()
        for lease in renewed:
            self._journal.write(What.HEARTBEAT, job=lease.job)
        entries = self._journal.read()
        self._kill_or_restart(entries)
        self._show(
            Snapshot(
                locked=self._locked,
                now=self._now(),
                zero=self._zero,
                phase=self._phase,
                entries=entries,
                leases=leases,
                alive={name: self._processes.alive(name) for name in WORKERS},
            )
        )
        time.sleep(STEP)
        return entries

    def _kill_or_restart(self, entries: list[Entry]) -> None:
        now = self._now()
        if not self._killed:
            if (
                self._phase == "running"
                and now > self._seconds / 3
                and (victim := self._import_in_its_middle(entries))
            ):
                self._killed, self._killed_at = victim.worker, now
                self._processes.kill(victim.worker)
        elif now > self._killed_at + RESTART_AFTER and not self._restarted:
            self._restarted = True
            self._processes.start_worker(self._killed)

    def _import_in_its_middle(self, entries: list[Entry]) -> Run | None:
        youngest, oldest = KILL_AGE
        now = time.monotonic()
        return next(
            (
                run
                for run in records.runs(entries)
                if run.outcome == "running"
                and run.lane.startswith("import_account")
                and youngest <= now - run.started <= oldest
            ),
            None,
        )

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
        return {entry.worker for entry in entries if entry.what is What.READY} >= set(WORKERS)

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
