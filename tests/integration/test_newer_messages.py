"""Messages of a newer version, as they arrive while a deployment replaces its workers."""

from __future__ import annotations

from collections.abc import Callable

from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.message.header import HEADER, VERSION
from tests.harness.worker import CeleryWorker
from tests.integration.stage import APP, Stage

Consume = Callable[..., CeleryWorker]


def test_a_message_of_a_newer_version_is_requeued_until_a_worker_can_read_it(
    stage: Stage, consume: Consume, name: str
) -> None:
    old = consume(name)
    header = {"version": VERSION + 1, "call": "c", "id": name, "options": {"ttl": 17}, "new": 1}
    # By name: the header of a call that has its code is written by this version.
    result = stage.app.app.send_task(
        f"{APP}.work", (name,), task_id=name, headers={HEADER: header}, queue=name
    )
    old.wait_for_event(EventName.REQUEUED, task_id=name, reason="newer message")
    assert f"its message has version {VERSION + 1}" in old.log
    assert f"reads messages up to version {VERSION}. Upgrade this worker" in old.log
    assert stage.starts(name) == []
    old.terminate()
    consume(name, env={"NEWER": "1"})
    assert result.get(timeout=60) == name
    [start] = stage.starts(name)
    assert start.data["ttl"] == 17, "the copy keeps the header"
