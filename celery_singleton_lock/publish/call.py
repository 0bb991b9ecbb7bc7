"""A call that is about to be published, as the parts of a publication see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..policy import Policy
from ..runtime import Runtime


@dataclass(slots=True, kw_only=True, eq=False)
class PendingCall:
    """A call of a task with ``unique``.

    Attributes:
        runtime: The runtime of the publisher's app.
        task: Name of the task.
        task_id: The id of the message.
        key: The lock key that the call will need.
        policy: The task's policy, with this call's options.
        options: Celery's options; ``countdown``, ``eta`` and the options of its canvas are read.
        expires: Celery's ``expires`` of the call or the task.
    """

    runtime: Runtime
    task: str
    task_id: str
    key: str
    policy: Policy
    options: dict[str, Any]
    expires: Any = None
