"""The pytest plugin: the fixture ``singleton_store``.

pytest imports this module in every project that has this package installed. Therefore the module
has no hooks, and imports nothing of this package before the fixture is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .testing.singleton_store import SingletonStore


@pytest.fixture
def singleton_store(request: pytest.FixtureRequest) -> Iterator[SingletonStore]:
    """An in-memory store with a manual clock, for the fixture ``celery_app`` or the current app."""
    from .testing.singleton_store import SingletonStore

    store = SingletonStore()
    names = request.fixturenames
    store.install(request.getfixturevalue("celery_app") if "celery_app" in names else None)
    yield store
    store.uninstall()
