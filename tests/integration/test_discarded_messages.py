"""A message that a worker discards before it is a task ends its claim, whatever is wrong with it.

A claim lasts 600 s here, so only the worker that discards the message can free it in time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis
from celery.signals import before_task_publish
from celery.worker.consumer import Consumer
from kombu import Message, compression

from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.option_values import OnDuplicate
from example_project.private_server import PrivateServer
from tests.harness.refused import NOT_IN_CHILDREN, ONE_WAY
from tests.harness.worker import CeleryWorker
from tests.integration.conftest import Consume
from tests.integration.key_queue import also_consume
from tests.integration.stage import Stage, open_stage, wait_until

APP = "tests.apps.discarded"

# The worker does not know it.
compression.register(lambda data: data, lambda data: data, "application/x-unknown", ["unknown"])


@pytest.fixture(scope="module")
def stage(redis_server: Any, _databases: Iterator[int], tmp_path_factory: Any) -> Iterator[Stage]:
    url = redis_server.url(next(_databases))
    env = {"LOCK_URL": url}
    with open_stage(url, tmp_path_factory.mktemp("discarded"), APP, env) as stage:
        yield stage


@pytest.fixture(scope="module")
def worker(stage: Stage) -> CeleryWorker:
    # East of Greenwich, the last minute of the calendar has no local time.
    return stage.worker(concurrency=1, env={"TZ": "Asia/Tokyo"})


def claim_of(task: Any, name: str) -> str:
    return Keyspace.claim(task.name, task.lock_key(name))


@contextmanager
def publishing(change: Callable[[Any, dict[str, Any]], None]) -> Iterator[None]:
    """Apply ``change`` to body and headers of each message that this process publishes."""

    def receive(body: Any, headers: dict[str, Any], **_: Any) -> None:
        change(body, headers)

    before_task_publish.connect(receive, weak=False, dispatch_uid=(uid := uuid4().hex))
    try:
        yield
    finally:
        before_task_publish.disconnect(dispatch_uid=uid)


def sent(task: Any, name: str, **options: Any) -> Any:
    return task.apply_async((name,), **options)


def changed(change: Callable[[Any, dict[str, Any]], None], **options: Any) -> Callable[..., Any]:
    def send(task: Any, name: str, queue: str, **others: Any) -> Any:
        with publishing(change):
            # What publishes keeps the list of receivers that there was when it was made. The signal
            # has had another one since a receiver of another test was collected.
            del task.app.amqp
            return sent(task, name, queue=queue, **options, **others)

    return send


def without_task(body: Any, headers: dict[str, Any]) -> None:
    del headers["task"]


def in_protocol_1(task: Any, name: str, **options: Any) -> Any:
    task.app.conf.task_protocol = 1
    del task.app.amqp
    try:
        return sent(task, name, **options)
    finally:
        task.app.conf.task_protocol = 2
        del task.app.amqp


#: How the message is sent, and why the worker discards it, by what is wrong.
WAYS: dict[str, tuple[Callable[..., Any], str]] = {
    "it does not decode": (
        lambda task, name, **options: sent(task, name, serializer=ONE_WAY, **options),
        "undecodable",
    ),
    "its content is not accepted": (
        lambda task, name, **options: sent(task, name, serializer="pickle", **options),
        "invalid",
    ),
    "it has JSON that loads refuses": (
        lambda task, name, **options: task.apply_async(
            (name, {"__type__": "no-such-type", "__value__": "1"}), **options
        ),
        "undecodable",
    ),
    "its compression is not known": (
        lambda task, name, **options: sent(task, name, compression="unknown", **options),
        "undecodable",
    ),
    "its expires is no time": (
        changed(lambda body, headers: headers.update(expires="soon")),
        "invalid",
    ),
    "it names no task": (changed(without_task), "invalid"),
    "it names no task and does not decode": (
        changed(without_task, serializer=ONE_WAY),
        "undecodable",
    ),
    "its eta is beyond the calendar": (
        lambda task, name, **options: sent(
            task, name, eta=datetime(9999, 12, 31, 23, 59, tzinfo=UTC), **options
        ),
        "invalid",
    ),
    "only the child does not decode it": (
        lambda task, name, **options: sent(task, name, serializer=NOT_IN_CHILDREN, **options),
        "undecodable",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_message_that_is_discarded_frees_its_claim_and_the_worker_says_why(
    stage: Stage, worker: CeleryWorker, name: str, way: str
) -> None:
    send, reason = WAYS[way]
    task = stage.app.known
    ended = send(task, name, queue="celery")
    wait_until(lambda: not stage.redis.exists(claim_of(task, name)), "its claim is free", 15)
    following = task.delay(name)
    assert following.id != ended.id
    assert following.get(timeout=30) == name
    worker.wait_for_log(rf"{ended.id}\S* was discarded \({reason}\)", timeout=5)


@pytest.mark.parametrize(
    "results", [pytest.param("there", marks=pytest.mark.slow), "disabled", "away"]
)
def test_a_message_of_an_unknown_task_frees_its_claim(
    stage: Stage,
    worker: CeleryWorker,
    name: str,
    consume: Consume,
    private_redis: PrivateServer,
    results: str,
) -> None:
    task = stage.app.gone
    ended = {
        each: send(task, each, queue=name)
        for each, send in ((f"{name}-2", sent), (f"{name}-1", in_protocol_1))
    }
    for each in ended:
        assert stage.redis.exists(claim_of(task, each))
    env = {"WITHOUT": "1"}
    if results == "disabled":
        env["RESULT_URL"] = "disabled://"
    elif results == "away":
        env["RESULT_URL"] = private_redis.url()
        private_redis.kill()
    other = consume(name, env=env)
    claims = [claim_of(task, each) for each in ended]
    wait_until(lambda: not stage.redis.exists(*claims), "their claims are free", 15)
    for result in ended.values():
        other.wait_for_log(rf"{result.id}\S* was discarded \(unknown\)", timeout=5)


def test_a_claim_that_the_store_refuses_to_free_is_freed_when_the_rights_are_back(
    redis_url: str, private_redis: PrivateServer, tmp_path: Path, name: str
) -> None:
    env = {"LOCK_URL": private_redis.url()}
    with (
        open_stage(redis_url, tmp_path, APP, env) as stage,
        redis.Redis.from_url(private_redis.url(), decode_responses=True) as admin,
    ):
        admin.acl_setuser("admin", enabled=True, nopass=True, categories=["+@all"], keys=["*"])
        admin.execute_command("AUTH", "admin", "")
        task = stage.app.known
        sent(task, name, queue=name, serializer="pickle")
        claim = claim_of(task, name)
        assert admin.exists(claim)
        worker = stage.worker(concurrency=1)
        admin.execute_command("ACL", "SETUSER", "default", "-evalsha", "-eval")
        also_consume(stage, worker, name)
        wait_until(
            lambda: admin.info("commandstats").get("cmdstat_evalsha", {}).get("rejected_calls"),
            "the store has refused to free the claim",
        )
        assert admin.exists(claim)
        admin.execute_command("ACL", "SETUSER", "default", "+evalsha", "+eval")
        wait_until(lambda: not admin.exists(claim), "the claim is free")


@pytest.mark.parametrize("way", ["its content is not accepted", "it does not decode"])
def test_the_newest_arguments_of_a_discarded_message_are_deleted(
    stage: Stage, worker: CeleryWorker, name: str, way: str
) -> None:
    send, _ = WAYS[way]
    task, singleton = stage.app.known, {"on_duplicate": OnDuplicate.REPLACE}
    ended = send(task, name, queue=name, singleton=singleton)
    again = task.apply_async((name, "newest"), queue=name, singleton=singleton)
    assert again.id == ended.id
    arguments = claim_of(task, name).replace("}:claim|", "}:args|", 1) + "|*"
    assert stage.redis.keys(arguments)
    also_consume(stage, worker, name)
    wait_until(lambda: not stage.redis.keys(arguments), "the arguments are deleted", 15)
    assert not stage.redis.exists(claim_of(task, name))


def test_no_other_method_of_celery_or_kombu_ends_a_message_before_its_run() -> None:
    """A new version of Celery may have another way; `WAYS` and the unknown task are those of today.

    The requests of tasks acknowledge and reject through the promises of ``on_task_received``.
    """
    ending = {"ack", "reject", "ack_log_error", "reject_log_error"}
    assert ending <= vars(Message).keys()
    methods = inspect.getmembers(Consumer, inspect.isfunction)
    assert {name for name, method in methods if ending & set(method.__code__.co_names)} == {
        *("on_decode_error", "on_invalid_task", "on_unknown_message", "on_unknown_task"),
    }
