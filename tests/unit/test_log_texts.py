"""Each log line of the package says that it is ours: Celery's format shows no logger's name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

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
