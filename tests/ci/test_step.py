"""A step of a delivery, with planted defects: what each of them leads to."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

import pytest

from tests.ci import processes
from tests.ci.__main__ import report
from tests.ci.step import MOST_REPEATED, Result, Runner, Step

# Each starts a run of tests of its own, which takes as long as a worker does.
pytestmark = pytest.mark.slow

GOOD = "def test_good(): pass\n"
BAD = "def test_bad(): assert False\n"
#: Fails the first time alone.
UNSTEADY = """
from pathlib import Path
def test_unsteady():
    mark = Path(__file__).with_suffix(".mark")
    if not mark.exists():
        mark.touch()
        raise AssertionError("the first time")
"""


@pytest.fixture
def run() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def runner(run: str, tmp_path: Path) -> Runner:
    return Runner(run=run, folder=tmp_path / "results", seconds=100)


def take(runner: Runner, project: Path, *tests: str, jobs: int = 0) -> Result:
    for number, text in enumerate(tests):
        (project / f"test_{number}.py").write_text(text)
    # Without the plugins that this environment has: they take most of the time of a start.
    pytest_ = f"PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 {sys.executable} -m pytest -p xdist -n {jobs}"
    (project / "Makefile").write_text(f"test:\n\t{pytest_} $(ARGS)\n")
    (project / "pytest.ini").touch()
    (project / "results").mkdir()
    command = ("make", "--directory", str(project), "test")
    return runner.take(Step(name="planted", command=command, limit=60, tests=True))


def test_a_test_that_fails_once_is_named_as_unsteady_and_stops_nothing(
    runner: Runner, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = take(runner, tmp_path, GOOD, UNSTEADY, jobs=2)
    assert result.ok
    assert result.unsteady == ("test_1.py::test_unsteady",)
    assert (result.passed, result.failed) == (2, ())
    assert "the first time" in capfd.readouterr().out


def test_a_test_that_always_fails_fails_the_step(runner: Runner, tmp_path: Path) -> None:
    result = take(runner, tmp_path, GOOD, BAD, UNSTEADY)
    assert not result.ok
    assert result.failed == ("test_1.py::test_bad",)
    assert result.unsteady == ("test_2.py::test_unsteady",)
    assert result.passed == 2


def test_a_module_that_can_not_be_imported_fails_the_step(runner: Runner, tmp_path: Path) -> None:
    result = take(runner, tmp_path, GOOD, "import nothing_of_this_name\n")
    assert not result.ok
    assert result.failed == ("test_1.py",)


def test_too_many_failed_tests_are_not_repeated(runner: Runner, tmp_path: Path) -> None:
    result = take(runner, tmp_path, *[UNSTEADY] * (MOST_REPEATED + 1))
    assert not result.ok
    assert len(result.failed) == MOST_REPEATED + 1


def test_a_run_without_a_test_fails(runner: Runner, tmp_path: Path) -> None:
    assert not take(runner, tmp_path).ok


def test_a_step_that_hangs_is_ended_and_its_processes_are_named(
    runner: Runner, run: str, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "sleep 1000 & sleep 2000"
    result = runner.take(Step(name="stuck", command=("bash", "-c", script), limit=1))
    assert result.word == "hung"
    assert "sleep 1000" in capfd.readouterr().out
    assert processes.of_run(run) == {}


def test_what_a_step_leaves_behind_is_named_and_ended(
    runner: Runner, run: str, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ("bash", "-c", "setsid sleep 1000 > /dev/null 2>&1 &")
    assert runner.take(Step(name="daemon", command=command, limit=60)).ok
    assert "left behind: " in capfd.readouterr().out
    assert processes.of_run(run) == {}


def test_no_step_begins_after_the_deadline_of_all(run: str, tmp_path: Path) -> None:
    late = Runner(run=run, folder=tmp_path, seconds=0)
    result = late.take(Step(name="late", command=("touch", str(tmp_path / "ran")), limit=60))
    assert result.word == "not run"
    assert not result.ok
    assert not (tmp_path / "ran").exists()


def test_the_table_has_every_step_and_the_count_stands_last(
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps = [Step(name=name, command=("true",), limit=1) for name in ("check", "test", "docs")]
    results = [
        Result(step=steps[0], word="failed", seconds=3),
        Result(step=steps[1], word="failed", passed=7, failed=("a::b",), unsteady=("c::d",)),
    ]
    report(results, steps)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "7 passed, 1 failed"
    assert lines[-3:-1] == ["unsteady: c::d", "failed: a::b"]
    assert any(line.startswith("docs") and line.endswith("not run") for line in lines)
