"""Tasks of several ``on_conflict`` whose keys have a rate. Bodies note the fence of their lease.

Its environment: LOSES=1: the first grants of the tasks in ``lost`` have no reply, and the store
is away at the second call of ``away``, in a worker with one process; WITHOUT_QUEUE=1: no task has
``on_conflict="queue"``.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from celery import Celery

from celery_singleton_lock import OnConflict, Rate, current_lease, singleton_task
from celery_singleton_lock.core.store_requests import Acquire, Granted, Refused
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.stores.redis.leases import RedisLeases
from tests.harness.journal import Journal

app = Celery("rates", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    singleton_lock_url=os.environ.get("LOCK_URL") or os.environ["RESULT_URL"],
)


def body(self: Any, name: str, number: int = 0, attempts: int = 1, countdown: float = 0) -> int:
    request = self.request
    with Journal.from_env().run(
        name, task_id=request.id, number=number, fence=current_lease().fence_number
    ):
        pass
    if request.retries + 1 < attempts:
        raise self.retry(countdown=countdown)
    return number


def task(name: str, **options: Any) -> Any:
    given = {"app": app, "bind": True, "name": f"rates.{name}", "key": "{name}", "ttl": 3}
    return singleton_task(**given, **options)(body)


if not os.environ.get("WITHOUT_QUEUE"):
    in_order = task("in_order", rate=10, on_conflict="queue", acks_late=True)
    early = task("early", rate=Rate(5, burst=2), on_conflict="queue")
    slow = task("slow", rate="10/h", on_conflict="queue")
    limited_in_time = task("limited_in_time", rate="40/m", on_conflict="queue")
skip = task("skip", rate=2, on_conflict="skip")
revoke = task("revoke", rate="10/m", on_conflict="revoke")
refuse = task("refuse", rate="10/m", on_conflict="raise")
wait = task("wait", rate=4, on_conflict="wait")
impatient = task("impatient", rate="10/m", on_conflict=OnConflict.wait(0.2))
unique = task("unique", rate="10/m", on_conflict="skip", unique="until_done")
crowd = task("crowd", rate=Rate(3, burst=6), limit=6, on_conflict="skip")
kept = task("kept", rate=2, on_conflict="skip", hold_on_retry=False)
# Their first grant has no reply, and the store does not answer their next requests either.
lost = {
    rule: task(f"lost_{rule}", rate="20/m", on_conflict=rule)
    for rule in ("skip", "revoke", "raise", "wait")
}


# After its first call, the store can't be reached for a moment.
away = task("away", rate="20/m", on_conflict="skip")


def lose_first_grants() -> None:
    acquire, asked = RedisLeases.acquire, Counter[str]()

    def lossy(leases: RedisLeases, request: Acquire, *, timeout: float) -> Granted | Refused:
        key = request.slots[0]
        is_away = ".away:" in key
        asked[key] += ".lost_" in key or is_away
        error = StoreUnavailable("no reply")
        error.was_sent = not is_away and asked[key] == 1
        if asked[key] == 2 or (is_away and asked[key] == 3):
            raise error
        reply = acquire(leases, request, timeout=timeout)
        if error.was_sent:
            raise error
        return reply

    RedisLeases.acquire = lossy  # type: ignore[method-assign]


if os.environ.get("LOSES"):
    lose_first_grants()
several = task("several", rate=Rate("3/m", burst=3), limit=2, on_conflict="skip")
