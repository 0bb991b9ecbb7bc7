"""A process in a pseudo-terminal: what a person would see, and the keys they press."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping, Sequence
from typing import Self

from example_project.private_server import tied_to_parent
from tests.harness.processes import ROOT, TIMEOUT

_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[=>])")
#: What a program writes to go on at the top left.
_HOME = "\x1b[H"

# COLUMNS, where the tests' own environment has it, would count for more than the terminal's size.
_ENVIRON = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}


class Terminal:
    """``with Terminal(["top"], lines=24, columns=80) as terminal: terminal.wait_for("load")``."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        lines: int = 24,
        columns: int = 80,
    ) -> None:
        self.output = ""
        self._news = threading.Condition()
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self._popen = subprocess.Popen(
            tied_to_parent(command),
            env={**_ENVIRON, "TERM": "xterm-256color", **(env or {})},
            cwd=ROOT,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            # The terminal controls the process, so that the key for it sends SIGINT.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._popen.kill()
        self._popen.wait()
        self._reader.join(TIMEOUT)
        os.close(self._master)

    @property
    def screen(self) -> str:
        """What the program wrote since it last went to the top left, without colours."""
        return _ESCAPES.sub("", self.output.rpartition(_HOME)[2]).replace("\r\n", "\n")

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until the screen has a text that matches."""
        with self._news:
            self._news.wait_for(lambda: re.search(pattern, self.screen), TIMEOUT)
        found = re.search(pattern, self.screen)
        assert found, f"{pattern!r} does not appear: {self.screen}"
        return found

    def press_ctrl_c(self) -> None:
        os.write(self._master, b"\x03")

    def terminate(self) -> None:
        """SIGTERM."""
        self._popen.terminate()

    def wait(self) -> int:
        """The exit status, once it has ended and all that it wrote is read."""
        status = self._popen.wait(TIMEOUT)
        self._reader.join(TIMEOUT)
        return status

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # EIO: the process has ended
                return
            with self._news:
                self.output += data.decode(errors="replace")
                self._news.notify_all()
