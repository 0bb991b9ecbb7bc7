"""A difference is neither hidden by a flaky test nor made by one."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.celery_suite.comparison import ABSENT, Tally, suspects


def test_a_test_is_run_again_that_ended_differently_or_failed_in_both_runs() -> None:
    plain = {"a": "passed", "b": "passed", "c": "skipped", "e": "error"}
    singleton = {"a": "failed", "c": "skipped", "d": "passed", "e": "error"}
    assert suspects(plain, singleton) == ["a", "b", "d", "e"]


@pytest.mark.parametrize(
    ("plain", "singleton", "differs"),
    [
        ({"passed": 6}, {"passed": 5, "failed": 1}, True),
        ({"passed": 5, "failed": 1}, {"failed": 6}, True),
        ({"passed": 6}, {"passed": 5, "skipped": 1}, True),
        ({"passed": 5, "failed": 1}, {"passed": 6}, False),
        ({"failed": 6}, {"failed": 6}, False),
        ({"passed": 5, "error": 1}, {"passed": 5, "failed": 1}, False),
        ({"passed": 1}, {ABSENT: 1}, True),
        ({ABSENT: 1}, {"passed": 1}, True),
    ],
)
def test_a_test_differs_if_it_fails_more_often_with_singletons(
    plain: dict[str, int], singleton: dict[str, int], differs: bool
) -> None:
    tally = Tally(plain=Counter(plain), singleton=Counter(singleton))
    assert tally.differs is differs
