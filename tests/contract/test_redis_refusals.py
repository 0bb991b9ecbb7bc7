"""What a Redis that can take no leases now says (LOADING, READONLY, BUSY): it passes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import redis

from celery_singleton_lock.core.store import RENEWED, Granted
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.testing.contract import ask, new_key, new_token
from celery_singleton_lock.testing.contract.steps import lease_of, renew
from example_project.private_server import PrivateServer, find_binary, free_port
from tests.harness.busy import busy

from .conftest import program

# Microseconds that loading a key takes, and keys: two seconds together.
LOAD_DELAY_US, KEYS = 5_000, 400


@pytest.fixture
def slow_loader() -> Iterator[PrivateServer]:
    """A server that takes its time to load, and answers meanwhile."""
    options = {
        "--enable-debug-command": "yes",
        "--key-load-delay": str(LOAD_DELAY_US),
        "--loading-process-events-interval-bytes": "1024",
    }
    arguments = [word for pair in options.items() for word in pair]
    with PrivateServer(binary=program(find_binary), arguments=arguments) as server:
        yield server


@pytest.mark.slow
def test_a_server_that_loads_its_data_is_unavailable_until_it_has(
    slow_loader: PrivateServer,
) -> None:
    with (
        redis.Redis(port=slow_loader.port) as raw,
        closing(RedisStore(slow_loader.url())) as store,
    ):
        raw.mset({f"key-{number}": "x" * 100 for number in range(KEYS)})
        assert isinstance(ask(store, new_key(), new_token()), Granted)
        reload = threading.Thread(target=raw.execute_command, args=("DEBUG RELOAD",))
        reload.start()
        said = []
        while reload.is_alive():
            try:
                ask(store, new_key(), new_token())
            except StoreUnavailable as exc:
                said.append(str(exc))
        reload.join()
        assert any("loading" in text for text in said), said
        assert isinstance(ask(store, new_key(), new_token()), Granted)


def test_a_server_that_became_a_replica_is_unavailable_until_it_is_a_master_again(
    private_redis: PrivateServer,
) -> None:
    with redis.Redis(port=private_redis.port) as client:
        raw: Any = client
        with closing(RedisStore(private_redis.url())) as store:
            assert isinstance(ask(store, new_key(), new_token()), Granted)
            raw.execute_command("REPLICAOF", "127.0.0.1", str(free_port()))
            with pytest.raises(StoreUnavailable, match="is a replica now"):
                ask(store, new_key(), new_token())
            raw.execute_command("REPLICAOF", "NO", "ONE")
            assert isinstance(ask(store, new_key(), new_token()), Granted)


@pytest.mark.parametrize("forgotten", [False, True], ids=["by its digest", "by its source"])
def test_a_renewal_that_a_replica_refused_leaves_no_connection_to_it(
    private_redis: PrivateServer, forgotten: bool
) -> None:
    with redis.Redis(port=private_redis.port) as client:
        raw: Any = client
        with closing(RedisStore(private_redis.url())) as store:
            key, token = new_key(), new_token()
            assert isinstance(ask(store, key, token), Granted)
            assert renew(store, [lease_of(key, token)]) == [RENEWED]
            raw.execute_command("REPLICAOF", "127.0.0.1", str(free_port()))
            if forgotten:
                raw.script_flush()
            with pytest.raises(StoreUnavailable, match="is a replica now"):
                renew(store, [lease_of(key, token)])
            raw.execute_command("REPLICAOF", "NO", "ONE")
            assert not any(store._connections._idle.values())


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "not connected"])
def test_a_server_that_runs_a_script_for_too_long_is_unavailable_until_the_script_ends(
    private_redis: PrivateServer, connected: bool
) -> None:
    # To select a database is a command too, and is refused while the connection is opened.
    with closing(RedisStore(private_redis.url(1))) as store:
        if connected:
            assert isinstance(ask(store, new_key(), new_token()), Granted)
        with (
            busy(lambda: redis.Redis(port=private_redis.port)),
            pytest.raises(StoreUnavailable, match="BUSY"),
        ):
            ask(store, new_key(), new_token())
        assert isinstance(ask(store, new_key(), new_token()), Granted)
