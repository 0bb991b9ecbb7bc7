"""An earlier revision of the package, importable beside the current one under another name.

A change is measured in one process with what it replaced: two runs of a benchmark differ by more
than most changes do.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from celery_singleton_lock import __name__ as _PACKAGE

__all__ = ["PACKAGE", "exported"]

#: The name under which the earlier revision is imported.
PACKAGE: Final = f"{_PACKAGE}_before"
_ROOT: Final = Path(__file__).parents[2]
# Names that both versions would share in one process: attributes of the app and of its tasks.
_SHARED: Final = ("_singleton_runtimes", "singleton_policy", "singleton_execution")


@contextmanager
def exported(revision: str) -> Iterator[Path]:
    """A directory to import `PACKAGE` from, at ``revision``; it is in ``sys.path`` meanwhile.

    Raises:
        subprocess.CalledProcessError: This is no git checkout, or it has no such revision.
    """
    with TemporaryDirectory(prefix="benchmark-before-") as name:
        directory = Path(name)
        archive = subprocess.run(
            ["git", "archive", revision, _PACKAGE], cwd=_ROOT, capture_output=True, check=True
        )
        subprocess.run(["tar", "-x"], cwd=directory, input=archive.stdout, check=True)
        package = (directory / _PACKAGE).rename(directory / PACKAGE)
        for module in package.rglob("*.py"):
            source = module.read_text().replace(_PACKAGE, PACKAGE)
            for shared in _SHARED:
                source = source.replace(shared, f"{shared}_before")
            module.write_text(source)
        sys.path.insert(0, name)
        try:
            yield directory
        finally:
            sys.path.remove(name)
