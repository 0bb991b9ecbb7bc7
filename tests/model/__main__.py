"""``make model``: every check, a table, and exit status 1 unless all found what they have to."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import monotonic

from tests.model.checks import CHECKS, Check
from tests.model.coverage import never_reached
from tests.model.spin import Run, SpinFailed, missing_programs, verify

_ROW = "{:<11} {:<42} {:<8} {:<8} {:>11} {:>6} {:>7}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make model", description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="searches at once")
    parser.add_argument("--only", default="", help="checks with this in their claim")
    parser.add_argument("--trail", type=Path, help="directory for the steps to each error")
    options = parser.parse_args()
    missing = missing_programs()
    if missing:
        print(f"not installed: {', '.join(missing)}. On Debian: apt-get install spin gcc libc6-dev")
        return 1
    checks = [check for check in CHECKS if options.only in check.claim]
    began = monotonic()
    print(_ROW.format("model", "claim", "must", "is", "states", "steps", "seconds"))
    wrong = 0
    runs: list[tuple[Check, Run]] = []
    with ThreadPoolExecutor(max(options.jobs, 1)) as pool:
        for check, outcome in _outcomes(pool, checks):
            wrong += not _tell(check, outcome, options.trail)
            if isinstance(outcome, Run):
                runs.append((check, outcome))
    if not options.only:
        for action in never_reached(runs):
            wrong += 1
            print(f"no search that holds has come by {action}: it claims nothing of that")
    print(f"{len(checks)} checks, {wrong} wrong, {monotonic() - began:.0f} s")
    return 1 if wrong else 0


def _outcomes(
    pool: ThreadPoolExecutor, checks: list[Check]
) -> Iterator[tuple[Check, Run | SpinFailed]]:
    return zip(checks, pool.map(_outcome, checks), strict=True)


def _outcome(check: Check) -> Run | SpinFailed:
    try:
        return verify(check.model, check.definitions, check.search)
    except SpinFailed as exc:
        return exc


def _tell(check: Check, outcome: Run | SpinFailed, trails: Path | None) -> bool:
    """Print the row; whether it is as it has to be."""
    must = "hold" if check.holds else "fail"
    row = partial(_ROW.format, check.model.stem, check.claim, must)
    if isinstance(outcome, SpinFailed):
        print(row("unknown", "", "", ""), outcome, sep="\n", flush=True)
        return False
    found = "holds" if not outcome.error else "fails"
    print(row(found, f"{outcome.states:,}", outcome.steps, f"{outcome.seconds:.1f}"), flush=True)
    if outcome.error and trails is not None:
        trails.mkdir(parents=True, exist_ok=True)
        (trails / f"{check.claim.replace(' ', '-')}.txt").write_text(outcome.trail)
    right = not outcome.error if check.holds else check.violated in outcome.error
    if not right and outcome.error:
        print(f"  violated: {outcome.error}", flush=True)
    return right


if __name__ == "__main__":
    sys.exit(main())
