"""What docs/how-to/deploy.md puts into containers, run on this host as it is printed."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from celery_singleton_lock.core.events import EventName
from example_project.private_server import free_port
from tests.harness.deliveries import wait_until
from tests.harness.keys import EVERY_NAME
from tests.harness.pages import block_with, blocks
from tests.harness.processes import ROOT, Process

PAGE = (ROOT / "docs/how-to/deploy.md").read_text()
TUTORIAL = (ROOT / "docs/tutorials/first-lock.md").read_text()
[IMAGE] = blocks(PAGE, "dockerfile")
WORKER, BEAT = blocks(PAGE, "yaml")
_, SERVE = blocks((ROOT / "docs/how-to/monitoring.md").read_text(), "yaml")
START = Callable[..., Process]


def command(manifest: str, after: str = "image:") -> list[str]:
    """The first ``command`` of a manifest behind a word: a list of YAML in one line."""
    found = re.search(r"command: \[(.*)\]$", manifest[manifest.index(after) :], re.MULTILINE)
    assert found
    words = shlex.shlex(found[1], posix=True)
    words.whitespace, words.whitespace_split, words.commenters = ", ", True, ""
    return list(words)


def test_the_image_runs_what_the_deployment_runs() -> None:
    [line] = re.findall(r"^CMD (\[.*\])$", IMAGE, re.MULTILINE)
    assert json.loads(line) == command(WORKER)


@pytest.fixture
def environment(tmp_path: Path, redis_url: str) -> dict[str, str]:
    """A container's: the manifests' variables, here with the server of this test."""
    (tmp_path / "tasks.py").write_text(block_with(TUTORIAL, "# tasks.py"))
    names = set(re.findall(r"\{name: (\w+), value: ", WORKER))
    assert names == set(re.findall(r"\{name: (\w+), value: ", BEAT))
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {
        **dict.fromkeys(names, redis_url),
        "HOSTNAME": socket.gethostname(),
        "PATH": programs,
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
    }


@pytest.fixture
def start(tmp_path: Path, environment: dict[str, str]) -> Iterator[START]:
    processes: list[Process] = []

    def start(*words: str) -> Process:
        process = Process(words, env=environment, cwd=tmp_path).start()
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.end()


@pytest.mark.slow
def test_a_worker_answers_its_probe_until_it_ends_and_leaves_no_key(
    start: START, redis_url: str, redis_client: redis.Redis
) -> None:
    worker = start(*command(WORKER))
    worker.wait_for_log(re.escape(f"singleton locks live in {redis_url}"))
    worker.wait_for_log("ready")
    probe = command(WORKER, after="livenessProbe:")
    alive = start(*probe)
    assert alive.wait() == 0, alive.log
    start("celery", "-A", "tasks", "call", "tasks.sync", "--args=[42, 3]").wait()
    worker.wait_for_log("account 42: sync starts")
    worker.terminate()
    assert worker.wait() == 0
    assert any("succeeded" in line for line in worker.lines), worker.log
    assert not redis_client.keys(f"{EVERY_NAME}account:42")
    ended = start(*probe)
    assert ended.wait() != 0, ended.log


@pytest.mark.slow
def test_the_other_beat_leads_when_the_leader_is_stopped(start: START, tmp_path: Path) -> None:
    words = command(BEAT)
    beats = [
        [str(tmp_path / name) if word == "/tmp/schedule" else word for word in words]
        for name in ("one", "two")
    ]
    assert words not in beats
    leader = start(*beats[0])
    leader.wait_for_event(EventName.LEADING)
    other = start(*beats[1])
    other.wait_for_event(EventName.STANDING_BY)
    leader.terminate()
    assert leader.wait() == 0
    other.wait_for_event(EventName.LEADING)


@pytest.mark.slow
def test_the_server_answers_its_probe_the_service_and_the_service_monitor(
    start: START, redis_url: str
) -> None:
    words, port = command(SERVE), str(free_port())
    start("celery", "-A", "tasks", "worker", "-l", "INFO", "-E").wait_for_log("ready")
    start(*words, "--port", port).wait_for_log(r"^http://0\.0\.0\.0:")
    [probe] = re.findall(r"httpGet: \{path: (\S+), port: http\}", SERVE)
    [scraped] = re.findall(r"port: http, path: (\S+), interval", SERVE)
    [service] = re.findall(r"kind: Service\nmetadata:\n  name: (\w+)", SERVE)
    assert words[words.index("--allowed-host") + 1] == service
    assert set(re.findall(r"(?:containerPort|port): (\d+)", SERVE)) == {"9876"}

    def status(path: str, host: str) -> int:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Host": host})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    wait_until(lambda: status(probe, "10.0.0.7:9876") == 200, "it is ready")
    assert status(scraped, "10.0.0.7:9876") == 200
    assert status("/", f"{service}:9876") == 200
    assert status("/", "another:9876") == 421
