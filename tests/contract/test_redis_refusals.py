"""What a Redis that takes no leases now says (LOADING, READONLY, BUSY, MISCONF): it passes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import pytest
import redis

from celery_singleton_lock.core.lease import Kind
from celery_singleton_lock.core.store_requests import (
    RENEWED,
    CompletionState,
    Granted,
    Release,
    ReleaseReply,
)
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.testing.contract import TIMEOUT, ask, new_key, new_token
from celery_singleton_lock.testing.contract.steps import (
    LONG,
    lease_of,
    mark,
    new_claim,
    renew,
    take_claim,
)
from example_project.private_server import PrivateServer, find_binary, free_port
from tests.harness.busy import busy
from tests.harness.deliveries import wait_until
from tests.harness.servers import server_version

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
            assert not any(store.runner.connections._idle.values())


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


def _becomes_a_replica(client: Any, server: PrivateServer) -> Callable[[], object]:
    client.execute_command("REPLICAOF", "127.0.0.1", str(free_port()))
    return lambda: client.execute_command("REPLICAOF", "NO", "ONE")


def _can_not_save(client: Any, server: PrivateServer) -> Callable[[], object]:
    client.config_set("save", "3600 1")
    (server.directory / "dump.rdb").mkdir()
    client.bgsave()
    wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", "it fails")
    return lambda: client.config_set("stop-writes-on-bgsave-error", "no")


def _is_full(client: Any, server: PrivateServer) -> Callable[[], object]:
    client.config_set("maxmemory", "1")
    return lambda: client.config_set("maxmemory", "0")


def _lacks_replicas(client: Any, server: PrivateServer) -> Callable[[], object]:
    if server_version() < (7, 0):
        pytest.skip("Redis 6.2 holds back commands, and no scripts, for the lack of replicas")
    client.config_set("min-replicas-to-write", "1")
    return lambda: client.config_set("min-replicas-to-write", "0")


def _denies_scripts(client: Any, server: PrivateServer) -> Callable[[], object]:
    client.execute_command("ACL", "SETUSER", "default", "-eval", "-evalsha", "-set")
    return lambda: client.execute_command("ACL", "SETUSER", "default", "+@all")


@pytest.mark.parametrize(
    ("refuse", "passes"),
    [
        (_becomes_a_replica, True),
        (_can_not_save, True),
        (_lacks_replicas, True),
        (_is_full, False),
        (_denies_scripts, False),
    ],
)
def test_a_server_that_refuses_writes_grants_loses_and_releases_nothing(
    private_redis: PrivateServer,
    refuse: Callable[[Any, PrivateServer], Callable[[], object]],
    passes: bool,
) -> None:
    """A release that it refuses for a time is repeated, as StoreUnavailable says."""
    with (
        redis.Redis(port=private_redis.port) as client,
        closing(RedisStore(private_redis.url())) as store,
    ):
        key, token, (free, claim), other = new_key(), new_token(), new_claim(), new_token()
        lease = lease_of(key, token)
        assert isinstance(ask(store, key, token), Granted)
        reserve = Release(keys=(key,), token=token, become=Kind.COOLING, become_ttl=LONG)
        requests: list[Callable[[], object]] = [
            lambda: ask(store, free, other),
            lambda: take_claim(store, claim, other),
            lambda: store.leases.release(reserve, timeout=TIMEOUT),
            lambda: mark(store, key, token, CompletionState.DONE),
        ]
        relent = refuse(client, private_redis)
        for request in requests:
            with pytest.raises(StoreError) as caught:
                request()
            assert isinstance(caught.value, StoreUnavailable) is passes, caught.value
        with suppress(StoreError):  # PEXPIRE needs no memory
            assert renew(store, [lease]) == [RENEWED]
        relent()
        assert renew(store, [lease]) == [RENEWED]
        assert isinstance(ask(store, free, new_token()), Granted)
        assert store.leases.release(reserve, timeout=TIMEOUT) is ReleaseReply.OURS
