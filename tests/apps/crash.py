"""Tasks that are killed, delivered twice and retried.

A body ends when the test opens its gate, so that a test decides what happens in mid-body, and waits
for it to have happened, whatever the speed of the machine.

Its environment: BROKER_URL, RESULT_URL, JOURNAL; LOCK_URL, PREFIX, TTL, MARKER_TTL,
VISIBILITY_TIMEOUT, HEARTBEAT, QUEUE_TYPE and UNKNOWN_PROCESS if wanted.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from celery import Celery, Task, signals
from kombu import Exchange, Queue

from celery_singleton_lock import SingletonTask, current_lease, runtime, singleton_task
from tests.harness.journal import Journal

app = Celery("crash", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"])
#: Seconds, of what has to be free soon.
TTL = float(os.environ.get("TTL", "1.5"))
app.conf.update(
    broker_connection_retry_on_startup=True,
    # Messages wait in the worker, as many as come: that is where they get too old.
    worker_prefetch_multiplier=100,
)
if "LOCK_URL" in os.environ:
    app.conf.singleton_lock_url = os.environ["LOCK_URL"]
if "PREFIX" in os.environ:
    app.conf.singleton_lock_prefix = os.environ["PREFIX"]
if "MARKER_TTL" in os.environ:
    app.conf.singleton_lock_completion_ttl = float(os.environ["MARKER_TTL"])
if "VISIBILITY_TIMEOUT" in os.environ:
    app.conf.broker_transport_options = {
        "visibility_timeout": float(os.environ["VISIBILITY_TIMEOUT"]),
        # The sweep for messages that got too old, every second.
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }
if "HEARTBEAT" in os.environ:
    app.conf.broker_heartbeat = float(os.environ["HEARTBEAT"])
if "QUEUE_TYPE" in os.environ:
    quorum = os.environ["QUEUE_TYPE"] == "quorum"
    # Native delayed delivery (quorum queues) routes by patterns.
    kind = "topic" if quorum else "direct"
    arguments = {"x-queue-type": "quorum"} if quorum else {}
    app.conf.update(
        broker_transport_options={"confirm_publish": True},
        task_default_exchange_type=kind,
        task_queues=[
            Queue("celery", Exchange("celery", kind), "celery", queue_arguments=arguments),
            # Name, exchange and routing key differ.
            Queue("reports", Exchange("work", kind), "work.report", queue_arguments=arguments),
            # What comes here has any key.
            Queue("all", Exchange("any", "topic"), "any.#", queue_arguments=arguments),
        ],
    )

if "UNKNOWN_PROCESS" in os.environ:  # as on systems that have no identity of a process
    runtime.identity_of_this_process = lambda: ""

#: Seconds after which a body gives up waiting for its gate; no test comes near.
PATIENCE = 90.0
#: Seconds between two looks of a body at its gate.
POLL = 0.02


def gate(name: str) -> Path:
    """The file whose existence means "go on"."""
    return Path(os.environ["JOURNAL"]).with_name(f"gate-{name}")


def open_gate(name: str) -> None:
    """Let all bodies pass that wait there, now and later."""
    gate(name).touch()


def pass_gate(name: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not gate(name).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the gate {name} was not opened")
        time.sleep(POLL)


def occupy(task: Any, key: str, gate_name: str) -> str:
    """The body of all tasks here; returns a name for this one run of it."""
    mark = uuid4().hex
    fence = current_lease().fence_number if isinstance(task, SingletonTask) else None
    with Journal.from_env().run(
        key, task_id=task.request.id, fence=fence, mark=mark, retries=task.request.retries
    ):
        pass_gate(gate_name)
    return mark


@singleton_task(app=app, bind=True, key="{key}", ttl=TTL, acks_late=True)
def late(self: Task, key: str, gate_name: str) -> str:
    """What is acknowledged after the body."""
    return occupy(self, key, gate_name)


@singleton_task(app=app, bind=True, key="{key}", ttl=60, acks_late=True, reject_on_worker_lost=True)
def requeued(self: Task, key: str, gate_name: str) -> str:
    """Its ttl is longer than any test waits: what frees the key earlier is not the ttl."""
    return occupy(self, key, gate_name)


@singleton_task(
    app=app,
    bind=True,
    key="{key}",
    ttl=60,
    default_retry_delay=0,
    max_retries=1,
)
def lost_once(self: Task, key: str, gate_name: str) -> str:
    """Acknowledged before the body. The option is Celery's, from 5.7 on."""
    return occupy(self, key, gate_name)


lost_once.retry_on_worker_lost = True  # as a keyword it is refused where Celery lacks it


@singleton_task(app=app, bind=True, key="{key}", ttl=TTL, acks_late=True, ignore_result=True)
def silent(self: Task, key: str, gate_name: str) -> str:
    return occupy(self, key, gate_name)


@singleton_task(app=app, bind=True, key="{key}", ttl=60)
def early(self: Task, key: str, gate_name: str) -> str:
    """What is acknowledged before the body."""
    return occupy(self, key, gate_name)


@singleton_task(app=app, bind=True, key="{key}", ttl=TTL, acks_late=True, on_conflict="retry")
def patient(self: Task, key: str, gate_name: str) -> str:
    """Waits in the queue, not in the worker."""
    return occupy(self, key, gate_name)


@singleton_task(
    app=app, bind=True, key="{key}", ttl=TTL, acks_late=True, reject_on_worker_lost=True
)
def first_late(self: Task, key: str, gate_name: str) -> str:
    """A link of a chain: what follows is sent after the early release."""
    return occupy(self, key, gate_name)


@singleton_task(app=app, bind=True, key="{key}", ttl=TTL)
def first_early(self: Task, key: str, gate_name: str) -> str:
    return occupy(self, key, gate_name)


@app.task(bind=True)
def follower(self: Task, key: str) -> None:
    with Journal.from_env().run(f"after {key}", task_id=self.request.id):
        pass


@signals.before_task_publish.connect
def _die_before_the_first_follower(sender: str, body: Any, **_: Any) -> None:
    """In the child, after the body and the early release of its lease, before it is sent."""
    if sender != follower.name:
        return
    key = body[0][-1]
    if not gate(f"died-{key}").exists():
        open_gate(f"died-{key}")
        Journal.from_env().note("dies", key=key)
        os.kill(os.getpid(), signal.SIGKILL)
