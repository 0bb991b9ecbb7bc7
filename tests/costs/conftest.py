"""What all tests of costs have in common."""

from __future__ import annotations

import pytest

from celery_singleton_lock.stores.redis import connection


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no connection be checked before its use.

    A connection that was idle for 10 ms is checked, which a busy machine reaches between any two
    steps. Then the same work has another count.
    """
    monkeypatch.setattr(connection, "_CHECKED_AFTER", float("inf"))
