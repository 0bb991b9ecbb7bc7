"""One app in this process, with a real lock store: its tasks run in Celery's own tracer, no worker.

What a worker does beside (fetching, its pool, its events) is Celery's alone, and not counted here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any, Final
from uuid import UUID

from celery import Celery
from celery.app.trace import build_tracer

from celery_singleton_lock import OnConflict, hold, singleton_task
from celery_singleton_lock.core.lease import Holder, Lease, Token
from celery_singleton_lock.core.store_requests import Acquire, Refused, Release
from celery_singleton_lock.message.header import HEADER, VERSION
from celery_singleton_lock.message.request_data import ATTRIBUTE, Arrival
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.redis import connection as connections

__all__ = ["Site", "open_site"]

# Seconds: nothing is renewed or expires while something is counted.
TTL: Final = 600.0
_WORKER: Final = "celery@host.example"
_PID: Final = os.getpid()
_numbers = count()


# Tasks after which a process remembers as many of its releases as it ever does.
_WARM_UP = 100


class Site:
    """An app and its runtime.

    Args:
        url: The URL of the store.
        others: How many more singleton tasks the app has.
        results: URL of a result backend; None: there is none.

    Attributes:
        plain: A task of Celery's that does nothing.
        ours: The same under a lease. The rest are ours too:
        late: Acknowledged late.
        patient: Requeue where the key is taken.
        unique: Claimed when it is published.
        newest: Claimed, and run with the arguments of the last call.
        cancelling: Cancels an older call.
        queued: Waits in the queue of its key.
    """

    def __init__(self, url: str, others: int = 0, results: str | None = None) -> None:
        self.app = app = Celery("costs", broker="memory://", backend=results, set_as_current=False)
        app.conf.singleton_lock_url = url
        self.plain: Any = app.task(_body, name="costs.plain", shared=False)
        # Celery gives an app's tasks to all apps that come after it, unless an option forbids it.
        shared: dict[str, Any] = {
            **{"app": app, "shared": False},
            **{"key": "account:{account_id}", "ttl": TTL},
        }
        self.ours: Any = singleton_task(name="costs.ours", **shared)(_body)
        self.late: Any = singleton_task(name="costs.late", acks_late=True, **shared)(_body)
        self.patient: Any = singleton_task(
            name="costs.patient", on_conflict=OnConflict.retry(), **shared
        )(_body)
        self.unique: Any = singleton_task(name="costs.unique", unique="until_done", **shared)(_body)
        self.newest: Any = singleton_task(
            name="costs.newest", unique="until_start", on_duplicate="replace", **shared
        )(_body)
        self.cancelling: Any = singleton_task(
            name="costs.cancelling", on_conflict="cancel_running", **shared
        )(_body)
        self.queued: Any = singleton_task(name="costs.queued", on_conflict="queue", **shared)(_body)
        for number in range(others):
            singleton_task(name=f"costs.other_{number}", **shared)(_body)
        app.finalize()
        self.runtime = Runtime.of(app)
        self._tracers: dict[str, Any] = {}

    def run(
        self, task: Any, name: str = "k", header: Mapping[str, Any] | None = None, **request: Any
    ) -> Any:
        """A delivery of ``task``, as a worker's child gets it; what Celery would store.

        Args:
            task: The task.
            name: Its argument.
            header: Further content of the header of this library.
            **request: Further attributes of the request.
        """
        tracer = self._tracers.get(task.name)
        if tracer is None:
            # As a worker has it: what the decorator gave is a proxy for it.
            task = self.app.tasks[task.name]
            tracer = self._tracers[task.name] = build_tracer(task.name, task, app=self.app)
        number = next(_numbers)
        task_id = str(UUID(int=number))
        message = {**_message(task.name, task_id, number), **request}
        if header is not None:
            message[HEADER] = {**message[HEADER], **header}
        return tracer(task_id, [name], {}, message).retval

    def drain(self) -> None:
        """Read the replies to asynchronous releases.

        They are read with the reply to the next command, and it is chance whether both come at once
        or one after the other.
        """
        self.runtime.store.async_releases.drain(timeout=5.0)

    def publish(self, task: Any, name: str = "k") -> Any:
        """A call, as a web request makes it."""
        return task.apply_async((name,), task_id=str(UUID(int=next(_numbers))))

    def acquire(self, name: str = "k", task: Any = None, process: str = "") -> Lease | Refused:
        """What a run of a task (`ours`) asks the locker, in a process of that identity."""
        task_name = (task or self.ours).name
        number = next(_numbers)
        task_id = str(UUID(int=number))
        return self.runtime.locker.acquire(
            Acquire(
                slots=(self.runtime.keyspace.lock(task_name, f"account:{name}"),),
                token=Token(task_id, 0, 0, f"{number:016x}"),
                holder=Holder(
                    task=task_name,
                    task_id=task_id,
                    worker=_WORKER,
                    pid=_PID,
                    since=1.7e9,
                    process=process,
                ),
                ttl=TTL,
            )
        )

    def release(self, lease: Lease | Refused) -> None:
        """As an early release or the end of a `hold` does."""
        assert isinstance(lease, Lease), lease
        self.runtime.locker.release(lease, Release(keys=(lease.key,), token=lease.token))

    def cycle(self) -> None:
        """Acquire and release."""
        self.release(self.acquire())

    def hold(self) -> None:
        """A ``with hold()`` of a key with tasks."""
        with hold("account:block", scope=self.ours.name, ttl=TTL, app=self.app):
            pass

    def renew(self) -> None:
        """A sweep of the heartbeat in which every lease of this process is due."""
        self.make_due()
        self.sweep()

    def make_due(self) -> None:
        """Let every lease of this process be due in the next sweep."""
        for lease in self.runtime.locker.heartbeat._leases:
            lease.due = lease.sweep_at = 0.0

    def sweep(self) -> None:
        """As the heartbeat's thread does."""
        assert self.runtime.locker.heartbeat.sweep()

    @contextmanager
    def taken(self, name: str = "k", task: Any = None) -> Iterator[None]:
        """Another client has the key of a task (`ours`)."""
        # Not hold(): whose block it is in, that enters its lease again.
        lease = self.acquire(name, task)
        yield
        self.release(lease)


def _body(account_id: str) -> None:
    """Nothing."""


def _message(task: str, task_id: str, number: int) -> Mapping[str, Any]:
    """What Celery's request holds of a message that a worker received."""
    return {
        "lang": "py",
        "task": task,
        "id": task_id,
        "root_id": task_id,
        "parent_id": None,
        "group": None,
        "retries": 0,
        "timelimit": [None, None],
        "replaced_task_nesting": 0,
        "hostname": _WORKER,
        "delivery_info": {"exchange": "", "routing_key": "celery", "redelivered": False},
        HEADER: {"version": VERSION, "id": task_id, "call": f"{number:08x}"},
        "headers": {},
        ATTRIBUTE: Arrival(nonce=f"{number:016x}"),
    }


def _end_heartbeat(site: Site) -> None:
    """Leave the sweeps to `Site.renew`: the thread's own would come in between, now and then."""
    others = set(threading.enumerate())
    site.cycle()
    heartbeat = site.runtime.locker.heartbeat
    heartbeat.close()
    for thread in set(threading.enumerate()) - others:
        thread.join(60)
        assert not thread.is_alive()
    # As if the thread slept: from now on no lease that comes has to start it or to wake it.
    heartbeat._running = True
    site.cycle()
    heartbeat.sweep()


@contextmanager
def open_site(url: str, others: int = 0, results: str | None = None) -> Iterator[Site]:
    """A site, and its end."""
    site = Site(url, others, results)
    # Counting is slow: a connection would count as idle between two steps, or not, by chance.
    checked_after, connections._CHECKED_AFTER = connections._CHECKED_AFTER, float("inf")
    try:
        _end_heartbeat(site)
        for _ in range(_WARM_UP):
            site.run(site.ours)
        yield site
    finally:
        connections._CHECKED_AFTER = checked_after
        site.runtime.close()
        with site.app.connection_for_write() as connection:
            connection.default_channel.queue_purge("celery")
        site.app.close()
