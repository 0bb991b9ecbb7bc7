"""``python -m tests.chaos``: campaigns by seed, or the locks that are broken on purpose.

    make chaos ARGS="--minutes 30 --seed 7"
    make chaos ARGS="--minutes 5 --seed 7,8,9"
    make chaos ARGS="--minutes 2 --faults stop-child,restart-kept"
    make chaos ARGS="--hosts 3 --minutes 5"
    make chaos ARGS="--store etcd --hosts 3"
    make chaos ARGS="--pool threads"
    make chaos ARGS="--churn --hours 3"
    make chaos ARGS="--variants"
    make chaos ARGS="--controls"

Ends with 0 if the lock kept its promises (and every variant was caught), else with 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from example_project.private_server import ServerNotFound
from tests.chaos.campaign import Campaign, run
from tests.chaos.clocks import find_libfaketime
from tests.chaos.hosts import HostsUnavailable, enter_network
from tests.chaos.promises import PROMISES
from tests.chaos.publisher import MIX, QUEUE_MIX
from tests.chaos.report import report
from tests.chaos.schedule import SORTS
from tests.chaos.site import Plan
from tests.chaos.variants import VARIANTS, Variant


def main() -> int:
    """The exit status."""
    options = _options()
    out = options.out or Path(tempfile.mkdtemp(prefix="chaos-"))
    out.mkdir(parents=True, exist_ok=True)
    print(f"history and logs: {out}", flush=True)
    variants = [variant for variant in VARIANTS if not options.only or variant.name in options.only]
    of_variants = (options.variants or options.controls) and any(
        t.campaign.plan.hosts for t in variants
    )
    if options.hosts or of_variants:
        try:
            enter_network()
        except HostsUnavailable as error:
            print(error, file=sys.stderr)
            return 1
    if options.variants:
        return _variants(out, variants)
    if options.controls:
        return _controls(out, variants)
    return max(_campaign(options, seed, out / f"seed-{seed}") for seed in options.seed)


def _campaign(options: argparse.Namespace, seed: int, directory: Path) -> int:
    plan = Plan(
        ttl=options.ttl,
        workers=options.workers or options.hosts or 2,
        concurrency=options.concurrency,
        beside=options.pool,
        clock=options.clock,
        churn=options.churn,
        beats=options.beats,
        store=options.store,
        hosts=options.hosts,
        wall_clocks=bool(options.hosts) and _have_libfaketime(),
    )
    mix = dict(QUEUE_MIX if options.queue else MIX)
    if options.pool == "gevent":
        mix.pop("held_async", None)  # greenlets share a thread, which runs one event loop at a time
    campaign = Campaign(
        seconds=60 * options.minutes,
        seed=seed,
        plan=plan,
        faults=options.faults,
        calm=options.calm,
        keys=options.keys,
        mix=mix,
    )
    print(f"seed {seed}: {options.minutes:g} minutes of faults", flush=True)
    outcome = run(campaign, directory)
    text = report(outcome)
    (directory / "report.txt").write_text(text)
    print(text, flush=True)
    return 1 if outcome.verdict.violations else 0


def _variants(out: Path, variants: list[Variant]) -> int:
    status = 0
    for variant in variants:
        began = time.monotonic()
        outcome = run(variant.campaign, out / variant.name)
        (out / variant.name / "report.txt").write_text(report(outcome))
        caught = outcome.verdict.of(variant.caught_by)
        took = time.monotonic() - began
        word = "caught" if caught else "NOT CAUGHT"
        print(
            f"{word} in {took:3.0f} s: {variant.name}: {len(caught)} x {variant.caught_by}",
            flush=True,
        )
        if caught:
            print(f"    {caught[0].text}", flush=True)
        else:
            status = 1
            print(report(outcome), flush=True)
    return status


def _controls(out: Path, variants: list[Variant]) -> int:
    status = 0
    for variant in variants:
        outcome = run(variant.control(), out / f"{variant.name}-whole")
        found = len(outcome.verdict.violations)
        sections = outcome.verdict.counts["critical sections"]
        print(f"{found} violations in {sections} sections: {variant.name}, whole", flush=True)
        if found:
            status = 1
            print(report(outcome), flush=True)
    return status


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="of faults, per seed")
    parser.add_argument("--hours", type=float, default=0.0, help="of faults, instead of minutes")
    parser.add_argument(
        "--seed", type=_seeds, default=None, help="or several: 7,8,9; a new one by default"
    )
    parser.add_argument("--faults", type=_names, default=(), help=", ".join(s.name for s in SORTS))
    parser.add_argument("--calm", action="store_true", help="break nothing")
    parser.add_argument("--clock", action="store_true", help="step the store's wall clock too")
    parser.add_argument(
        "--churn", action="store_true", help="revoke calls; pool processes come and go"
    )
    parser.add_argument("--ttl", type=float, default=2.0, help="of the leases, seconds")
    parser.add_argument("--workers", type=int, default=0, help="2, or one per host")
    parser.add_argument("--store", choices=PROMISES, default="redis", help="what locks")
    parser.add_argument("--hosts", type=int, default=0, help="of the workers; needs root")
    parser.add_argument(
        "--pool",
        choices=["threads", "gevent"],
        default="",
        help="of another worker beside the prefork ones",
    )
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--beats", type=int, default=3, help="of one schedule")
    parser.add_argument("--keys", type=int, default=8)
    parser.add_argument("--queue", action="store_true", help='tasks with on_conflict="queue" alone')
    parser.add_argument("--out", type=Path, default=None, help="a directory to keep")
    parser.add_argument("--variants", action="store_true", help="the locks broken on purpose")
    parser.add_argument(
        "--controls", action="store_true", help="the variants' campaigns with the lock whole"
    )
    parser.add_argument("--only", type=_names, default=(), help="names of variants")
    options = parser.parse_args()
    if options.hours:
        options.minutes = 60 * options.hours
    if options.seed is None:
        options.seed = [int(time.time()) % 100_000]
    return options


def _have_libfaketime() -> bool:
    try:
        find_libfaketime()
    except ServerNotFound:
        print("the hosts share one wall clock: libfaketime is not installed", flush=True)
        return False
    return True


def _seeds(text: str) -> list[int]:
    return [int(seed) for seed in text.split(",")]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


if __name__ == "__main__":
    sys.exit(main())
