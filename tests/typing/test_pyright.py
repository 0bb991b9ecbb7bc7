"""pyright agrees with mypy about `cases.py`: the types it shows, and the lines it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import missing
from tests.typing.test_types import CASES, expected, page_example, wrong_lines


def as_mypy_says(report: dict[str, Any]) -> str:
    """One report, spelled as the marks of the cases are; of an error only that it is one."""
    if report["severity"] == "error":
        return "E"
    shown = re.fullmatch(r'Type of ".*" is "(.*)"', report["message"])
    assert shown is not None, report
    # mypy has brackets around parameters, and leaves out a default's value.
    return "R: " + re.sub(r" = \w+", " =", re.sub(r"\[\((.*?)\)", r"[[\1]", shown[1]))


@pytest.mark.slow
def test_pyright_infers_what_the_cases_say(tmp_path: Path) -> None:
    if find_spec("pyright") is None:
        missing("pyright, of the dev extra")
    page, refused = page_example(tmp_path)
    options = ["--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(
        [sys.executable, "-m", "pyright", *options, CASES, page],
        # Its wrapper would ask a registry for a newer version.
        env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    reports: dict[str, dict[int, str]] = {}
    for report in json.loads(done.stdout)["generalDiagnostics"]:
        if report["severity"] in ("error", "information"):
            lines = reports.setdefault(report["file"], {})
            lines[report["range"]["start"]["line"] + 1] = as_mypy_says(report)
    assert reports.pop(page) == {refused: "E"}
    [found] = reports.values()
    wanted = {line: "E" if mark[0] == "E" else mark for line, mark in expected().items()}
    assert len(wanted) > 30
    wrong = wrong_lines(wanted, found)
    assert not wrong, "\n".join([*wrong, "", done.stdout])
