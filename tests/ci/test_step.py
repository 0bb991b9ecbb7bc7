"""A step of a delivery, with planted defects: what each of them leads to."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

import pytest

from tests.ci import processes
from tests.ci.__main__ import report
from tests.ci.step import Result, Runner, Step

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
TEST_BAD, TEST_UNSTEADY = "test_1.py::test_bad", "test_2.py::test_unsteady"


@pytest.mark.parametrize(
    ("tests", "passed", "failed", "unsteady"),
    [
        ([GOOD, GOOD, UNSTEADY], 3, (), (TEST_UNSTEADY,)),
        ([GOOD, BAD, UNSTEADY], 2, (TEST_BAD,), (TEST_UNSTEADY,)),
        ([GOOD, "import nothing_of_this_name\n"], None, ("test_1.py",), ()),
        ([], 0, (), ()),
    ],
)
def test_a_test_that_fails_once_is_unsteady_and_one_that_always_fails_fails_the_step(
    tests: list[str],
    passed: int | None,
    failed: tuple[str, ...],
    unsteady: tuple[str, ...],
    tmp_path: Path,
) -> None:
    for number, text in enumerate(tests):
        (tmp_path / f"test_{number}.py").write_text(text)
    # Without the plugins that this environment has: they take most of the time of a start.
    pytest_ = f"PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 {sys.executable} -m pytest -p xdist -n 0"
    (tmp_path / "Makefile").write_text(f"test:\n\t{pytest_} $(ARGS)\n")
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "results").mkdir()
    command = ("make", "--directory", str(tmp_path), "test")
    runner = Runner(run=uuid.uuid4().hex, folder=tmp_path / "results", seconds=100)
    result = runner.take(Step(name="planted", command=command, limit=60, tests=True))
    assert result.ok is (bool(tests) and not failed)
    assert (result.failed, result.unsteady) == (failed, unsteady)
    assert passed in (None, result.passed)


def test_a_step_ends_at_its_limit_and_what_it_leaves_behind_is_named_and_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = uuid.uuid4().hex
    runner = Runner(run=run, folder=tmp_path, seconds=100)
    script = "sleep 1000 & sleep 2000"
    stuck = runner.take(Step(name="stuck", command=("bash", "-c", script), limit=1))
    assert stuck.word == "hung"
    assert "sleep 1000" in capfd.readouterr().out
    command = ("bash", "-c", "setsid sleep 1000 > /dev/null 2>&1 &")
    assert runner.take(Step(name="daemon", command=command, limit=60)).ok
    assert "left behind: " in capfd.readouterr().out
    assert processes.of_run(run) == {}
    late = Runner(run=run, folder=tmp_path, seconds=0)
    assert late.take(Step(name="late", command=("true",), limit=60)).word == "not run"


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
    assert lines[-3:] == ["unsteady: c::d", "failed: a::b", "7 passed, 1 failed"]
    assert any(line.startswith("docs") and line.endswith("not run") for line in lines)
