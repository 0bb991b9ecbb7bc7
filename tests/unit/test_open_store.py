"""From a URL to a store: members, logins, extras that are missing, schemes of other packages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import singleton_task
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.store import Capabilities
from celery_singleton_lock.errors import SettingsError
from celery_singleton_lock.settings import read_settings
from celery_singleton_lock.stores import open_store
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.stores.store_url import StoreUrl, masked
from celery_singleton_lock.worker.bootstep import check_tasks


def parse(url: str) -> StoreUrl:
    return StoreUrl.parse(url, port=7, host="")


def test_a_url_names_members_login_path_and_options() -> None:
    url = parse("etcds://me:p%40s%2Fs@h1:1,h2,[::1]:3/a/b/?ca=/c.pem&key=/k")
    assert url.hosts == (("h1", 1), ("h2", 7), ("::1", 3))
    assert (url.username, url.password, url.path) == ("me", "p@s/s", "a/b")
    assert url.options == {"ca": "/c.pem", "key": "/k"}
    assert "p@s" not in repr(url)


@pytest.mark.parametrize(
    "url",
    ["etcd://", "etcd://h1,,h2", "etcd://h:port", "etcd://h:99999", "etcd://a b", "etcd://[h"],
)
def test_a_url_that_cannot_be_read_is_refused(url: str) -> None:
    with pytest.raises(SettingsError):
        parse(url)


def test_a_password_that_is_not_quoted_is_not_shown() -> None:
    with pytest.raises(SettingsError) as caught:
        parse("etcd://me:se/cret@h1")
    assert "cret" not in str(caught.value)


def test_an_unknown_option_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(SettingsError, match=r"'cart'.*'?cert"):
        open_store("etcd://h/?cart=x")


def test_passwords_are_masked() -> None:
    assert masked("zk://me:secret@h1:1,h2:2/x") == "zk://me:**@h1:1,h2:2/x"
    assert masked("zk://h1:1,h2:2/x") == "zk://h1:1,h2:2/x"


@pytest.mark.parametrize("scheme", ["etcd", "zk"])
def test_several_hosts_pass_the_settings_and_their_password_is_masked(scheme: str) -> None:
    url = f"{scheme}://me:secret@h1:1,h2:2/x"
    app = Celery("t", set_as_current=False, broker="memory://")
    app.conf.singleton_lock_url = url
    settings = read_settings(app)
    assert settings.url == url
    assert "secret" not in settings.safe_url
    assert "h1:1,h2:2" in settings.safe_url


@pytest.mark.parametrize(
    ("url", "client", "extra"),
    [("etcd://h", "requests", "etcd"), ("zks://h", "kazoo", "zookeeper")],
)
def test_a_client_that_is_missing_is_named_with_its_extra(
    url: str, client: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name.startswith("celery_singleton_lock.stores."):
            monkeypatch.delitem(sys.modules, name)
        elif name.partition(".")[0] == client:
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, client, None)
    with pytest.raises(SettingsError, match=rf'pip install "celery-singleton-lock\[{extra}\]"'):
        open_store(url)


def test_nothing_is_sent_before_the_first_use() -> None:
    for url in ("etcd://192.0.2.1:1/x", "zk://192.0.2.1:1/x"):
        open_store(url).close()


# --- schemes of other packages -------------------------------------------------------------------


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with two entry points, one of them broken."""
    (tmp_path / "paper_store.py").write_text(
        "from celery_singleton_lock.core.clock import SystemClock\n"
        "from celery_singleton_lock.stores.memory import MemoryStore\n"
        "def open_paper(url, *, clock, fence_base, options, wait_replicas):\n"
        "    store = MemoryStore(clock or SystemClock(), fence_base=fence_base)\n"
        "    store.url = url\n"
        "    return store\n"
    )
    info = tmp_path / "paper_store-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paper-store\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[celery_singleton_lock.stores]\npaper = paper_store:open_paper\ntorn = paper_store:gone\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("distribution")
def test_another_packages_scheme_opens_its_store() -> None:
    store: Any = open_store("paper://shelf/7", fence_base=5)
    assert isinstance(store, MemoryStore)
    assert store.url == "paper://shelf/7"


@pytest.mark.usefixtures("distribution")
def test_an_entry_point_that_cannot_be_loaded_is_named() -> None:
    with pytest.raises(SettingsError, match=r"'torn', registered as paper_store:gone"):
        open_store("torn://x")


@pytest.mark.usefixtures("distribution")
def test_an_unknown_scheme_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(SettingsError, match=r"papers'.*paper"):
        open_store("papers://x")


# --- what a store can't do -----------------------------------------------------------------------


def nothing() -> None:
    """A body."""


class Coarse(MemoryStore):
    capabilities = Capabilities(fence=True, name="coarse", min_ttl=1.0, max_limit=10)


def test_a_fence_that_redlock_has_not_is_refused_at_the_workers_start() -> None:
    app = Celery("t", set_as_current=False, broker="memory://")
    singleton_task(app=app, name="t", shared=False, needs_fence=True)(nothing)
    with pytest.raises(SettingsError, match=r"needs_fence=True, but the store \(redlock\) has no"):
        check_tasks(app, open_store("redlock://h1,h2,h3/0"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"ttl": 0.5},
            r"t has ttl=0\.5 s, but the store \(coarse\) keeps no lease for less than 1",
        ),
        ({"limit": 11}, r"t has limit=11, but the store \(coarse\) looks through at most 10"),
    ],
)
def test_a_policy_that_the_store_cannot_keep_is_refused(
    options: dict[str, Any], sentence: str
) -> None:
    app = Celery("t", set_as_current=False, broker="memory://")
    singleton_task(app=app, name="t", shared=False, **options)(nothing)
    with pytest.raises(SettingsError, match=sentence):
        check_tasks(app, Coarse(SystemClock()))
