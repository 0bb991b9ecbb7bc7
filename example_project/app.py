"""The Celery app of the example, and its settings.

Everything a run of the demo changes comes from the environment, so the same app also works by hand:

    celery -A example_project.app worker -l INFO
    celery -A example_project.app beat --scheduler singleton -l INFO
"""

import os
from pathlib import Path

from celery import Celery

from example_project.beats import NIGHT
from example_project.consumers import client_name

#: The one switch: `off` registers the very same tasks without a lock (see tasks.py).
LOCKED = os.environ.get("EXAMPLE_LOCK", "on") != "off"

REDIS_URL = (
    os.environ.get("EXAMPLE_REDIS_URL") or os.environ.get("REDIS_URL") or "redis://localhost:6379/0"
)

#: Begins every key in Redis, so that the demo can share a server with other work.
PREFIX = os.environ.get("EXAMPLE_PREFIX", "example")

#: Where the journal and the bank's database live.
DIRECTORY = Path(os.environ.get("EXAMPLE_DIR", "."))
JOURNAL_PATH = DIRECTORY / "journal.jsonl"
BANK_PATH = DIRECTORY / "bank.sqlite3"

#: Of this process, in the journal: "worker-1", "beat-2".
NAME = os.environ.get("EXAMPLE_NAME", "by-hand")

#: Seconds after which Redis gives an unacknowledged message to another worker. An hour by default;
#: so short here because the demo waits for it after the kill. It stays longer than every body, or
#: live jobs would be delivered twice.
VISIBILITY_TIMEOUT = 3

app = Celery("example", broker=REDIS_URL, backend=REDIS_URL, include=["example_project.tasks"])

app.conf.update(
    # One message per process at a time: a job waits in the queue, where every worker can take it.
    worker_prefetch_multiplier=1,
    # Workers that outlive a killed demo find no broker any more and end by themselves.
    broker_connection_max_retries=3,
    broker_connection_retry_on_startup=True,
    worker_cancel_long_running_tasks_on_connection_loss=True,
    singleton_lock_prefix=PREFIX,
    # Several beats run, one of them leads. When it dies, another does within so many seconds.
    singleton_lock_beat_ttl=2,
    singleton_lock_beat_poll=0.5,
    result_backend_transport_options={"global_keyprefix": f"{PREFIX}:"},
    broker_transport_options={
        "global_keyprefix": f"{PREFIX}:",
        # How the demo finds a worker's connections; an older kombu ignores it.
        "client_name": client_name(PREFIX, NAME),
        "visibility_timeout": VISIBILITY_TIMEOUT,
        # kombu 5.7 sweeps for unacknowledged messages every 100 s by default. An older
        # kombu ignores both options; there the restarted worker sweeps when it starts.
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        # A worker killed during its sweep would keep the others from sweeping for this long, 300 s
        # by default.
        "unacked_mutex_expire": 2,
    },
    beat_schedule={
        "nightly-report": {
            "task": "example_project.tasks.nightly_report",
            "schedule": NIGHT,
            "kwargs": {"region": "eu"},
        }
    },
)
