"""A pytest plugin of both modes: what Celery's tests need to be run alone, and their outcomes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

_outcomes: dict[str, str] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Some tests use the session's worker and do not ask for it. Run alone, they would not end.
    for item in items:
        assert isinstance(item, pytest.Function)
        item.fixturenames.append("celery_session_worker")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # Setup, call, subtests and teardown report: the first report that is not a pass counts.
    if _outcomes.get(report.nodeid, "passed") == "passed":
        _outcomes[report.nodeid] = _outcome(report)


# Only a session that came to its end leaves a file.
def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.getoption("outcomes").write_text(json.dumps(_outcomes))


def _outcome(report: pytest.TestReport) -> str:
    if report.skipped:
        return "xfailed" if hasattr(report, "wasxfail") else "skipped"
    if report.failed:
        return "failed" if report.when == "call" else "error"
    return "passed"
