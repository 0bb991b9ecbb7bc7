"""A page of the documentation as a script: its files, its sessions, its commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from tests.harness.processes import ROOT

__all__ = ["Page", "block_with", "blocks", "run"]


def blocks(text: str, language: str = "python") -> list[str]:
    """The fenced blocks of one language."""
    fences = re.findall(r"^```([^\n]*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [block for of_language, block in fences if of_language == language]


def block_with(text: str, start: str) -> str:
    (found,) = [block for block in blocks(text) if start in block]
    return found


def run(*arguments: str, folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder with the package importable."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


class Page:
    """A page whose examples run in ``folder``, on the server at ``redis_url``.

    A Python block that begins with ``# name.py`` is that file, and one with ``# name.py, at the
    end`` is added to it. Blocks with ``>>>`` are sessions.
    """

    def __init__(self, name: str, folder: Path, redis_url: str) -> None:
        text = (ROOT / "docs" / name).read_text()
        self._text = re.sub(r"redis://localhost:6379/\d", redis_url, text)
        self._folder = folder

    def write(self) -> Self:
        """Write the page's files into the folder."""
        for block in blocks(self._text):
            if match := re.match(r"# ([\w/]+\.py)(, at the end)?\n", block):
                path = self._folder / match[1]
                path.parent.mkdir(parents=True, exist_ok=True)
                before = path.read_text() if match[2] else ""
                path.write_text(before + block)
        return self

    @property
    def sessions(self) -> list[str]:
        return [block for block in blocks(self._text) if ">>>" in block]

    def check(self, *sessions: str) -> None:
        """Assert that sessions print what the page says; all of them, if none is given."""
        (self._folder / "session.txt").write_text("\n".join(sessions or self.sessions))
        done = run("-m", "doctest", "-o", "ELLIPSIS", "session.txt", folder=self._folder)
        assert done.returncode == 0, done.stdout + done.stderr

    def commands(self, start: str) -> list[list[str]]:
        """The arguments of the commands that begin with ``start``."""
        lines = "\n".join(blocks(self._text, "")).splitlines()
        return [line.split("  #")[0].split() for line in lines if line.startswith(start)]
