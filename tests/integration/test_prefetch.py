"""A message that the broker has given to a busy worker is not lost with that worker.

Kombu's Redis transport loses one that Redis has popped and whose reply no worker reads, with its
claim; the fault campaign excuses such messages (tests.chaos.jobs).
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.chaos.proxy import Kind, Mode, Proxy
from tests.chaos.site import stopped
from tests.harness.rabbit import RabbitServer
from tests.harness.worker import CeleryWorker

from .stage import Stage, open_stage, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

APP = "tests.apps.prefetch"


def pops(stage: Stage) -> bool:
    """Whether a worker waits for a message."""
    clients = stage.redis.client_list()
    return any(c["cmd"] == "brpop" and "b" in c["flags"] for c in clients)


def stop(worker: CeleryWorker) -> None:
    """Have its parent read nothing more."""
    os.kill(worker.pid, signal.SIGSTOP)
    wait_until(lambda: stopped(worker.pid), "the worker stands still", timeout=20.0)


def wait_until_popped(stage: Stage) -> None:
    wait_until(lambda: not stage.redis.llen("celery"), "the message is popped", timeout=20.0)
    assert not stage.redis.hlen("unacked"), "it is not noted as unacknowledged"


def assert_lost(stage: Stage, task: str) -> None:
    """A later message of a task is run, and no earlier one is left anywhere."""
    assert getattr(stage.app, task).delay("later").get(timeout=30) == "later"
    wait_until(lambda: not stage.redis.hlen("unacked"), "it is acknowledged", timeout=20.0)
    assert not stage.redis.llen("celery")


def test_a_message_popped_as_a_countdown_ends_survives_its_worker(
    redis_url: str, tmp_path: Path
) -> None:
    with open_stage(redis_url, tmp_path, APP) as stage:
        worker = stage.worker(concurrency=1)
        # Until its countdown ends, the worker may have a message more, and has asked for it.
        stage.app.work.apply_async(("first",), countdown=1)
        stage.journal.wait_for_starts(1, key="first")
        assert pops(stage), stage.redis.client_list()
        stage.app.work.delay("second")
        wait_until(lambda: stage.redis.hlen("unacked") == 2, "the broker knows both", timeout=20.0)
        worker.kill_group()

        stage.open("first")
        stage.open("second")
        stage.worker(concurrency=1, env={"VISIBILITY_TIMEOUT": "1"})
        stage.journal.wait_for_ends(1, key="second")


@pytest.mark.parametrize("task", ["plain", "once"])
def test_kombu_loses_a_message_that_redis_popped_for_a_worker_that_is_killed(
    task: str, redis_url: str, tmp_path: Path
) -> None:
    with open_stage(redis_url, tmp_path, APP) as stage:
        worker = stage.worker(concurrency=1)
        wait_until(lambda: pops(stage), "the worker waits for a message", timeout=20.0)
        stop(worker)
        call = getattr(stage.app, task).delay("first")
        wait_until_popped(stage)
        worker.kill_group()

        stage.worker(concurrency=1, env={"VISIBILITY_TIMEOUT": "1"})
        assert_lost(stage, task)
        assert not call.ready()


@pytest.mark.parametrize("task", ["plain", "once"])
def test_kombu_loses_a_message_in_a_reply_that_does_not_arrive(
    task: str, redis_url: str, tmp_path: Path
) -> None:
    address, _, database = redis_url.rpartition("/")
    server = int(address.rpartition(":")[2])
    with Proxy(server) as proxy, open_stage(redis_url, tmp_path, APP) as stage:
        through = f"redis://127.0.0.1:{proxy.port}/{database}"
        worker = stage.worker(concurrency=1, env={"BROKER_URL": through, "VISIBILITY_TIMEOUT": "1"})
        wait_until(lambda: pops(stage), "the worker waits for a message", timeout=20.0)
        proxy.set(Mode(kind=Kind.NO_REPLIES))
        call = getattr(stage.app, task).delay("first")
        wait_until_popped(stage)
        proxy.cut_connections()
        proxy.set(Mode())

        assert_lost(stage, task)
        assert not call.ready()
        assert worker.alive


def test_the_claim_of_a_lost_message_answers_equal_calls_until_unique_for(
    redis_url: str, tmp_path: Path
) -> None:
    with open_stage(redis_url, tmp_path, APP) as stage:
        worker = stage.worker(concurrency=1)
        wait_until(lambda: pops(stage), "the worker waits for a message", timeout=20.0)
        stop(worker)
        called = time.monotonic()
        lost = stage.app.once.delay("first")
        wait_until_popped(stage)
        worker.kill_group()
        assert stage.app.once.delay("first").id == lost.id

        stage.worker(concurrency=1)
        wait_until(
            lambda: stage.app.once.delay("first").id != lost.id,
            "an equal call is published",
            timeout=stage.app.UNIQUE_FOR + 10.0,
        )
        assert time.monotonic() - called > stage.app.UNIQUE_FOR - 1
        assert stage.app.once.delay("second").get(timeout=30) == "second"


@pytest.mark.parametrize("task", ["plain", "once"])
def test_rabbitmq_delivers_it_to_the_next_worker(
    task: str, rabbit: RabbitServer, redis_url: str, tmp_path: Path
) -> None:
    broker = {"BROKER_URL": rabbit.url(rabbit.vhost())}
    with open_stage(redis_url, tmp_path, APP, env=broker) as stage:
        worker = stage.worker(concurrency=1)
        stop(worker)
        call = getattr(stage.app, task).delay("first")
        worker.kill_group()
        stage.worker(concurrency=1)
        assert call.get(timeout=30) == "first"
