"""The thread of the looks at the queues of keys, without a store."""

from __future__ import annotations

import pytest
from celery import Celery

from celery_singleton_lock.worker.queue_look import QueueLook


def test_a_flood_of_keys_that_are_asked_for_keeps_no_look_from_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = Celery("looks", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_url = "memory://"
    seen: list[str] = []

    def open_store() -> None:
        raise AssertionError("nothing is looked at here")

    def is_over() -> bool:
        return seen.count("all") == 2 or len(seen) == 20_000

    def look_at(key: str) -> None:
        seen.append(key)
        look._soon.put(key)

    look = QueueLook(app, open_store, is_over)  # type: ignore[arg-type]
    monkeypatch.setattr(look, "look", lambda: seen.append("all"))
    monkeypatch.setattr(look, "_look_at", look_at)
    monkeypatch.setattr(look, "_pause", 0.01)
    look._soon.put("a")
    look._run()
    assert seen.count("all") == 2
