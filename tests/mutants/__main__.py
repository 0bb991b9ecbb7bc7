"""``python -m tests.mutants``: apply each mutant to a copy, and run the tests that must catch it.

The copy lies in a temporary folder and is first on the path, before the editable installation, so
that pytest and the workers that the tests start import the package from there. All tests run once
on the copy as it is: a test that fails without a mutant would prove nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.mutants.mutant import ROOT, Mutant, load

# The environment, the caches and the history are not needed, and are large.
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "demo-output")
_PYTEST = ("-q", "-n", "0", "-p", "no:randomly", "--no-header", "--tb=short", "--timeout=60")
# Seconds. A test has a timeout of its own, but not the end of pytest.
_LONGEST = 900.0
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", re.MULTILINE)
# pytest's exit status if tests failed. A change after which nothing is collected is not caught.
_TESTS_FAILED = 1


class Copy:
    """A copy of the repository in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._root = folder / "copy"
        shutil.copytree(ROOT, self._root, ignore=_LEFT_OUT)
        self._environment = {**os.environ, "PYTHONPATH": str(self._root), "COLUMNS": "300"}
        command = [sys.executable, "-c", "import celery_singleton_lock as it; print(it.__file__)"]
        # From another directory, as a worker may be started: only the path leads to the copy.
        found = self._run(command, folder).stdout.strip()
        if not Path(found).is_relative_to(self._root):
            raise RuntimeError(f"the tests would import {found}, which is not in the copy")

    def test(self, tests: Iterable[str], *options: str) -> tuple[int, str]:
        """Run ``tests``; the exit status of pytest, and its output."""
        command = [sys.executable, "-m", "pytest", *_PYTEST, *options, *dict.fromkeys(tests)]
        try:
            done = self._run(command, self._root)
        except subprocess.TimeoutExpired as exc:
            return -1, f"{exc}"
        return done.returncode, done.stdout + done.stderr

    def test_mutant(self, mutant: Mutant) -> tuple[int, str]:
        """As :meth:`test`, with ``mutant`` applied meanwhile."""
        path = self._root / mutant.file
        path.write_text(mutant.changed(self._root))
        try:
            # A slow test that is given for a quick one is not collected, and catches nothing.
            return self.test(mutant.tests, "-x", *(() if mutant.slow else ("-m", "not slow")))
        finally:
            # With its time of modification, so that Python does not use what it compiled meanwhile.
            shutil.copy2(ROOT / mutant.file, path)

    def _run(self, command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=_LONGEST,
        )


def run(mutants: list[Mutant]) -> int:
    """Print a line for each mutant and a summary; the exit status."""
    with TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder))
        status, output = copy.test(test for mutant in mutants for test in mutant.tests)
        if status:
            print(f"{output}\nunchanged tests do not pass")
            return 1
        missed = 0
        for mutant in mutants:
            print(f"{mutant.name}: ", end="", flush=True)
            begun = time.monotonic()
            status, output = copy.test_mutant(mutant)
            if status == _TESTS_FAILED:
                failed = _FAILED.search(output)
                by = failed[1].rpartition("::")[2].partition("[")[0] if failed else "an error"
                print(f"caught in {time.monotonic() - begun:.1f} s by {by}", flush=True)
            else:
                missed += 1
                print(f"NOT CAUGHT (pytest ended with {status})\n{output}", flush=True)
    print(f"{len(mutants) - missed} caught, {missed} not caught")
    return 1 if missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", metavar="NAME", help="the mutants whose names contain this")
    parser.add_argument("--list", action="store_true", help="print the names and their tests")
    options = parser.parse_args()
    mutants = [mutant for mutant in load() if (options.only or "") in mutant.name]
    if not mutants:
        parser.error(f"no mutant is named like {options.only!r}")
    if not options.list:
        return run(mutants)
    for mutant in mutants:
        print(mutant.name + " (slow)" * mutant.slow, *mutant.tests, sep="\n    ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
