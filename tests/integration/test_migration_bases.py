"""The drop-in bases: what a publisher claims and is answered, and what a worker frees."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import redis
from celery import chain, group, states
from celery.utils import uuid
from kombu.exceptions import OperationalError
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_singleton_lock.migration import (
    AlreadyQueued,
    AlreadyQueuedError,
    DuplicateTaskError,
    bridge,
    clear_locks,
)
from tests.apps.gate import Gate
from tests.chaos.proxy import Kind, Mode, Proxy
from tests.harness.deliveries import wait_until
from tests.harness.journal import Journal
from tests.harness.keys import EVERY_NAME
from tests.harness.worker import CeleryWorker

APP = "tests.apps.migrated"


@pytest.fixture(params=["bridge", "finish"])
def conf(request: pytest.FixtureRequest, environment: dict[str, str], redis_url: str) -> str:
    """While old processes may run, and in the release after."""
    finish = {"singleton_lock_old_locks": False, "singleton_lock_url": redis_url}
    environment["CONF"] = json.dumps(finish if request.param == "finish" else {})
    return str(request.param)


@pytest.fixture(autouse=True)
def clients_end() -> Iterator[None]:
    """A process keeps one client for each old server, and each test has another database."""
    yield
    while bridge._clients:
        bridge._clients.popitem()[1].close()


@pytest.fixture
def tasks(conf: str, load_app: Callable[..., ModuleType]) -> ModuleType:
    return load_app(APP)


@pytest.fixture
def at_work(
    conf: str, worker: Callable[..., CeleryWorker], load_app: Callable[..., ModuleType]
) -> ModuleType:
    """The tasks, with a worker."""
    worker(APP, concurrency=2)
    return load_app(APP)


def old_keys(client: redis.Redis) -> list[str]:
    patterns = ("qo_*", "SINGLETONLOCK_*", "h-lock:*")
    return [key for pattern in patterns for key in client.scan_iter(pattern)]


def claims(client: redis.Redis) -> list[str]:
    return [*old_keys(client), *client.scan_iter(f"{EVERY_NAME}:claim|*")]


def the_claim(client: redis.Redis, conf: str) -> str:
    [key] = claims(client)
    assert key.startswith(EVERY_NAME.removesuffix("*")) is (conf == "finish")
    return key


def sent(client: redis.Redis) -> int:
    count: Any = client.llen("celery")
    return int(count)


def test_celery_once_claims_and_answers(
    tasks: ModuleType, redis_client: redis.Redis, conf: str
) -> None:
    tasks.once.delay("a")
    assert 40_000 < redis_client.pttl(the_claim(redis_client, conf)) <= 50_000
    with pytest.raises(AlreadyQueued) as raised:
        tasks.once.delay("a", gate="other arguments")
    assert 40 < raised.value.countdown <= 50
    result = tasks.once.apply_async(("a",), once={"graceful": True})
    assert (result.result, result.state) == (None, states.REJECTED)
    tasks.once.apply_async(("b",), once={"timeout": 5})
    assert sent(redis_client) == 2
    lives = sorted(redis_client.pttl(key) for key in claims(redis_client))
    assert lives[0] <= 5_000


def test_celery_singleton_claims_and_answers(
    tasks: ModuleType, redis_client: redis.Redis, conf: str
) -> None:
    first = tasks.singleton.delay("a")
    assert tasks.singleton.delay("a", end="fail").id == first.id
    lives = redis_client.pttl(the_claim(redis_client, conf))
    assert lives == -1 if conf == "bridge" else lives > 86_000_000
    first = tasks.raising.delay("a")
    with pytest.raises(DuplicateTaskError) as raised:
        tasks.raising.delay("a")
    assert raised.value.task_id == first.id
    first = tasks.hooked.delay("a")
    assert tasks.hooked.delay("a") == f"duplicate of {first.id}"
    assert sent(redis_client) == 3


def test_celery_heimdall_claims_and_answers(
    tasks: ModuleType, redis_client: redis.Redis, conf: str
) -> None:
    first = tasks.heimdall.delay("a")
    assert 60_000 < redis_client.pttl(the_claim(redis_client, conf)) <= 70_000
    assert tasks.heimdall.delay("a").id == first.id
    first = tasks.periodic.delay("a")
    with pytest.raises(AlreadyQueuedError) as raised:
        tasks.periodic.delay("a")
    assert raised.value.likely_culprit == first.id
    assert sent(redis_client) == 2


def test_a_duplicate_is_in_the_log_of_its_publisher(
    tasks: ModuleType, redis_client: redis.Redis, conf: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = tasks.once.delay("a")
    with caplog.at_level(logging.INFO), pytest.raises(AlreadyQueued):
        tasks.once.delay("a")
    texts = [record.getMessage() for record in caplog.records]
    [text] = [text for text in texts if "duplicate" in text]
    assert first.id in text
    assert the_claim(redis_client, conf) in text


def test_a_publish_that_fails_leaves_no_claim(tasks: ModuleType, redis_client: redis.Redis) -> None:
    for task in (tasks.once, tasks.singleton, tasks.heimdall):
        with pytest.raises(Exception, match=r"serializer|encoder"):
            task.apply_async(("a",), serializer="no such serializer")
    assert claims(redis_client) == []


@pytest.mark.slow
def test_a_publisher_without_a_lock_store_frees_its_claim(
    environment: dict[str, str], load_app: Callable[..., ModuleType], redis_client: redis.Redis
) -> None:
    away = {"broker_url": "amqp://127.0.0.1:1", "task_publish_retry": False}
    environment["CONF"] = json.dumps({**away, "result_backend": "rpc://"})
    with pytest.raises(OperationalError):
        load_app(APP).once.delay("a")
    assert old_keys(redis_client) == []


@pytest.fixture
def old_server(tasks: ModuleType, redis_client: redis.Redis, conf: str) -> Iterator[Proxy]:
    """The way to the server of celery-singleton's keys, for a client that repeats requests."""
    if conf == "finish":
        pytest.skip("the old key is not claimed")
    server = redis_client.connection_pool.connection_kwargs
    with Proxy(int(server["port"])) as proxy:
        tasks.app.conf.singleton_backend_url = f"redis://127.0.0.1:{proxy.port}/{server['db']}"
        again = (redis.ConnectionError,)
        tasks.app.conf.singleton_backend_kwargs = {
            "retry": Retry(NoBackoff(), 1, supported_errors=again),
            # Without it, redis-py 5 opens a connection again, and does not repeat a request.
            "retry_on_error": list(again),
        }
        tasks.singleton.old_client().ping()  # so that the next reply is not that to a handshake
        yield proxy


PUBLISH: dict[str, Callable[[Any], Any]] = {
    "alone": lambda call: call.apply_async(),
    "in a group": lambda call: group(call, call.clone(("b",))).apply_async(),
    "in a chain": lambda call: chain(call, call.clone(("b",))).apply_async(),
    "with an id": lambda call: call.apply_async(task_id="import"),
}


@pytest.mark.parametrize("how", PUBLISH)
def test_a_call_whose_claim_got_no_reply_is_published(
    tasks: ModuleType, redis_client: redis.Redis, old_server: Proxy, how: str
) -> None:
    old_server.lose_next_reply()
    PUBLISH[how](tasks.singleton.s("a"))
    assert sent(redis_client) == (2 if how == "in a group" else 1)


def test_only_after_says_yes_although_the_reply_was_lost(
    tasks: ModuleType, old_server: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = tasks.singleton.old_client()
    monkeypatch.setattr(tasks.periodic, "setup_redis", lambda: client)
    old_server.lose_next_reply()
    assert tasks.periodic.only_after("nightly", 60)
    assert not tasks.periodic.only_after("nightly", 60)


def test_the_claim_of_a_call_that_failed_ends_when_the_old_server_answers(
    tasks: ModuleType, redis_client: redis.Redis, old_server: Proxy
) -> None:
    old_server.set(Mode(kind=Kind.LOSE_REPLIES, probability=1.0))
    with pytest.raises(redis.ConnectionError):
        tasks.singleton.delay("a")
    assert len(old_keys(redis_client)) == 1
    old_server.set(Mode())
    wait_until(lambda: not old_keys(redis_client), "the claim is free")
    tasks.singleton.delay("a")
    assert sent(redis_client) == 1


def test_the_old_key_of_an_ended_task_is_free_when_the_old_server_answers(
    tasks: ModuleType, redis_client: redis.Redis, old_server: Proxy
) -> None:
    first = tasks.singleton.delay("a")
    old_server.set(Mode(kind=Kind.REFUSE))
    old_server.cut_connections()
    tasks.singleton.free_old_key(["a"], {}, first.id)
    assert len(old_keys(redis_client)) == 1
    old_server.set(Mode())
    wait_until(lambda: not old_keys(redis_client), "the key is free")


def test_a_second_call_with_the_same_id_is_a_duplicate(
    tasks: ModuleType, redis_client: redis.Redis
) -> None:
    for _ in range(2):
        assert tasks.singleton.apply_async(("a",), task_id="import").id == "import"
    assert sent(redis_client) == 1


def test_clear_locks_deletes_the_old_keys_only(
    tasks: ModuleType, redis_client: redis.Redis, conf: str
) -> None:
    tasks.singleton.delay("a")
    tasks.singleton.delay("b")
    tasks.once.delay("a")
    clear_locks(tasks.app)
    assert not list(redis_client.scan_iter("SINGLETONLOCK_*"))
    assert len(claims(redis_client)) == (1 if conf == "bridge" else 3)


def test_release_lock_frees_one_old_key(tasks: ModuleType, redis_client: redis.Redis) -> None:
    redis_client.set(tasks.singleton.old_key(["a"], {}), "some call")
    tasks.singleton.release_lock(["a"])
    assert old_keys(redis_client) == []


def test_an_eager_call_claims_runs_and_frees(
    tasks: ModuleType, redis_client: redis.Redis, journal: Journal
) -> None:
    tasks.app.conf.task_always_eager = True
    for task in (tasks.once, tasks.until_start, tasks.singleton, tasks.heimdall):
        assert task.delay("a").get() == task.delay("a").get() == "ran"
    assert claims(redis_client) == []
    assert len(journal.runs()) == 8


def test_a_call_may_go_without_a_claim(tasks: ModuleType, redis_client: redis.Redis) -> None:
    for _ in range(2):
        tasks.once.apply_async(("a",), once={"timeout": 5}, singleton=False)
        tasks.singleton.apply_async(("a",), singleton=False)
    assert claims(redis_client) == []
    assert sent(redis_client) == 4


def test_a_direct_call_is_a_function_call(tasks: ModuleType, redis_client: redis.Redis) -> None:
    redis_client.set(tasks.until_start.get_key(("a",)), "another call")
    for task in (tasks.once, tasks.until_start, tasks.singleton, tasks.heimdall):
        assert task("a") == "ran"
    assert len(claims(redis_client)) == 1


@pytest.mark.slow
def test_a_worker_frees_what_the_old_package_frees(
    at_work: ModuleType, redis_client: redis.Redis, journal: Journal, conf: str
) -> None:
    check_each_end(at_work, redis_client, journal)
    check_unlock_before_run(at_work, redis_client, journal)
    check_heimdalls_period(at_work, redis_client, conf)


def check_each_end(tasks: ModuleType, client: redis.Redis, journal: Journal) -> None:
    """Each end frees the task's own claim and no other."""
    fails = tasks.singleton.delay("a", end="fail")
    retries = tasks.singleton.delay("b", end="retry")
    assert tasks.singleton.delay("b").id == retries.id  # also while it waits for its retry
    with pytest.raises(ValueError, match="fail"):
        fails.get(timeout=30)
    with pytest.raises(tasks.singleton.MaxRetriesExceededError):
        retries.get(timeout=30)
    assert len(journal.runs("b")) == 3
    assert [tasks.once.delay("a").get(timeout=30), tasks.heimdall.delay("a").get(timeout=30)]
    wait_until(lambda: not claims(client), "all claims are free")
    assert tasks.singleton.delay("a").get(timeout=30) == "ran"
    wait_until(lambda: not claims(client), "the claim is free")
    # The end of a message without a claim does not free another call's.
    for task in (tasks.singleton, tasks.once):
        other, claimant = task.old_key(["c"], {}), uuid()
        client.set(other, claimant)
        tasks.app.send_task(task.name, ["c"]).get(timeout=30)
        assert client.getdel(other) == claimant
    # celery-once writes a token of redis-py's Lock, which names no call.
    assert client.lock(tasks.once.old_key(["d"], {})).acquire()
    tasks.app.send_task(tasks.once.name, ["d"]).get(timeout=30)
    wait_until(lambda: not claims(client), "the end of a body frees it")


def check_unlock_before_run(tasks: ModuleType, client: redis.Redis, journal: Journal) -> None:
    """One call may wait while another runs."""
    first = tasks.until_start.delay("start", gate="first")
    journal.wait_for_starts(1, key="start")
    second = tasks.until_start.delay("start", gate="first")
    third = tasks.until_start.delay("start", gate="first")
    assert third.state == states.REJECTED
    Gate(client, "first").open()
    assert first.get(timeout=30) == second.get(timeout=30) == "ran"
    assert journal.overlaps() == []
    wait_until(lambda: not claims(client), "all claims are free")


def check_heimdalls_period(tasks: ModuleType, client: redis.Redis, conf: str) -> None:
    """A period outlives its task, and messages without a claim look at the key."""
    assert tasks.periodic.delay("a").get(timeout=30) is True
    with pytest.raises(AlreadyQueuedError):
        tasks.periodic.delay("a")
    if conf == "bridge":
        skipped = tasks.app.send_task(tasks.periodic.name, ["a"])
        assert skipped.get(timeout=30) is None
        client.delete("h-lock:own-a")
        assert tasks.app.send_task(tasks.periodic.name, ["a"]).get(timeout=30) is False
        assert client.exists("h-lock:own-a")


def test_heimdalls_base_runs_each_message_of_a_base_though_another_call_has_the_old_key(
    worker: Callable[..., CeleryWorker],
    load_app: Callable[..., ModuleType],
    redis_client: redis.Redis,
    redis_url: str,
) -> None:
    finish = {"singleton_lock_old_locks": False, "singleton_lock_url": redis_url}
    release_2 = load_app(APP, CONF=json.dumps(finish))
    release_1 = load_app(APP, CONF="{}")
    calls = [
        (release_2.heimdall, {}),  # claimed by `unique`, which its header names
        (release_2.periodic, {}),  # a period, which no header names
        (release_1.heimdall, {}),
        (release_1.heimdall, {"singleton": False}),
    ]
    results = [task.apply_async((f"n{n}",), **options) for n, (task, options) in enumerate(calls)]
    unclaimed = release_1.app.send_task(release_1.heimdall.name, [f"n{len(calls)}"])
    for number, (task, _) in enumerate([*calls, (release_1.heimdall, {})]):
        redis_client.set(task.old_key([f"n{number}"], {}), "another call")
    worker(APP, env={"CONF": "{}"})
    assert [result.get(timeout=30) for result in results] == ["ran", True, "ran", "ran"]
    assert unclaimed.get(timeout=30) is None


@pytest.mark.slow
def test_a_wrong_old_setting_stops_the_worker_with_one_line(
    worker: Callable[..., CeleryWorker], environment: dict[str, str]
) -> None:
    environment["CONF"] = json.dumps({"singleton_backend_class": "mine.Backend"})
    process = worker(APP, wait=False)
    assert process.wait() != 0
    [line] = [line for line in process.lines if "mine.Backend" in line]
    assert "RedisBackend only" in line


@pytest.mark.slow
def test_celery_singletons_expiry_does_not_stop_a_worker_and_is_read_by_the_bridge(
    worker: Callable[..., CeleryWorker],
    environment: dict[str, str],
    load_app: Callable[..., ModuleType],
    redis_client: redis.Redis,
) -> None:
    environment["CONF"] = json.dumps({"singleton_lock_expiry": 30})
    tasks = load_app(APP)
    tasks.singleton.delay("a")
    [key] = claims(redis_client)
    assert 20_000 < redis_client.pttl(key) <= 30_000
    process = worker(APP)
    wait_until(lambda: not claims(redis_client), "the claim is free")
    [line] = [line for line in process.lines if "singleton_lock_expiry" in line]
    assert "migration.Singleton" in line
