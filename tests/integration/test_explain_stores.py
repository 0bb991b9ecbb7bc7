"""`explain` on each store: the fates of tasks that a real worker has run there."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from celery import group

from celery_singleton_lock import inspection
from celery_singleton_lock.inspection import Fate
from tests.harness.explanations import explained, text
from tests.harness.redlock_nodes import RedlockNodes
from tests.harness.worker import CeleryWorker
from tests.integration.stage import Stage, open_stage

APP = "tests.apps.fates"
# On Redis, test_explain.py stages them one by one. Valkey and Sentinel run the same scripts.
STORES = ["cluster", "redlock", "etcd", "zookeeper"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def lock_url(request: pytest.FixtureRequest, stack: ExitStack) -> str:
    kind = request.param
    if kind == "redlock":
        return stack.enter_context(RedlockNodes(3)).url()
    if kind in ("etcd", "zookeeper"):
        return str(request.getfixturevalue(kind).url("fates"))
    return str(request.getfixturevalue(kind).url)


@pytest.fixture(scope="module", params=STORES)
def stage(
    request: pytest.FixtureRequest,
    redis_server: Any,
    _databases: Iterator[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stage]:
    with ExitStack() as stack:
        env = {"LOCK_URL": lock_url(request, stack), "PREFIX": f"t-{secrets.token_hex(4)}"}
        url, directory = redis_server.url(next(_databases)), tmp_path_factory.mktemp("fates")
        yield stack.enter_context(open_stage(url, directory, APP, env))


@pytest.fixture(scope="module")
def worker(stage: Stage) -> CeleryWorker:
    return stage.worker(concurrency=4, args=["--prefetch-multiplier", "4"])


def test_each_fate_is_reported_on_each_store(stage: Stage, worker: CeleryWorker) -> None:
    app, name, once = stage.app, secrets.token_hex(4), {"unique": "until_done"}
    explain = partial(explained, app.app, timeout=0.3)
    key = app.work.lock_key(name)
    holder = app.work.delay(name, gate=name)
    running = explain(holder, Fate.RUNNING)
    assert (running.key, f"on {worker.hostname}" in running.sentences[0]) == (key, True)

    queued = app.work.apply_async((f"{name}-queued",), queue="of no worker", singleton=once)
    again = app.work.s(f"{name}-queued").set(singleton=once)
    [duplicate] = group(again).apply_async().results
    calls = {
        Fate.SKIPPED: app.work.delay(name),
        Fate.REFUSED: app.refusing.delay(name),
        Fate.REQUEUED: app.sleepy.delay(name),
        Fate.WAITING: app.waiting.delay(name),
        Fate.DUPLICATE: duplicate,
        Fate.QUEUED: queued,
        Fate.RETRYING: app.flaky.delay(f"{name}-retry"),
        Fate.RAN: app.late.delay(f"{name}-late"),
    }
    # Each takes the time in which workers reply.
    with ThreadPoolExecutor() as threads:
        found = dict(zip(calls, threads.map(explain, calls.values(), calls), strict=True))
    for fate in (Fate.SKIPPED, Fate.REFUSED, Fate.REQUEUED, Fate.WAITING):
        other = found[fate].holder
        assert other is not None
        assert (other["task_id"], found[fate].key) == (holder.id, key)
    first = found[Fate.DUPLICATE].holder
    assert first is not None
    assert first["task_id"] == queued.id
    assert "has the claim" in text(found[Fate.QUEUED])
    assert "is reserved for it" in text(found[Fate.RETRYING])
    assert "Its completion record says" in text(found[Fate.RAN]), "its result is not stored"
    assert explain(app.work.delay(f"{name}-free"), Fate.RAN).state == "SUCCESS"

    held = inspection.find_task(app.app, holder.id)
    assert held is not None
    assert inspection.release(app.app, held.key, held.token, user="ann", reason="stuck")
    lost = explain(holder, Fate.LOST_LEASE)
    assert "released by ann on " in lost.sentences[0]
    assert "An operator released its key" in lost.sentences[-2]
    assert inspection.explain(app.app, "no-such-task").fate is Fate.UNKNOWN
