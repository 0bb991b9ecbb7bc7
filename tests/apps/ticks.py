"""An app for many beats: its messages say when and by which process they were sent.

Its environment: BROKER_URL, RESULT_URL; LOCK_URL, the lock store; EVERY, seconds of the entry
``interval``; ENTRIES, how many entries of that interval; CRONTAB, of any value, for the entry
``crontab``; SETTINGS, JSON of more settings; REDBEAT_URL; SLOW_OBSERVER, seconds that a receiver of
``beat_leading`` takes.
A file AMBUSH, once it exists, names a pid and what happens to that process at its next
send, as ``<pid> SIGSTOP send``; ``authorize`` for ``send``: just before it asks the store.
``BLOCK`` for the signal: its thread waits until the file exists no more, and the others go on.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from celery import Celery
from celery.schedules import crontab
from celery.signals import beat_init, before_task_publish

from celery_singleton_lock.core.store_requests import Authorization, AuthorizeRun
from celery_singleton_lock.instrumentation import beat_leading
from celery_singleton_lock.stores.redis.schedule import RedisSchedule

app = Celery("ticks", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.broker_connection_retry_on_startup = True
app.conf.singleton_lock_url = os.environ.get("LOCK_URL", os.environ["BROKER_URL"])
# RedBeat's keys are beside the queue, unless the test says otherwise.
app.conf.redbeat_redis_url = os.environ.get("REDBEAT_URL", os.environ["BROKER_URL"])
app.conf.update(json.loads(os.environ.get("SETTINGS", "{}")))


def ambush(place: str) -> None:
    file = Path(os.environ.get("AMBUSH", "no such file"))
    if not file.exists():
        return
    pid, signal_name, where = file.read_text().split()
    if int(pid) == os.getpid() and where == place:
        if signal_name == "BLOCK":
            print("blocked", flush=True)
            while file.exists():
                time.sleep(0.01)
            return
        file.unlink()
        os.kill(os.getpid(), getattr(signal, signal_name))


_authorize_tick = RedisSchedule.authorize


def authorize_run(self: RedisSchedule, request: AuthorizeRun, *, timeout: float) -> Authorization:
    """Called by beat when it has looked at its lease for the last time."""
    ambush("authorize")
    return _authorize_tick(self, request, timeout=timeout)


@beat_init.connect
def prepare_beat(**_: Any) -> None:
    RedisSchedule.authorize = authorize_run  # type: ignore[method-assign]


@before_task_publish.connect
def stamp(headers: dict[str, Any], **_: Any) -> None:
    """Called by beat between its swap of the last run and the send."""
    ambush("send")
    headers.update(sent_at=time.time(), beat=os.getpid())


@beat_leading.connect
def observe(**_: Any) -> None:
    """An observer that may be slow: a webhook, say."""
    time.sleep(float(os.environ.get("SLOW_OBSERVER", "0")))


app.conf.beat_schedule = {}
if "EVERY" in os.environ:
    every = float(os.environ["EVERY"])
    app.conf.beat_schedule["interval"] = {"task": "interval", "schedule": every}
    for number in range(1, int(os.environ.get("ENTRIES", "1"))):
        name = f"interval{number}"
        app.conf.beat_schedule[name] = {"task": name, "schedule": every}
if "CRONTAB" in os.environ:
    app.conf.beat_schedule["crontab"] = {"task": "crontab", "schedule": crontab()}
