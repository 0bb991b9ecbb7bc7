"""What workers and beats write to the journal: their bodies, and Celery signals around them."""

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import Task
from celery.signals import (
    after_task_publish,
    beat_init,
    task_postrun,
    task_prerun,
    worker_ready,
)

from example_project.app import JOURNAL_PATH, LOCKED, NAME
from example_project.journal import Journal, What, lane_of

if TYPE_CHECKING or LOCKED:
    from celery_singleton_lock import current_lease, is_skipped
else:
    from example_project.unlocked import current_lease, is_skipped

journal = Journal(JOURNAL_PATH)


@contextmanager
def body(task: "Task[Any, Any]", argument: object) -> Iterator[None]:
    """Write when this body begins and how it ends. A body that is killed leaves no end."""
    request = task.request
    write = partial(
        journal.write,
        lane=lane_of(task.name, [argument], {}),
        job=str(request.id),
        body=uuid.uuid4().hex,
        worker=NAME,
    )
    write(What.START, fence=current_lease().fence)
    outcome = "done"
    try:
        yield
    except BaseException as error:
        outcome = type(error).__name__
        raise
    finally:
        write(What.END, detail=outcome)


@after_task_publish.connect
def _sent(headers: dict[str, Any], body: Sequence[Any], **_: object) -> None:
    lane = lane_of(headers["task"], body[0], body[1])
    journal.write(What.SENT, lane=lane, job=headers["id"], worker=NAME)


@task_prerun.connect
def _taken(
    task: "Task[Any, Any]",
    task_id: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    **_: object,
) -> None:
    # Before the lock is asked, and so before the claim of this message ends: the next call that
    # claims is published after this entry.
    journal.write(What.TAKEN, lane=lane_of(task.name, args, kwargs), job=task_id, worker=NAME)


@task_postrun.connect
def _skipped(
    task: "Task[Any, Any]",
    task_id: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    retval: Any,
    **_: object,
) -> None:
    if is_skipped(retval):
        journal.write(What.SKIP, lane=lane_of(task.name, args, kwargs), job=task_id, worker=NAME)


@worker_ready.connect
@beat_init.connect
def _ready(**_: object) -> None:
    journal.write(What.READY, worker=NAME)
