"""Calls to etcd, before any server has answered; and what the error replies of a member mean."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.stores.etcd.gateway import Gateway, LeaseGone
from celery_singleton_lock.stores.etcd.store import EtcdStore
from celery_singleton_lock.stores.store_url import StoreUrl
from celery_singleton_lock.testing.contract import ask, new_key, new_token
from example_project.private_server import free_port


@pytest.mark.parametrize("option", ["ca", "cert"])
def test_a_certificate_that_is_not_there_is_reported_as_an_unreachable_store(
    option: str, tmp_path: Path
) -> None:
    missing = tmp_path / "missing.pem"
    url = f"etcds://127.0.0.1:{free_port()}/?{option}={missing}"
    with closing(EtcdStore(url)) as store, pytest.raises(StoreUnavailable, match=missing.name):
        ask(store, new_key(), new_token())


class _Member(BaseHTTPRequestHandler):
    """Sends the next of the server's replies, and notes the token of each request."""

    protocol_version = "HTTP/1.1"
    server: Any

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.tokens.append(self.headers["Authorization"])
        status, reply = self.server.replies.pop(0)
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def member() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Member)
    server.replies, server.tokens = [], []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _request(member: Any, login: str = "") -> Any:
    clock = SystemClock()
    url = StoreUrl.parse(f"etcd://{login}127.0.0.1:{member.server_port}", port=2379)
    with closing(Gateway(url, clock)) as gateway:
        return gateway.request("kv/txn", {}, clock.now() + 20, repeatable=False)


def _error(message: str, code: int, version: str) -> dict[str, Any]:
    """An error reply of etcd: 3.6 has left out a field that repeats the message."""
    reply = {"code": code, "message": message}
    return reply if version == "3.6" else {"error": message, **reply}


@pytest.mark.parametrize("version", ["3.4", "3.6"])
@pytest.mark.parametrize(
    ("status", "code", "message", "error"),
    [
        (404, 5, "etcdserver: requested lease not found", LeaseGone),
        (429, 8, "etcdserver: too many requests", StoreUnavailable),
        (429, 8, "etcdserver: mvcc: database space exceeded", StoreError),
        (403, 7, "etcdserver: permission denied", StoreError),
        (503, 14, "etcdserver: request timed out", StoreUnavailable),
        (503, 14, "etcdserver: no leader", StoreUnavailable),
        (500, 2, "context deadline exceeded", StoreUnavailable),
    ],
)
def test_an_error_reply_is_a_refusal_or_no_answer_in_each_version_of_etcd(
    member: Any, version: str, status: int, code: int, message: str, error: type[Exception]
) -> None:
    member.replies.append((status, _error(message, code, version)))
    with pytest.raises(error, match=message) as caught:
        _request(member)
    assert type(caught.value) is error


@pytest.mark.parametrize("version", ["3.4", "3.6"])
def test_a_token_that_has_expired_is_renewed_in_each_version_of_etcd(
    member: Any, version: str
) -> None:
    refused = _error("etcdserver: invalid auth token", 16, version)
    member.replies += [(200, {"token": "old"}), (401, refused)]
    member.replies += [(200, {"token": "new"}), (200, {"succeeded": True})]
    assert _request(member, "user:password@") == {"succeeded": True}
    assert member.tokens == [None, "old", None, "new"]
