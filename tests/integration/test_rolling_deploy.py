"""A rolling deploy: workers and publishers of the deployed version beside those of this one.

The deployed version is exported from the repository's history and runs in processes of its own, on
the same broker and store. Whatever one version publishes, requeues, reserves or leaves behind, the
other one has to understand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import kombu
import pytest
import redis

from celery_singleton_lock import is_skipped
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.runtime import Runtime
from tests.apps.gate import Gate
from tests.harness.deliveries import RedisBroker, reported, wait_until
from tests.harness.journal import Journal, most_at_once
from tests.harness.keys import EVERY_NAME
from tests.harness.processes import ROOT
from tests.harness.rabbit import RabbitServer
from tests.harness.serve import ServeProcess
from tests.harness.ticks import Ticks, faults, longest_gap
from tests.harness.versions import (
    DEPLOYED,
    OLDEST,
    HistoryNotFound,
    Publisher,
    export_deployed,
    imports_from,
)
from tests.harness.worker import CeleryBeat, CeleryWorker

pytestmark = pytest.mark.slow
without_new_options = pytest.mark.parametrize("deployed", [OLDEST], indirect=True)

APP = "tests.apps.rolling"
#: Seconds; short where a lease has to expire.
TTL, SHORT_TTL = 30.0, 2.0
VISIBILITY_TIMEOUT = 2.0
QUEUES = ("celery", "first", "second")

swept = pytest.mark.skipif(
    kombu.VERSION[:2] < (5, 7), reason="before kombu 5.7 the sweep comes every 100 s at best"
)


@pytest.fixture(scope="session")
def deployed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the deployed version, or of the commit that is the parameter."""
    commit = getattr(request, "param", DEPLOYED)
    try:
        return export_deployed(tmp_path_factory.mktemp("deployed"), commit)
    except HistoryNotFound as error:
        # Not a missing part, which would be a failure in CI: a source archive or a shallow clone
        # has no way to get it.
        pytest.skip(str(error))


class Deploy:
    """Both versions on one broker and one store.

    Args:
        first: The directory of the version that acts first.
        second: That of the other one.
        start: Starts a worker; the fixture `worker`.
        environment: The environment of all processes.
        stack: Ends the publishers.
    """

    def __init__(
        self,
        first: Path,
        second: Path,
        start: Callable[..., CeleryWorker],
        environment: dict[str, str],
        stack: ExitStack,
    ) -> None:
        self.first, self.second = first, second
        self._start, self._environment, self._stack = start, environment, stack

    def worker(self, root: Path, **options: Any) -> CeleryWorker:
        return self._start(APP, cwd=root, env=imports_from(root), **options)

    def serve(self, root: Path) -> ServeProcess:
        env = {**self._environment, **imports_from(root)}
        process = ServeProcess(APP, env=env, cwd=root).start()
        self._stack.callback(process.kill_group)
        return process.wait_until_ready()

    def publisher(self, root: Path) -> Publisher:
        publisher = self._stack.enter_context(Publisher(root, APP, self._environment))
        assert publisher.root == root
        return publisher

    def publishers(self) -> tuple[Publisher, Publisher]:
        return self.publisher(self.first), self.publisher(self.second)


@pytest.fixture(params=["deployed first", "present first"])
def roots(request: pytest.FixtureRequest, deployed: Path) -> tuple[Path, Path]:
    """Which version acts first, in both directions."""
    return (deployed, ROOT) if request.param == "deployed first" else (ROOT, deployed)


@pytest.fixture
def deploy(
    roots: tuple[Path, Path],
    worker: Callable[..., CeleryWorker],
    environment: dict[str, str],
    redis_url: str,
) -> Iterator[Deploy]:
    environment.update(LOCK_URL=redis_url, TTL=str(TTL))
    with ExitStack() as stack:
        yield Deploy(*roots, worker, environment, stack)


@pytest.fixture
def short_lived(environment: dict[str, str], deploy: Deploy) -> None:
    """Leases that expire soon, and messages that come back soon."""
    environment.update(TTL=str(SHORT_TTL), VISIBILITY_TIMEOUT=str(VISIBILITY_TIMEOUT))


@pytest.fixture
def result(deploy: Deploy, load_app: Callable[..., ModuleType]) -> Callable[[str], Any]:
    """``result(task_id)``: what the task returned, as this version reads it."""
    app = load_app(APP).app
    return lambda task_id: app.AsyncResult(task_id).get(timeout=60)


@pytest.fixture
def gates(redis_client: redis.Redis) -> Callable[[str], None]:
    """Opens a gate."""
    return lambda name: Gate(redis_client, name).open()


def ran_by(journal: Journal, task_id: str) -> list[Path]:
    """The versions that ran the bodies of a task, in order."""
    return [Path(run.data["root"]) for run in journal.runs() if run.task_id == task_id]


def claims(client: redis.Redis) -> list[str]:
    return list(client.scan_iter(f"{EVERY_NAME}:claim|*"))


def left_behind(client: redis.Redis) -> list[str]:
    """The keys of leases, reservations, claims and wait queues; markers expire by themselves."""
    return [
        key
        for key in client.scan_iter(EVERY_NAME)
        if "}:done|" not in key
        and "}:ended|" not in key
        and not key.endswith(("}:fence", "}:number", ":0}:shards"))
    ]


def assert_clean(journal: Journal, client: redis.Redis) -> None:
    """No two bodies at once, no message left, no key or claim left."""
    RedisBroker(client, QUEUES).wait_until_empty()
    assert_no_key_left(journal, client)


def assert_no_key_left(journal: Journal, client: redis.Redis) -> None:
    wait_until(lambda: not left_behind(client), "all keys are free", timeout=20)
    assert [two for two in journal.overlaps() if not two[0].key.startswith("pair ")] == []


CALLS: list[dict[str, Any]] = [
    {"task": task, "args": args, "kwargs": kwargs, "key": True}
    for task in ("by_arguments", "by_plain_arguments")
    for args, kwargs in (
        (["a"], {}),
        (["a", 1], {}),
        (["a"], {"value": [1, 2.5, None, True]}),
        (["ä b#%", {"b": 1, "a": {"d": [], "c": "x=y\n"}}], {"flag": True}),
        ([], {"name": "a", "value": "x" * 500}),
    )
]
CALLS += [
    {"task": "by_arguments", "args": ["a"], "kwargs": {"colour": "red", "b": 2}, "key": True},
    *(
        {"task": task, "args": args, "key": True}
        for task in ("by_template", "by_names", "by_nothing", "by_callable")
        for args in (["a", 1], ["ä: b%", "c d:#"], ["x" * 200, 2.5])
    ),
    {"task": "by_template", "args": ["a", {"a": [2], "b": 1}], "key": True},
    {"task": "work", "args": ["a"], "key": True},
]
# Changed after 0.1, on purpose and as the changelog says: the order of a dict no longer counts.
CHANGED = [{"task": "by_template", "args": ["a", {"b": 1, "a": [2]}], "key": True}]


@pytest.mark.parametrize(
    ("deployed", "changed"), [(DEPLOYED, []), (OLDEST, CHANGED)], indirect=["deployed"]
)
def test_both_versions_make_the_same_keys(deploy: Deploy, changed: list[dict[str, Any]]) -> None:
    calls = CALLS + CHANGED
    first, second = (publisher.ask(calls) for publisher in deploy.publishers())
    different = [call for call, *keys in zip(calls, first, second, strict=True) if len({*keys}) > 1]
    assert different == changed


def test_duplicates_of_both_versions_never_overlap(
    deploy: Deploy, journal: Journal, redis_client: redis.Redis, result: Callable[[str], Any]
) -> None:
    for root in (deploy.first, deploy.second):
        deploy.worker(root, concurrency=3)
    calls = [(task, name) for task in ("work", "patient", "waiting") for name in "ab"] * 2
    sent = [one for publisher in deploy.publishers() for one in publisher.send_all(calls)]
    assert_each_ran_or_was_skipped(calls * 2, sent, journal, result)
    assert_clean(journal, redis_client)


def assert_each_ran_or_was_skipped(
    calls: list[tuple[str, str]],
    task_ids: list[str],
    journal: Journal,
    result: Callable[[str], Any],
) -> None:
    """Each call ran once, or is a skip of the only task that skips."""
    for (task, name), task_id in zip(calls, task_ids, strict=True):
        skipped = is_skipped(result(task_id))
        assert len(ran_by(journal, task_id)) == (0 if skipped else 1), (task, name, task_id)
        assert not skipped or task == "work"


def test_a_crowd_of_both_versions_loses_nothing(
    deploy: Deploy, journal: Journal, redis_client: redis.Redis, result: Callable[[str], Any]
) -> None:
    workers = [deploy.worker(root, concurrency=4) for root in (deploy.first, deploy.second)]
    tasks = ("patient", "late", "waiting", "pair", "soon", "once", "once_late", "work")
    sent: list[tuple[str, str, str]] = []
    publishers = deploy.publishers()
    for _ in range(6):
        for publisher in publishers:
            calls = [(task, name) for task in tasks for name in "abc"]
            sent += [(*c, i) for c, i in zip(calls, publisher.send_all(calls), strict=True)]
    for task, name, task_id in sent:
        skipped = is_skipped(result(task_id))
        assert len(ran_by(journal, task_id)) == (0 if skipped else 1), (task, name, task_id)
        assert not skipped or task == "work"
    assert_clean(journal, redis_client)
    assert all(most_at_once(journal.records(), f"pair {name}") <= 2 for name in "abc")
    requeue = [set(reported([worker], EventName.REQUEUED)) for worker in workers]
    crossed = [
        {run.task_id for run in journal.runs() if Path(run.data["root"]) == reader} & copies
        for reader, copies in ((deploy.second, requeue[0]), (deploy.first, requeue[1]))
    ]
    assert all(crossed), "no copy that one version requeued was read by the other"


def test_what_a_worker_does_is_counted_by_serve_of_the_other_version(
    deploy: Deploy, result: Callable[[str], Any], gates: Callable[[str], None]
) -> None:
    server = deploy.serve(deploy.second)
    wait_until(lambda: server.sample("events_up") == 1, "it is connected")
    deploy.worker(deploy.first, concurrency=4, args=["-E"])
    publisher = deploy.publisher(deploy.first)
    holder = publisher.send("work", "held", "gate")
    ran = publisher.send_all([("work", f"n{number}") for number in range(20)])
    assert not any(is_skipped(result(task_id)) for task_id in ran)
    assert is_skipped(result(publisher.send("work", "held")))
    gates("gate")
    result(holder)
    task, each = f"{APP}.work", ("acquisitions_total", "releases_total", "hold_seconds_count")

    def counts() -> list[float]:
        return [server.sample(name, task=task) for name in each]

    wait_until(lambda: counts() == [21] * len(each), "each lease is counted")
    assert server.sample("conflicts_total", task=task, outcome="skip") == 1


@pytest.mark.parametrize("runs_on", ["first", "second"])
def test_a_duplicate_of_the_other_version_is_answered_until_the_run_is_done(
    runs_on: str,
    deploy: Deploy,
    journal: Journal,
    redis_client: redis.Redis,
    result: Callable[[str], Any],
    gates: Callable[[str], None],
) -> None:
    first, second = deploy.publishers()
    queued = first.send("once", "k", "gate")
    assert second.send("once", "k", "gate") == queued
    deploy.worker(getattr(deploy, runs_on), concurrency=1)
    journal.wait_for_starts(1)
    assert [one.send("once", "k", "gate") for one in (first, second)] == [queued] * 2
    gates("gate")
    assert result(queued) == str(getattr(deploy, runs_on))
    wait_until(lambda: not claims(redis_client), "the claim is free")
    following = second.send("once", "k", "gate")
    assert following != queued
    assert result(following)
    assert len(journal.runs()) == 2
    assert_clean(journal, redis_client)


@without_new_options
def test_a_deployed_worker_says_that_it_does_not_know_the_newest_arguments(
    deployed: Path,
    deploy: Deploy,
    journal: Journal,
    redis_client: redis.Redis,
    result: Callable[[str], Any],
) -> None:
    replace = {"singleton": {"on_duplicate": "replace"}}
    publisher = deploy.publisher(ROOT)
    queued = publisher.send("soon", "k", **replace)
    assert publisher.send("soon", "k", "a gate that never opens", **replace) == queued
    worker = deploy.worker(deployed, concurrency=1)
    assert result(queued) == str(deployed), "it ran with the first call's arguments"
    assert "on_duplicate='replace'" in worker.log
    assert "the call's options are ignored" in worker.log
    wait_until(lambda: not claims(redis_client), "the claim is free")
    assert len(journal.runs()) == 1


@pytest.mark.parametrize("runs_on", ["first", "second"])
def test_the_call_after_a_start_runs_whichever_version_makes_it(
    runs_on: str,
    deploy: Deploy,
    journal: Journal,
    redis_client: redis.Redis,
    result: Callable[[str], Any],
    gates: Callable[[str], None],
) -> None:
    first, second = deploy.publishers()
    running = first.send("soon", "k", "gate")
    assert second.send("soon", "k", "gate") == running
    deploy.worker(getattr(deploy, runs_on), concurrency=2)
    journal.wait_for_starts(1)
    following = second.send("soon", "k", "gate")
    assert following != running
    assert first.send("soon", "k", "gate") == following
    gates("gate")
    assert result(running)
    assert result(following)
    assert len(journal.runs()) == 2
    assert_clean(journal, redis_client)


@without_new_options
@pytest.mark.parametrize("roots", ["deployed first"], indirect=True)
@pytest.mark.parametrize(
    ("task", "args"),
    [("work", ["a"]), ("once", ["a"]), ("retried_once", ["a", "celery", 0.1])],
)
def test_a_deployed_worker_leaves_a_period_alone_and_logs_what_it_can_not_do(
    deployed: Path,
    deploy: Deploy,
    redis_client: redis.Redis,
    result: Callable[[str], Any],
    task: str,
    args: list[Any],
) -> None:
    worker, publisher = deploy.worker(deployed, concurrency=2), deploy.publisher(ROOT)
    period = {"unique": "until_expired", "unique_for": 600}
    first = publisher.send(task, *args, singleton=period)
    [key] = [key for key in claims(redis_client) if "%period|" in key]
    before = redis_client.get(key), redis_client.pexpiretime(key)
    assert result(first) == str(deployed)
    RedisBroker(redis_client, QUEUES).wait_until_empty()
    wait_until(lambda: left_behind(redis_client) == [key], "the lease is free")
    assert (redis_client.get(key), redis_client.pexpiretime(key)) == before
    assert publisher.send(task, *args, singleton=period) == first
    # A duplicate in a canvas is the one thing that its worker has to decide, and this one can't.
    member = publisher.send(task, *args, singleton=period, group_id="g")
    assert member != first
    assert result(member) == str(deployed)
    worker.wait_for_log(r"unique='until_expired'.*the call's options are ignored")


@pytest.mark.parametrize("task", ["retried", "retried_once"])
def test_a_retry_runs_in_the_other_version_and_its_key_stays_reserved(
    task: str,
    deploy: Deploy,
    journal: Journal,
    redis_client: redis.Redis,
    result: Callable[[str], Any],
) -> None:
    deploy.worker(deploy.first, queues=["first"])
    deploy.worker(deploy.second, queues=["second"])
    publishers = deploy.publishers()
    options = {"queue": "first"}
    task_id = publishers[0].send(task, "k", "second", 5, **options)
    journal.wait_for_ends(1)
    wait_until(lambda: reserved(redis_client), "the key is reserved")
    rivals = [p.send("work", "k", queue=q) for p in publishers for q in ("first", "second")]
    assert all(is_skipped(result(rival)) for rival in rivals)
    if task == "retried_once":
        assert [p.send(task, "k", "second", 5, **options) for p in publishers] == [task_id] * 2
    assert result(task_id) == str(deploy.second)
    assert ran_by(journal, task_id) == [deploy.first, deploy.second]
    assert_clean(journal, redis_client)


def reserved(client: redis.Redis) -> bool:
    values = (client.get(key) for key in left_behind(client) if "|" not in key)
    return any(value and value.startswith("r") for value in values)


def test_copies_that_one_version_requeue_run_in_the_other(
    deploy: Deploy,
    load_app: Callable[..., ModuleType],
    journal: Journal,
    redis_client: redis.Redis,
    result: Callable[[str], Any],
    gates: Callable[[str], None],
) -> None:
    """As in a rolling restart: the worker that requeued them ends, and its successor reads them."""
    deploy.worker(deploy.second, queues=["second"], concurrency=1)
    before = deploy.worker(deploy.first, queues=["first"])
    publishers = deploy.publishers()
    holder = publishers[0].send("work", "k", "gate", queue="second")
    journal.wait_for_starts(1)
    tasks = ("patient", "late", "once", "soon", "once_late")
    sent = [publisher.send(task, "k", queue="first") for publisher in publishers for task in tasks]
    # One of the two calls with a claim is the answer to the other.
    assert len(set(sent)) == len(tasks) + 2
    wait_until(
        lambda: set(reported([before], EventName.REQUEUED)) == set(sent), "all were requeued"
    )
    # Without a stream of results: a shutdown of Celery's pool in one may wait for its children for
    # half a minute or for ever, with locks or without.
    load_app(APP).app.control.cancel_consumer("first", destination=[before.hostname])
    wait_until(lambda: redis_client.llen("first") == len(set(sent)), "all copies are queued")
    before.terminate()
    before.wait()
    assert [p.send("once", "k", queue="first") for p in publishers] == [sent[2]] * 2
    deploy.worker(deploy.second, queues=["first"])
    gates("gate")
    assert result(holder)
    assert {result(task_id) for task_id in sent} == {str(deploy.second)}
    assert all(ran_by(journal, task_id) == [deploy.second] for task_id in sent)
    assert_clean(journal, redis_client)


@swept
@pytest.mark.parametrize("task", ["late", "once_late"])
def test_what_a_killed_worker_ran_is_run_again_by_the_other_version(
    task: str,
    short_lived: None,
    deploy: Deploy,
    journal: Journal,
    redis_client: redis.Redis,
    result: Callable[[str], Any],
    gates: Callable[[str], None],
) -> None:
    publishers = deploy.publishers()
    victim = deploy.worker(deploy.first, concurrency=2)
    task_ids = [publishers[number].send(task, f"k{number}", "gate") for number in range(2)]
    starts = journal.wait_for_starts(2)
    deploy.worker(deploy.second, concurrency=3)
    at = victim.kill_group()
    for start in starts:
        journal.death(start.pid, at)
    # After the kill: kombu loses what a killed worker was just taking from a queue in Redis.
    rivals = [p.send("patient", name) for p in publishers for name in ("k0", "k1")]
    if task == "once_late":
        assert publishers[1].send(task, "k0", "gate") == task_ids[0]
    gates("gate")
    assert {result(task_id) for task_id in (*task_ids, *rivals)} == {str(deploy.second)}
    for task_id in task_ids:
        assert finished(journal, task_id) == [False, True]
    assert all(finished(journal, rival) == [True] for rival in rivals)
    assert_clean(journal, redis_client)


def finished(journal: Journal, task_id: str) -> list[bool]:
    return [run.finished for run in journal.runs() if run.task_id == task_id]


@pytest.mark.parametrize("task", ["late", "once_late"])
def test_a_message_delivered_again_to_the_other_version_waits_and_is_dropped(
    task: str,
    deploy: Deploy,
    journal: Journal,
    redis_client: redis.Redis,
    result: Callable[[str], Any],
    gates: Callable[[str], None],
    load_app: Callable[..., ModuleType],
) -> None:
    running = deploy.worker(deploy.first, concurrency=1)
    task_id = deploy.publisher(deploy.second).send(task, "k", "gate")
    journal.wait_for_starts(1)
    load_app(APP).app.control.cancel_consumer("celery", destination=[running.hostname])
    running.wait_for_log("no longer consuming|Canceling queue|[Cc]ancel")
    other = deploy.worker(deploy.second, concurrency=1)
    RedisBroker(redis_client).deliver_again(task_id)
    other.wait_for_event(EventName.REQUEUED, task_id=task_id)
    gates("gate")
    assert result(task_id) == str(deploy.first)
    other.wait_for_event(EventName.DROPPED, task_id=task_id, reason="done")
    assert ran_by(journal, task_id) == [deploy.first]
    assert_clean(journal, redis_client)


def test_a_release_hands_the_key_over_to_a_waiter_of_the_other_version(
    deploy: Deploy,
    journal: Journal,
    redis_client: redis.Redis,
    result: Callable[[str], Any],
    gates: Callable[[str], None],
) -> None:
    deploy.worker(deploy.first, queues=["first"], concurrency=2)
    deploy.worker(deploy.second, queues=["second"], concurrency=2)
    publishers = deploy.publishers()
    holder = publishers[0].send("waiting", "k", "gate", queue="first")
    journal.wait_for_starts(1)
    waiters = [
        publishers[number % 2].send("waiting", "k", queue=queue)
        for number, queue in enumerate(("second", "first", "second"))
    ]
    wait_until(lambda: waiting(redis_client) == 3, "three calls are queued for the key")
    gates("gate")
    assert [result(task_id) for task_id in (holder, waiters[1])] == [str(deploy.first)] * 2
    assert [result(waiters[n]) for n in (0, 2)] == [str(deploy.second)] * 2
    assert len(journal.runs()) == 4
    assert_clean(journal, redis_client)


def waiting(client: redis.Redis) -> int:
    queues = [key for key in client.scan_iter(f"{EVERY_NAME}:line|*") if not key.endswith("!")]
    return sum(client.zcard(key) for key in queues)


def test_beats_of_both_versions_elect_one_leader_and_send_no_tick_twice(
    deploy: Deploy,
    environment: dict[str, str],
    beat: Callable[..., CeleryBeat],
    redis_client: redis.Redis,
) -> None:
    every, ttl = 0.5, 1.5
    environment.update(EVERY=str(every), BEAT_TTL=str(ttl))
    ticks = Ticks(redis_client)

    def start(root: Path) -> CeleryBeat:
        return beat(APP, cwd=root, env=imports_from(root), scheduler="singleton")

    leader = start(deploy.first)
    ticks.wait_for(2)
    for number, root in enumerate((deploy.second, deploy.first, deploy.second)):
        standby = start(root)
        standby.wait_for_event(EventName.STANDING_BY)
        if number == 1:
            leader.terminate()
            leader.wait()
        else:
            leader.kill_group()
        standby.wait_for_event(EventName.LEADING)
        ticks.wait_for(2)
        leader = standby
    sent = ticks.of()
    assert len({tick.beat for tick in sent}) == 4
    assert faults(sent, every) == []
    assert longest_gap(sent) < ttl + 2


def test_on_rabbitmq_the_other_version_runs_what_a_killed_worker_ran(
    deploy: Deploy,
    short_lived: None,
    environment: dict[str, str],
    rabbit: RabbitServer,
    journal: Journal,
    redis_client: redis.Redis,
    load_app: Callable[..., ModuleType],
    gates: Callable[[str], None],
) -> None:
    environment["BROKER_URL"] = rabbit.url(rabbit.vhost())
    app = load_app(APP).app
    publishers = deploy.publishers()
    victim = deploy.worker(deploy.first, concurrency=2)
    late = [publishers[number].send("late", f"k{number}", "gate") for number in range(2)]
    starts = journal.wait_for_starts(2)
    deploy.worker(deploy.second, concurrency=3)
    rivals = [
        publisher.send(task, name)
        for publisher in publishers
        for task in ("patient", "once", "waiting")
        for name in ("k0", "k1")
    ]
    at = victim.kill_group()
    for start in starts:
        journal.death(start.pid, at)
    deploy.worker(deploy.first, concurrency=3)
    gates("gate")
    for task_id in (*late, *rivals):
        app.AsyncResult(task_id).get(timeout=60)
    assert all(finished(journal, task_id) == [False, True] for task_id in late)
    assert all(finished(journal, task_id)[-1:] == [True] for task_id in rivals)
    assert_no_key_left(journal, redis_client)


@pytest.mark.parametrize("roots", ["deployed first"], indirect=True)
@pytest.mark.parametrize("task", ["queued", "queued_late"])
def test_calls_in_order_go_on_when_a_deployed_worker_has_run_the_first(
    task: str,
    deploy: Deploy,
    journal: Journal,
    redis_client: redis.Redis,
    result: Callable[[str], Any],
    load_app: Callable[..., ModuleType],
) -> None:
    """It does not tell the queue that the call has ended; a look asks the result backend."""
    deploy.worker(deploy.first, queues=["first"])
    deploy.worker(deploy.second, queues=["second"])
    publisher = deploy.publisher(ROOT)
    sent = [publisher.send(task, "a", queue=q) for q in ("first", "second", "second")]
    assert result(sent[0]) == str(deploy.first)
    module = load_app(APP)
    key = getattr(module, task).lock_key("a")
    wait_until(lambda: not redis_client.exists(key), "the lease is free")
    assert ran_by(journal, sent[1]) == [], "the queue waits for a look"
    look_now(module, task)
    assert [ran_by(journal, one) for one in sent if result(one)] == [
        [deploy.first],
        [deploy.second],
        [deploy.second],
    ]
    assert_clean(journal, redis_client)


@pytest.mark.parametrize("roots", ["deployed first"], indirect=True)
@pytest.mark.parametrize(("task", "runs_again"), [("queued", True), ("queued_late", False)])
def test_a_call_in_order_without_a_result_may_run_again_after_a_deployed_worker_has_run_it(
    task: str,
    runs_again: bool,
    deploy: Deploy,
    journal: Journal,
    redis_client: redis.Redis,
    result: Callable[[str], Any],
    load_app: Callable[..., ModuleType],
) -> None:
    """The marker of its message is left if that is acknowledged late."""
    deployed = deploy.worker(deploy.first, queues=["first"])
    publisher = deploy.publisher(ROOT)
    first = publisher.send(task, "a", queue="first", ignore_result=True)
    second = publisher.send(task, "a", queue="first")
    journal.wait_for_ends(1)
    deployed.terminate()
    deployed.wait()
    deploy.worker(deploy.second, queues=["first"])
    look_now(load_app(APP), task)
    assert result(second) == str(deploy.second)
    assert ran_by(journal, first) == [deploy.first, *([deploy.second] if runs_again else [])]
    assert_clean(journal, redis_client)


def look_now(module: ModuleType, task: str) -> None:
    """Have a worker look at the queue of the key ``a``, without a wait for the deadline."""
    calls = Runtime.of(module.app).store.call_queue
    assert calls
    calls.defer(getattr(module, task).lock_key("a"), seconds=0.0, timeout=5.0)
