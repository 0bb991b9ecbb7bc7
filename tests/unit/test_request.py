"""What the worker parent does with what a dead child left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import singleton_task
from celery_singleton_lock.core.clock import SystemClock
from celery_singleton_lock.core.lease import Token
from celery_singleton_lock.message.claim import Claim
from celery_singleton_lock.message.header import HEADER
from celery_singleton_lock.option_values import Unique
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.testing.contract.steps import publish, record_of, take
from celery_singleton_lock.worker.dead_child import release_leases
from celery_singleton_lock.worker.request import SingletonRequestMixin
from celery_singleton_lock.worker.shared_memory import SharedMemory
from tests.unit.pool_child import Child

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
    # The children touch nothing but the record.
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

app = Celery("requests", broker="memory://", set_as_current=False)


@singleton_task(app=app, shared=False, key="{name}", unique="until_done")
def sync(name: str) -> None: ...


class Request(SingletonRequestMixin):
    """A message that a child had in hand; Celery's part is left out."""

    _already_cancelled = _already_revoked = False

    def __init__(self, id: str, child: int, claim: Claim) -> None:
        self.app, self.task, self.id, self.worker_pid = app, sync, id, child
        header = {"id": id, "claim": claim.to_header()}
        self.request_dict = {"headers": {HEADER: header}}


class Parent:
    """The parent of one pool child."""

    def __init__(self) -> None:
        self.store = MemoryStore(SystemClock())
        self.record = SharedMemory()
        self.runtime = Runtime(app, store=self.store)

    def claim_of(self, name: str) -> Claim:
        key = self.runtime.keyspace.claim(sync.name, sync.lock_key(name))
        return Claim(key=key, unique=Unique.UNTIL_DONE, unique_for=600.0)


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Parent]:
    parent = Parent()
    Runtime.install(app, parent.runtime)
    monkeypatch.setattr(Runtime, "lease_notes", parent.record)
    yield parent
    Runtime.install(app, None)


def test_a_release_that_was_not_confirmed_is_the_parents_when_the_child_dies(
    parent: Parent,
) -> None:
    key, token = sync.lock_key("earlier"), Token("earlier", 0, 0, "n1")
    take(parent.store, key, token)
    child = Child(0, lambda: parent.record.note((key,), str(token), 60.0))
    release_leases(Request("now", child.kill(), parent.claim_of("now")), None)
    assert parent.store.leases.inspect(key) is None


@pytest.mark.parametrize("comes_back", [True, False])
def test_an_earlier_message_that_is_still_written_down_has_no_part_in_this_ones_claim(
    parent: Parent, comes_back: bool
) -> None:
    earlier, now = parent.claim_of("earlier"), parent.claim_of("now")
    token = Token("earlier", 0, 0, "n1")
    publish(parent.store, earlier.key, token, ttl=60.0)
    publish(parent.store, now.key, Token("now", 0, 0, "n2"), ttl=60.0)

    def life() -> None:
        parent.record.note((sync.lock_key("earlier"),), str(token), 60.0, earlier.key)

    request: Any = Request("now", Child(0, life).kill(), now)
    release_leases(request, None, comes_back)
    assert record_of(parent.store, earlier.key).token == token.call_id
    found = parent.store.leases.inspect(now.key)
    if comes_back:
        assert found is not None
        assert found.ttl > 60.0, "it waits in the queue again, for as long as from the start"
    else:
        assert found is None


def test_celerys_own_headers_are_not_taken_from_a_nested_copy_of_all_headers(
    parent: Parent,
) -> None:
    request = Request("now", 0, parent.claim_of("now"))
    celerys = {"id": "now", "task": "sync", "eta": None, "expires": None, "retries": 0}
    request.request_dict = {**celerys, "tenant": "t", "headers": {**celerys, "x-trace": "abc"}}
    request._sift()
    assert request.request_dict["headers"] == {"tenant": "t", "x-trace": "abc"}
    assert celerys.items() <= request.request_dict.items()
