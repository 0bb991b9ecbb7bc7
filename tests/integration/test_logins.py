"""Logins by a credential provider, in the URL and in the setting, as Celery takes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import celery
import pytest
import redis

from celery_singleton_lock import StoreError, StoreUnavailable, hold
from celery_singleton_lock.core.events import Event
from celery_singleton_lock.core.lease import LossReason
from celery_singleton_lock.core.observers import elsewhere
from celery_singleton_lock.instrumentation import lease_lost
from celery_singleton_lock.runtime import Runtime
from example_project.private_server import PrivateServer
from tests.apps.logins import Slow
from tests.harness.journal import Journal
from tests.harness.worker import CeleryWorker

StartWorker = Callable[..., CeleryWorker]
LoadApp = Callable[..., ModuleType]
UNIQUE = "tests.apps.unique"
QUERY = "credential_provider=tests.apps.logins:Locks"
#: Whether Celery's result backend knows providers. That of 5.5 takes the path for a provider.
PROVIDERS = celery.__version__ >= "5.6"


@pytest.fixture
def server() -> Iterator[PrivateServer]:
    with PrivateServer() as server:
        yield server


def let_in(server: PrivateServer, password: str) -> None:
    """The user ``locks`` has this password, and no other."""
    with redis.Redis.from_url(server.url()) as client:
        client.acl_setuser(
            "locks",
            enabled=True,
            reset_passwords=True,
            passwords=[f"+{password}"],
            keys=["*"],
            channels=["*"],
            categories=["+@all"],
        )


@pytest.fixture
def password(
    server: PrivateServer, tmp_path: Path, environment: dict[str, str], monkeypatch: Any
) -> Path:
    """The file with the password that the provider reads; other logins are refused."""
    file = tmp_path / "password"
    file.write_text("first")
    monkeypatch.setenv("LOCKS_PASSWORD", str(file))
    environment["LOCKS_PASSWORD"] = str(file)
    let_in(server, "first")
    return file


def close_the_rest(server: PrivateServer) -> None:
    with redis.Redis.from_url(server.url()) as client:
        client.acl_setuser("default", enabled=False)


def test_a_worker_and_a_publisher_log_in_by_the_result_backends_provider(
    server: PrivateServer,
    password: Path,
    worker: StartWorker,
    load_app: LoadApp,
    environment: dict[str, str],
    journal: Journal,
) -> None:
    # No setting of ours: the URL is the result backend's, with options that only Celery has.
    environment["RESULT_URL"] = f"{server.url()}?{QUERY}&max_connections=20"
    unique = load_app(UNIQUE)
    close_the_rest(server)
    process = worker(UNIQUE, concurrency=1)
    assert "(result_backend)" in process.log
    if PROVIDERS:
        assert unique.once.delay("ann").get(timeout=20) == "ann"
    else:
        with pytest.raises(AttributeError, match="get_credentials"):
            unique.once.delay("ann")
        # It has left no claim, and locks log in though results can't.
        unique.once.apply_async(("ann",), ignore_result=True)
        journal.wait_for_ends(1, key="ann")
    assert process.log.count("max_connections of the store's URL: without effect") == 1


def test_a_new_connection_asks_the_provider_again(
    server: PrivateServer, password: Path, load_app: LoadApp, environment: dict[str, str]
) -> None:
    port = urlsplit(server.url()).port
    url = f"redis://ignored:wrong@127.0.0.1:{port}/0?{QUERY}"
    app = load_app(UNIQUE, LOCK_URL=url).app
    with hold("ann", scope="work", app=app):
        pass
    let_in(server, "second")
    password.write_text("second")
    with redis.Redis.from_url(server.url()) as client:
        client.client_kill_filter(_type="normal", skipme=True)
    with hold("ann", scope="work", app=app):
        pass


@pytest.mark.parametrize("password", ["", "unneeded"])
def test_a_server_without_a_password_takes_any_that_a_provider_gives(
    server: PrivateServer, load_app: LoadApp, monkeypatch: Any, password: str
) -> None:
    monkeypatch.setenv("BARE_PASSWORD", password)
    url = f"{server.url()}?credential_provider=tests.apps.logins:Bare"
    app = load_app(UNIQUE, RESULT_URL=url).app
    with hold("ann", scope="work", app=app):
        pass


def test_a_password_in_the_url_is_not_needed_by_a_server_without_one(
    server: PrivateServer, load_app: LoadApp
) -> None:
    url = server.url().replace("redis://", "redis://:unneeded@")
    with hold("ann", scope="work", app=load_app(UNIQUE, LOCK_URL=url).app):
        pass
    with redis.Redis.from_url(server.url()) as client:
        client.config_set("requirepass", "needed")
        with (
            pytest.raises(StoreError, match="refuses the login"),
            hold("ann", scope="work", app=load_app(UNIQUE, LOCK_URL=url).app),
        ):
            pass


def test_a_provider_that_fails_is_a_store_that_does_not_answer(
    server: PrivateServer, password: Path, load_app: LoadApp
) -> None:
    app = load_app(UNIQUE, LOCK_URL=f"{server.url()}?{QUERY}").app
    password.write_text("wrong")
    with pytest.raises(StoreError, match="refuses the login"), hold("a", scope="work", app=app):
        pass
    password.unlink()
    with (
        pytest.raises(StoreUnavailable, match=r"Locks gives no login: .*No such file"),
        hold("a", scope="work", app=app),
    ):
        pass


def test_a_loss_is_reported_in_time_though_a_provider_blocks(
    server: PrivateServer, load_app: LoadApp, tmp_path: Path, monkeypatch: Any
) -> None:
    """It runs on the heartbeat's thread when a connection has ended."""
    gate, lost = tmp_path / "gate", threading.Event()
    monkeypatch.setenv("LOCKS_GATE", str(gate))
    url = f"{server.url()}?credential_provider=tests.apps.logins:Slow"
    app = load_app(UNIQUE, LOCK_URL=url).app

    def receive(event: Event, **_: Any) -> None:
        lost.set()

    lease_lost.connect(receive)
    with (
        redis.Redis.from_url(server.url()) as client,
        hold("ann", scope="work", ttl=2, app=app) as lease,
    ):
        gate.touch()
        client.client_kill_filter(_type="normal", skipme=True)
        try:
            assert lost.wait(20)
            assert lease.loss is not None
            assert lease.loss.reason is LossReason.UNREACHABLE
        finally:
            gate.unlink()
            lease_lost.disconnect(receive)  # a dead one counts until the next event
    with hold("bob", scope="work", app=app):
        pass


def test_a_connection_that_is_opened_too_late_is_used_by_the_next_request(
    server: PrivateServer, load_app: LoadApp, tmp_path: Path, monkeypatch: Any
) -> None:
    gate = tmp_path / "gate"
    monkeypatch.setenv("LOCKS_GATE", str(gate))
    url = f"{server.url()}?credential_provider=tests.apps.logins:Slow"
    store = Runtime.of(load_app(UNIQUE, LOCK_URL=url).app).store
    gate.touch()
    before = Slow.asked
    with elsewhere():
        with pytest.raises(StoreUnavailable, match=r"no connection in 1\.5 s .*credential"):
            store.schedule.last_runs(["a key"], timeout=0.5)
        gate.unlink()
        assert store.schedule.last_runs(["a key"], timeout=0.5) == [None]
    assert Slow.asked == before + 1
