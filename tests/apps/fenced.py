"""A task that writes to a resource which compares fencing tokens, as the documentation advises.

Its environment: BROKER_URL, RESULT_URL, LOCK_URL, JOURNAL.
"""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path
from typing import Any

from celery import Celery

from celery_singleton_lock import current_lease, singleton_task
from tests.harness.journal import Journal

app = Celery("fenced", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    singleton_lock_url=os.environ["LOCK_URL"],
)

#: Seconds after which a body gives up waiting for its gate; no test comes near.
PATIENCE = 90.0
POLL = 0.02


def beside_the_journal(name: str) -> Path:
    return Path(os.environ["JOURNAL"]).with_name(name)


def open_gate(name: str) -> None:
    """Let all bodies pass that wait there, now and later."""
    beside_the_journal(f"gate-{name}").touch()


def account() -> sqlite3.Connection:
    """One account, with the fence of its last writer."""
    connection = sqlite3.connect(beside_the_journal("account.sqlite"), timeout=30)
    with connection:
        connection.execute("CREATE TABLE IF NOT EXISTS account (writer TEXT, last_fence INTEGER)")
        connection.execute(
            "INSERT INTO account SELECT 'none', 0 WHERE NOT EXISTS (SELECT 1 FROM account)"
        )
    return connection


# It renews late, and it goes on when it learns of its loss: what is left is the fence.
@singleton_task(app=app, bind=True, key="{key}", ttl=60, on_lost="continue")
def write(self: Any, key: str, gate: str) -> bool:
    """Wait at the gate, then write; whether the resource took it."""
    fence = current_lease().fence
    with Journal.from_env().run(key, task_id=self.request.id, fence=fence):
        deadline = time.monotonic() + PATIENCE
        while not beside_the_journal(f"gate-{gate}").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the gate {gate} was not opened")
            time.sleep(POLL)
        connection = account()
        with connection:
            changed = connection.execute(
                "UPDATE account SET writer = ?, last_fence = ? WHERE last_fence < ?",
                (gate, fence, fence),
            )
        connection.close()
        return changed.rowcount == 1
