"""``make demo``, as a user without a terminal sees it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_demo_shows_nothing_double_with_the_lock_and_much_without(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "example_project.demo", "--seconds", "7", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    with_lock, without = re.findall(r"^.*overlaps: (.*)$", done.stdout, flags=re.MULTILINE)[-2:]
    assert with_lock.startswith(
        "0   jobs lost: 0   scheduled runs sent twice: 0   messages for 40 calls: "
    )
    assert int(with_lock.rpartition(" ")[2]) < 20
    overlaps, lost, twice, messages = map(int, re.findall(r"\b\d+(?!\d| calls)", without))
    assert (lost, messages) == (0, 40)
    assert overlaps > 0
    assert twice > 0
    first_run = done.stdout.partition("The run without the lock")[0]
    assert re.search(r"worker-\d  KILLED", first_run)
    killed = re.search(r"(beat-\d)    KILLED", first_run)
    assert killed
    after_kill = first_run[killed.end() :]
    other = ({"beat-1", "beat-2"} - {killed[1]}).pop()
    assert f"{killed[1]}    leads" in first_run[: killed.start()]
    assert f"{other}    leads" in after_kill
    assert f"{killed[1]}    sends " not in after_kill
    assert "calls that published nothing" in first_run
    assert re.search(r"waiting at the same time, at most +1 ", done.stdout)
    assert re.search(r"a run began after the last call +yes ", done.stdout)
    assert "\x1b" not in done.stdout, "plain lines where there is no terminal"
    assert (tmp_path / "timeline.svg").read_text().startswith("<svg")
