"""What workers and Beat write to the journal: their bodies, and Celery signals around them."""

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from celery import Task
from celery.signals import after_task_publish, task_postrun, worker_ready

from example_project.app import JOURNAL_PATH, LOCKED
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
        worker=str(request.hostname).partition("@")[0],
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
    arguments, keywords = body[0], body[1]
    journal.write(What.SENT, lane=lane_of(headers["task"], arguments, keywords), job=headers["id"])


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
        worker = str(task.request.hostname).partition("@")[0]
        journal.write(What.SKIP, lane=lane_of(task.name, args, kwargs), job=task_id, worker=worker)


@worker_ready.connect
def _ready(sender: Any, **_: object) -> None:
    journal.write(What.READY, worker=str(sender.hostname).partition("@")[0])
