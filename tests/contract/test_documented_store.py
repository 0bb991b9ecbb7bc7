"""The contract on the store that docs/reference/own-store.md shows, taken from the page."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest

from celery_singleton_lock.stores import open_store

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "own-store.md"
TEXT = PAGE.read_text()
STORE, TESTS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
[ENTRY_POINT] = re.findall(r"```toml\n.*\n(.*)\n```", TEXT)

store_module: Any = ModuleType("sqlite_store")
exec(compile(STORE, str(PAGE), "exec"), vars(store_module))


def documented_tests() -> dict[str, Any]:
    """What the page's test module defines; it imports the store by its name."""
    tests: dict[str, Any] = {"__name__": __name__}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "sqlite_store", store_module)
        exec(compile(TESTS, str(PAGE), "exec"), tests)
    return tests


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory in memory, where there is one: SQLite waits for the disk at each commit."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        yield Path(directory)


TestSQLiteStore = documented_tests()["TestSQLiteStore"]


def test_its_entry_point_opens_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "sqlite_store-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sqlite-store\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[celery_singleton_lock.stores]\n{ENTRY_POINT.replace(chr(34), '')}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "sqlite_store", store_module)
    store = open_store(f"sqlite://{tmp_path}/locks.db")
    assert isinstance(store, store_module.SQLiteStore)
