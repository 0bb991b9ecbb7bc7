"""The protections that `make model` takes out are found missing; what holds takes too long here."""

from __future__ import annotations

import pytest

from tests.conftest import missing
from tests.model.checks import CHECKS, Check
from tests.model.spin import Search, SpinFailed, missing_programs, read_report, verify

_FOUND_AT_ONCE = {"NO_EXPIRY", "NO_SWEEP", "NO_HINT_AT_GRANT", "HINT_AT_RELEASE_ONLY"}
QUICK = [
    check
    for check in CHECKS
    if check.search is Search.SHORTEST
    or (not check.holds and _FOUND_AT_ONCE.intersection(check.definitions))
]
COMPLETE = "depth reached 9, errors: 0\n   12 states, stored\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("check", QUICK, ids=lambda check: check.claim.replace(" ", "-"))
def test_a_protocol_without_one_of_its_protections_is_refuted(check: Check) -> None:
    programs = missing_programs()
    if programs:
        missing(f"not installed: {', '.join(programs)}")
    run = verify(check.model, check.definitions, check.search)
    assert check.violated in run.error
    assert run.trail


def test_a_search_without_an_error_has_found_none() -> None:
    run = read_report(COMPLETE, "lease.pml", 1.0)
    assert (run.error, run.states, run.steps) == ("", 12, 9)


@pytest.mark.parametrize(
    "report",
    [
        "",
        "error: max search depth too small\n" + COMPLETE,
        "pan: reached -DMEMLIM bound\n" + COMPLETE,
        COMPLETE.replace("errors: 0", "errors: 1"),
        "pan:1: assertion violated (x) (at depth 3)\n" + COMPLETE,
    ],
)
def test_a_search_that_is_not_complete_is_no_verdict(report: str) -> None:
    with pytest.raises(SpinFailed):
        read_report(report, "lease.pml", 1.0)
