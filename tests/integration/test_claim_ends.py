"""However a claimed message ends, its claim is free at once or within its bound.

A claim lasts 600 s here, a lease 60 s, and every wait is shorter: what only its expiry would free
fails the test. Where the expiry is the bound, the call says a smaller one. The bounds are listed in
docs/reference/options.md ("When a claim ends").
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import celery
import pytest
from celery import chain
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded
from celery.result import AsyncResult

from celery_singleton_lock import LockConflict, OnConflict, hold, is_skipped
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.runtime import Runtime
from example_project.private_server import PrivateServer
from tests.harness.deliveries import RedisBroker
from tests.harness.processes import kill_process
from tests.harness.worker import CeleryWorker
from tests.integration.stage import Stage, open_stage, wait_until

APP = "tests.apps.claims"

# Seconds; nothing waits that long when all is well.
SOON = 20.0
# Seconds for "at once": what takes its time is a machine with two busy cores. Far below a lease.
AT_ONCE = 8.0
# Seconds until a worker has noticed that a child of its pool is dead, as Celery looks after them.
CHILD_ENDS = 10.0
# Processes of the module's worker.
CHILDREN = 12

#: "replace": until_start, and the store has the newest arguments of the message.
UNIQUE = ["until_start", "until_done", "replace"]
in_each_way = pytest.mark.parametrize("unique", UNIQUE)


@pytest.fixture(scope="module")
def worker(stage: Stage) -> CeleryWorker:
    return stage.worker(concurrency=CHILDREN)


def claimed(way: str) -> dict[str, Any]:
    """The options of one of the ways of `UNIQUE`."""
    if way == "replace":
        return {"unique": "until_start", "on_duplicate": "replace"}
    return {"unique": way}


class Claim:
    """The claim of one task's calls of one name.

    Args:
        stage: Where it is.
        task: The name of the task.
        name: First argument of its calls.
        singleton: Their options.
    """

    def __init__(self, stage: Stage, task: str, name: str, **singleton: Any) -> None:
        self.task: Any = getattr(stage.app, task)
        self.name, self.lock = name, self.task.lock_key(name)
        singleton |= claimed(singleton.get("unique", "until_done"))
        self._stage, self._singleton = stage, singleton
        self.unique = singleton.get("unique")
        assert self.lock is not None
        self.key = Runtime.of(stage.app.app).keyspace.claim(self.task.name, self.lock)
        # Where the leases are: not always where the stage's messages are.
        self._store: Any = Runtime.of(stage.app.app).store

    def call(self, way: str = "succeed", gate: str | None = None, **options: Any) -> AsyncResult:
        singleton = {**self._singleton, **options.pop("singleton", {})}
        return self.task.apply_async((self.name, way, gate), singleton=singleton, **options)

    @property
    def phase(self) -> str | None:
        """What its task is doing; None where it is free."""
        record = self._store.leases.inspect(self.key)
        return None if record is None else str(record.phase)

    @property
    def arguments(self) -> list[str]:
        """The keys with the newest arguments of its messages."""
        pattern = self.key.replace("}:claim|", "}:args|", 1)
        return [key for key, *_ in self._store.operators.texts(f"{pattern}|*")]

    @property
    def ttl(self) -> float:
        """Seconds until it expires."""
        record = self._store.leases.inspect(self.key)
        assert record is not None, f"{self.key} is free"
        return float(record.ttl)

    def holds(self, phase: str, *, at_least: float = 0.0) -> None:
        """Wait until it is in ``phase``, for ``at_least`` seconds to come."""
        wait_until(lambda: self.phase == phase, f"{self.key} is {phase}")
        assert self.ttl > at_least

    def is_free(self, within: float = AT_ONCE, *, leaves_arguments: bool = False) -> None:
        """Wait until it is free, and the newest arguments are deleted.

        Args:
            within: Seconds.
            leaves_arguments: Whether no process could delete them, or the message comes back.
        """
        wait_until(lambda: self.phase is None, f"{self.key} is free", timeout=within)
        if not leaves_arguments:
            wait_until(lambda: not self.arguments, "the arguments are deleted", timeout=within)

    def can_be_had(self, before: AsyncResult) -> None:
        """An equal call is admitted, and runs."""
        self.has_run(self.call(), instead_of=before)

    def has_run(self, again: AsyncResult, *, instead_of: AsyncResult) -> None:
        assert again.id != instead_of.id, "answered with the call that has ended"
        self._stage.journal.wait_for(
            lambda records: [r for r in records if r.task_id == again.id and r.event == "end"],
            what="the equal call has run",
            timeout=SOON,
        )
        self.is_free(leaves_arguments=True)
        wait_until(lambda: again.id not in str(self.arguments), "its arguments are deleted")

    def is_running(self, call: AsyncResult) -> None:
        """Wait until its body waits at the gate; an equal call finds it, or is admitted."""
        self._stage.journal.wait_for(
            lambda records: [r for r in records if r.task_id == call.id and r.event == "start"],
            what=f"{call.id} has begun",
        )
        if self._singleton.get("unique") == "until_start":
            assert self.phase is None
        else:
            assert self.phase == "running"
            assert self.call().id == call.id


@pytest.fixture
def claim(stage: Stage, name: str) -> Callable[..., Claim]:
    return lambda task, **singleton: Claim(stage, task, name, **singleton)


def starts_of(stage: Stage, call: AsyncResult) -> list[int]:
    """The process ids of the bodies of ``call``."""
    records = stage.journal.records()
    return [r.pid for r in records if r.event == "start" and r.task_id == call.id]


def wait_for_starts(stage: Stage, call: AsyncResult, count: int) -> None:
    """Wait until ``call`` has begun ``count`` bodies."""
    stage.journal.wait_for(
        lambda _: len(starts_of(stage, call)) >= count, what=f"{call.id} has begun {count} bodies"
    )


def accepted(
    stage: Stage, worker: CeleryWorker, calls: Iterable[tuple[Claim, AsyncResult]]
) -> bool:
    """Whether the worker's parent knows the processes that run ``calls``."""
    inspect = stage.app.app.control.inspect(destination=[worker.hostname], timeout=SOON, limit=1)
    pids = {each["id"]: each["worker_pid"] for each in inspect.active()[worker.hostname]}
    return all(pids.get(call.id) for _, call in calls)


def consume(stage: Stage, worker: CeleryWorker, queue: str) -> None:
    """Have ``worker`` take what waits in ``queue``, and say so when it does."""
    control = stage.app.app.control
    assert control.add_consumer(queue, destination=[worker.hostname], reply=True, timeout=SOON)


def revoke(stage: Stage, worker: CeleryWorker, call: AsyncResult) -> None:
    """Have ``worker`` know that ``call`` is revoked."""
    control = stage.app.app.control
    assert control.revoke(call.id, destination=[worker.hostname], reply=True, timeout=SOON)


@contextmanager
def not_consumed(stage: Stage, worker: CeleryWorker, queue: str = "celery") -> Iterator[None]:
    """Have ``worker`` leave what comes to ``queue`` there for so long."""
    control = stage.app.app.control
    assert control.cancel_consumer(queue, destination=[worker.hostname], reply=True, timeout=SOON)
    try:
        yield
    finally:
        consume(stage, worker, queue)


def holding(stage: Stage, name: str) -> Any:
    return hold(name, scope=stage.app.NAMES, app=stage.app.app)


def in_all_ways(stage: Stage, name: str, *tasks: str, **singleton: Any) -> list[Claim]:
    """Claims of ``tasks``, in each way of ``UNIQUE``, each on a key of its own."""
    return [
        Claim(stage, task, f"{name}-{task}-{unique}", unique=unique, **singleton)
        for task in tasks
        for unique in UNIQUE
    ]


# By the body's own doing.

# Task, how it ends, and the number of its bodies until then.
ENDS = [
    *((task, way, 1) for task in ("early", "late") for way in ("succeed", "fail", "ignore")),
    ("early", "reject", 1),
    ("late", "reject", 1),
    ("early", "requeue", 1),  # it was acknowledged: there is nothing to requeue
    ("late", "requeue", 2),
    ("failing", "succeed", 1),
    ("failing", "fail", 1),
    ("early", "retry_without_success", 2),
    ("early", "retry", 2),
    ("early", "retry_now", 3),
    ("late", "retry_now", 3),
    ("generous", "retry_now", 3),
    ("early", "replace", 2),
    ("early", "replace_by_another", 2),
    *((task, "leave", 1) for task in ("early", "late", "silent")),
    ("requeued", "leave", 2),
]


@pytest.mark.parametrize(
    "unique", ["until_done", *(pytest.param(u, marks=pytest.mark.slow) for u in UNIQUE[::2])]
)
def test_however_a_body_ends_its_key_and_its_claim_are_free(
    stage: Stage, worker: CeleryWorker, name: str, unique: str
) -> None:
    broker = RedisBroker(stage.redis)
    for some in batched(ENDS):
        begun = []
        for task, way, bodies in some:
            one = Claim(stage, task, f"{name}-{task}-{way}", unique=unique)
            begun.append((one, one.call(way, one.name), way, bodies))
        for one, call, way, bodies in begun:
            one.is_running(call)
            stage.open(f"{one.name}-2")  # of the second body of a task that is replaced
            stage.open(one.name)
            wait_for_starts(stage, call, bodies)
            # One that is acknowledged late is so when its claim is settled.
            wait_until(lambda call=call: not broker.messages()[call.id], f"{way} is acknowledged")
            one.is_free()
            wait_until(lambda lock=one.lock: not stage.redis.get(lock), f"{one.lock} is free")
            assert len(starts_of(stage, call)) == bodies
        for one, again, call in [(one, one.call(), call) for one, call, *_ in begun]:
            one.has_run(again, instead_of=call)
    assert not [pair for pair in stage.journal.overlaps() if pair[0].key.startswith(name)]


def batched(ends: list[tuple[str, str, int]]) -> list[list[tuple[str, str, int]]]:
    """As many as the worker has children for, and one more for what is published meanwhile."""
    return [ends[first : first + CHILDREN - 1] for first in range(0, len(ends), CHILDREN - 1)]


@in_each_way
def test_a_caller_that_has_seen_the_result_is_not_answered_with_it(
    stage: Stage, worker: CeleryWorker, claim: Callable[..., Claim], unique: str
) -> None:
    one = claim("early", unique=unique)
    for _ in range(10):
        call = one.call()
        call.get(timeout=SOON)
        again = one.call()
        assert again.id != call.id
        again.get(timeout=SOON)
        one.is_free()


@in_each_way
@pytest.mark.parametrize("task", ["early", "late", "generous"])
def test_a_retry_has_the_claim_through_its_countdown(
    stage: Stage,
    worker: CeleryWorker,
    name: str,
    claim: Callable[..., Claim],
    unique: str,
    task: str,
) -> None:
    one = claim(task, unique=unique)
    call = one.call("retry", name)
    one.is_running(call)
    stage.open(name)
    one.holds("retrying", at_least=stage.app.UNIQUE_FOR - AT_ONCE)
    assert one.call().id == call.id
    assert call.get(timeout=SOON) == name
    assert len(starts_of(stage, call)) == 2
    one.is_free()
    one.can_be_had(call)


@in_each_way
def test_a_retry_with_another_key_leaves_the_first_claim_at_once(
    stage: Stage, worker: CeleryWorker, name: str, claim: Callable[..., Claim], unique: str
) -> None:
    one = claim("early", unique=unique)
    call = one.call("move", name)
    one.is_running(call)
    stage.open(name)
    one.is_free()
    wait_until(lambda: call.state == "RETRY", "it will be tried again in a minute")
    one.can_be_had(call)


@in_each_way
def test_a_task_that_replaces_itself_keeps_its_claim(
    stage: Stage, worker: CeleryWorker, name: str, claim: Callable[..., Claim], unique: str
) -> None:
    one = claim("early", unique=unique)
    call = one.call("replace", name)
    one.is_running(call)
    stage.open(name)
    wait_for_starts(stage, call, 2)
    # Its second body waits at another gate.
    one.is_running(call)
    stage.open(f"{name}-2")
    one.is_free()
    one.can_be_had(call)


@in_each_way
def test_the_links_of_a_chain_claim_the_same_key_one_after_the_other(
    stage: Stage, worker: CeleryWorker, name: str, claim: Callable[..., Claim], unique: str
) -> None:
    one = claim("skipping", unique=unique)
    links = [one.task.si(name).set(singleton=claimed(unique)) for _ in range(3)]
    result = chain(*links).apply_async()
    assert result.get(timeout=SOON) == name
    calls = [result, result.parent, result.parent.parent]
    assert [len(starts_of(stage, call)) for call in calls] == [1, 1, 1], "none was a duplicate"
    one.is_free()
    one.can_be_had(result)


# Never begun.


@pytest.mark.parametrize(
    ("unique", "rule", "end"),
    [
        ("until_done", "skip", None),
        ("until_done", "revoke", TaskRevokedError),
        ("until_done", "raise", LockConflict),
        ("until_done", OnConflict.wait(0.3), LockConflict),
        ("until_done", OnConflict.retry(0.1, 0.1, 0.3), LockConflict),
        # The others would give up the one waiting call that represents all: they are refused.
        ("until_start", "raise", LockConflict),
        ("until_start", OnConflict.wait(0.3), LockConflict),
    ],
    ids=lambda value: getattr(value, "action", getattr(value, "__name__", str(value))),
)
def test_a_conflict_that_ends_a_call_frees_its_claim_before_its_caller_is_notified(
    stage: Stage,
    worker: CeleryWorker,
    name: str,
    claim: Callable[..., Claim],
    unique: str,
    rule: Any,
    end: Any,
) -> None:
    one = claim("early", unique=unique, on_conflict=rule)
    with holding(stage, name):
        call = one.call()
        if end is None:
            assert is_skipped(call.get(timeout=SOON))
        else:
            with pytest.raises(end):
                call.get(timeout=SOON)
        assert one.phase is None
    claim("early", unique=unique).can_be_had(call)


def test_a_call_that_waits_in_the_queue_keeps_its_claim(
    stage: Stage, worker: CeleryWorker, name: str, claim: Callable[..., Claim]
) -> None:
    one = claim("early", unique="until_start")
    with holding(stage, name):
        call = one.call()
        worker.wait_for_event(EventName.REQUEUED, task_id=call.id, sequence=2)
        one.holds("queued", at_least=stage.app.UNIQUE_FOR - AT_ONCE)
        assert one.call().id == call.id
    assert call.get(timeout=SOON) == name
    one.is_free()


def test_a_call_that_is_revoked_before_it_ran_frees_its_claim_when_a_worker_discards_it(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    claims = in_all_ways(stage, name, "early", "silent")
    calls = [(one, one.call(queue=name)) for one in claims]
    for one, call in calls:
        revoke(stage, worker, call)
        assert one.phase == "queued"
    consume(stage, worker, name)
    for one, call in calls:
        one.is_free()
        assert starts_of(stage, call) == []
        one.can_be_had(call)


@pytest.mark.parametrize(
    "pool",
    [
        "threads",
        pytest.param("prefork", marks=pytest.mark.slow),
        pytest.param("gevent", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_discards_many_calls_waits_for_no_silent_store(
    redis_url: str, tmp_path: Path, name: str, pool: str
) -> None:
    """It consumes messages on the same thread, and answers the broker's heartbeats there."""
    with PrivateServer() as locks, open_stage(redis_url, tmp_path, APP) as stage:
        stage.app.app.conf.singleton_lock_url = locks.url()
        worker = stage.worker(concurrency=1, pool=pool, env={"LOCK_URL": locks.url()})
        claims = [Claim(stage, "early", f"{name}-{number}") for number in range(100)]
        calls = [one.call(queue=name) for one in claims]
        control = stage.app.app.control
        ids, here = [call.id for call in calls], [worker.hostname]
        assert control.revoke(ids, destination=here, reply=True, timeout=SOON)
        locks.pause()
        consume(stage, worker, name)
        worker.wait_for_log(f"Discarding revoked task: .*{calls[-1].id}", timeout=SOON)
        assert control.ping(here, timeout=SOON)
        locks.resume()
        for one in claims:
            one.is_free()


@pytest.mark.slow
def test_a_call_that_expires_frees_its_claim_with_and_without_a_worker(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    claims = in_all_ways(stage, name, "early")
    lonely = [(one, one.call(queue=name, expires=2)) for one in claims]
    assert all(one.ttl <= 2 for one, _ in lonely)
    for one, _ in lonely:
        one.is_free(2 + AT_ONCE)
    # One that was requeued has unique_for ahead of it: here it is the worker that frees it.
    with ExitStack() as holds:
        for one in claims:
            holds.enter_context(holding(stage, one.name))
        calls = [(one, one.call(expires=3)) for one in claims]
        for one, call in calls:
            worker.wait_for_event(EventName.REQUEUED, task_id=call.id, sequence=1)
            one.holds("queued", at_least=stage.app.UNIQUE_FOR - AT_ONCE)
        for one, _ in calls:
            one.is_free(3 + AT_ONCE)
    for one, call in lonely + calls:
        assert starts_of(stage, call) == []
        one.can_be_had(call)


@pytest.mark.slow
def test_a_call_that_ends_without_a_lease_frees_its_claim(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    failing = [(one, one.call("fail")) for one in in_all_ways(stage, name, "never_begun")]
    keyless = [(one, one.call()) for one in in_all_ways(stage, name, "free_in_workers")]
    waiting = in_all_ways(stage, name, "early", on_conflict=OnConflict.wait(SOON))
    with ExitStack() as holds:
        for one in waiting:
            holds.enter_context(holding(stage, one.name))
        limited = [(one, one.call(soft_time_limit=3)) for one in waiting]
        for one, _ in limited:
            one.holds("queued", at_least=stage.app.UNIQUE_FOR - AT_ONCE)
        for one, call in [*failing, *keyless, *limited]:
            wait_until(call.ready, f"{one.key} has ended")
            one.is_free()
    assert all(call.state == "FAILURE" for _, call in [*failing, *limited])
    for one, call in [*failing, *keyless, *limited]:
        one.can_be_had(call)


# From outside.


def all_running(
    stage: Stage, name: str, *tasks: str, way: str = "sleep", **singleton: Any
) -> list[tuple[Claim, AsyncResult]]:
    """Bodies of ``tasks`` that go on until they are ended, claimed in all ways."""
    running = [(one, one.call(way)) for one in in_all_ways(stage, name, *tasks, **singleton)]
    for one, call in running:
        one.is_running(call)
    return running


def test_a_body_that_is_terminated_frees_its_claim_when_its_child_ends(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    running = all_running(stage, name, "early", "late", "silent", "requeued")
    for _, call in running:
        call.revoke(terminate=True)
    for _, call in running:
        worker.wait_for_log(rf"Terminating {call.id}")
        stage.journal.wait_for(
            lambda records, call=call: [
                r for r in records if r.event == "end" and r.task_id == call.id
            ]
        )
    for one, call in running:
        one.is_free(CHILD_ENDS)
        assert len(starts_of(stage, call)) == 1
    for one, call in running:
        one.can_be_had(call)


def test_a_revoked_body_that_stays_keeps_its_claim(
    stage: Stage, worker: CeleryWorker, name: str, claim: Callable[..., Claim]
) -> None:
    one = claim("silent")
    call = one.call("stay")
    one.is_running(call)
    call.revoke(terminate=True)
    stage.journal.wait_for(
        lambda records: [r for r in records if r.key == name and r.data.get("text") == "stayed"]
    )
    worker.wait_for_log(rf"Terminating {call.id}")
    one.holds("running")
    assert one.call().id == call.id
    stage.open(f"{name}-2")
    one.is_free()
    # Celery takes whatever this child does from now on for the termination that it was sent.
    kill_process(starts_of(stage, call)[0])


def test_a_running_call_that_is_revoked_keeps_its_claim(
    stage: Stage, worker: CeleryWorker, name: str, claim: Callable[..., Claim]
) -> None:
    """Without ``terminate``, it runs on."""
    one = claim("early")
    call = one.call("succeed", name)
    one.is_running(call)
    revoke(stage, worker, call)
    # As a worker does that is asked too, and does not run it; before Celery 5.7, every worker.
    stage.app.app.backend.mark_as_revoked(call.id, reason="revoked", store_result=True)
    assert call.state == "REVOKED"
    assert one.call().id == call.id
    stage.open(name)
    one.is_free()
    one.can_be_had(call)


@pytest.mark.slow
def test_a_killed_child_s_claim_is_free_at_once_or_when_its_message_has_run_again(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    # Celery can publish a retry of what was lost, since 5.7.
    retried = 2 if hasattr(celery.Task, "retry_on_worker_lost") else 1
    bodies = {"early": 1, "late": 1, "requeued": 2, "retried": retried}
    running = all_running(stage, name, *bodies)
    for _, call in running:
        kill_process(starts_of(stage, call)[0])
    for one, call in running:
        wait_for_starts(stage, call, bodies[one.task.__name__])
        one.is_free(CHILD_ENDS)
        assert len(starts_of(stage, call)) == bodies[one.task.__name__]
    for one, call in running:
        one.can_be_had(call)


def test_a_child_that_dies_after_its_result_is_stored_frees_its_claim(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    ended = [(one, one.call(gate=name)) for one in in_all_ways(stage, name, "mortal")]
    # Before, the pool would take the call for one that no process has begun, and run it again.
    wait_until(lambda: accepted(stage, worker, ended), "the pool knows which process runs each")
    stage.open(name)
    for one, call in ended:
        worker.wait_for_log(rf"singleton freed: \S+\[{call.id}\]")
        one.is_free(CHILD_ENDS)
        assert call.get(timeout=SOON) == one.name


@pytest.mark.parametrize(
    ("way", "bodies"),
    [("interrupt", {"early": 1, "late": 1, "requeued": 2}), ("cancel", {"early": 1, "late": 1})],
)
def test_a_base_exception_frees_the_claim_of_what_does_not_come_back(
    stage: Stage, worker: CeleryWorker, name: str, way: str, bodies: dict[str, int]
) -> None:
    ended = [(one, one.call(way)) for one in in_all_ways(stage, name, *bodies)]
    for one, call in ended:
        wait_until(call.ready, "it has ended")
        one.is_free(CHILD_ENDS)
        assert len(starts_of(stage, call)) == bodies[one.task.__name__]


@pytest.mark.slow
def test_a_time_limit_frees_the_claim_when_the_child_is_dead_or_queues_it_again(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    soft = [
        (one, one.call("sleep", soft_time_limit=1))
        for one in in_all_ways(stage, f"{name}-soft", "early")
    ]
    running = all_running(stage, name, "limited", "limited_late", way="defy")
    comes_back = hasattr(celery.Task, "acks_on_timeout")  # before 5.7, it is acknowledged
    late = running[len(UNIQUE) :] if comes_back else []
    with not_consumed(stage, worker):  # what comes back waits until it was looked at
        for one, _ in late:
            one.holds("queued", at_least=stage.app.UNIQUE_FOR - AT_ONCE)
    for _, call in late:
        wait_for_starts(stage, call, 2)
    for ended, error in [
        (soft, SoftTimeLimitExceeded),
        (running[: len(running) - len(late)], TimeLimitExceeded),
    ]:
        for _, call in ended:
            with pytest.raises(error):
                call.get(timeout=SOON)
    for one, call in [*soft, *running]:
        one.is_free()
        one.can_be_had(call)


def test_a_soft_time_limit_that_strikes_during_the_acquire_frees_the_claim(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    calls = [
        (one, one.call(soft_time_limit=1))
        for one in in_all_ways(stage, name, "unanswered", "unanswered_late")
    ]
    for one, call in calls:
        with pytest.raises(SoftTimeLimitExceeded):
            call.get(timeout=SOON)
        one.is_free()
        assert stage.redis.get(one.lock) is None
        one.can_be_had(call)


def test_a_termination_during_the_acquire_frees_the_claim(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    calls = [(one, one.call()) for one in in_all_ways(stage, name, "unanswered", "unanswered_late")]
    for _, call in calls:
        stage.journal.wait_for(
            lambda records, call=call: [r for r in records if r.task_id == call.id],
            what="it was granted",
        )
        call.revoke(terminate=True)
    for one, call in calls:
        wait_until(call.ready, "it has ended")
        one.is_free(CHILD_ENDS)
        one.can_be_had(call)


def test_a_lost_lease_frees_the_claim_or_queues_it_again(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    running = all_running(stage, name, "early", "late", ttl=1.5)
    failed, late = running[: len(UNIQUE)], running[len(UNIQUE) :]
    with not_consumed(stage, worker):  # what comes back waits until it was looked at
        for one, _ in running:
            stage.redis.delete(one.lock)
        for one, call in failed:
            wait_until(call.failed, "it has failed")
            # Released before its failure is stored, and long before it would expire.
            assert one.phase is None
        for one, _ in late:
            if one.unique == "until_done":
                one.holds("queued", at_least=stage.app.UNIQUE_FOR - AT_ONCE)
            else:
                assert one.phase is None  # it ended with the start, and is never made again
    for _, call in late:
        wait_for_starts(stage, call, 2)
    for one, call in running:
        wait_until(call.ready, "it has ended")
        one.is_free()
        one.can_be_had(call)


def test_a_power_cut_holds_a_claim_for_a_ttl_at_most(
    stage: Stage, worker: CeleryWorker, name: str
) -> None:
    doomed = stage.worker(concurrency=len(UNIQUE), queues=[name])
    claims = in_all_ways(stage, name, "early", ttl=1)
    calls = [(one, one.call("succeed", name, queue=name)) for one in claims]
    for one, call in calls:
        one.is_running(call)
    doomed.kill_group()
    for one, call in calls:
        one.is_free(1 + AT_ONCE, leaves_arguments=True)
        one.can_be_had(call)


@pytest.mark.slow
@in_each_way
def test_a_message_redelivered_after_a_power_cut_has_its_claim_again(
    redis_url: str, tmp_path: Path, name: str, unique: str
) -> None:
    with open_stage(redis_url, tmp_path, APP) as stage:
        doomed = stage.worker(concurrency=1, env={"VISIBILITY_TIMEOUT": "2"})
        one = Claim(stage, "late", name, unique=unique, ttl=1)
        call = one.call("succeed", name)
        one.is_running(call)
        doomed.kill_group()
        one.is_free(1 + AT_ONCE, leaves_arguments=True)
        stage.worker(concurrency=2, env={"VISIBILITY_TIMEOUT": "2"})
        wait_for_starts(stage, call, 2)
        one.is_running(call)
        stage.open(name)
        assert call.get(timeout=SOON) == name
        one.is_free()
        one.can_be_had(call)


@pytest.mark.slow
@in_each_way
@pytest.mark.parametrize(
    ("task", "number", "bodies"),
    [
        pytest.param("early", signal.SIGTERM, 1, id="early-warm"),
        pytest.param("late", signal.SIGTERM, 1, id="late-warm"),
        pytest.param("early", signal.SIGQUIT, 1, id="early-cold"),
        pytest.param("late", signal.SIGQUIT, 2, id="late-cold"),
    ],
)
def test_a_shutdown_frees_the_claims_of_what_has_ended_and_keeps_the_others(
    redis_url: str,
    tmp_path: Path,
    name: str,
    unique: str,
    task: str,
    number: signal.Signals,
    bodies: int,
) -> None:
    with open_stage(redis_url, tmp_path, APP) as stage:
        ending = stage.worker(concurrency=1)
        one, waiting = (Claim(stage, task, each, unique=unique) for each in (name, f"{name}-w"))
        cold = number == signal.SIGQUIT
        call = one.call("sleep" if cold else "succeed", None if cold else name)
        one.is_running(call)
        behind = waiting.call()
        ending.wait_for_log(rf"\[{behind.id}\] received")
        ending.send_signal(number)
        ending.wait_for_log("(Cold|Warm) shutdown")
        stage.open(name)
        ending.wait(SOON)
        if bodies == 1:
            one.is_free()
        else:
            one.holds("queued", at_least=stage.app.UNIQUE_FOR - 2 * AT_ONCE)
        waiting.holds("queued")
        stage.worker(concurrency=2)
        assert behind.get(timeout=SOON) == f"{name}-w"
        wait_for_starts(stage, call, bodies)
        one.is_free()
        waiting.is_free()
        one.can_be_had(call)


@pytest.mark.slow
def test_a_store_that_is_away_at_the_release_holds_a_claim_for_a_ttl_at_most(
    redis_url: str, tmp_path: Path, name: str
) -> None:
    with (
        PrivateServer() as locks,
        open_stage(redis_url, tmp_path, APP) as stage,
    ):
        stage.app.app.conf.singleton_lock_url = locks.url()
        worker = stage.worker(concurrency=2, env={"LOCK_URL": locks.url()})
        one = Claim(stage, "early", name, ttl=2)
        call = one.call("succeed", name)
        one.is_running(call)
        locks.pause()
        stage.open(name)
        assert call.get(timeout=SOON) == name
        worker.wait_for_event(EventName.RELEASE_FAILED)
        locks.resume()
        one.is_free(2 + AT_ONCE)
        one.can_be_had(call)


# Races.


def test_a_late_duplicate_that_is_discarded_leaves_the_claim_of_the_live_one(
    stage: Stage, worker: CeleryWorker, name: str, claim: Callable[..., Claim]
) -> None:
    one = claim("late")
    call = one.call("succeed", name)
    one.is_running(call)
    revoke(stage, worker, call)
    RedisBroker(stage.redis).deliver_again(call.id)
    worker.wait_for_log(rf"Discarding revoked task: \S+\[{call.id}\]")
    # A second message: the worker settles what it discards after it has said so.
    Claim(stage, "other", f"{name}-2").call().get(timeout=SOON)
    assert one.phase == "running"
    stage.open(name)
    one.is_free()


def test_a_late_duplicate_that_is_dropped_leaves_the_claim_of_the_next_call(
    stage: Stage, worker: CeleryWorker, name: str, claim: Callable[..., Claim]
) -> None:
    one = claim("late")
    call = one.call("succeed", name)
    one.is_running(call)
    broker = RedisBroker(stage.redis)
    broker.deliver_again(call.id)
    worker.wait_for_event(EventName.REQUEUED, task_id=call.id, sequence=1)
    assert one.phase == "running"
    stage.open(name)
    one.is_free()
    again = one.call("succeed", f"{name}-2")
    one.is_running(again)
    worker.wait_for_event(EventName.DROPPED, task_id=call.id)
    assert one.phase == "running"
    stage.open(f"{name}-2")
    one.is_free()


# What it costs.
