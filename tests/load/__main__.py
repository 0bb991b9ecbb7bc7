"""``make load``: the loads, scaled down by default; ``ARGS=--full`` for the real ones."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.load import backlog, leases, rates, tasks

_LOADS = ("tasks", "leases", "backlog", "rates")


def main() -> int:
    """Run what was asked for; exit status 1 if anything was lost, doubled, intruded or left."""
    parser = argparse.ArgumentParser(prog="make load", description=__doc__)
    parser.add_argument(
        "--full", action="store_true", help="50 000 tasks; 10 000 leases; 100 000 and 10 000 calls"
    )
    parser.add_argument("--only", choices=_LOADS, help="one of them")
    parser.add_argument("--tasks", type=int, help="how many tasks")
    parser.add_argument("--keys", type=int, default=500)
    parser.add_argument("--kills", type=float, default=0.1, help="share of tasks that are killed")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--processes", type=int, default=4, help="pool processes of each worker")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--leases", type=int, help="how many leases")
    parser.add_argument("--seconds", type=float, help="that they are held")
    parser.add_argument("--restarts", type=int, help="of their server meanwhile")
    given = parser.parse_args()
    full = given.full
    ok = True
    if given.only in (None, "tasks"):
        load = tasks.TaskLoad(
            tasks=given.tasks or (50_000 if full else 5000),
            keys=given.keys,
            kills=given.kills,
            workers=given.workers,
            processes=given.processes,
            seed=given.seed,
        )
        print(load, flush=True)
        with tempfile.TemporaryDirectory(prefix="csl-load-") as directory:
            report = tasks.run(load, Path(directory))
        print(report, flush=True)
        ok = ok and report.ok
    if given.only in (None, "leases"):
        held = leases.LeaseLoad(
            leases=given.leases or (10_000 if full else 2000),
            seconds=given.seconds or (600.0 if full else 60.0),
            restarts=(10 if full else 3) if given.restarts is None else given.restarts,
        )
        print(held, flush=True)
        leased = leases.run(held)
        print(leased, flush=True)
        ok = ok and leased.ok
    if given.only in (None, "backlog"):
        # The calls of one key run one after another: a tenth of the others takes as long.
        many, few = (100_000, 1000), (10_000, 1)
        if not full:
            many, few = (5000, 50), (500, 1)
        for (calls, keys), paused in ((many, False), (many, True), (few, False)):
            with tempfile.TemporaryDirectory(prefix="csl-load-") as directory:
                waited = backlog.run(calls, keys, Path(directory), paused=paused)
            print(waited, flush=True)
            ok = ok and waited.ok
    if given.only in (None, "rates"):
        rated = rates.RateLoad(calls=10_000, keys=100, kills=5) if full else rates.RateLoad()
        with tempfile.TemporaryDirectory(prefix="csl-load-") as directory:
            started = rates.run(rated, Path(directory))
        print(started, flush=True)
        ok = ok and started.ok
    print("ok" if ok else "NOT OK")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
