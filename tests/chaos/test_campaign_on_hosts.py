"""As `test_campaign`, on several hosts: network namespaces of a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.variants import VARIANTS, Variant
from tests.conftest import missing, need_a_server
from tests.harness.etcd import find_etcd
from tests.harness.processes import ROOT
from tests.harness.zookeeper import find_zookeeper

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEED = 5
WITH_HOSTS = [variant for variant in VARIANTS if variant.campaign.plan.hosts]


@pytest.fixture(autouse=True)
def _servers() -> None:
    need_a_server()


def in_a_process_of_its_own(*options: str) -> str:
    """What a campaign prints that has hosts: it changes the network of its process."""
    command = [sys.executable, "-m", "tests.chaos", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if "--hosts needs" in done.stderr:
        missing(done.stderr.strip().splitlines()[-1])
    print(done.stdout)
    assert done.returncode == 0
    return done.stdout


def need(store: str) -> None:
    """Skip the test, or fail in continuous integration, if the servers of ``store`` are missing."""
    if store == "etcd" and find_etcd() is None:
        missing("etcd is not installed. Debian: apt-get install etcd-server")
    if store == "zookeeper" and find_zookeeper() is None:
        missing("ZooKeeper is not installed. Debian: apt-get install zookeeper")


# Not etcd: before 3.4.31, a leader that stood still may end leases that are held.
@pytest.mark.alone
@pytest.mark.parametrize("store", ["redis", "zookeeper"])
def test_the_lock_keeps_its_promises_on_three_hosts(store: str, tmp_path: Path) -> None:
    need(store)
    options = ["--hosts", "3", "--minutes", "0.5", "--seed", str(SEED), "--out", str(tmp_path)]
    assert "host-" in in_a_process_of_its_own("--store", store, *options)


@pytest.mark.parametrize("variant", WITH_HOSTS, ids=lambda variant: variant.name)
def test_a_lock_that_takes_hosts_for_granted_is_caught(variant: Variant, tmp_path: Path) -> None:
    need(variant.campaign.plan.store)
    in_a_process_of_its_own("--variants", "--only", variant.name, "--out", str(tmp_path))
