"""``make demo``, as a user without a terminal sees it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_demo_shows_no_overlap_with_the_lock_and_some_without(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "example_project.demo", "--seconds", "7", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "overlaps: 0   jobs lost: 0" in done.stdout
    assert "KILLED" in done.stdout
    assert "\x1b" not in done.stdout, "plain lines where there is no terminal"
    assert (tmp_path / "timeline.svg").read_text().startswith("<svg")
