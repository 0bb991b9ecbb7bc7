"""A short campaign on the lock as it is, and the locks that are broken on purpose.

The long ones are `make chaos`. On a machine that is too busy, leases of 2 s are lost though nothing
was broken, and losses are told late: so a campaign that has to end without a violation runs alone.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from example_project.private_server import ServerNotFound, find_valkey
from tests.chaos.bodies import bodies
from tests.chaos.campaign import Campaign, Outcome, run
from tests.chaos.clocks import find_libfaketime
from tests.chaos.publisher import QUEUE_MIX
from tests.chaos.report import report
from tests.chaos.site import Plan
from tests.chaos.usage import KINDS, usages
from tests.chaos.variants import VARIANTS, Variant
from tests.conftest import missing, need_a_server
from tests.harness.journal import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEED = 5
ON_ONE_HOST = [variant for variant in VARIANTS if not variant.campaign.plan.hosts]


@pytest.fixture(autouse=True)
def _servers() -> None:
    need_a_server()


def judged(campaign: Campaign, directory: Path) -> Outcome:
    """What came of it; printed in full if the test fails."""
    outcome = run(campaign, directory / "campaign")
    print(report(outcome))
    return outcome


@pytest.mark.alone
def test_the_lock_keeps_its_promises_through_two_minutes_of_faults(tmp_path: Path) -> None:
    outcome = judged(Campaign(seconds=120, seed=SEED, plan=Plan(beats=3)), tmp_path)
    assert outcome.verdict.violations == ()
    # It was put to the test: bodies contended while things were broken.
    counts = outcome.verdict.counts
    assert counts["critical sections"] > 50
    assert {row.kind for row in usages(outcome.directory)} == KINDS
    assert counts["faults"] > 15
    assert counts["ticks"] > 30
    assert counts["messages published"] > counts["jobs published"]


@pytest.mark.alone
def test_calls_in_queues_run_in_turn_through_a_minute_of_faults(tmp_path: Path) -> None:
    outcome = judged(Campaign(seconds=60, seed=SEED, mix=QUEUE_MIX), tmp_path)
    assert outcome.verdict.violations == ()
    assert outcome.verdict.counts["critical sections"] > 50
    assert outcome.verdict.counts["faults"] > 10


@pytest.mark.alone
def test_the_lock_keeps_its_promises_while_the_servers_clock_is_stepped(tmp_path: Path) -> None:
    try:
        find_libfaketime()
        find_valkey()
    except ServerNotFound as error:
        missing(str(error))
    campaign = Campaign(
        seconds=30, seed=SEED, plan=Plan(clock=True), faults=("clock-step",), haste=3.0
    )
    outcome = judged(campaign, tmp_path)
    assert outcome.verdict.violations == ()
    assert events(outcome.records, "loss"), "the clock was never stepped forward"
    # The clock went back too, and no fence did: that is a rule of the checker. Here: some fences
    # were made while the server's clock was ahead of ours.
    wall = time.time() - time.monotonic()
    ahead = [(body.fence or 0) / 1e6 - (wall + body.begin) for body in bodies(outcome.records)]
    assert max(ahead) > 1


@pytest.mark.alone
def test_each_holder_is_notified_of_a_restart_without_data_within_a_second(tmp_path: Path) -> None:
    campaign = Campaign(
        seconds=30, seed=SEED, faults=("restart-empty",), mix={"lasting": 1}, haste=2.0
    )
    outcome = judged(campaign, tmp_path)
    assert outcome.verdict.violations == ()
    assert outcome.verdict.counts["leases taken by a restart of the store"] > 5


@pytest.mark.parametrize("variant", ON_ONE_HOST, ids=lambda variant: variant.name)
def test_a_lock_that_is_broken_on_purpose_is_caught(variant: Variant, tmp_path: Path) -> None:
    outcome = judged(variant.campaign, tmp_path)
    assert outcome.verdict.of(variant.caught_by)
