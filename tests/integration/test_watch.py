"""`celery singleton watch`: a table in a real pseudo-terminal, lines of changes elsewhere."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import redis

from celery_singleton_lock import hold
from celery_singleton_lock.runtime import Runtime
from example_project.private_server import PrivateServer
from tests.harness.calls import Calls
from tests.harness.processes import Process
from tests.harness.terminal import Terminal

POOLS = "tests.apps.pools"
BRIEF = f"{POOLS}.brief"
COMMAND = [sys.executable, "-m", "celery", "-A", POOLS, "singleton", "watch", "--interval", "0.2"]

pytestmark = pytest.mark.slow

LoadApp = Callable[..., ModuleType]


@pytest.fixture
def lines(environment: dict[str, str]) -> Iterator[Callable[..., Process]]:
    """``lines("--sort", "age", PYTHONPATH=...)``: a `watch` without a terminal."""
    started: list[Process] = []

    def start(*arguments: str, **env: str) -> Process:
        process = Process([*COMMAND, *arguments], env={**environment, **env}, name="watch")
        started.append(process.start())
        return process

    yield start
    for process in started:
        process.kill_group()
        assert "Traceback" not in process.log


def test_a_terminal_shows_holders_come_and_go_and_survives_an_outage(
    environment: dict[str, str], load_app: LoadApp, private_redis: PrivateServer
) -> None:
    environment["LOCK_URL"] = private_redis.url(0)
    app = load_app(POOLS).app
    with Terminal(COMMAND, env=environment, columns=160) as terminal:
        terminal.wait_for(r"redis://127\.0\.0\.1:\d+/0 .*0 held, 0 claimed")
        # What would be markup to rich is a key like any other.
        with hold("[red]a", scope=BRIEF, ttl=60, app=app):
            with hold("b", scope=BRIEF, ttl=60, app=app):
                terminal.wait_for(r"(?s)2 held.*\[red\]a.*running.*running")
            terminal.wait_for(r"(?s)1 held.*\[red\]a")
            assert ":b" not in terminal.screen
            private_redis.kill()
            terminal.wait_for(r"(?s)1 held.*store-unreachable at 20.*below is what was.*\[red\]a")
            private_redis.restart(keep_data=True)
            terminal.wait_for(r"(?s)1 held, 0 claimed(?!.*store-unreachable).*\[red\]a")
        terminal.wait_for("0 held")
        terminal.press_ctrl_c()
        assert terminal.wait() == 0
    assert "\x1b[?1049h" in terminal.output, "it has the screen for itself"
    assert terminal.output.rstrip().endswith("\x1b[?1049l"), "and gives it back"
    assert "\x1b[?25h" in terminal.output, "with the cursor"
    assert "Traceback" not in terminal.output


def test_a_terminal_shows_the_progress_of_a_long_first_search(
    environment: dict[str, str], private_redis: PrivateServer
) -> None:
    environment["LOCK_URL"] = private_redis.url(0)
    with redis.Redis.from_url(private_redis.url(0)) as client:
        for start in range(0, 300_000, 10_000):
            client.mset({f"result-{number}": "{}" for number in range(start, start + 10_000)})
    with Terminal(COMMAND, env=environment, columns=160) as terminal:
        terminal.wait_for(r"redis://127\.0\.0\.1:\d+/0 +searched [\d,]+ pages of keys: 0 keys are")
        terminal.wait_for("0 held, 0 claimed")
        terminal.press_ctrl_c()
        assert terminal.wait() == 0


def test_a_terminal_is_given_back_at_sigterm_too(
    environment: dict[str, str], load_app: LoadApp
) -> None:
    app = load_app(POOLS).app
    with (
        hold("a" * 300, scope=BRIEF, ttl=60, app=app),
        Terminal(COMMAND, env=environment, lines=5, columns=40) as terminal,
    ):
        terminal.wait_for("1 held")
        assert max(map(len, terminal.screen.splitlines())) <= 40
        terminal.terminate()
        assert terminal.wait() == 0
    assert terminal.output.rstrip().endswith("\x1b[?1049l")


def test_elsewhere_each_change_is_a_line(
    lines: Callable[..., Process], load_app: LoadApp, private_redis: PrivateServer
) -> None:
    app, url = load_app(POOLS).app, private_redis.url(0)
    app.conf.singleton_lock_url = url
    process = lines("--scope", BRIEF, LOCK_URL=url)
    with hold("a", scope="elsewhere", ttl=60, app=app):
        with hold("a", scope=BRIEF, ttl=60, app=app) as first:
            held = process.wait_for_log(rf"^\S+ held key={first.key} state=running .*fence=(\d+)")
            assert int(held[1]) == first.fence
            private_redis.kill()
            process.wait_for_log(rf'^\S+ store-unreachable store={url} error="')
            private_redis.restart(keep_data=True)
            process.wait_for_log(rf"^\S+ store-back store={url}$")
        process.wait_for_log(rf"^\S+ gone key={first.key}$")
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0
    changes = [line.split()[1] for line in process.lines]
    assert [change for change in changes if change != "store-unreachable"] == [
        "held",
        "store-back",
        "gone",
    ]


def test_changes_are_also_json_with_the_number_of_waiting_clients(
    lines: Callable[..., Process], load_app: LoadApp
) -> None:
    app = load_app(POOLS).app
    process = lines("--json", "--sort", "waiting")
    done = threading.Event()

    def take_the_key_next() -> None:
        with hold("a", scope=BRIEF, ttl=60, wait=60, app=app):
            done.wait(60)

    waiter = threading.Thread(target=take_the_key_next)
    with hold("a", scope=BRIEF, ttl=60, app=app) as lease:
        process.wait_for_log('"held"')
        waiter.start()
        process.wait_for_log('"changed".*"waiting": 1')
    process.wait_for_log('"changed".*"waiting": 0')
    done.set()
    waiter.join(60)
    process.wait_for_log('"gone"')
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0
    rows: list[Any] = [json.loads(line) for line in process.lines]
    assert rows[0]["token"] == str(lease.token)
    assert rows[-1] == {"at": rows[-1]["at"], "change": "gone", "key": lease.key}


def test_a_call_that_waits_in_the_queue_of_a_key_is_a_change(
    lines: Callable[..., Process], load_app: LoadApp
) -> None:
    app = load_app(POOLS).app
    calls = Calls(Runtime.of(app).store)
    calls.key = Runtime.of(app).keyspace.lock(BRIEF, "a")
    process = lines()
    first, second = calls.joined(2)
    free = f"state=free task_id={first.task_id}"
    process.wait_for_log(f"(held|changed) key={calls.key} {free} .*calls=2")
    calls.begin(first)
    process.wait_for_log(f"changed key={calls.key} state=running .*calls=1")
    calls.end(first)
    calls.begin(second)
    process.wait_for_log(f"changed key={calls.key} state=running")
    calls.end(second)
    process.wait_for_log(f"gone key={calls.key}")


def test_a_terminal_without_rich_gets_lines_and_the_name_of_the_extra(
    environment: dict[str, str], load_app: LoadApp, tmp_path: Path
) -> None:
    (tmp_path / "rich.py").write_text("raise ImportError('not installed')")
    app = load_app(POOLS).app
    with (
        hold("a", scope=BRIEF, ttl=60, app=app) as lease,
        Terminal(COMMAND, env={**environment, "PYTHONPATH": str(tmp_path)}) as terminal,
    ):
        terminal.wait_for(
            rf"(?s)pip install 'celery-singleton-lock\[watch\]'.* held key={lease.key}"
        )
        terminal.press_ctrl_c()
        assert terminal.wait() == 0


def test_a_question_that_the_store_cannot_answer_ends_it(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [*COMMAND, "--waiting"],
        env={**environment, "LOCK_URL": "memory://", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")


def test_a_login_that_may_not_search_for_keys_is_told_what_to_grant(
    lines: Callable[..., Process], private_redis: PrivateServer
) -> None:
    with redis.Redis.from_url(private_redis.url()) as client:
        client.execute_command("ACL", "SETUSER", "ops", "on", ">pw", "~*", "&*", "+@all", "-scan")
        process = lines(LOCK_URL=private_redis.url().replace("://", "://ops:pw@"))
        process.wait_for_log(r" store-refuses .*grant \+scan")
        client.execute_command("ACL", "SETUSER", "ops", "+scan")
        process.wait_for_log(" store-back ")
