"""`celery -A app singleton doctor` on etcd and ZooKeeper: each finding where the fault is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock.doctor import Severity
from celery_singleton_lock.doctor.context import Server
from celery_singleton_lock.doctor.servers import check_version, mended_in
from celery_singleton_lock.stores import open_store
from celery_singleton_lock.testing.contract import ask, new_key, new_token
from tests.conftest import missing
from tests.harness.certificates import Certificates
from tests.harness.deliveries import wait_until
from tests.harness.etcd import EtcdCluster, find_etcd
from tests.harness.zookeeper import ZooKeeperEnsemble, find_zookeeper

from .doctor_apps import app_on, findings, found, severities, worst

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

Cluster = EtcdCluster | ZooKeeperEnsemble


@pytest.fixture
def need_etcd() -> None:
    if find_etcd() is None:
        missing("etcd is not installed. Debian: apt-get install etcd-server")


@pytest.fixture
def need_zookeeper() -> None:
    if find_zookeeper() is None:
        missing("ZooKeeper is not installed. Debian: apt-get install zookeeper")


@pytest.fixture
def sick(consensus: Cluster) -> Iterator[Cluster]:
    """Each of the two, to kill members of; they live again afterwards."""
    yield consensus
    for number in range(3):
        if not consensus.alive(number):
            consensus.start_member(number)
    consensus.leader()


def told_of_the_version(app: Celery) -> list[tuple[str, Severity]]:
    """What doctor says of the installed version: nothing loud, unless it has a flaw."""
    (server,) = found(app, "server")
    name, version = re.findall(r"(etcd|ZooKeeper) ([\d.]+)", server.text)[0]
    if not mended_in(name, tuple(map(int, version.split(".")))):
        assert server.severity is Severity.OK
        return []
    assert "or newer" in server.remedy
    return [("server", Severity.WARNING if name == "etcd" else Severity.NOTE)]


def test_a_sound_one_is_advised_to_guard_its_locks_and_nothing_else(consensus: Cluster) -> None:
    app = app_on(consensus.url("sound"))
    notes = [f for f in findings(app) if f.severity is not Severity.OK]
    expected = [("login", Severity.NOTE), *told_of_the_version(app)]
    assert sorted((f.subject, f.severity) for f in notes) == expected
    (members,) = found(app, "members")
    assert "3 of 3" in members.text
    assert "server" in severities(app)


@pytest.mark.parametrize(
    ("product", "version", "mended"),
    [
        ("etcd", (3, 4, 23), "3.4.31"),
        ("etcd", (3, 4, 31), ""),
        ("etcd", (3, 5, 12), "3.5.13"),
        ("etcd", (3, 6, 0), ""),
        ("ZooKeeper", (3, 5, 9), ""),
        ("ZooKeeper", (3, 8, 0), "3.8.1"),
        ("ZooKeeper", (3, 8, 1), ""),
        ("Redis", (7, 0, 15), ""),
    ],
)
def test_a_version_with_a_flaw_is_told_with_the_one_that_has_none(
    product: str, version: tuple[int, ...], mended: str
) -> None:
    assert mended_in(product, version) == mended


@pytest.mark.parametrize(
    ("product", "version", "is_old"),
    [
        ("Redis", "6.0.16", True),
        ("Redis", "6.2.0", False),
        ("Valkey", "7.2.4", False),
        ("etcd", "3.3.27", True),
        ("ZooKeeper", "3.7.2", True),
        ("ZooKeeper", "3.9.2", False),
    ],
)
def test_a_version_that_no_test_runs_with_is_a_warning(
    product: str, version: str, is_old: bool
) -> None:
    server = Server(name="", product=product, version=version, info={"version": version})
    context: Any = None  # it is not asked
    (finding,) = check_version(context, server)
    assert (finding.severity is Severity.WARNING) is is_old
    assert ("older than" in finding.text) is is_old


def test_a_member_that_is_away_is_a_warning_and_no_majority_an_error(sick: Cluster) -> None:
    app = app_on(sick.url("sick"))
    sick.kill(0)
    sick.leader()
    wait_until(lambda: worst(app) is Severity.WARNING, "the others have a leader", timeout=60)
    away = found(app, "members")[0]
    assert away.severity is Severity.WARNING
    assert str(sick.ports[0]) in away.text
    sick.kill(1)
    wait_until(
        lambda: severities(app).get("quorum") is Severity.ERROR, "the last notices", timeout=60
    )
    assert len([f for f in found(app, "members") if f.severity is Severity.WARNING]) == 3


def test_a_leaders_ttl_that_the_store_cannot_keep_is_an_error(consensus: Cluster) -> None:
    app = app_on(consensus.url("short"))
    app.conf.singleton_lock_beat_ttl = 0.5
    (finding,) = found(app, "beat")
    assert finding.severity is Severity.ERROR
    assert "singleton_lock_beat_ttl=0.5 s" in finding.text


# --- etcd ----------------------------------------------------------------------------------------


def test_a_url_that_names_some_of_etcds_members_is_noted(etcd: EtcdCluster) -> None:
    (finding,) = found(app_on(etcd.url("some", members=(0,))), "cluster")
    assert "3 members, and the URL names 1" in finding.text


def test_a_ttl_between_whole_seconds_is_noted(etcd: EtcdCluster) -> None:
    (finding,) = found(app_on(etcd.url("ttl"), ttl=2.5), "ttl")
    assert finding.severity is Severity.NOTE
    assert "ttl=2.5" in finding.text


@pytest.mark.usefixtures("need_etcd")
def test_an_election_timeout_that_lengthens_leases_is_a_warning() -> None:
    options = ["--election-timeout", "6000", "--heartbeat-interval", "600"]
    with EtcdCluster(1, options=options) as cluster:
        app = app_on(cluster.url("long"), ttl=5)
        (finding,) = found(app, "ttl")
        (alone,) = found(app, "cluster")
        assert not cluster.post("lease/leases", {}).get("leases") or worst(app) is Severity.WARNING
    assert finding.severity is Severity.WARNING
    assert "no lease of less than 9 s" in finding.text
    assert "1 members vote" in alone.text


@pytest.mark.usefixtures("need_etcd")
@pytest.mark.parametrize("alarm", ["NOSPACE", "CORRUPT"])
def test_an_alarm_is_an_error(alarm: str) -> None:
    with EtcdCluster(1) as cluster:
        member = cluster.post("maintenance/status", {})["header"]["member_id"]
        raised = {"action": "ACTIVATE", "memberID": member, "alarm": alarm}
        assert cluster.post("maintenance/alarm", raised)["alarms"]
        everything = findings(app_on(cluster.url("full")))
        (finding,) = [each for each in everything if each.subject == "alarms"]
        [refused] = [f for f in everything if f.severity is Severity.ERROR and f != finding]
    assert refused.remedy == finding.remedy
    assert finding.severity is Severity.ERROR
    assert finding.text.startswith(f"{alarm} is raised")


@pytest.mark.usefixtures("need_etcd")
def test_an_even_number_of_voters_is_noted() -> None:
    with EtcdCluster(4) as cluster:
        (finding,) = found(app_on(cluster.url("even")), "cluster")
    assert finding.severity is Severity.NOTE
    assert "4 members vote: no more of them may fail than of 3" in finding.text


@pytest.mark.usefixtures("need_etcd")
def test_a_login_with_no_more_rights_than_locking_needs_is_enough() -> None:
    with EtcdCluster(1) as cluster:
        cluster.post("auth/user/add", {"name": "root", "password": "top"})
        cluster.post("auth/role/add", {"name": "root"})
        cluster.post("auth/user/grant", {"user": "root", "role": "root"})
        cluster.post("auth/user/add", {"name": "worker", "password": "pw"})
        cluster.post("auth/role/add", {"name": "locks"})
        permission = {"permType": "READWRITE", "key": "bG9ja3Mv", "range_end": "bG9ja3Mw"}
        cluster.post("auth/role/grant", {"name": "locks", "perm": permission})
        cluster.post("auth/user/grant", {"user": "worker", "role": "locks"})
        cluster.post("auth/enable", {})
        app = app_on(cluster.url("locks").replace("://", "://worker:pw@"))
        here = severities(app)
        elsewhere = app_on(cluster.url("others").replace("://", "://worker:pw@"))
        (refused,) = found(elsewhere, "rights")
        loud = {severity for _, severity in told_of_the_version(app)}
        assert worst(app) is (Severity.WARNING if Severity.WARNING in loud else Severity.NOTE)
    assert here["reachability"] is here["login"] is Severity.OK
    assert refused.severity is Severity.ERROR
    assert "grant-permission" in refused.remedy


@pytest.mark.usefixtures("need_etcd")
def test_a_login_that_etcd_refuses_is_no_missing_right_and_no_missing_quorum() -> None:
    with EtcdCluster(1) as cluster:
        url = cluster.url("login")
        app = app_on(url.replace("://", "://worker:pw@"))
        assert "no user and password" in found(app, "login")[0].remedy
        for name in ("root", "worker"):
            cluster.post("auth/user/add", {"name": name, "password": "pw"})
        cluster.post("auth/role/add", {"name": "root"})
        cluster.post("auth/user/grant", {"user": "root", "role": "root"})
        cluster.post("auth/enable", {})
        assert "name a user and password" in found(app_on(url), "login")[0].remedy
        wrong = findings(app_on(url.replace("://", "://worker:wrong@")))
    reported = {f.subject: f for f in wrong if f.severity in (Severity.WARNING, Severity.ERROR)}
    assert reported.keys() == {"login", "members"}
    assert all("correct user and password" in finding.remedy for finding in reported.values())
    assert "wrong" not in str(reported)


@pytest.mark.usefixtures("need_etcd")
def test_a_wrong_scheme_is_not_taken_for_a_store_that_must_be_started(tmp_path: Path) -> None:
    with EtcdCluster(1) as plain:
        to_plain = findings(app_on(plain.url("tls").replace("etcd://", "etcds://")))
    with EtcdCluster(1, tls=Certificates(tmp_path)) as secured:
        url, _, _ = secured.url("tls").partition("?")
        to_secured = findings(app_on(url.replace("etcds://", "etcd://")))
    for reported in (to_plain, to_secured):
        (of_leases,) = (
            f for f in reported if "doesn't answer" in f.text and f.subject != "members"
        )
        assert of_leases.subject in ("tls", "connection")  # an end, or a reset: see faults.py
        assert "does the server speak TLS" in of_leases.remedy


# --- ZooKeeper -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("need_zookeeper")
def test_sessions_that_are_longer_or_shorter_than_a_ttl_are_reported() -> None:
    with ZooKeeperEnsemble(1, tick=2.0, max_session=20.0) as ensemble:
        app = app_on(ensemble.url("sessions"), ttl=1.5)
        app.conf.singleton_lock_beat_ttl = 30
        longer, shorter = found(app, "session")
    assert longer.severity is shorter.severity is Severity.WARNING
    assert "grants 4 s where ttl=1.5 s" in longer.text
    assert "grants 20 s where ttl=30 s" in shorter.text


@pytest.mark.usefixtures("need_zookeeper")
def test_a_member_alone_is_noted_and_is_asked_over_tls(tmp_path: Path) -> None:
    with ZooKeeperEnsemble(1, tls=Certificates(tmp_path)) as ensemble:
        reported, alone = found(app_on(ensemble.url("tls")), "members")
    assert reported.severity is Severity.OK
    assert "standalone" in reported.text
    assert alone.severity is Severity.NOTE


def test_tls_to_zookeeper_without_it_names_the_scheme(zookeeper: ZooKeeperEnsemble) -> None:
    reported = findings(app_on(zookeeper.url("tls").replace("zk://", "zks://")))
    remedies = {finding.subject: finding.remedy for finding in reported}
    assert "with TLS (rediss://, etcds://, zks://)" in remedies["reachability"]
    assert "does the server speak TLS" in remedies["members"]


def test_nodes_that_belong_to_others_or_to_all_users_are_reported(
    zookeeper: ZooKeeperEnsemble,
) -> None:
    def url(path: str, login: str = "") -> str:
        return zookeeper.url(path).replace("://", f"://{login}{'@' * bool(login)}")

    with closing(open_store(url("unguarded"))) as store:
        ask(store, new_key(), new_token())
    (unguarded,) = found(app_on(url("unguarded", "a:pw")), "rights")
    assert unguarded.severity is Severity.WARNING
    assert "made without a login" in unguarded.text
    with closing(open_store(url("owned", "a:pw"))) as store:
        ask(store, new_key(), new_token())
    own = app_on(url("owned", "a:pw"))
    assert severities(own)["login"] is Severity.OK
    assert not found(own, "rights")
    closed = [f for f in found(app_on(url("owned", "b:pw")), "rights") if "another login" in f.text]
    assert closed[0].severity is Severity.ERROR
