"""``make celery-suite``: exit status 1 if a test fails more often with singletons than without."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from time import monotonic

import celery

from tests.celery_suite.comparison import ABSENT, Tally, suspects
from tests.celery_suite.suite import DIRECTORY, TESTS, Ended, Mode, SuiteRun, download, unpack


def main() -> int:
    """Run the suite in both modes, and again alone each test that failed or differed."""
    parser = argparse.ArgumentParser(prog="make celery-suite", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each test that is run alone")
    parser.add_argument("tests", nargs="*", default=TESTS, help="files or tests; default: both")
    given = parser.parse_args()
    began = monotonic()
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    archive = download()
    for mode in Mode:
        unpack(archive, mode)
    print(f"The suite of Celery {celery.__version__}; its logs are in {DIRECTORY}", flush=True)
    whole = _both(given.tests, "all")
    for mode, ended in whole.items():
        print(f"{mode:<10} {_summary(ended)}", flush=True)
    differing = 0
    for test in suspects(whole[Mode.PLAIN].outcomes, whole[Mode.SINGLETON].outcomes):
        tally = _again(test, whole, given.rounds)
        differing += tally.differs
        print(f"{'DIFFERS' if tally.differs else 'same'}  {test}: {tally}", flush=True)
    locked = _locked(whole)
    print(f"{differing} tests differ, {monotonic() - began:.0f} s")
    return 0 if locked and not differing else 1


def _both(tests: Sequence[str], name: str) -> dict[Mode, Ended]:
    """Run in both modes at the same time, so that other work on the machine disturbs both alike."""
    with (
        SuiteRun(Mode.PLAIN, tests, name=name) as plain,
        SuiteRun(Mode.SINGLETON, tests, name=name) as singleton,
    ):
        return {Mode.PLAIN: plain.wait(), Mode.SINGLETON: singleton.wait()}


def _again(test: str, whole: Mapping[Mode, Ended], rounds: int) -> Tally:
    counts = {mode: Counter([ended.outcomes.get(test, ABSENT)]) for mode, ended in whole.items()}
    if all(test in ended.outcomes for ended in whole.values()):
        name = test.rpartition("::")[2].replace("/", "-")
        for round in range(1, rounds + 1):
            for mode, ended in _both([test], f"{name}-{round}").items():
                counts[mode][ended.outcomes.get(test, ABSENT)] += 1
    return Tally(plain=counts[Mode.PLAIN], singleton=counts[Mode.SINGLETON])


def _locked(whole: Mapping[Mode, Ended]) -> bool:
    """Whether the tasks of one run were singletons, and those of the other were not."""
    scripts = {mode: ended.scripts for mode, ended in whole.items()}
    if scripts[Mode.PLAIN] == 0 and scripts[Mode.SINGLETON] > 0:
        return True
    print("The comparison shows nothing: the locks were used in both runs, or in none")
    return False


def _summary(ended: Ended) -> str:
    counts = Counter(ended.outcomes.values())
    words = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    return f"{len(ended.outcomes)} tests: {words}; {ended.scripts} scripts run by the lock store"


if __name__ == "__main__":
    sys.exit(main())
