"""The projects in examples/: the commands and the session of each README, as they are printed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from celery_singleton_lock.core.events import EventName
from example_project.private_server import PrivateServer, free_port
from tests.acceptance.test_readme import ROOT, blocks
from tests.conftest import missing
from tests.harness.processes import Process
from tests.integration.stage import wait_until

pytestmark = pytest.mark.slow


class Project:
    """A copy of one of the projects, on this test's Redis database and a port of its own."""

    def __init__(self, source: Path, folder: Path, redis_url: str) -> None:
        self.folder = shutil.copytree(source, folder)
        self.readme = (folder / "README.md").read_text()
        self.port = free_port()
        self.env = {"REDIS_URL": redis_url, "PYTHONPATH": str(ROOT)}
        self.processes: list[Process] = []

    def command(self, start: str) -> list[str]:
        """The README's one command that begins so, for the interpreter of the tests."""
        [line] = [
            line
            for block in blocks(self.readme, "")
            for line in block.splitlines()
            if line.startswith(start)
        ]
        program, *arguments = shlex.split(line)
        module = [] if program == "python" else ["-m", program]
        return [sys.executable, *module, *arguments]

    def start(self, start: str, *more: str, until: str) -> Process:
        command = [*self.command(start), *more]
        process = Process(command, env=self.env, name=start, cwd=self.folder).start()
        self.processes.append(process)
        process.wait_for_log(until)
        return process

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def session(self) -> list[str]:
        """Do what the README's session shows; returns what its commands printed.

        A command after ``sleep`` is repeated until it prints what it should.
        """
        [text] = [block for block in blocks(self.readme, "") if block.startswith("$ ")]
        steps = re.findall(r"^\$ (sleep \d+; )?(.*)\n(.*)$", text, flags=re.MULTILINE)
        return [self.step(command, output, bool(slept)) for slept, command, output in steps]

    def step(self, command: str, output: str, repeats: bool) -> str:
        shown = re.compile(re.escape(output).replace(re.escape("..."), ".*"))
        command = command.replace("localhost:8000", f"localhost:{self.port}")
        attempts: list[str] = []

        def goes_as_printed() -> bool:
            attempts.append(self.run("bash", "-c", command))
            return shown.fullmatch(attempts[-1]) is not None

        if repeats:
            wait_until(goes_as_printed, f"{command} prints {output}")
        else:
            assert goes_as_printed(), f"{command}\n{attempts}\ninstead of {output}"
        return attempts[-1]

    def status(self, path: str, *options: str) -> int:
        """The status of the response to curl with ``options``."""
        shown = ("-s", "-g", "-o", os.devnull, "-w", "%{http_code}")
        return int(self.run("curl", *shown, *options, f"localhost:{self.port}{path}"))


@pytest.fixture
def project(tmp_path: Path, redis_url: str) -> Iterator[Callable[..., Project]]:
    if shutil.which("curl") is None:
        missing("curl is not installed")
    projects: list[Project] = []

    def copy(name: str, url: str = redis_url) -> Project:
        projects.append(Project(ROOT / "examples" / name, tmp_path / name, url))
        return projects[-1]

    yield copy
    for process in [process for each in projects for process in each.processes]:
        process.end()
        print(f"--- {process.name}\n{process.log}")


def test_the_django_project(project: Callable[[str], Project], redis_client: redis.Redis) -> None:
    shop = project("django")
    shop.run(*shop.command("python manage.py migrate"))
    shop.start(
        "python manage.py runserver", f"{shop.port}", "--noreload", until="Quit the server with"
    )
    change = f"curl -s -d by=1 localhost:{shop.port}/products/2/change/"
    for _ in range(5):
        shop.step(change, '{"changed": 1}', repeats=False)
    assert redis_client.llen("celery") == 1, "a burst of changes is one message"
    for by in ("", "soon", "nan", "1e308", "1000001", "9" * 5000):
        assert shop.status("/products/2/change/", "-d", f"by={by}") == 400
    assert shop.status("/products/2/change/", "-d", "") == 400
    for product in (0, 99, 2**63, "9" * 500):
        assert shop.status(f"/products/{product}/") == 404
        assert shop.status(f"/products/{product}/change/", "-d", "by=1") == 404
    assert redis_client.llen("celery") == 1, "what is refused is not published"
    worker = shop.start("celery -A shop worker", until=r"ready\.")
    shop.session()
    show = f"curl -s localhost:{shop.port}/products/2/"
    shop.step(show, '{"stock": 5, "listed": 5}', repeats=True)
    assert worker.log.count("singleton locks live in") == 1, "pool processes don't repeat it"
    # The marketplace forgets its stocks, and the periodic task repairs them. Two beats, one leads.
    damage = "from shop.models import Listing; Listing.objects.update(stock=0)"
    often = "from django_celery_beat.models import *; IntervalSchedule.objects.update(every=1)"
    shop.run(sys.executable, "manage.py", "shell", "-c", f"{damage}\n{often}")
    leader = shop.start("celery -A shop beat", until="beat: Starting")
    leader.wait_for_event(EventName.LEADING)
    standby = shop.start("celery -A shop beat", until="beat: Starting")
    standby.wait_for_event(EventName.STANDING_BY)
    shop.step(show, '{"stock": 5, "listed": 5}', repeats=True)
    leader.terminate()
    standby.wait_for_event(EventName.LEADING)


def test_the_fastapi_project(project: Callable[[str], Project]) -> None:
    reports = project("fastapi")
    reports.start("uvicorn web:web", "--port", f"{reports.port}", until="Uvicorn running")
    for wait in ("-1", "nan", "inf", "1e308", "31", "soon"):
        assert reports.status(f"/customers/7?wait={wait}", "-X", "DELETE") == 422
    for customer in (-1, 0, 2**63, "9" * 300):
        assert reports.status(f"/customers/{customer}", "-X", "DELETE") == 422
        assert reports.status(f"/customers/{customer}/report", "-X", "POST") == 422
    assert reports.status("/tasks/no-such-task") == 200
    reports.start("celery -A tasks worker", until=r"ready\.")
    first, second, *_ = reports.session()
    assert first == second, "both orders have one task"
    task = re.search(r'"task":"(.*)"', first)
    assert task is not None
    state = f"curl -s localhost:{reports.port}/tasks/{task[1]}"
    reports.step(state, '{"state":"SUCCESS","file":"reports/7.txt"}', repeats=True)
    explained = reports.run(
        sys.executable, "-m", "celery", "-A", "tasks", "singleton", "explain", task[1]
    )
    assert "ran" in explained


def test_the_fastapi_project_asks_to_come_back_later_while_redis_is_down(
    project: Callable[..., Project],
) -> None:
    with PrivateServer() as server:
        reports = project("fastapi", server.url())
        reports.start("uvicorn web:web", "--port", f"{reports.port}", until="Uvicorn running")
        assert reports.status("/customers/7/report", "-X", "POST") == 202
        server.kill()
        assert reports.status("/customers/8/report", "-X", "POST") == 503
        assert reports.status("/tasks/some-task") == 503
        assert reports.status("/customers/8", "-X", "DELETE") == 503
