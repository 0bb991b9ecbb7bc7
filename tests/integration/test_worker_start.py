"""What is wrong is said where it is written, or when the worker starts; and in one line.

Also: every form in which a task can be a singleton, and every form of the store's URL.
"""

from __future__ import annotations

import logging
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery, Task, shared_task

from celery_singleton_lock import (
    PER_TASK,
    OnConflict,
    SettingsError,
    SingletonTask,
    hold,
    inspection,
    is_skipped,
    pause,
    resume,
    singleton_task,
)
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.core.store import Capabilities
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.instrumentation import EventPipe
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores import open_store
from celery_singleton_lock.worker.bootstep import check_app, check_tasks
from example_project.private_server import PrivateServer
from tests.conftest import missing
from tests.harness.app_module import without_tasks_of_other_tests
from tests.harness.etcd import EtcdCluster, find_etcd
from tests.harness.keys import EVERY_NAME, LOCKING, name_in_store
from tests.harness.worker import CeleryWorker
from tests.harness.zookeeper import ZooKeeperEnsemble

StartWorker = Callable[..., CeleryWorker]
LoadApp = Callable[..., ModuleType]
WriteApp = Callable[..., str]
SayAtStart = Callable[..., list[str]]

HEAD = """\
import os
from celery import Celery, Task, shared_task
from celery_singleton_lock import SingletonTask, current_lease, hold, is_skipped, singleton_task

app = Celery("site", broker=os.environ["BROKER_URL"], backend=os.environ["RESULT_URL"] or None)
app.conf.broker_connection_retry_on_startup = True
if "LOCK_URL" in os.environ:
    app.conf.singleton_lock_url = os.environ["LOCK_URL"]

"""
# What the scripts call; nothing else is needed to hold locks.
ONE_TASK = """\
@singleton_task(app=app, key="{name}")
def greet(name):
    return f"hello {name} {current_lease().fence}"

"""


@pytest.fixture
def write_app(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> WriteApp:
    """``write_app("...code...")``: the name of a module with an app of one task, and that code."""
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"
    monkeypatch.syspath_prepend(tmp_path)

    def write(code: str = "", *, head: str = HEAD + ONE_TASK, name: str = "site_of_test") -> str:
        (tmp_path / f"{name}.py").write_text(head + textwrap.dedent(code))
        return name

    return write


def refusal(process: CeleryWorker) -> str:
    """The one line with which a worker stopped."""
    assert process.wait() not in (0, None)
    assert "Traceback" not in process.log
    assert "ready." not in process.log
    [line] = [line for line in process.lines if "CRITICAL" in line]
    return line.split("] ", 1)[1]


@pytest.fixture
def say_at_start(
    load_app: LoadApp, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> SayAtStart:
    """``say_at_start(write_app(), LOCK_URL=...)``: what a worker would warn of, in this process."""

    # A check that finds no store leaves this to the leases that follow.
    monkeypatch.setattr(Runtime, "may_evict", False)

    def check(name: str, **env: str) -> list[str]:
        with without_tasks_of_other_tests():
            check_app(load_app(name, **env).app)
        return [
            f"{record.levelname} {record.getMessage()}"
            for record in caplog.records
            if record.levelno >= logging.WARNING
        ]

    return check


def nothing() -> None:
    """A body."""


@contextmanager
def server(*arguments: str) -> Iterator[PrivateServer]:
    with PrivateServer(arguments=arguments) as private:
        yield private


# Settings.


def test_a_wrong_setting_stops_the_worker_with_one_line_that_names_it(
    worker: StartWorker, write_app: WriteApp
) -> None:
    line = refusal(worker(write_app("app.conf.singleton_lock_tll = 5\n"), wait=False))
    assert "'singleton_lock_tll' (did you mean 'singleton_lock_ttl'?)" in line


def test_an_embedded_worker_raises_instead_of_exiting() -> None:
    app = Celery(set_as_current=False, broker="memory://")
    singleton_task(app=app, name="t", shared=False)(nothing)
    app.conf.singleton_lock_tll = 1
    with pytest.raises(SettingsError, match="singleton_lock_ttl"):
        app.Worker(pool="solo")
    # All workers of a process have one pipe, which it keeps.
    pipe, EventPipe.running = EventPipe.running, None
    assert pipe is not None
    os.close(pipe.reader)
    os.close(pipe._writer)


def test_nowhere_to_keep_locks_stops_the_worker(
    environment: dict[str, str], say_at_start: SayAtStart, write_app: WriteApp
) -> None:
    environment |= {"BROKER_URL": "amqp://127.0.0.1:1", "RESULT_URL": ""}
    with pytest.raises(SettingsError) as refused:
        say_at_start(write_app())
    for words in (
        "neither the result backend nor the broker is Redis",
        "singleton_lock_url = ",
        "for the app ",
        "give app=...",
        "fixture singleton_store",
    ):
        assert words in str(refused.value)


def test_locks_in_memory_stop_a_worker_beside_which_others_can_run(
    say_at_start: SayAtStart, write_app: WriteApp
) -> None:
    refused = "locks in memory:// exclude nothing between processes.*singleton_store"
    with pytest.raises(SettingsError, match=refused):
        say_at_start(write_app(), LOCK_URL="memory://")


def test_locks_in_memory_stop_a_worker_with_children(
    environment: dict[str, str], worker: StartWorker, write_app: WriteApp
) -> None:
    environment |= {"BROKER_URL": "memory://", "RESULT_URL": ""}
    assert "locks in memory://" in refusal(worker(write_app(), pool="prefork", wait=False))


def test_locks_in_memory_are_refused_to_holders_and_publishers_too() -> None:
    app = Celery(set_as_current=False, broker="redis://127.0.0.1:1")
    app.conf.singleton_lock_url = "memory://"
    singleton_task(app=app, name="t", shared=False, unique="until_done")(nothing)
    with pytest.raises(SettingsError, match="locks in memory://"), hold("k", scope="s", app=app):
        pass
    with pytest.raises(SettingsError, match="locks in memory://"):
        app.tasks["t"].delay()
    app.conf.task_always_eager = True
    with hold("k", scope="s", app=app):
        assert app.tasks["t"].delay().state == "SUCCESS"


#: The options of tasks by their names, the store, and what is said of them.
REFUSED: dict[str, tuple[dict[str, dict[str, Any]], str, str]] = {
    "unequal limits": (
        {
            "one": {"key": PER_TASK, "scope": "s"},
            "two": {"key": PER_TASK, "scope": "s", "limit": 2},
        },
        "memory://",
        r"limit=2.*limit=1.*both are in scope 's': give them one limit, or two",
    ),
    "unequal rates": (
        {
            "one": {"key": PER_TASK, "scope": "s", "on_conflict": "skip"},
            "two": {"key": PER_TASK, "scope": "s", "on_conflict": "skip", "rate": "10/m"},
        },
        "memory://",
        r'two has rate="10/m" and one has no rate, but both are in scope .s.: give them one rate',
    ),
    **{
        f"a rate, {url}": (
            {"slow": {"rate": "10/m", "on_conflict": "skip"}},
            url,
            r'slow has rate="10/m", but the store \(\w+\) can.t count the starts',
        )
        for url in ("etcd://localhost", "zk://localhost", "redlock://a:1,b:1,c:1/0")
    },
    "a fence that the app needs": (
        {"three_at_a_time": {"limit": 3}},
        "memory://",
        "three_at_a_time: needs_fence=True with limit=3.*use limit=1",
    ),
    "not all queue": (
        {
            "one": {"key": PER_TASK, "scope": "s", "on_conflict": "queue"},
            "two": {"key": PER_TASK, "scope": "s"},
        },
        "memory://",
        '^one has on_conflict="queue" and two has not',
    ),
    "a claim that nothing makes": (
        {"sync": {"on_duplicate": "raise"}},
        "memory://",
        "@singleton_task on sync: on_duplicate='raise' has no effect without unique",
    ),
    **{
        f"cancel_running, {url}": (
            {"t": {"on_conflict": "cancel_running"}},
            url,
            't has on_conflict="cancel_running", but the sto',
        )
        for url in ("memory://", "etcd://localhost", "redlock://a:1,b:1,c:1/0")
    },
    **{
        f"a queue, {url}": (
            {"t": {"on_conflict": "queue"}},
            url,
            r't has on_conflict="queue", but the store \(',
        )
        for url in ("etcd://localhost", "zk://localhost", "redlock://a:1,b:1,c:1/0")
    },
}


@pytest.mark.parametrize("problem", REFUSED)
def test_tasks_that_can_not_keep_their_promises_are_refused_at_the_start(problem: str) -> None:
    tasks, url, message = REFUSED[problem]
    app = Celery(set_as_current=False)
    app.conf.singleton_lock_needs_fence = problem == "a fence that the app needs"
    for name, options in tasks.items():
        singleton_task(app=app, shared=False, name=name, **options)(nothing)
    app.finalize()
    with closing(open_store(url)) as store, pytest.raises(SettingsError, match=message):
        check_tasks(app, store)


@pytest.mark.parametrize("url", ["etcd://localhost", "zk://localhost", "redlock://a:1,b:1,c:1/0"])
def test_a_store_that_can_not_pause_says_so(url: str) -> None:
    app = Celery(set_as_current=False)
    app.conf.singleton_lock_url = url
    for call in (pause, resume):
        with pytest.raises(SettingsError, match="can't pause keys: use Redis, Valkey"):
            call(scope="shop.sync", app=app)
    assert inspection.pauses(app) == []


def test_a_worker_names_all_wrong_tasks_at_its_start() -> None:
    app = Celery(set_as_current=False)
    app.conf.singleton_lock_on_store_error = "run"
    for number in range(2):
        options: Any = {"app": app, "shared": False, "on_conflict": "queue"}
        singleton_task(**options, name=f"contradicts{number}")(nothing)
    for number in (1, 2):
        options = {"app": app, "shared": False, "key": PER_TASK, "scope": "s"}
        singleton_task(**options, name=f"limited{number}", limit=number)(nothing)
    singleton_task(app=app, shared=False, name="newest", on_conflict="cancel_running")(nothing)
    singleton_task(app=app, shared=False, name="off", on_conflict="queue", enabled=False)
    app.task(name="around", shared=False)(app.tasks["newest"])
    app.finalize()
    with pytest.raises(SettingsError) as refused:
        check_tasks(app, open_store("memory://"))
    first, *others = str(refused.value).splitlines()
    assert first == "5 problems with tasks"
    assert len(others) == 5
    for name in ("contradicts0", "contradicts1", "limited2", "newest", "around"):
        assert [line for line in others if name in line.partition(" has ")[0]], name


def test_a_plain_task_around_a_singleton_task_is_refused() -> None:
    app = Celery(set_as_current=False)
    locked = singleton_task(app=app, name="locked", shared=False)(nothing)
    store: Any = SimpleNamespace(capabilities=Capabilities(fence=True, name="any"))
    app.finalize()
    check_tasks(app, store)
    app.task(name="unlocked", shared=False)(locked)
    with pytest.raises(SettingsError, match="task unlocked calls the singleton task locked as a f"):
        check_tasks(app, store)


# The store at the start.


def test_a_server_that_may_evict_leases_grants_none_until_its_policy_is_corrected(
    worker: StartWorker, write_app: WriteApp, load_app: LoadApp
) -> None:
    app = write_app("""
    @app.task
    def plain():
        return "plain"

    @app.task
    def holding():
        with hold("anything", scope="site", app=app):
            return "held"
    """)
    with (
        server("--maxmemory", "50mb", "--maxmemory-policy", "allkeys-lru") as evicting,
        redis.Redis.from_url(evicting.url()) as client,
    ):
        process = worker(app, env={"LOCK_URL": evicting.url()})
        process.wait_for_log(r"ERROR.*no locks: .*maxmemory-policy is allkeys-lru .*two runs")
        process.wait_for_log("noeviction.*or accept it with singleton_lock_allow_eviction = True")
        tasks = load_app(app, LOCK_URL=evicting.url())
        refused = tasks.greet.delay("you")
        outage = process.wait_for_event(EventName.STORE_UNREACHABLE, task_id=refused.id)
        assert outage.task == "site_of_test.greet"
        assert "WARNING" in outage.line
        assert "allkeys-lru" in outage.fields["error"]
        process.wait_for_event(EventName.REQUEUED, task_id=refused.id, reason="store")
        assert tasks.plain.delay().get(timeout=30) == "plain", "other tasks of the worker run"
        # A number of keys of the server, not of one task: no lease, and so no fence, was granted.
        with pytest.raises(StoreError, match="allkeys-lru"):
            tasks.holding.delay().get(timeout=30)
        assert not client.keys(f"{EVERY_NAME}greet*")
        assert not client.keys(f"{EVERY_NAME}site:*")
        assert not refused.ready()
        client.config_set("maxmemory-policy", "noeviction")
        assert refused.get(timeout=60).startswith("hello you ")
        process.wait_for_log("WARNING.*does not endanger leases any more")


def test_a_server_that_may_evict_leases_grants_none_though_it_was_away_at_the_start(
    worker: StartWorker, write_app: WriteApp, load_app: LoadApp
) -> None:
    app = write_app()
    with server("--maxmemory", "50mb", "--maxmemory-policy", "allkeys-lru") as evicting:
        evicting.kill()
        process = worker(app, env={"LOCK_URL": evicting.url()})
        process.wait_for_log("WARNING.*can't be used")
        evicting.start()
        refused = load_app(app, LOCK_URL=evicting.url()).greet.delay("you")
        outage = process.wait_for_event(EventName.STORE_UNREACHABLE, task_id=refused.id)
        assert "allkeys-lru" in outage.fields["error"]
        process.wait_for_log("ERROR.*no locks: .*allkeys-lru.*noeviction")
        with redis.Redis.from_url(evicting.url()) as client:
            assert not client.keys(f"{EVERY_NAME}greet*")
            client.config_set("maxmemory-policy", "noeviction")
        assert refused.get(timeout=60).startswith("hello you ")


def test_a_server_that_may_evict_leases_is_accepted_by_a_setting(
    say_at_start: SayAtStart, write_app: WriteApp
) -> None:
    app = write_app("app.conf.singleton_lock_allow_eviction = True")
    with server("--maxmemory", "50mb", "--maxmemory-policy", "volatile-ttl") as evicting:
        [line] = say_at_start(app, LOCK_URL=evicting.url())
    assert re.search(r"WARNING.*maxmemory-policy is volatile-ttl", line)


@pytest.mark.parametrize("policy", ["volatile-lru", "volatile-lfu"])
def test_a_server_that_evicts_renewed_leases_last_is_a_warning(
    policy: str, say_at_start: SayAtStart, write_app: WriteApp
) -> None:
    with server("--maxmemory", "50mb", "--maxmemory-policy", policy) as evicting:
        [line] = say_at_start(write_app(), LOCK_URL=evicting.url())
    assert re.search(rf"WARNING.*maxmemory-policy is {policy} \(maxmemory 52428800\)", line)


def test_without_maxmemory_an_evicting_policy_is_a_warning(
    say_at_start: SayAtStart, write_app: WriteApp
) -> None:
    with server("--maxmemory-policy", "volatile-ttl") as evicting:
        [line] = say_at_start(write_app(), LOCK_URL=evicting.url())
    assert re.search(r"WARNING.*maxmemory-policy is volatile-ttl.*a maxmemory.*not set", line)


def test_a_server_that_evicts_nothing_is_no_warning(
    say_at_start: SayAtStart, write_app: WriteApp, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "celery_singleton_lock")
    assert say_at_start(write_app()) == []
    assert "singleton locks live in redis://" in caplog.text


def test_a_plain_task_with_the_options_of_a_lock_is_refused() -> None:
    app = Celery("plain", broker="memory://", set_as_current=False)

    @app.task(name="sync", singleton={"ttl": 5}, shared=False)
    def sync() -> None: ...

    with pytest.raises(SettingsError, match="add base=SingletonTask to the decorator"):
        check_tasks(app, Runtime.of(app).store)


def test_a_ttl_above_the_visibility_timeout_is_a_warning(
    say_at_start: SayAtStart, write_app: WriteApp
) -> None:
    code = """
    app.conf.broker_transport_options = {"visibility_timeout": 30}

    @singleton_task(app=app, name="short", ttl=20, acks_late=True)
    def short(): ...

    @singleton_task(app=app, name="early", ttl=60)
    def early(): ...

    @singleton_task(app=app, name="late", ttl=60, acks_late=True)
    def late(): ...
    """
    [line] = say_at_start(write_app(code))
    assert line.startswith("WARNING")
    assert "late has ttl=60 s" in line
    assert "visibility_timeout of 30 s" in line
    assert "Set ttl below visibility_timeout." in line


def test_a_debounce_above_the_visibility_timeout_is_a_warning(
    say_at_start: SayAtStart, write_app: WriteApp
) -> None:
    code = """
    app.conf.broker_transport_options = {"visibility_timeout": 90}

    @singleton_task(app=app, name="index", key="{number}", debounce=120)
    def index(number): ...

    @singleton_task(app=app, name="short", key="{number}", debounce=90)
    def short(number): ...
    """
    [line] = say_at_start(write_app(code))
    assert line.startswith("WARNING")
    assert "index has debounce=120 s, longer than the broker's visibility_timeout of 90 s" in line
    assert "every 30 s" in line
    assert "Set visibility_timeout above debounce." in line


def test_results_that_reach_the_first_caller_alone_are_a_warning(
    environment: dict[str, str], redis_url: str, say_at_start: SayAtStart, write_app: WriteApp
) -> None:
    environment |= {"RESULT_URL": "rpc://", "LOCK_URL": redis_url}
    [warning] = say_at_start(
        write_app("""
        @singleton_task(app=app, name="once", unique="until_done")
        def once(): ...

        @singleton_task(app=app, name="skips", unique="until_done", on_duplicate="skip")
        def skips(): ...

        @singleton_task(app=app, name="silent", unique="until_done", ignore_result=True)
        def silent(): ...
        """)
    )
    assert warning.startswith("WARNING")
    assert {"once", "rpc"} <= {*re.findall(r"\w+", warning)}
    assert not {"skips", "silent"} & {*re.findall(r"\w+", warning)}
    assert "redis://" in warning, "it names the way out"
    assert "ignore_result=True" in warning


def test_a_max_hold_below_the_ttl_is_a_warning(
    say_at_start: SayAtStart, write_app: WriteApp
) -> None:
    code = """
    @singleton_task(app=app, name="sync", max_hold=20, ttl=60)
    def sync(): ...
    """
    [line] = say_at_start(write_app(code))
    assert line.startswith("WARNING")
    assert "sync has max_hold=20 s, shorter than its ttl of 60 s" in line


def refuse_all(client: Any) -> str:
    client.execute_command("REPLICAOF", "127.0.0.1", "1")
    return ""


def without_replicas(client: Any) -> str:
    if int(client.info("server")["redis_version"].partition(".")[0]) < 7:
        pytest.skip("before 7.0 the server applies it to no script; the doctor says so")
    client.config_set("min-replicas-to-write", "1")
    return ""


def fill_up(client: Any) -> str:
    client.config_set("maxmemory", "1")
    return ""


def take_rights(client: Any) -> str:
    client.execute_command("ACL", "SETUSER", "default", "-set", "-eval", "-evalsha")
    return ""


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (refuse_all, "WARNING.*no locks now.*is a replica now.*requeued.*url at the master"),
        (without_replicas, "WARNING.*no locks now.*To do: start replicas, or lower min-rep"),
        (fill_up, "ERROR.*no locks, because.*used memory > .maxmemory.*To do: raise maxmemory"),
        (take_rights, "ERROR.*no locks, because.*permission.*doctor"),
        (lambda client: "/999999", "ERROR.*no locks, because.*To do: correct the database number"),
        (lambda client: "wrong", "ERROR.*no locks, because.*refuses the login.*doctor"),
    ],
    ids=["replica", "replicas", "memory", "rights", "database", "login"],
)
def test_a_store_that_refuses_writes_is_reported_when_the_worker_starts_and_stops_none(
    spoil: Callable[[Any], str], said: str, say_at_start: SayAtStart, write_app: WriteApp
) -> None:
    """It answers PING and reads: only a lease shows the fault."""
    with server() as refusing:
        with redis.Redis.from_url(refusing.url()) as client:
            path = spoil(client) or "/0"
        url = f"redis://127.0.0.1:{refusing.port}{path}"
        if path == "wrong":
            url = f"redis://stranger:wrong@127.0.0.1:{refusing.port}/0"
        [line] = say_at_start(write_app(), LOCK_URL=url)
    assert re.search(said, line)


def test_a_starting_worker_leaves_no_lease(say_at_start: SayAtStart, write_app: WriteApp) -> None:
    with server() as store, redis.Redis.from_url(store.url(), decode_responses=True) as client:
        say_at_start(write_app(), LOCK_URL=store.url())
        assert client.keys(f"{EVERY_NAME}:shard"), "it has tried one"
        assert not client.keys("*singleton-start*")


def test_a_login_that_may_not_ask_for_info_works(
    say_at_start: SayAtStart, write_app: WriteApp, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "celery_singleton_lock")
    with (
        server("--maxmemory", "50mb", "--maxmemory-policy", "allkeys-lru") as limited,
        redis.Redis.from_url(limited.url()) as client,
    ):
        client.acl_setuser(
            "locks",
            enabled=True,
            passwords=["+s3cret"],
            keys=[EVERY_NAME],
            categories=["-@all"],
            commands=[*LOCKING],
        )
        url = f"redis://locks:s3cret@127.0.0.1:{limited.port}/0"
        assert say_at_start(write_app(), LOCK_URL=url) == []
        assert client.keys(f"{EVERY_NAME}:shard")
    assert "singleton locks live in redis://locks:**@127" in caplog.text
    assert "s3cret" not in caplog.text


def test_a_worker_whose_store_is_down_starts_and_says_so(
    say_at_start: SayAtStart, write_app: WriteApp, private_redis: PrivateServer
) -> None:
    private_redis.kill()
    [line] = say_at_start(write_app(), LOCK_URL=private_redis.url())
    assert re.search(r"WARNING.*can't be used \(.*doesn't answer.*requeued until it can", line)


def test_a_wrong_password_is_said_and_not_shown(
    say_at_start: SayAtStart, write_app: WriteApp, private_redis: PrivateServer
) -> None:
    with redis.Redis.from_url(private_redis.url()) as client:
        client.config_set("requirepass", "right")
    url = f"redis://:wr0ng@127.0.0.1:{private_redis.port}/0"
    [line] = say_at_start(write_app(), LOCK_URL=url)
    assert re.search(r"ERROR.*refuses the login", line)
    assert "wr0ng" not in line


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_etcd_without_space_is_said_with_its_remedy(
    pool: str, worker: StartWorker, write_app: WriteApp
) -> None:
    if find_etcd() is None:
        missing("etcd is not installed. Debian: apt-get install etcd-server")
    with EtcdCluster(1) as cluster:
        member = cluster.post("maintenance/status", {})["header"]["member_id"]
        raised = {"action": "ACTIVATE", "memberID": member, "alarm": "NOSPACE"}
        assert cluster.post("maintenance/alarm", raised)["alarms"]
        process = worker(write_app(), pool=pool, env={"LOCK_URL": cluster.url("full")}, wait=False)
        process.wait_for_log("ERROR.*space exceeded.*To do: etcdctl compact, defrag")


@pytest.mark.slow
def test_nodes_of_zookeeper_that_belong_to_another_login_are_said_with_the_remedy(
    zookeeper: ZooKeeperEnsemble, worker: StartWorker, write_app: WriteApp
) -> None:
    url = zookeeper.url("of-ann")
    app = Celery(set_as_current=False, broker="memory://")
    app.conf.singleton_lock_url = url.replace("://", "://ann:pw@")
    with hold("k", scope="s", app=app):
        pass
    Runtime.of(app).close()
    env = {"LOCK_URL": url.replace("://", "://bob:pw@")}
    process = worker(write_app(), env=env, wait=False)
    process.wait_for_log("ERROR.*NoAuth.*To do: the login under which the nodes were made")
    process.wait_until_ready()


# Forms of the URL.


@pytest.mark.parametrize("form", ["unix", "redis+socket", "redis+socket as the broker"])
def test_a_store_behind_a_socket_file(
    form: str, environment: dict[str, str], write_app: WriteApp, load_app: LoadApp
) -> None:
    with PrivateServer(unixsocket=True) as socket_server:
        path = socket_server.directory / "server.sock"
        urls = {
            "unix": f"unix://{path}?db=3",
            "redis+socket": f"redis+socket://{path}?virtual_host=3",
            "redis+socket as the broker": f"redis+socket://{path}?virtual_host=3",
        }
        if form.endswith("broker"):
            environment |= {"BROKER_URL": urls[form], "RESULT_URL": ""}
        else:
            environment["LOCK_URL"] = urls[form]
        app = load_app(write_app()).app
        with (
            redis.Redis(unix_socket_path=str(path), db=3, decode_responses=True) as client,
            hold("x", scope="s", app=app) as lease,
        ):
            assert client.exists(lease.key, name_in_store("shard")) == 2


# Decorator errors.


def error_of(kind: type[Exception], **named: Any) -> str:
    """What the decorator says to these options of a task ``sync(account_id, force=False)``."""

    def sync(account_id: int, force: bool = False) -> None: ...

    app = Celery(set_as_current=False)
    with pytest.raises(kind) as caught:
        singleton_task(app=app, shared=False, **named)(sync)
    assert "sync" in str(caught.value)  # it names the task
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "kind", "remedy"),
    [
        ({"tll": 5}, TypeError, "did you mean 'ttl'?"),
        ({"acks_lat": True}, TypeError, "did you mean 'acks_late'?"),
        ({"unique_on": ["account_id"]}, TypeError, 'Here the same is key=("name of'),
        ({"lock_expiry": 10}, TypeError, "celery-singleton. Here the same is unique_for"),
        ({"raise_on_duplicate": True}, TypeError, 'on_duplicate="raise"'),
        ({"once": {"keys": ["account_id"]}}, TypeError, "migration.QueueOnce"),
        ({"heimdall": {"unique": True}}, TypeError, "celery-heimdall. Here the same is unique="),
        ({"max_wait": 5}, TypeError, "write on_conflict=OnConflict.retry(max_wait=5)"),
        ({"max_waiting": 5}, TypeError, "write on_conflict=OnConflict.queue(max_waiting=5)"),
        ({"limits": 2}, TypeError, "declare it in a class of your own, given as base="),
        ({"singleton": {"ttl": 5}}, TypeError, "Give the lock's options by their own names"),
        ({"lock_key": "x"}, TypeError, "another name to an attribute of yours"),
        ({"key": "account:{account}"}, ValueError, "(it has: account_id, force)"),
        ({"key": ("acount_id",)}, ValueError, "(it has: account_id, force)"),
        ({"ttl": 0}, ValueError, "ttl=0: at least 0.3 seconds"),
        (
            {"on_conflict": "cancel_running", "limit": 2},
            ValueError,
            "it is not defined which",
        ),
        (
            {"on_conflict": "cancel_running", "unique": "until_done"},
            ValueError,
            "no equal call is published while one runs",
        ),
        (
            {"on_conflict": "wait", "timeout": 1},
            TypeError,
            "write on_conflict=OnConflict.wait(timeout=1)",
        ),
        ({"retry": True}, TypeError, "retry=True would replace the method retry() of the task"),
        ({"autoretry_for": OSError}, TypeError, "give a tuple of exception classes"),
        (
            {"on_conflict": "queue", "debounce": 5, "key": "{account_id}"},
            ValueError,
            'on_conflict="queue" with debounce=5',
        ),
        (
            {"on_conflict": {"action": "retry", "delay": 90, "max_delay": 60}},
            ValueError,
            "max_delay=60.0 is shorter than delay=90.0",
        ),
    ],
    ids=repr,
)
def test_a_wrong_option_fails_at_the_decorator_and_names_the_cure(
    options: dict[str, Any], kind: type[Exception], remedy: str
) -> None:
    assert remedy in error_of(kind, **options)


def test_options_of_on_conflict_fail_where_they_are_written() -> None:
    with pytest.raises(TypeError, match=r"OnConflict.wait\(timeout\)='5': give seconds"):
        OnConflict.wait(timeout="5")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"OnConflict.retry\(delay\)=-1: give seconds"):
        OnConflict.retry(delay=-1)
    with pytest.raises(ValueError, match=r"within\)=0.01: at least 0.1 seconds; each check is"):
        OnConflict.cancel_running(within=0.01)
    with pytest.raises(ValueError, match=r"within=5, timeout=2\): the newer call gives up before"):
        OnConflict.cancel_running(within=5, timeout=2)


def test_a_single_call_can_not_set_cancel_running() -> None:
    app = Celery(set_as_current=False, broker="memory://")
    task = singleton_task(app=app, name="t", shared=False)(nothing)
    with pytest.raises(ValueError, match=r"t: on_conflict=\"cancel_running\" belongs to the task"):
        task.apply_async(singleton={"on_conflict": "cancel_running"})


def test_a_task_is_not_decorated_twice() -> None:
    app = Celery(set_as_current=False)

    @app.task(shared=False)
    def plain() -> None: ...

    with pytest.raises(TypeError, match="is a task already: remove one of the decorators"):
        singleton_task(app=app, shared=False)(plain)
    with pytest.raises(TypeError, match="one function, and options by keyword"):
        singleton_task("account:{account_id}")  # type: ignore[call-overload]


def test_a_wrong_option_of_the_base_class_form_fails_at_the_decorator() -> None:
    for options, kind, message in (
        ({"tll": 5}, TypeError, "did you mean 'ttl'"),
        ({"key": "{missing}"}, ValueError, r"it has: account_id"),
        ({"ttl": 0}, ValueError, "at least 0.3 seconds"),
        (True, TypeError, "on s: singleton=True: give a dict"),
        ([("ttl", 5)], TypeError, "on s: singleton=.*: give a dict"),
    ):
        app = Celery(set_as_current=False)
        with pytest.raises(kind, match=message):

            @app.task(base=SingletonTask, singleton=options, name="s", lazy=False, shared=False)
            def sync(account_id: int) -> None: ...


def test_options_of_a_claim_that_nothing_makes_are_refused_at_the_call() -> None:
    app = Celery(set_as_current=False, broker="memory://")
    for name in ("plain", "claiming"):
        unique = {"unique": "until_done"} if name == "claiming" else {}
        singleton_task(app=app, name=name, shared=False, **unique)(nothing)
    for options in ({"on_duplicate": "raise"}, {"unique_for": 60}):
        with pytest.raises(ValueError, match=r"has no effect without unique: add unique="):
            app.tasks["plain"].apply_async(singleton=options)
        where: dict[str, Any] = {"singleton": {**options, "unique": None}}
        with pytest.raises(ValueError, match="has no effect without unique"):
            app.tasks["claiming"].apply_async(**where)


def test_the_error_about_replaced_arguments_advises_no_claim_that_refuses_them() -> None:
    app = Celery(set_as_current=False, broker="memory://")
    plain = singleton_task(app=app, name="plain", shared=False)(nothing)
    where: dict[str, Any] = {"singleton": {"on_duplicate": "replace"}}
    with pytest.raises(ValueError, match=r'without unique: add unique="until_start", or drop it'):
        plain.apply_async(**where)


@pytest.mark.parametrize("options", [{"on_duplicate": "skip"}, {"unique_for": 60}])
def test_options_of_a_claim_that_nothing_makes_are_refused_where_they_are_written(
    options: dict[str, Any],
) -> None:
    """And by the first call of a process that only publishes, as far as the settings may differ."""
    app = Celery(set_as_current=False, broker="memory://")
    with pytest.raises(ValueError, match="has no effect without unique"):
        singleton_task(app=app, name="refused", shared=False, unique=None, **options)(nothing)
    plain = singleton_task(app=app, name="plain", shared=False, **options)(nothing)
    with pytest.raises(ValueError, match=r"@singleton_task on plain: .* has no effect without"):
        plain.delay()
    app.conf.task_always_eager = True
    with pytest.raises(ValueError, match="has no effect without unique"):
        plain.delay()


def test_the_app_may_make_the_claims_of_which_a_task_has_options() -> None:
    app = Celery(set_as_current=False, broker="redis://localhost")
    app.conf.singleton_lock_unique = "until_done"
    singleton_task(app=app, name="sync", shared=False, on_duplicate="raise")(nothing)
    app.finalize()
    store: Any = SimpleNamespace(capabilities=Capabilities(fence=True, name="any"))
    check_tasks(app, store)


# Forms of a task. Each runs, and is skipped while its key is held.

FORMS = """
import pydantic

@app.task(base=SingletonTask, singleton={"key": "{name}"}, name="by_base")
def by_base(name):
    return ["by_base", name, current_lease().key]

class ByClass(SingletonTask):
    name = "by_class"
    singleton = {"key": "{name}", "ttl": 30}

    def run(self, name):
        return ["by_class", name, current_lease().key]

by_class = app.register_task(ByClass())

@singleton_task(key="{name}", name="shared")
def shared(name):
    return ["shared", name, current_lease().key]

@singleton_task(name="bare_shared")
def bare(name):
    return ["bare", name, current_lease().key]

class Order(pydantic.BaseModel):
    name: str

@singleton_task(app=app, pydantic=True, key="{order.name}", name="with_pydantic")
def with_pydantic(order: Order):
    assert isinstance(order, Order)
    return ["pydantic", order.name, current_lease().key]

from celery.worker.request import Request

class OwnRequest(Request):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.request_dict["mark"] = "own request"

class OwnBase(Task):
    Request = OwnRequest

    def __call__(self, *args, **kwargs):
        held = current_lease().key  # inside the lease
        return ["own call", held, *super().__call__(*args, **kwargs)]

    def after_return(self, status, retval, task_id, args, kwargs, einfo):
        self.backend.client.rpush("after", f"{status} {task_id}")

@singleton_task(app=app, base=OwnBase, bind=True, key="{name}", name="own_base")
def own_base(self, name):
    return ["own_base", name, self.request.mark]
"""


@pytest.fixture
def forms(
    worker: StartWorker, write_app: WriteApp, load_app: LoadApp
) -> tuple[ModuleType, CeleryWorker]:
    name = write_app(FORMS)
    return load_app(name), worker(name)


def test_every_form_of_a_task_is_a_singleton(
    forms: tuple[ModuleType, CeleryWorker], redis_client: redis.Redis
) -> None:
    module, process = forms
    tasks: dict[str, Any] = {
        "by_base": module.by_base,
        "by_class": module.by_class,
        "shared": module.shared,
        "with_pydantic": module.with_pydantic,
        "own_base": module.own_base,
    }
    if not hasattr(Task, "_dump_pydantic_arguments"):
        del tasks["with_pydantic"]  # Celery publishes no models before 5.7
    for name, task in tasks.items():
        argument = module.Order(name="ann") if name == "with_pydantic" else "ann"
        result = task.delay(argument)
        value = result.get(timeout=20)
        key = task.lock_key(argument)
        assert key == name_in_store(f"{name}:ann")
        if name == "own_base":
            assert value == ["own call", key, "own_base", "ann", "own request"]
            # The user's after_return was called, though it doesn't call ours.
            assert redis_client.blpop(["after"], timeout=20) == ("after", f"SUCCESS {result.id}")
        else:
            assert value[1:] == ["ann", key]
        with hold("ann", scope=name, wait=10, app=module.app):
            skipped = task.delay(argument).get(timeout=20)
        if name == "own_base":  # the user's __call__ doesn't run without the lease
            assert redis_client.blpop(["after"], timeout=20)
        assert is_skipped(skipped)
    bare = module.bare.delay("ann").get(timeout=20)
    assert bare[2] == module.bare.lock_key("ann")
    assert "own call" not in bare
    assert process.alive


def test_celerys_own_shared_task_takes_the_base_class() -> None:
    @shared_task(base=SingletonTask, singleton={"key": "{a}"}, name="tests.celery_shared")
    def f(a: int) -> int:
        return a

    app = Celery(set_as_current=False)
    app.conf.task_always_eager = True
    app.finalize()
    task: Any = app.tasks["tests.celery_shared"]
    assert task.lock_key(1).endswith(":tests.celery_shared:1")
    assert task.delay(1).get() == 1


def test_a_store_whose_locks_are_in_another_number_of_shards_stops_the_worker(
    say_at_start: SayAtStart, write_app: WriteApp, redis_client: redis.Redis
) -> None:
    redis_client.set(name_in_store("shards"), "256")
    with pytest.raises(SettingsError) as refused:
        say_at_start(write_app())
    assert "kept in 256 shard(s)" in str(refused.value)
    assert "looks for them in 1" in str(refused.value)
    assert "delete that key" in str(refused.value)


def test_a_refusal_for_the_number_of_shards_is_an_error_that_users_can_import(
    redis_url: str, redis_client: redis.Redis
) -> None:
    redis_client.set(name_in_store("shards"), "256")
    app = Celery("shards", broker=redis_url, backend=redis_url, set_as_current=False)
    with pytest.raises(StoreError, match="256 shard") as refused, hold("k", scope="s", app=app):
        pass
    app.close()
    assert type(refused.value) is StoreError
