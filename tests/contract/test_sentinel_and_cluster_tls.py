"""Sentinel and Cluster over TLS: among the servers, and from here to each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from celery_singleton_lock.core.store import Store
from celery_singleton_lock.core.store_requests import (
    RENEWED,
    Granted,
    Refused,
    Release,
    ReleaseReply,
)
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.stores import open_store
from celery_singleton_lock.testing.contract import TIMEOUT, ask, lease_of, new_key, new_token
from tests.harness.certificates import Certificates
from tests.harness.cluster import Cluster
from tests.harness.deliveries import wait_until
from tests.harness.sentinels import MASTER, Sentinels

# Several servers each: `make test` keeps memory, Redis and Valkey.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def tls_sentinels(certificates: Certificates, tls_url: str) -> Iterator[Sentinels]:
    # Where there is a `tls_url`, there is a program that was built with TLS.
    with Sentinels(tls=certificates) as processes:
        yield processes


@pytest.fixture(scope="module")
def tls_cluster(certificates: Certificates, tls_url: str) -> Iterator[Cluster]:
    with Cluster(tls=certificates) as processes:
        yield processes


@pytest.fixture(params=["tls_sentinels", "tls_cluster"])
def servers(request: pytest.FixtureRequest) -> Sentinels | Cluster:
    found: Sentinels | Cluster = request.getfixturevalue(request.param)
    return found


def test_leases_are_taken_renewed_and_released_over_tls(servers: Sentinels | Cluster) -> None:
    with closing(open_store(servers.url)) as store:
        tokens = {new_key(): new_token() for _ in range(20)}  # on every master of a cluster
        for key, token in tokens.items():
            assert isinstance(ask(store, key, token), Granted)
            assert isinstance(ask(store, key, new_token()), Refused)
        leases = [lease_of(key, token) for key, token in tokens.items()]
        assert store.leases.renew(leases, timeout=TIMEOUT) == [RENEWED] * len(leases)
        for key, token in tokens.items():
            assert give(store, key, token) is ReleaseReply.OURS


def give(store: Store, key: str, token: object) -> ReleaseReply:
    return store.leases.release(Release(keys=(key,), token=token), timeout=TIMEOUT)  # type: ignore[arg-type]


def test_a_certificate_of_an_unknown_authority_is_refused(servers: Sentinels | Cluster) -> None:
    url, _, _ = servers.url.partition("?")
    with (
        closing(open_store(f"{url}?master_name={MASTER}" if "sentinel" in url else url)) as store,
        pytest.raises(StoreUnavailable, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        ask(store, new_key(), new_token())


def test_a_plain_connection_gets_nothing_from_a_port_that_speaks_tls(
    servers: Sentinels | Cluster,
) -> None:
    plain = servers.url.replace("sentinels://", "sentinel://").replace("rediss+", "redis+")
    plain = plain.partition("&ssl_ca" if "sentinel" in plain else "?ssl_ca")[0]
    with closing(open_store(plain)) as store, pytest.raises(StoreUnavailable):
        ask(store, new_key(), new_token())


def test_kombus_form_speaks_tls_to_the_servers_and_not_to_the_sentinels(
    tls_sentinels: Sentinels, certificates: Certificates
) -> None:
    options = {"master_name": MASTER, "ssl_ca_certs": str(certificates.ca)}
    with closing(open_store(tls_sentinels.kombu_url, options=options)) as store:
        assert isinstance(ask(store, new_key(), new_token()), Granted)
    options = {"master_name": MASTER}  # the servers' port speaks nothing else
    with (
        closing(open_store(tls_sentinels.kombu_url, options=options)) as store,
        pytest.raises(StoreUnavailable),
    ):
        ask(store, new_key(), new_token())


def test_a_failover_is_followed_over_tls(certificates: Certificates, tls_url: str) -> None:
    with (
        Sentinels(tls=certificates) as sentinels,
        closing(open_store(sentinels.url)) as store,
        closing(open_store(sentinels.url, wait_replicas=2)) as waiting,
    ):
        key, token = new_key(), new_token()
        assert isinstance(ask(waiting, key, token), Granted)
        old = sentinels.master()
        old.kill()
        sentinels.wait_until_promoted(old)

        def renewed() -> bool:
            try:
                return store.leases.renew([lease_of(key, token)], timeout=TIMEOUT) == [RENEWED]
            except StoreUnavailable:
                return False

        wait_until(renewed, "the new master is found")
        assert isinstance(ask(store, key, new_token()), Refused)
