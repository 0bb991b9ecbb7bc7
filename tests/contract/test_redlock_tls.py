"""Redlock over TLS, with servers that speak it on a second port."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from celery_singleton_lock.core.store_requests import Granted, Release, ReleaseReply
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.stores.redlock.store import RedlockStore
from celery_singleton_lock.testing.contract import TIMEOUT, ask, lease_of, new_key, new_token
from example_project.private_server import PrivateServer, ServerStartFailed, free_port

# Several servers each: `make test` keeps memory, Redis and Valkey.
pytestmark = pytest.mark.slow


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("openssl is not installed")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


@pytest.fixture
def tls_nodes(certificate: tuple[Path, Path]) -> Iterator[tuple[list[PrivateServer], str]]:
    """Three servers, and their hosts as a URL has them."""
    cert, key = certificate
    servers, hosts = [], []
    with ExitStack() as stack:
        for _ in range(3):
            port = free_port()
            options = ["--tls-port", str(port), "--tls-auth-clients", "no"]
            options += ["--tls-cert-file", str(cert), "--tls-key-file", str(key)]
            try:
                servers.append(stack.enter_context(PrivateServer(arguments=options)))
            except ServerStartFailed as exc:
                pytest.skip(f"this server was built without TLS: {exc}")
            hosts.append(f"127.0.0.1:{port}")
        yield servers, ",".join(hosts)


def test_leases_are_taken_renewed_and_released_over_tls(
    tls_nodes: tuple[list[PrivateServer], str], certificate: tuple[Path, Path]
) -> None:
    servers, hosts = tls_nodes
    url = f"redlocks://{hosts}/1?quarantine=0&ssl_ca_certs={certificate[0]}"
    key, token = new_key(), new_token()
    with closing(RedlockStore(url)) as store, closing(RedlockStore(url)) as fresh:
        assert isinstance(ask(store, key, token), Granted)
        # More than one record of TLS in each direction.
        leases = [lease_of(key, token)] + [lease_of(new_key(), new_token()) for _ in range(600)]
        assert store.leases.renew(leases, timeout=TIMEOUT).count(None) == 1
        assert [record.key for record in store.operators.scan(f"{key}*")] == [key]
        servers[0].pause()
        try:
            # Open links, and some that shake hands with a server that stands still.
            for each in (store, fresh):
                assert isinstance(ask(each, new_key(), new_token()), Granted)
        finally:
            servers[0].resume()
        released = store.leases.release(Release(keys=(key,), token=token), timeout=TIMEOUT)
        assert released is ReleaseReply.OURS


def test_a_certificate_of_an_unknown_authority_is_refused(
    tls_nodes: tuple[list[PrivateServer], str],
) -> None:
    url = f"redlocks://{tls_nodes[1]}/0?quarantine=0"
    with (
        closing(RedlockStore(url)) as store,
        pytest.raises(StoreUnavailable, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        ask(store, new_key(), new_token())
    with closing(RedlockStore(f"{url}&ssl_cert_reqs=none")) as store:
        assert isinstance(ask(store, new_key(), new_token()), Granted)
