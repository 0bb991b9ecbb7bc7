"""One step of a run: a command with a limit, and for tests one repetition of what failed.

Guarantees:
    A step ends at its limit, with the stacks of its processes in the log, and leaves none behind.
    A test that failed is repeated once, alone. If it passes then, it is named as unsteady.
Non-guarantees:
    More than `MOST_REPEATED` failed tests are not repeated: that is no unsteadiness.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from xml.etree import ElementTree

from tests.ci.processes import MARK, end_all, print_stacks

MOST_REPEATED = 10

#: Seconds for the repetition of failed tests: each may take the limit of one test (120 s).
_REPETITION = 300.0

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A command of the Makefile, or another one.

    Attributes:
        limit: Seconds after which it is ended.
        tests: Whether it is a target of the Makefile that calls pytest with ARGS.
        args: The ARGS of such a target.
    """

    name: str
    command: tuple[str, ...]
    limit: float
    tests: bool = False
    args: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a step ended.

    Attributes:
        word: "passed", "failed", "hung", or "not run" if no time was left.
        seconds: Its duration.
        failed: Names of tests; so are `unsteady`.
        modules: The seconds that the tests of each module took together.
    """

    step: Step
    word: str
    seconds: float = 0.0
    passed: int = 0
    failed: tuple[str, ...] = ()
    unsteady: tuple[str, ...] = ()
    modules: Mapping[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether it does not stop a delivery."""
        return self.word == "passed"


class Runner:
    """Runs steps one after another, within one deadline.

    Args:
        run: The mark of this run's processes.
        folder: Where results of the tests are written, and temporary files go.
        seconds: The time for all steps together.
    """

    def __init__(self, *, run: str, folder: Path, seconds: float) -> None:
        self._run = run
        self._folder = folder
        self._deadline = time.monotonic() + seconds

    def take(self, step: Step) -> Result:
        """Run the step to its end or to its limit, whichever comes first."""
        print(f"\n=== {step.name}", flush=True)
        begin = time.monotonic()
        result = self._tests(step) if step.tests else self._command(step)
        result = replace(result, seconds=time.monotonic() - begin)
        print(f"=== {step.name}: {result.word}, {result.seconds:.0f} s", flush=True)
        return result

    def _command(self, step: Step) -> Result:
        return Result(step=step, word=self._execute(step.command, step.limit))

    def _tests(self, step: Step) -> Result:
        folder = self._folder / step.name.replace(" ", "-")
        cache = folder / "cache"
        first = folder / "first.xml"
        args = f"{step.args} -o cache_dir={cache} --junitxml={first}"
        word = self._execute((*step.command, f"ARGS={args}"), step.limit)
        passed, modules = _report(first)
        failed = _last_failed(cache)
        if word != "failed" or not failed or len(failed) > MOST_REPEATED:
            return Result(
                step=step, word=word, passed=passed, failed=tuple(failed), modules=modules
            )
        print(f"=== {step.name}: {len(failed)} failed, repeated alone", flush=True)
        # Without `args`: --lf leaves out modules, so that the parts would be dealt differently.
        args = f"-o cache_dir={cache} -n 0 --lf --lfnf=none"
        word = self._execute((*step.command, f"ARGS={args}"), _REPETITION)
        still = failed if word == "hung" else _last_failed(cache)
        unsteady = [each for each in failed if each not in still]
        return Result(
            step=step,
            word=word,
            passed=passed + len(unsteady),
            failed=tuple(still),
            unsteady=tuple(unsteady),
            modules=modules,
        )

    def _execute(self, command: tuple[str, ...], limit: float) -> str:
        """Returns "passed", "failed" or "hung"; "not run" if there was no time left."""
        limit = min(limit, self._deadline - time.monotonic())
        if limit <= 0:
            return "not run"
        environment = {**os.environ, MARK: self._run, "TMPDIR": str(self._folder), "CI": "true"}
        process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            # The signals of a terminal or of `timeout` end this program, which then ends the step.
            start_new_session=True,
        )
        try:
            word = "passed" if process.wait(limit) == 0 else "failed"
        except subprocess.TimeoutExpired:
            print(f"=== ended after {limit:.0f} s; its processes were:", flush=True)
            print_stacks(self._run, _ROOT / ".venv/bin/py-spy")
            word = "hung"
        finally:
            left = end_all(self._run)
            process.wait()
        if word != "hung":
            for each in left:
                print(f"=== left behind: {each[:200]}", flush=True)
        return word


def _report(path: Path) -> tuple[int, dict[str, float]]:
    """How many tests passed, and the seconds of each module; nothing if pytest wrote no report."""
    if not path.exists():
        return 0, {}
    passed, seconds = 0, dict[str, float]()
    for test in ElementTree.parse(path).getroot().iter("testcase"):
        passed += all(test.find(word) is None for word in ("failure", "error", "skipped"))
        # "tests.unit.test_key.TestTemplate", or "tests.unit.test_key"
        names = test.get("classname", "").split(".")
        module = next((n for n, name in enumerate(names) if name.startswith("test_")), None)
        if module is not None:
            name = "/".join(names[: module + 1]) + ".py"
            seconds[name] = seconds.get(name, 0.0) + float(test.get("time", 0))
    return passed, dict(seconds)


def _last_failed(cache: Path) -> list[str]:
    """The tests that `--last-failed` would run."""
    names = cache / "v/cache/lastfailed"
    return sorted(json.loads(names.read_text())) if names.exists() else []
