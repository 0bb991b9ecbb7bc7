"""An app that knows nothing of celery-singleton-lock and sends its tasks by name.

Its environment: BROKER_URL, RESULT_URL; TICK, seconds, for Beat.
"""

from __future__ import annotations

import os

from celery import Celery

app = Celery("foreign", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
if "TICK" in os.environ:
    app.conf.beat_schedule = {
        "tick": {"task": "tests.apps.pools.tick", "schedule": float(os.environ["TICK"])}
    }
