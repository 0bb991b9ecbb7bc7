"""A test that is repeated, with planted defects: what is printed of each."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from tests.ci import steady
from tests.ci.steady import busy_loop, main

# Each starts runs of tests of its own.
pytestmark = pytest.mark.slow

#: Fails in the second of the runs, which are counted in a file.
SECOND = """
from pathlib import Path
def test_second():
    count = Path(__file__).with_suffix(".count")
    with count.open("a") as stream:
        stream.write(".")
    assert len(count.read_text()) != 2, "the second time"
"""


@pytest.fixture(autouse=True)
def _few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the plugins that this environment has: they take most of the time of a start."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def repeat(project: Path, text: str, *arguments: str) -> int:
    (project / "pytest.ini").touch()
    (project / "test_planted.py").write_text(text)
    return main([str(project / "test_planted.py"), "-p", "xdist", *arguments], runs=1)


def test_a_run_that_fails_is_counted_and_its_traceback_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steady, "LOOPS", 0)
    assert repeat(tmp_path, SECOND) == 1
    printed = capsys.readouterr().out
    assert "quiet: 1 of 1 passed" in printed
    assert "beside 0 busy loops: 0 of 1 passed" in printed
    assert "AssertionError: the second time" in printed


def test_a_busy_loop_computes_and_ends_with_its_block() -> None:
    with busy_loop() as pid:
        process = psutil.Process(pid)
        while process.cpu_times().user < 0.1:
            assert process.status() != psutil.STATUS_ZOMBIE
        assert process.cmdline()[0] == sys.executable
    assert not psutil.pid_exists(pid)
