"""Each agent traces publishers and a worker: tasks run as often as in plain Celery.

Agents add headers to every message, some as ``headers["headers"]``, which hides all other headers
from Celery's request. The oldest ones are installed beside the newest, in a directory of their own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from celery_singleton_lock import hold
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.runtime import Runtime
from tests.harness.journal import overlaps
from tests.harness.processes import Process
from tests.harness.worker import CeleryWorker
from tests.integration.stage import Stage, open_stage

APP = "tests.apps.headers"
pytestmark = pytest.mark.slow

_BIN = Path(sys.executable).parent
_OLDER = Path(sys.prefix) / "older"


@dataclass(frozen=True, kw_only=True)
class Agent:
    """How an agent is started.

    Attributes:
        command: Prefix of the traced program's command.
        env: Its settings; nothing leaves the machine.
        header: One that it adds to each message.
    """

    command: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    header: str = ""


_DATADOG = Agent(
    command=(sys.executable, "-m", "ddtrace.commands.ddtrace_run"),
    env={
        "DD_CELERY_DISTRIBUTED_TRACING": "true",
        "DD_TRACE_AGENT_URL": "http://127.0.0.1:9",
        "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
        "DD_REMOTE_CONFIGURATION_ENABLED": "false",
    },
    header="x-datadog-trace-id",
)
_SENTRY = Agent(env={"FOREIGN": "sentry"}, header="sentry-trace")
_OLDER_ENV = {"PYTHONPATH": str(_OLDER)}
AGENTS = {
    "none": Agent(),
    "ddtrace": _DATADOG,
    "older ddtrace": Agent(
        command=_DATADOG.command, env={**_DATADOG.env, **_OLDER_ENV}, header=_DATADOG.header
    ),
    "sentry-sdk": _SENTRY,
    "older sentry-sdk": Agent(env={**_SENTRY.env, **_OLDER_ENV}, header=_SENTRY.header),
    "opentelemetry": Agent(
        command=(str(_BIN / "opentelemetry-instrument"),),
        env={f"OTEL_{each}_EXPORTER": "none" for each in ("TRACES", "METRICS", "LOGS")},
        header="traceparent",
    ),
    "newrelic": Agent(
        command=(str(_BIN / "newrelic-admin"), "run-program"),
        # Without a licence: nothing is sent.
        env={
            "NEW_RELIC_DEVELOPER_MODE": "true",
            "NEW_RELIC_LICENSE_KEY": "0" * 40,
            "NEW_RELIC_APP_NAME": "tests",
        },
        header="traceparent",
    ),
}


@pytest.fixture(scope="module", params=AGENTS)
def agent(request: Any) -> Agent:
    return AGENTS[request.param]


class AgentsStage(Stage):
    """A stage whose publishers and worker are traced."""

    agent: Agent

    def publish(self, *calls: tuple[str, list[Any], dict[str, Any]]) -> list[str]:
        """Send calls from a process of their own; their ids."""
        command = [sys.executable, "-m", "tests.apps.publish_calls", json.dumps(calls)]
        process = Process(
            [*self.agent.command, *command], env={**self.environment, **self.agent.env}
        )
        process.start()
        try:
            ids = json.loads(process.wait_for_log(r"published (\[.*\])")[1])
            process.wait()
        finally:
            process.end()
        return list(ids)

    def ran(self, name: str) -> list[str]:
        return [start.task_id for start in self.starts(name)]

    def result(self, task_id: str) -> Any:
        return self.app.app.AsyncResult(task_id).get(timeout=60)


@pytest.fixture(scope="module")
def stage(
    agent: Agent,
    redis_server: Any,
    _databases: Iterator[int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[AgentsStage]:
    url, directory = redis_server.url(next(_databases)), tmp_path_factory.mktemp("agents")
    with open_stage(url, Path(directory), APP) as stage:
        stage.__class__ = AgentsStage
        stage.agent = agent
        yield stage


@pytest.fixture(scope="module")
def worker(stage: AgentsStage) -> Iterator[CeleryWorker]:
    env = {**stage.environment, **stage.agent.env}
    worker = CeleryWorker(APP, concurrency=4, env=env)
    worker.command[:0] = stage.agent.command
    worker.start()
    try:
        yield worker.wait_until_ready()
    finally:
        worker.kill_group()
        print(worker.log)


@pytest.fixture
def name() -> str:
    return uuid4().hex[:12]


def test_the_agent_traces_the_messages(
    stage: AgentsStage, worker: CeleryWorker, name: str, agent: Agent
) -> None:
    """Without this the other tests would prove nothing."""
    [task_id] = stage.publish(("plain", [name], {}))
    stage.result(task_id)
    [start] = stage.starts(name)
    assert not agent.header or agent.header in start.data["headers"]


def test_calls_that_conflict_run_as_often_as_in_plain_celery(
    stage: AgentsStage, worker: CeleryWorker, name: str
) -> None:
    for task, key in (("plain", f"{name}-plain"), ("patient", name)):
        [first] = stage.publish((task, [key, key], {}))
        stage.journal.wait_for_starts(1, key=key)
        others = stage.publish(*[(task, [key], {})] * 3)
        if task == "patient":
            for other in others:
                worker.wait_for_event(EventName.REQUEUED, task_id=other, sequence=2)
        stage.open(key)
        for each in (first, *others):
            stage.result(each)
        assert sorted(stage.ran(key)) == sorted([first, *others])
    assert not overlaps(r for r in stage.journal.records() if r.key == name)


def test_work_that_is_requeued_after_a_lost_lease_runs_again(
    stage: AgentsStage, worker: CeleryWorker, name: str
) -> None:
    [task_id] = stage.publish(("late", [name, name], {"singleton": {"ttl": 1}}))
    stage.journal.wait_for_starts(1, key=name)
    Runtime.of(stage.app.app).store.operators.free(stage.app.late.lock_key(name), None)
    with hold(name, scope=stage.app.NAMES, app=stage.app.app):
        worker.wait_for_event(EventName.REQUEUED, task_id=task_id, reason="lease-lost")
        worker.wait_for_event(EventName.REQUEUED, task_id=task_id, reason="started")
    stage.open(name)
    assert stage.result(task_id) == name
    assert stage.ran(name) == [task_id] * 2


def test_what_a_call_has_set_and_its_claim_are_read(
    stage: AgentsStage, worker: CeleryWorker, name: str
) -> None:
    [retried] = stage.publish(("patient", [name, None, True], {"singleton": {"ttl": 17}}))
    assert stage.result(retried) == name
    assert [start.data["ttl"] for start in stage.starts(name)] == [17, 17]
    other = f"{name}-claimed"
    [claimed] = stage.publish(("claimed", [other, other], {}))
    stage.journal.wait_for_starts(1, key=other)
    runtime = Runtime.of(stage.app.app)
    claim = runtime.keyspace.claim("claimed", stage.app.claimed.lock_key(other))
    assert runtime.store.leases.inspect(claim) is None
    stage.open(other)
    stage.result(claimed)


@pytest.mark.parametrize(
    "how", ["apply_async", "with headers", "signature", "send_task", "send_task with headers"]
)
def test_a_task_that_requeues_itself_runs_as_often_as_in_plain_celery(
    stage: AgentsStage, worker: CeleryWorker, name: str, how: str
) -> None:
    tasks = ["plain_again", "again_late", "again_early"]
    ids = stage.publish(*[(task, [f"{name}-{task}", 2, how], {}) for task in tasks])
    for task, task_id in zip(tasks, ids, strict=True):
        assert stage.result(task_id) == 0
        assert stage.ran(f"{name}-{task}") == [task_id] * 3


def test_a_copy_has_all_headers_of_its_message(
    stage: AgentsStage, worker: CeleryWorker, name: str
) -> None:
    with hold(name, scope=stage.app.NAMES, app=stage.app.app):
        [task_id] = stage.publish(("patient", [name], {"headers": {"tenant": "t"}}))
        worker.wait_for_event(EventName.REQUEUED, task_id=task_id, sequence=2)
    assert stage.result(task_id) == name
    [start] = stage.starts(name)
    assert start.data["tenant"][:2] == ["t", "t"]
    assert start.data["ours"] == []
