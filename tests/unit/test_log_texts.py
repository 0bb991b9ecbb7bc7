"""The log lines of the package: each says that it is ours, and that of an event has its parts.

Celery's format shows no logger's name.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_singleton_lock.core.events import Event, EventName
from celery_singleton_lock.core.lease import Holder
from celery_singleton_lock.instrumentation.log import log_event
from tests.harness.log import read_event

PACKAGE = Path(__file__).parents[2] / "celery_singleton_lock"
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}


def texts(source: str) -> Iterator[tuple[int, str]]:
    """The line and the first words of each message that is logged."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in LEVELS
            and getattr(node.func.value, "id", "") in ("logger", "_logger")
        ):
            message = node.args[0]
            if isinstance(message, ast.JoinedStr):
                message = message.values[0]
            if isinstance(message, ast.Constant):
                yield node.lineno, str(message.value)


def test_each_log_line_begins_with_singleton() -> None:
    found = [
        (f"{path.relative_to(PACKAGE)}:{line}", text)
        for path in PACKAGE.rglob("*.py")
        for line, text in texts(path.read_text())
    ]
    assert len(found) > 30, "the calls are found"
    assert not [each for each in found if not each[1].startswith("singleton")]


def test_a_line_that_does_not_is_found() -> None:
    source = 'logger.warning("the store is away")\nlogger.info(f"no {store}")'
    assert list(texts(source)) == [(1, "the store is away"), (2, "no ")]


@pytest.mark.parametrize(
    ("task", "task_id"), [("app.sync", "4b1c"), ("", "block-1"), ("", "")], ids=str
)
def test_the_tests_read_a_line_as_the_event_that_was_logged(
    task: str, task_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = {"reason": 'started "work" is not skipped', "outcome": "wait", "again": True}
    event = Event(
        name=EventName.CONFLICT,
        key="a key",
        task=task,
        task_id=task_id,
        holder=Holder(worker="w@h"),
        data=data,
    )
    with caplog.at_level("DEBUG"):
        log_event(event)
    found = read_event(f"[2026-11-24 10:00:00: INFO/MainProcess] {caplog.messages[0]}")
    assert found is not None
    assert (found.name, found.task, found.task_id) == (event.name, task, task_id)
    assert found.has(key="a key", reason="started", outcome="wait", again=True)
    assert not found.has(outcome="waited")
    assert read_event("singleton: a line that is about no event") is None


def test_no_id_or_text_forges_or_reverses_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """Unicode's separators of lines, and its characters that change the direction of a text."""
    bad = "a\nb\u2028c\u2029d\u202ee\u2066f\u200bg\ufeffh"
    with caplog.at_level(logging.INFO, logger="celery_singleton_lock"):
        log_event(Event(name=EventName.RELEASE_FAILED, key="k", task_id=bad, data={"error": bad}))
    (record,) = caplog.records
    line = record.getMessage()
    assert line.isprintable()
    assert line.count(r"a\nb\u2028c\u2029d\u202ee\u2066f\u200bg\ufeffh") == 2
