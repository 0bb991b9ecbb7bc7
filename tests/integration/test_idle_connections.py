"""Idle connections to the store that a NAT or a load balancer has dropped silently.

Requests sent over one of these are lost, while the store answers over a new connection. The proxy
in between is the NAT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from celery_singleton_lock import DuplicateTask
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.runtime import Runtime
from example_project.private_server import ExternalServer, PrivateServer
from tests.chaos.proxy import Proxy
from tests.harness.journal import Journal
from tests.harness.processes import kill_process
from tests.harness.worker import CeleryWorker

StartWorker = Callable[..., CeleryWorker]
LoadApp = Callable[..., ModuleType]
UNIQUE, CRASH = "tests.apps.unique", "tests.apps.crash"
# No worker consumes it.
QUEUE = "idle"


@pytest.fixture
def nat(redis_server: PrivateServer | ExternalServer) -> Iterator[Proxy]:
    port = urlsplit(redis_server.url()).port
    assert port is not None
    with Proxy(port) as proxy:
        yield proxy


@pytest.fixture
def environment(environment: dict[str, str], redis_url: str, nat: Proxy) -> dict[str, str]:
    """The lock store alone is behind the NAT."""
    lock_url = f"redis://127.0.0.1:{nat.port}{urlsplit(redis_url).path}"
    return {**environment, "LOCK_URL": lock_url}


def publish(task: Any, name: str, **singleton: Any) -> Any:
    return task.apply_async((name,), queue=QUEUE, singleton=singleton or None)


def test_an_equal_call_is_not_published_though_the_connection_was_dropped(
    load_app: LoadApp, nat: Proxy, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    unique = load_app(UNIQUE)
    first = publish(unique.once, "ann")
    nat.forget_connections()
    assert publish(unique.once, "ann").id == first.id
    assert redis_client.llen(QUEUE) == 1
    assert not [text for text in caplog.messages if "without-claim" in text]


def test_a_duplicate_raises_what_it_should_though_the_connection_was_dropped(
    load_app: LoadApp, nat: Proxy, redis_client: redis.Redis
) -> None:
    unique = load_app(UNIQUE)
    first = publish(unique.once, "ann", on_duplicate="raise")
    nat.forget_connections()
    with pytest.raises(DuplicateTask) as caught:
        publish(unique.once, "ann", on_duplicate="raise")
    assert caught.value.task_id == first.id
    assert redis_client.llen(QUEUE) == 1


def test_a_call_that_could_not_be_sent_leaves_no_claim_though_the_connection_was_dropped(
    load_app: LoadApp, nat: Proxy
) -> None:
    unique = load_app(UNIQUE)
    publish(unique.once, "bob")

    def fail(*_: Any, **__: Any) -> None:
        nat.forget_connections()
        raise OSError("the broker is away")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unique.app, "send_task", fail)
        patch.setattr(type(unique.app.amqp), "send_task_message", fail)
        with pytest.raises(OSError, match="away"):
            publish(unique.once, "ann")
    key = Runtime.of(unique.app).keyspace.claim(unique.once.name, unique.once.lock_key("ann"))
    with closing(Runtime.of(unique.app).open_store()) as store:
        assert store.leases.inspect(key) is None


@pytest.mark.slow
def test_a_dead_childs_key_is_freed_though_the_parents_connection_was_dropped(
    worker: StartWorker,
    load_app: LoadApp,
    journal: Journal,
    nat: Proxy,
    redis_client: redis.Redis,
) -> None:
    crash = load_app(CRASH)
    process = worker(CRASH, concurrency=1)
    for count, key in enumerate(("first", "second"), 1):
        if count == 2:
            nat.forget_connections()  # the parent's is idle, after the first release
        crash.early.delay(key, "killed")
        start = journal.wait_for_starts(count)[-1]
        journal.death(start.pid, kill_process(start.pid))
        locked = crash.early.lock_key(key, "")
        died = f"pool process {start.pid} died"
        process.wait_for_event(EventName.FREED, key=locked, reason=died)
        assert not redis_client.exists(locked)
