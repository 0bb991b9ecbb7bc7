"""What Celery 5.7 brought is not needed: 5.5 is the oldest that we allow."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo
from celery.exceptions import Terminated, WorkerLostError

from celery_singleton_lock import celery_compat
from celery_singleton_lock.publish.publication import is_chords_body

# Its classes take parameters when they run only since then (`EagerResult[int]`); the types are
# older. Django's and RedBeat's schedulers are left out: they ask for more than an import.
PROGRAM = """
    import importlib, pkgutil, sys
    import celery.beat, celery.canvas, celery.result, celery.worker.request

    for module in [m for name, m in list(sys.modules.items()) if name.startswith("celery")]:
        for cls in [c for c in list(vars(module).values()) if isinstance(c, type)]:
            if cls.__module__.startswith("celery.") and "__class_getitem__" in vars(cls):
                del cls.__class_getitem__

    import celery_singleton_lock as package

    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not found.name.endswith((".beat.django", ".beat.redbeat")):
            importlib.import_module(found.name)
    print([name for name in package.__all__ if not hasattr(package, name)])
"""


@pytest.mark.slow
def test_everything_is_imported_where_celerys_classes_take_no_parameters() -> None:
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    "change", ["del utils.HIDDEN_SETTINGS", "utils.HIDDEN_SETTINGS = ('API', 'TOKEN')"]
)
def test_an_import_needs_no_pattern_of_celerys_report(change: str) -> None:
    program = f"import celery.app.utils as utils; {change}; import celery_singleton_lock.task.base"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def signature(task_id: str) -> dict[str, Any]:
    return {"task": "t", "options": {"task_id": task_id}}


@pytest.mark.parametrize(
    ("name", "chord", "expected"),
    [
        ("member", signature("body"), True),
        ("member", signature("another"), False),
        ("member", None, False),
        ("member", {"options": 3}, False),
        ("member", 3, False),
        ("celery.chord_unlock", None, True),
    ],
    ids=repr,
)
def test_a_chords_body_is_known_by_its_publisher(name: str, chord: Any, expected: bool) -> None:
    """Its options don't say so: were it taken for a single call, its chord would wait for ever."""
    running = SimpleNamespace(name=name, request=SimpleNamespace(chord=chord))
    assert is_chords_body(running, "body") is expected
    assert not is_chords_body(None, "body")


def ended_by(error: BaseException) -> ExceptionInfo:
    """What the pool hands to a request's `on_failure`."""
    try:
        raise error
    except BaseException:
        return ExceptionInfo()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({}, WorkerLostError),
        ({"_already_revoked": True}, Terminated),
        ({"_already_cancelled": True}, Terminated),
    ],
    ids=str,
)
def test_a_task_that_exits_is_a_lost_worker(
    error: BaseException, state: dict[str, bool], expected: type
) -> None:
    """Celery 5.5 and 5.6 acknowledge it else, so a job that may run again is lost."""
    found = celery_compat.failure_of(SimpleNamespace(**state), ended_by(error))
    assert type(found.exception) is expected is found.type
    assert repr(error) in str(found.exception)
    assert type(error).__name__ in found.traceback, "the user's own traceback"


def test_another_base_exception_is_a_failure_that_can_be_stored() -> None:
    found = celery_compat.failure_of(SimpleNamespace(), ended_by(asyncio.CancelledError("stop")))
    assert isinstance(found.exception, Exception)
    cls = type(found.exception)
    assert (cls.__module__, cls.__qualname__) == ("asyncio.exceptions", "CancelledError")
    assert found.exception.args == ("stop",)


@pytest.mark.parametrize(
    ("request_of", "error"),
    [
        (SimpleNamespace(), ArithmeticError()),
        (SimpleNamespace(), WorkerLostError()),
        (SimpleNamespace(_worker_lost_info=None), SystemExit()),  # Celery 5.7 does it itself
        (SimpleNamespace(_worker_lost_info=None), asyncio.CancelledError()),
    ],
    ids=repr,
)
def test_any_other_failure_is_left_alone(request_of: Any, error: BaseException) -> None:
    info = ended_by(error)
    assert celery_compat.failure_of(request_of, info) is info
