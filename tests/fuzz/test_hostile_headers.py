"""Messages of foreign publishers against one real worker: it goes on, others keep what is theirs.

The leases and claims of others are the test's own, put straight into the store. What counts: none
of them changes; no body runs without its lease or beside a holder; no message is gone without a
line in the log; the next task runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.core.lease import Token
from celery_singleton_lock.core.store_requests import Granted
from celery_singleton_lock.message.header import HEADER, Delivery
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.testing.contract.steps import ask, publish
from tests.fuzz.letters import Letter, Writer
from tests.harness.deliveries import RedisBroker
from tests.harness.worker import CeleryWorker
from tests.integration.stage import Stage, open_stage, wait_until

TASKS = [
    f"tests.apps.hostile.{n}"
    for n in ("skipping", "raising", "waiting", "late", "unique", "retrying")
]
LETTERS = 300
PATIENCE = 120.0

# What ends a message, in Celery's words and ours.
_ENDED = re.compile(r"\[([^\]\s]+)\] (?:succeeded|raised|ignored|rejected)")
_DISCARDED = re.compile(r"Discarding revoked task: \S+\[([^\]\s]+)\]")


class Others:
    """What belongs to others: a lease and a claim on ``guarded``, and one of each elsewhere."""

    def __init__(self, stage: Stage) -> None:
        self._redis = stage.redis
        app = stage.app
        store = Runtime.of(app.app).store
        keyspace = Runtime.of(app.app).keyspace
        self.names = ["guarded", "elsewhere"]
        self.locks = [app.skipping.lock_key(name) for name in self.names]
        self.claims = [keyspace.claim(app.unique.name, key) for key in self.locks]
        self.token = Token(str(uuid4()), 0, 0, "others", "c0ffee")
        for key in self.locks:
            assert isinstance(ask(store, key, self.token), Granted)
        for claim in self.claims:
            publish(store, claim, self.token)
        self.before = self.now()

    def now(self) -> dict[str, str]:
        return {key: self._redis.get(key) for key in [*self.locks, *self.claims]}

    @property
    def loot(self) -> list[str]:
        token = self.token
        # Not id and call together: that is no forgery of a message, but the message.
        return [*self.locks, *self.claims, str(token), token.attempt, token.task_id, token.nonce]


@pytest.fixture(scope="module")
def stage(
    redis_server: Any, _databases: Iterator[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    url, directory = redis_server.url(next(_databases)), tmp_path_factory.mktemp("hostile")
    with open_stage(url, Path(directory), "tests.apps.hostile") as stage:
        yield stage


@pytest.fixture(scope="module")
def worker(stage: Stage) -> CeleryWorker:
    return stage.worker(concurrency=2)


@pytest.fixture(scope="module")
def others(stage: Stage) -> Others:
    return Others(stage)


def letter(task: str, name: str, **headers: Any) -> Letter:
    return Letter(f"tests.apps.hostile.{task}", name, str(uuid4()), headers)


def conflicting(**fields: Any) -> Letter:
    """A letter whose key others hold, with these fields of a copy."""
    sent = letter("waiting", "guarded")
    delivery = Delivery(token=Token(sent.task_id, 0, 0, "n"), **fields)
    sent.headers[HEADER] = delivery.header()
    return sent


def unlocked(stage: Stage) -> list[Any]:
    """Bodies that ran without a lease on their key."""
    starts = [r for r in stage.journal.records() if r.event == "start"]
    return [r for r in starts if r.data["held"] != stage.app.skipping.lock_key(r.key)]


def ended(worker: CeleryWorker) -> set[str]:
    log = worker.log
    found = {match[1] for said in (_ENDED, _DISCARDED) for match in said.finditer(log)}
    return found | {event.task_id for event in worker.events(EventName.DROPPED)}


def runs_a_normal_task(stage: Stage, name: str) -> None:
    """Whether each of the worker's processes goes on is seen by the tasks that they take."""
    results = [stage.app.skipping.delay(f"{name}-{number}") for number in range(4)]
    assert [r.get(timeout=PATIENCE) for r in results] == [f"{name}-{n}" for n in range(4)]


# One at a time: what was found by the many.


@pytest.mark.slow
@pytest.mark.parametrize("value", [None, 0, 5, "x", {}, {"entered": True}], ids=repr)
@pytest.mark.parametrize("task", ["skipping", "late"])
def test_a_header_named_as_our_own_state_lets_no_body_run_unlocked(
    stage: Stage, worker: CeleryWorker, others: Others, task: str, value: Any
) -> None:
    names = ("singleton_data", "singleton_begun", "singleton_claim", "is_eager")
    sent = letter(task, "guarded", **dict.fromkeys(names, value)).post(stage.app.app)
    wait_until(lambda: sent.task_id in ended(worker), "it ended", PATIENCE)
    assert [r for r in stage.journal.records() if r.task_id == sent.task_id] == []
    free = letter(task, str(uuid4()), **dict.fromkeys(names, value)).post(stage.app.app)
    stage.journal.wait_for_ends(key=free.name)
    assert unlocked(stage) == []


@pytest.mark.slow
def test_without_the_sieve_such_a_header_runs_the_body_unlocked(
    redis_url: str, tmp_path: Path
) -> None:
    """The test above, with the protection taken out."""
    with open_stage(redis_url, tmp_path, "tests.apps.hostile") as stage:
        Others(stage)
        stage.worker(env={"WITHOUT": "sieve"})
        sent = letter("skipping", "guarded", singleton_begun=None).post(stage.app.app)
        stage.journal.wait_for_ends(key="guarded")
        assert [start.task_id for start in unlocked(stage)] == [sent.task_id]


@pytest.mark.slow
@pytest.mark.parametrize(
    "headers",
    [{"as_execution_options": 1}, {"headers": 3}, {"headers": [1]}, {"get": None}, {"update": 0}],
    ids=str,
)
def test_a_message_that_cannot_be_copied_holds_no_worker_process(
    stage: Stage, worker: CeleryWorker, others: Others, headers: dict[str, Any]
) -> None:
    """Its requeued fails for good, and the process that has it in hand must not wait for better."""
    sent = [letter("waiting", "guarded", **headers).post(stage.app.app) for _ in range(4)]
    runs_a_normal_task(stage, str(uuid4()))
    for each in sent:
        wait_until(lambda each=each: each.task_id in ended(worker), "it ended", PATIENCE)
    assert unlocked(stage) == []


@pytest.mark.slow
def test_the_highest_sequence_number_loses_no_job(
    stage: Stage, worker: CeleryWorker, others: Others
) -> None:
    """Requeue, its copy must not count as older than itself."""
    sent = conflicting(sequence=10**9 - 1).post(stage.app.app)
    # The policy's max_wait is over at last, and not "dropped: superseded".
    worker.wait_for_log(rf"\[{sent.task_id}\] raised unexpected: LockConflict", timeout=PATIENCE)


@pytest.mark.slow
def test_a_first_conflict_in_the_future_does_not_wait_until_then(
    stage: Stage, worker: CeleryWorker, others: Others
) -> None:
    sent = conflicting(since=9e10).post(stage.app.app)
    worker.wait_for_log(rf"\[{sent.task_id}\] raised unexpected: LockConflict", timeout=PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "header",
    [
        None,
        {"v": 9, "id": "{id}", "lease": {"ttl": 5}, "features": ["x"]},
        {"attempt": "0.0", "started": False, "sequence": 2, "tries": 1, "since": 1.7e9},
        {"id": "{id}", "attempt": "0.0", "call": "c1", "claim": {"key": None, "terms": {}}},
        {"id": "{id}", "call": "c1", "options": {"ttl": 30, "patience": "much"}},
    ],
    ids=["none", "newer", "older", "half a claim", "an option of tomorrow"],
)
def test_messages_of_other_versions_run_once_and_locked(
    stage: Stage, worker: CeleryWorker, header: dict[str, Any] | None
) -> None:
    for task in ("skipping", "late", "unique"):
        sent = letter(task, str(uuid4()))
        if header is not None:
            id_too = {k: sent.task_id if v == "{id}" else v for k, v in header.items()}
            sent.headers["singleton_lock"] = id_too
        sent.post(stage.app.app)
        stage.journal.wait_for_ends(key=sent.name)
        wait_until(lambda sent=sent: sent.task_id in ended(worker), "it ended", PATIENCE)
        assert len(stage.journal.runs(sent.name)) == 1
        # Celery says that it succeeded before `after_return` releases.
        wait_until(lambda sent=sent: not stage.redis.keys(f"*{sent.name}"), "its keys are gone")
    assert unlocked(stage) == []


# Many.


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_hundreds_of_hostile_messages_leave_the_worker_and_others_as_they_were(
    stage: Stage, worker: CeleryWorker, others: Others
) -> None:
    seed = int(os.environ.get("FUZZ_SEED", "20261121"))
    print(f"FUZZ_SEED={seed}")
    runs_a_normal_task(stage, "before")
    pid, children = worker.pid, worker.children()
    writer = Writer(seed, TASKS, ["guarded", "shared-1", "shared-2"], others.loot)
    letters = [writer.write().post(stage.app.app) for _ in range(LETTERS)]
    broker = RedisBroker(stage.redis)
    wait_until(
        lambda: {each.task_id for each in letters} <= ended(worker) | set(broker.messages()),
        "every message has ended, or is in the broker",
        PATIENCE,
    )
    wait_until(
        lambda: all(f"[{each.task_id}] received" in worker.log for each in letters),
        "every message has arrived once",
        PATIENCE,
    )
    runs_a_normal_task(stage, "after")
    wait_until(
        lambda: {each.task_id for each in letters} <= ended(worker) | set(broker.messages()),
        "every message has ended, or is in the broker",
        PATIENCE,
    )
    assert others.now() == others.before
    assert unlocked(stage) == []
    assert stage.journal.overlaps() == []
    assert stage.journal.runs("guarded") == []
    assert (worker.pid, worker.alive, worker.children()) == (pid, True, children)
    for word in ("Unrecoverable", "Pool callback raised", "WorkerLostError", "can't be requeued"):
        assert word not in worker.log
