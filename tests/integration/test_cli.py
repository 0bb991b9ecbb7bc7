"""`celery -A app singleton ls | show | release`: what operators see, free, and can't break."""

from __future__ import annotations

import os
import pty
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import ModuleType

import pytest
import redis
from celery import Celery

from celery_singleton_lock import Lease, LeaseLost, hold, is_skipped
from celery_singleton_lock.cli.commands import runnable
from celery_singleton_lock.core.events import EventName
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Holder, Phase, Token
from celery_singleton_lock.core.store_requests import ClaimChange, ClaimRequest
from celery_singleton_lock.runtime import Runtime
from example_project.private_server import PrivateServer, free_port
from tests.harness.cli import Answer, run_apart, run_here
from tests.harness.journal import Journal, Record
from tests.harness.keys import EVERY_NAME, name_in_store
from tests.harness.processes import ROOT
from tests.harness.worker import CeleryWorker

POOLS = "tests.apps.pools"
BRIEF = f"{POOLS}.brief"

StartWorker = Callable[..., CeleryWorker]
LoadApp = Callable[..., ModuleType]


@pytest.fixture
def cli(environment: dict[str, str], load_app: LoadApp) -> Callable[..., Answer]:
    """``cli("show", KEY, answers="y\\n")``; with ``LOCK_URL=...``, in a process of its own."""

    def run(*arguments: str, answers: str = "", **env: str) -> Answer:
        if not env:
            return run_here(load_app(POOLS).app, *arguments, answers=answers)
        return run_apart(POOLS, *arguments, env={**environment, **env}, answers=answers)

    return run


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "celery", "-A", POOLS, "singleton", *arguments]


def notes(records: list[Record], text: str) -> list[Record]:
    return [record for record in records if record.data.get("text") == text]


@contextmanager
def held_by_another_thread(app: Celery) -> Iterator[Lease]:
    """The key of `brief`'s "a", held where the test's own thread doesn't re-enter it."""
    leases: queue.Queue[Lease] = queue.Queue()
    done = threading.Event()

    def body() -> None:
        with hold("a", scope=BRIEF, ttl=60, app=app) as lease:
            leases.put(lease)
            done.wait(60)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    try:
        yield leases.get(timeout=20)
    finally:
        done.set()
        thread.join(20)


def claim(pools: ModuleType, argument: str, phase: Phase = Phase.QUEUED) -> str:
    """The key of a claim of `brief`, published by this process."""
    store = Runtime.of(pools.app).store
    key = Keyspace.claim(BRIEF, pools.brief.lock_key(argument))
    token = Token(f"id-{argument}", 0, 0, "n", "c1")
    holder = Holder(
        task=BRIEF, task_id=f"id-{argument}", worker="web-1", pid=os.getpid(), since=1_700_000_000.0
    )
    assert (
        store.claims.take(ClaimRequest(key=key, token=token, holder=holder, ttl=600), timeout=5)
        is None
    )
    store.claims.change(token, ClaimChange(key=key, phase=phase, ttl=600), timeout=5)
    return key


Cli = Callable[..., Answer]


# Seeing.


def test_ls_says_that_nothing_is_held(cli: Cli, redis_url: str) -> None:
    in_a_process = cli("ls", LOCK_URL=redis_url)
    assert in_a_process == cli("ls") == Answer(0, "nothing is held\n", "")
    answer = cli("ls", "--json")
    assert (answer.status, answer.json()) == (0, [])


@pytest.mark.slow
def test_ls_lists_the_holders_of_the_keys(
    cli: Cli, worker: StartWorker, load_app: LoadApp, journal: Journal
) -> None:
    pools = load_app(POOLS)
    process = worker(POOLS)
    result = pools.brief.delay("a", until_open=True)
    [start] = journal.wait_for_starts(1, key="a")
    with hold("b", scope=BRIEF, ttl=60, app=pools.app):
        rows = {row["key"]: row for row in cli("ls", "--json").json()}
        text = cli("ls").out
        only_a = cli("ls", "brief:a").out
        by_glob = cli("ls", "*:b").out
    assert set(rows) == {pools.brief.lock_key("a"), pools.brief.lock_key("b")}
    running = rows[pools.brief.lock_key("a")]
    assert (running["state"], running["task"], running["task_id"]) == ("running", BRIEF, result.id)
    assert (running["worker"], running["pid"]) == (process.hostname, start.pid)
    assert running["fence"] == start.fence
    assert 40 < running["ttl"] <= 60
    assert rows[pools.brief.lock_key("b")]["pid"] == os.getpid()
    for key in rows:
        assert key in text
    assert result.id in text
    assert pools.brief.lock_key("a") in only_a
    assert pools.brief.lock_key("b") not in only_a
    assert pools.brief.lock_key("b") in by_glob
    assert pools.brief.lock_key("a") not in by_glob
    pools.gate("a").touch()
    result.get(timeout=20)


@pytest.mark.slow
def test_show_knows_the_three_spellings_of_a_key(cli: Cli, load_app: LoadApp) -> None:
    pools = load_app(POOLS)
    key = pools.brief.lock_key("a")
    with hold("a", scope=BRIEF, ttl=60, app=pools.app) as lease:
        for spelling in (key, f"{BRIEF}:a", "a"):
            answer = cli("show", "--json", spelling)
            assert (answer.status, answer.json()["key"]) == (0, key)
        text = cli("show", "a")
        assert text.status == 0
        assert re.search(rf"token: {re.escape(str(lease.token))}$", text.out, re.M)
        assert re.search(rf"fence: {lease.fence}$", text.out, re.M)
    free = cli("show", key)
    assert (free.status, free.out) == (1, f"{key} is free\n")
    free = cli("show", "--json", key)
    assert (free.status, free.json()) == (1, None)


TEXTS = {
    "blank": "account:Ann Lee",
    "escaped separator": "a%3Ab:c",
    "long": "account:" + "Ann Lee " * 40,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TEXTS)
def test_a_key_is_listed_shown_and_released_by_its_text(
    cli: Cli, load_app: LoadApp, kind: str
) -> None:
    app, text = load_app(POOLS).app, TEXTS[kind]
    scope = "bills: paid/ü"
    with hold(text, scope=scope, ttl=60, app=app) as lease:
        for spelling in (text, f"{scope}:{text}"):
            assert cli("show", "--json", spelling).json()["key"] == lease.key
        assert [row["key"] for row in cli("ls", "--json", text).json()] == [lease.key]
        assert cli("release", "--yes", text).out == f"released {lease.key}\n"
    claimed = Keyspace.claim(BRIEF, lease.key)
    take_claim = ClaimRequest(
        key=claimed, token=Token("id", 0, 0, "n", "c1"), holder=Holder(), ttl=60
    )
    assert Runtime.of(app).store.claims.take(take_claim, timeout=5) is None
    found = cli("show", "--json", f"claim|{BRIEF}|{scope}:{text}").json()
    assert found["key"] == claimed


def test_a_text_that_is_also_how_another_key_is_stored_is_refused_with_both(
    cli: Cli, load_app: LoadApp
) -> None:
    app = load_app(POOLS).app
    with (
        hold("a b", scope=BRIEF, ttl=60, app=app) as blank,
        hold("a%20b", scope=BRIEF, ttl=60, app=app) as quoted,
    ):
        answer = cli("release", "--yes", "a%20b")
        assert (answer.status, answer.out) == (2, "")
        assert blank.key in answer.err
        assert quoted.key in answer.err
        assert cli("show", "--json", "a b").json()["key"] == blank.key
        assert cli("release", "--yes", quoted.key).out == f"released {quoted.key}\n"


@pytest.mark.slow
def test_a_short_name_of_two_keys_is_refused_with_both(cli: Cli, load_app: LoadApp) -> None:
    pools = load_app(POOLS)
    with (
        hold("a", scope=BRIEF, ttl=60, app=pools.app),
        hold("a", scope="another", ttl=60, app=pools.app),
    ):
        answer = cli("release", "--yes", "a")
        assert answer.status == 2
        assert pools.brief.lock_key("a") in answer.err
        assert "another:a" in answer.err
        assert len(cli("ls", "--json").json()) == 2


@pytest.mark.slow
def test_the_key_of_a_task_with_a_limit_finds_a_slot_that_is_held(
    cli: Cli, worker: StartWorker, load_app: LoadApp, journal: Journal
) -> None:
    pools = load_app(POOLS)
    key = pools.limited.lock_key("a")
    worker(POOLS, pool="threads", concurrency=2)
    for _ in range(2):
        pools.limited.delay("a")
    journal.wait_for_starts(2, key="a")
    assert [row["key"] for row in cli("ls", "--json", key).json()] == [key, f"{key}#1"]
    assert cli("show", "--json", "a#1").json()["key"] == f"{key}#1"
    # The key itself is the first slot; once that is free, the key finds the one that is left.
    for spelling in (key, "a"):
        assert cli("show", "--json", spelling).json()["key"] == key
    assert cli("release", "--yes", key).status == 0
    for spelling in (key, "a", "a#1"):
        assert cli("show", "--json", spelling).json()["key"] == f"{key}#1"
    pools.gate("a").touch()


@pytest.mark.slow
def test_a_reservation_and_a_cooling_key_are_distinguished_from_a_run(
    cli: Cli, worker: StartWorker, load_app: LoadApp, journal: Journal
) -> None:
    pools = load_app(POOLS)
    worker(POOLS)
    retried = pools.fail_first.delay("a")
    cooled = pools.cooling.delay("b")
    cooled.get(timeout=20)
    journal.wait_for(lambda records: len(notes(records, EventName.RELEASED)) == 2)
    states = {row["key"]: row for row in cli("ls", "--json").json()}
    assert states[pools.fail_first.lock_key("a")]["state"] == "reserved for a retry"
    assert states[pools.fail_first.lock_key("a")]["task_id"] == retried.id
    assert states[pools.cooling.lock_key("b")]["state"] == "cooldown"
    # Both can be freed, and then the next call runs at once.
    for task, argument in ((pools.fail_first, "a"), (pools.cooling, "b")):
        assert is_skipped(task.delay(argument).get(timeout=20))
        freed = cli("release", task.lock_key(argument), answers="y\n")
        assert (freed.status, freed.err) == (0, "")
    assert not is_skipped(pools.cooling.delay("b").get(timeout=20))


# Releasing.


@pytest.mark.slow
def test_release_asks_and_no_is_the_default(cli: Cli, load_app: LoadApp) -> None:
    pools = load_app(POOLS)
    key = pools.brief.lock_key("a")
    with hold("a", scope=BRIEF, ttl=60, app=pools.app) as lease:
        for answers in ("\n", "n\n", ""):
            answer = cli("release", key, answers=answers)
            assert answer.status == 1
            assert "Release? [y/N]" in answer.out
            assert str(lease.token) in answer.out  # it shows whom it asks about
        assert cli("show", key).status == 0
        assert "--yes releases without asking" in answer.err, "there was no terminal to answer"
        answer = cli("release", key, answers="y\n")
        assert (answer.status, answer.err) == (0, "")
        assert answer.out.endswith(f"released {key}\n")
        assert cli("show", key).status == 1


@pytest.mark.slow
def test_release_of_a_free_key_says_so(cli: Cli) -> None:
    key = f"{BRIEF}:nothing"
    answer = cli("release", key)
    assert (answer.status, answer.out, answer.err) == (1, "", f"{key} is free\n")
    answer = cli("release", "--yes", "--json", key)
    assert (answer.status, answer.json()) == (1, {"key": key, "released": False})


def test_a_wrong_key_does_not_look_free(cli: Cli) -> None:
    assert cli("show", f"{BRIEF}:a").out == f"{BRIEF}:a is free\n"
    assert "breif:a: it is free, or misspelled" in cli("show", "breif:a").out


@pytest.mark.slow
def test_a_wrong_key_does_not_look_free_in_any_spelling(cli: Cli) -> None:
    for wrong in ("breif:a", name_in_store("a"), name_in_store(f"{BRIEF}:a", prefix="other")):
        answer = cli("show", wrong)
        assert answer.status == 1
        assert f"{wrong}: it is free, or misspelled" in answer.out
        assert f"\n  {BRIEF}:{{key}}\n" in answer.out, "it says how keys are spelled"
    answer = cli("show", "--json", "breif:a")
    assert (answer.status, answer.json()) == (1, None)
    assert "misspelled" in answer.err
    answer = cli("release", "breif:a")
    assert (answer.status, answer.out) == (1, "")
    assert "misspelled" in answer.err


@pytest.mark.slow
def test_a_free_key_is_reported_as_free_in_each_spelling(cli: Cli) -> None:
    for key in (f"{BRIEF}:a", name_in_store(f"{BRIEF}:a"), f"claim|{BRIEF}|{BRIEF}:a"):
        answer = cli("show", key)
        assert (answer.status, answer.out, answer.err) == (1, f"{key} is free\n", "")


def test_release_frees_nothing_if_the_holder_changed_meanwhile(
    cli: Cli, environment: dict[str, str], load_app: LoadApp
) -> None:
    pools = load_app(POOLS)
    key = pools.brief.lock_key("a")
    with ExitStack() as first:
        first.enter_context(hold("a", scope=BRIEF, ttl=60, app=pools.app))
        with subprocess.Popen(
            command("release", key),
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            shown = ""
            while not shown.endswith("[y/N]: "):
                shown += process.stdout.read(1)
            first.close()
            with hold("a", scope=BRIEF, ttl=60, app=pools.app) as second:
                _, error = process.communicate("y\n", timeout=20)
                assert process.returncode == 1
                assert error == f"not released: {key} is held by another token now\n"
                assert cli("show", "--json", key).json()["token"] == str(second.token)


@pytest.mark.slow
def test_release_compares_the_token_that_was_given(cli: Cli, load_app: LoadApp) -> None:
    pools = load_app(POOLS)
    key = pools.brief.lock_key("a")
    with hold("a", scope=BRIEF, ttl=60, app=pools.app) as old:
        pass
    with hold("a", scope=BRIEF, ttl=60, app=pools.app) as lease:
        stale = cli("release", "--json", "--token", str(old.token), key)
        assert (stale.status, stale.json()) == (1, {"key": key, "released": False})
        assert cli("show", "--json", key).json()["token"] == str(lease.token)
        right = cli("release", "--json", "--token", str(lease.token), key)
        assert (right.status, right.json()) == (0, {"key": key, "released": True})
        assert cli("show", key).status == 1


def test_release_with_yes_does_not_ask(cli: Cli, load_app: LoadApp) -> None:
    pools = load_app(POOLS)
    key = pools.brief.lock_key("a")
    with hold("a", scope=BRIEF, ttl=60, app=pools.app) as lease:
        wrong = cli("release", "--yes", "--token", f"{lease.token}x", key)
        assert (wrong.status, wrong.out) == (1, "")
        answer = cli("release", "--yes", key)
    assert (answer.status, answer.all) == (0, f"released {key}\n")


def test_json_never_asks(cli: Cli, load_app: LoadApp) -> None:
    pools = load_app(POOLS)
    with hold("a", scope=BRIEF, ttl=60, app=pools.app):
        answer = cli("release", "--json", "a")
        assert answer.status == 2
        assert "--yes or --token TOKEN" in answer.err
        assert cli("show", "a").status == 0


@pytest.mark.slow
def test_a_forced_release_interrupts_the_holder_and_the_next_fence_is_higher(
    cli: Cli,
    worker: StartWorker,
    load_app: LoadApp,
    journal: Journal,
    redis_client: redis.Redis,
) -> None:
    pools = load_app(POOLS)
    worker(POOLS)
    first = pools.interruptible.delay("a")
    [start] = journal.wait_for_starts(1, key="a")
    why = ("--reason", "stuck import")
    answer = cli("release", "--yes", "--json", *why, pools.interruptible.lock_key("a"))
    assert (answer.status, answer.json()["released"]) == (0, True)
    [shard] = redis_client.keys(f"{EVERY_NAME}:shard")
    bumped = int(redis_client.hget(shard, "|fence"))  # type: ignore[arg-type]
    assert start.fence is not None
    assert start.fence < bumped
    # The body sleeps for a minute; the next heartbeat comes within ttl/3.
    [end] = journal.wait_for_ends(1, key="a", timeout=20)
    assert end.data["error"] == "LeaseInterrupt"
    with pytest.raises(LeaseLost, match=r"operator \(released by \S+ on \S+: stuck import\)"):
        first.get(timeout=20)
    pools.gate("a").touch()
    assert not is_skipped(pools.interruptible.delay("a").get(timeout=20))
    fence = journal.runs("a")[-1].fence
    assert fence is not None
    assert fence > bumped
    [loss] = notes(journal.records(), EventName.LEASE_LOST)
    assert loss.task_id == first.id


@pytest.mark.slow
def test_an_old_holder_can_not_release_what_was_forced_from_it(cli: Cli, load_app: LoadApp) -> None:
    pools = load_app(POOLS)
    key = pools.brief.lock_key("a")
    with ExitStack() as first:
        old = first.enter_context(hold("a", scope=BRIEF, ttl=60, app=pools.app))
        assert cli("release", "--yes", key).status == 0
        with held_by_another_thread(pools.app) as new:
            assert new.fence > old.fence
            first.close()
            assert cli("show", "--json", key).json()["token"] == str(new.token)
    assert cli("show", key).status == 1


# Claims.


def test_ls_shows_what_a_claimed_message_does_and_its_publisher(
    cli: Cli, load_app: LoadApp
) -> None:
    pools = load_app(POOLS)
    keys = {phase: claim(pools, f"x-{phase}", phase) for phase in Phase}
    rows = {row["key"]: row for row in cli("ls", "--json").json()}
    assert set(rows) == set(keys.values())
    for phase, key in keys.items():
        row = rows[key]
        assert (row["state"], row["phase"]) == (f"claim, {phase}", phase)
        assert (row["task"], row["task_id"]) == (BRIEF, f"id-x-{phase}")
        assert (row["worker"], row["pid"]) == ("web-1", os.getpid())
        assert row["since"] == "2023-11-14T22:13:20+00:00"
        assert (row["token"], row["fence"]) == (f"id-x-{phase}+c1", None)
        assert 500 < row["ttl"] <= 600
    text = cli("ls", "x-queued").out
    [line] = [line for line in text.splitlines() if keys[Phase.QUEUED] in line]
    assert re.search(rf" claim, queued  .*{re.escape(BRIEF)}\[id-x-queued\]  web-1  ", line)
    assert keys[Phase.RUNNING] not in text


@pytest.mark.slow
def test_a_short_name_means_the_lease_and_a_claim_is_named_whole(
    cli: Cli, load_app: LoadApp
) -> None:
    pools = load_app(POOLS)
    key, claimed = pools.brief.lock_key("a"), claim(pools, "a")
    short_claim = claimed.partition("}:")[2]
    for spelling in ("a", f"{BRIEF}:a", key):
        assert cli("show", "--json", spelling).json() is None
    with hold("a", scope=BRIEF, ttl=60, app=pools.app) as lease:
        for spelling in ("a", f"{BRIEF}:a", key):
            row = cli("show", "--json", spelling).json()
            assert (row["key"], row["token"], row["phase"]) == (key, str(lease.token), None)
        for spelling in (claimed, short_claim):
            row = cli("show", "--json", spelling).json()
            assert (row["key"], row["state"]) == (claimed, "claim, queued")
        assert cli("release", "--yes", "a").out == f"released {key}\n"
    assert cli("show", "--json", claimed).status == 0
    text = cli("show", claimed).out
    assert re.search(r"^ *state: claim, queued$", text, re.M)
    assert re.search(r"^ *published by: web-1$", text, re.M)
    assert "fence" not in text


@pytest.mark.slow
def test_a_released_claim_lets_an_equal_call_be_published_and_leaves_the_lease(
    cli: Cli, load_app: LoadApp
) -> None:
    pools = load_app(POOLS)
    with hold("a", scope=BRIEF, ttl=60, app=pools.app) as lease:
        claimed = claim(pools, "a", Phase.RUNNING)
        asked = cli("release", claimed, answers="n\n")
        assert asked.status == 1
        assert "an equal call can be published as well. Release? [y/N]" in asked.out
        assert "another run may start" not in asked.out
        stale = cli("release", "--json", "--token", "id-other+c1", claimed)
        assert (stale.status, stale.json()) == (1, {"key": claimed, "released": False})
        freed = cli("release", claimed.partition("}:")[2], answers="y\n")
        assert (freed.status, freed.err) == (0, "")
        assert freed.out.endswith(f"released {claimed}\n")
        assert cli("show", claimed).status == 1
        assert cli("show", "--json", "a").json()["token"] == str(lease.token)
        claim(pools, "a")
        assert cli("release", "--json", "--token", "id-a+c1", claimed).status == 0


# What goes wrong.


@pytest.mark.slow
def test_an_unresponsive_store_is_one_line_and_an_exit_status(cli: Cli) -> None:
    url = f"redis://:s3cr%2Fet@127.0.0.1:{free_port()}/0"
    for arguments in (["ls"], ["show", "a"], ["release", "--yes", "a"]):
        answer = cli(*arguments, LOCK_URL=url)
        assert answer.status == 1
        assert answer.out == ""
        assert re.fullmatch(r"Error: the store doesn't answer: .*\n", answer.err)
        assert "s3cr" not in answer.all


@pytest.mark.slow
def test_the_password_is_never_shown(cli: Cli, private_redis: PrivateServer) -> None:
    with redis.Redis.from_url(private_redis.url()) as client:
        client.config_set("requirepass", "s3cr/et")
    right = f"redis://:s3cr%2Fet@127.0.0.1:{private_redis.port}/0"
    assert cli("ls", LOCK_URL=right).all == "nothing is held\n"
    wrong = cli("ls", LOCK_URL=f"redis://:s3crXet@127.0.0.1:{private_redis.port}/0")
    assert wrong.status == 1
    assert "refuses the login" in wrong.err
    # Not escaped: the URL can't be read, and the reader's error quotes what it takes for the port.
    broken = cli("ls", LOCK_URL=f"redis://:s3cr/et@127.0.0.1:{private_redis.port}/0")
    assert broken.status == 1
    no_scheme = cli("ls", LOCK_URL=f":s3cr/et@127.0.0.1:{private_redis.port}/0")
    assert no_scheme.status == 1
    for answer in (wrong, broken, no_scheme):
        assert "s3cr" not in answer.all


@pytest.mark.slow
def test_a_long_search_shows_its_progress_on_a_terminal_and_nowhere_else(
    environment: dict[str, str], private_redis: PrivateServer
) -> None:
    env = {**os.environ, **environment, "LOCK_URL": private_redis.url()}
    with redis.Redis.from_url(private_redis.url()) as client:
        for start in range(0, 300_000, 10_000):
            client.mset({f"result-{number}": "{}" for number in range(start, start + 10_000)})
    terminal, end = pty.openpty()
    shown = subprocess.Popen(command("ls"), cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=end)
    os.close(end)
    printed = b""
    with suppress(OSError):  # the end of a terminal
        while piece := os.read(terminal, 4096):
            printed += piece
    os.close(terminal)
    out, _ = shown.communicate(timeout=60)
    assert out == b"nothing is held\n"
    assert re.search(rb"searched [\d,]+ pages of keys: 0 keys are ours", printed)
    assert printed.endswith(b"\r\x1b[K"), "the line is erased"
    piped = subprocess.run(
        command("ls"), cwd=ROOT, env=env, capture_output=True, timeout=60, check=True
    )
    assert (piped.stdout, piped.stderr) == (b"nothing is held\n", b"")


def test_ls_reports_keys_that_other_recipes_left_under_our_names(
    cli: Cli, redis_client: redis.Redis
) -> None:
    forever, a_list = name_in_store("app.sync:a"), name_in_store("app.sync:b")
    redis_client.set(forever, "1763714400.5")
    redis_client.lpush(a_list, "token")
    answer = cli("ls", "--json")
    assert answer.json() == []
    assert f"not ours: {forever!r} has no expiry" in answer.err
    assert f"not ours: {a_list!r} is a list" in answer.err
    assert redis_client.exists(forever, a_list) == 2


@pytest.mark.parametrize(
    ("arguments", "app"),
    [
        (["celery", "-A", "proj", "singleton", "explain"], "proj"),
        (["celery", "--app", "proj", "singleton", "explain"], "proj"),
        (["celery", "--app=proj", "singleton", "explain"], "proj"),
        (["celery", "-Aproj", "singleton", "explain"], "proj"),
        (["celery", "singleton", "explain"], "..."),
    ],
)
def test_the_commands_that_a_command_names_can_be_copied(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], app: str
) -> None:
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.delenv("APP", raising=False)
    text = "free it with: celery -A ... singleton release 'k'"
    assert runnable(text) == f"free it with: celery -A {app} singleton release 'k'"
