"""`celery singleton serve` as a process: scraped by a real Prometheus, and through outages."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import redis

from celery_singleton_lock import hold
from example_project.private_server import PrivateServer
from tests.conftest import missing
from tests.harness.deliveries import wait_until
from tests.harness.processes import ROOT, Process
from tests.harness.prometheus import Prometheus, find_prometheus
from tests.harness.serve import ServeProcess

pytestmark = pytest.mark.slow

POOLS = "tests.apps.pools"

LoadApp = Callable[..., ModuleType]


@pytest.fixture
def prometheus(tmp_path: Path, _processes: list[Process]) -> Callable[..., Prometheus]:
    if find_prometheus() is None:
        missing("prometheus is not installed. Debian: apt-get install prometheus")

    def start(server: ServeProcess) -> Prometheus:
        process = Prometheus(server, tmp_path)
        _processes.append(process)
        process.start()
        return process

    return start


def test_a_real_prometheus_scrapes_it_and_evaluates_the_alerts(
    environment: dict[str, str],
    private_redis: PrivateServer,
    serve: Callable[..., ServeProcess],
    prometheus: Callable[..., Prometheus],
    load_app: LoadApp,
) -> None:
    environment["LOCK_URL"] = private_redis.url()
    app, server = load_app(POOLS).app, serve(POOLS)
    process = prometheus(server)
    with hold("k", scope="s", ttl=60, app=app):
        running = 'celery_singleton_keys{state="running"}'
        wait_until(lambda: process.values(running) == [1], "the key is scraped")
    wait_until(lambda: process.values(running) == [], "the release is scraped")
    [target] = process.ask("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    checked = subprocess.run(
        ["promtool", "check", "metrics"],
        input=server.get("metrics")[1],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    assert process.firing() == set()
    private_redis.kill()
    wait_until(lambda: "CeleryLockStoreUnreachable" in process.firing(), "the alert is pending")


def test_the_counters_of_the_apps_tasks_are_0_before_their_first_event(
    serve: Callable[..., ServeProcess],
) -> None:
    """Else the first loss after a start is no increase."""
    samples = serve(POOLS).samples()
    for reason in ("gone", "unreachable"):
        labels = {"task": f"{POOLS}.brief", "reason": reason}
        assert samples["losses_total", frozenset(labels.items())] == 0


def test_health_and_metrics_show_which_of_store_and_broker_is_away_until_it_is_back(
    environment: dict[str, str],
    private_redis: PrivateServer,
    redis_url: str,
    serve: Callable[..., ServeProcess],
) -> None:
    def health() -> tuple[int, dict[str, str]]:
        status, body = server.get("healthz")
        return status, json.loads(body)

    def of(status: int, **parts: bool) -> bool:
        found, report = health()
        return found == status and {n: text == "ok" for n, text in report.items()} == parts

    # Apart from the health: the gauge's reading of the keys is used for a second or more.
    def store_is(up: float) -> None:
        wait_until(lambda: server.sample("store_up") == up, f"store_up is {up}")

    environment.update(BROKER_URL=private_redis.url(), LOCK_URL=redis_url)
    server = serve(POOLS)
    wait_until(lambda: of(200, store=True, broker=True), "both are there")
    private_redis.kill()
    wait_until(lambda: of(503, store=True, broker=False), "the broker is away")
    store_is(1)
    assert server.sample("events_up") == 0
    assert server.state()["broker"]["error"]
    private_redis.start()
    wait_until(lambda: of(200, store=True, broker=True), "the broker is back")
    assert server.sample("events_up") == 1
    server.end()

    environment.update(BROKER_URL=redis_url, LOCK_URL=private_redis.url())
    server = serve(POOLS)
    wait_until(lambda: of(200, store=True, broker=True), "both are there")
    private_redis.kill()
    wait_until(lambda: of(503, store=False, broker=True), "the store is away")
    store_is(0)
    assert server.sample("events_up") == 1
    assert server.get("")[0] == 200
    assert server.state()["store"]["error"]
    private_redis.start()
    wait_until(lambda: of(200, store=True, broker=True), "the store is back")
    store_is(1)


def test_a_login_that_may_not_count_waiting_clients_sees_the_keys(
    environment: dict[str, str],
    private_redis: PrivateServer,
    serve: Callable[..., ServeProcess],
    load_app: LoadApp,
) -> None:
    with redis.Redis.from_url(private_redis.url()) as client:
        client.execute_command("ACL", "SETUSER", "ops", "on", ">pw", "~*", "&*", "+@all", "-zcount")
    environment["LOCK_URL"] = private_redis.url().replace("://", "://ops:pw@")
    app, server = load_app(POOLS).app, serve(POOLS)
    with hold("k", scope="s", ttl=60, app=app):
        [row] = server.state()["keys"]
        assert (row["waiting"], server.state()["counts"]["waiting"]) == (None, None)
        assert server.sample("keys", task="", state="running") == 1
    assert "pw" not in json.dumps(server.state())


def test_a_signal_ends_it(serve: Callable[..., ServeProcess]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        server = serve(POOLS)
        server.send_signal(number)
        server.wait()
        assert "Traceback" not in server.log


def test_a_bad_start_is_one_line_that_says_what_to_do(
    environment: dict[str, str], serve: Callable[..., ServeProcess], tmp_path: Path
) -> None:
    taken = serve(POOLS).url.rpartition(":")[2].rstrip("/")
    (tmp_path / "token").write_text("short")
    without = "import sys; sys.modules['prometheus_client'] = None; "
    program = f"{without}sys.argv[0] = 'celery'; from celery.__main__ import main; main()"
    for options, python, problem in (
        (["--port", taken], ["-m", "celery"], f"port {taken}"),
        (["--token-file", str(tmp_path / "none")], ["-m", "celery"], "can't be read"),
        (["--token-file", str(tmp_path / "token")], ["-m", "celery"], "at least 16 characters"),
        ([], ["-c", program], "pip install 'celery-singleton-lock[serve]'"),
    ):
        done = subprocess.run(
            [sys.executable, *python, "-A", POOLS, "singleton", "serve", *options],
            cwd=ROOT,
            env={**environment, "PATH": "/usr/bin", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout) == (1, ""), done
        assert problem in done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr
