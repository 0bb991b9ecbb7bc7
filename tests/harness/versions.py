"""Two versions of the package at once: the present one, and the one that is deployed already."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from example_project.private_server import tied_to_parent
from tests.harness.processes import ROOT

#: The commit whose workers and publishers the present ones have to work beside; of version 0.2.
DEPLOYED: Final = "65bc26a"
#: A commit of version 0.1, which lacks some options.
OLDEST: Final = "a210256"

#: What an app for both versions is made of, beside the package; taken from the present version.
_SHARED: Final = (
    "tests/__init__.py",
    "tests/apps/__init__.py",
    "tests/apps/gate.py",
    "tests/apps/rolling.py",
    "tests/harness/__init__.py",
    "tests/harness/journal.py",
)


class HistoryNotFound(Exception):
    """This tree has no git history that reaches back to the deployed version."""


def export_deployed(directory: Path, commit: str = DEPLOYED) -> Path:
    """Put the package of an earlier version into ``directory``, with the tests' apps beside it.

    Raises:
        HistoryNotFound: There is no repository here, or no such commit in it.
    """
    command = ["git", "archive", "--format=tar", commit, "celery_singleton_lock"]
    try:
        archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", b"").decode(errors="replace").strip() or error
        raise HistoryNotFound(
            f"no git history with {commit} here ({why}); a shallow clone lacks it"
        ) from error
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        # Python below 3.11.4 has no filters; later ones warn where none is given.
        if hasattr(tarfile, "data_filter"):
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(directory)
    for name in _SHARED:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, directory / name)
    return directory


def imports_from(root: Path) -> dict[str, str]:
    """The environment of a process that imports from ``root``; it has to start there, too."""
    return {"PYTHONPATH": str(root)}


class Publisher:
    """A process that publishes with the version in ``root``.

    Args:
        root: What it imports from.
        app: A module that answers on its standard output, as `tests.apps.rolling` does.
        env: Added to the environment of the test.
    """

    def __init__(self, root: Path, app: str, env: Mapping[str, str]) -> None:
        self._popen = subprocess.Popen(
            tied_to_parent([sys.executable, "-m", app]),
            cwd=root,
            env={**os.environ, **env, **imports_from(root)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.root = Path(self._answer())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._popen.kill()
        self._popen.communicate()

    def send(self, task: str, *args: Any, **options: Any) -> str:
        """Publish one call, with options of ``apply_async``; its task id."""
        return str(self.ask([{"task": task, "args": args, "options": options}])[0])

    def send_all(self, calls: Sequence[tuple[str, str]]) -> list[str]:
        """Publish calls of task and name, one after the other; their ids."""
        return [str(one) for one in self.ask([{"task": t, "args": [n]} for t, n in calls])]

    def ask(self, requests: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The answers, in order."""
        assert self._popen.stdin is not None
        self._popen.stdin.write("".join(f"{json.dumps(request)}\n" for request in requests))
        self._popen.stdin.flush()
        return [self._answer() for _ in requests]

    def _answer(self) -> Any:
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        assert line, "the publisher has ended; its traceback is on standard error"
        return json.loads(line)
