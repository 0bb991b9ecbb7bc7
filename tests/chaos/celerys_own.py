"""Ends of workers that Celery 5.7 and kombu 5.7 bring about by themselves; excused by name alone.

Each was looked into when a campaign met it. Anything else that ends by itself, or comes to no end,
is a violation.
"""

from __future__ import annotations

from pathlib import Path

import celery_singleton_lock
from tests.chaos.stacks import HEAD

_PACKAGE = str(Path(celery_singleton_lock.__file__).parent)

_CRASHES = {
    # Kombu acknowledges a message on a channel that the loss of the broker has closed.
    "AttributeError: 'NoneType' object has no attribute 'hostname'": (
        "workers that kombu ended when it lost the broker"
    ),
    # A pool process was killed before it could say that it was up.
    "WorkerLostError: Could not start worker processes": (
        "workers that Celery ended because a child was killed at its start"
    ),
}


def reason_for_crash(log: str) -> str:
    """Which of Celery's own errors has ended a worker with this log; empty if none."""
    if "Unrecoverable error: " not in log and "Traceback" not in log:
        return ""
    return next((reason for error, reason in _CRASHES.items() if error in log), "")


def reason_for_hang(stacks: str) -> str:
    """Which of Celery's own waits keeps a worker with these stacks from ending; empty if none.

    A cold shutdown runs in the handler of its signal. Where that has interrupted the writing of a
    job to a child, the pool waits for the children's answers, which nobody reads any more. That is
    the main thread's doing; another one of ours, the pulse, is in its frames at all times.
    """
    main = stacks.partition(HEAD)[0].partition("MainThread\n")[2].partition("LOCAL VARIABLES")[0]
    if "_flush_outqueue" in main and _PACKAGE not in main:
        return "shutdowns that hung in Celery's own pool"
    return ""
