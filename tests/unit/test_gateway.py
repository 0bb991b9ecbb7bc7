"""Calls to etcd, before any server has answered."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.stores.etcd.store import EtcdStore
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
