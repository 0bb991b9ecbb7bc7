"""The check of what a test leaves behind: what it finds, and what it allows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

CONFTEST = """
import pytest
from tests.harness import leftovers

leftovers.PATIENCE = 0.2
pytest_configure = leftovers.pytest_configure

@pytest.fixture(scope="session")
def session_file(tmp_path_factory):
    with open(tmp_path_factory.mktemp("session") / "file", "w") as file:
        yield file

@pytest.fixture(scope="module")
def shared():
    yield []
"""

TESTS = """
import os, socket, subprocess, sys, threading, time

kept = []

def test_leaves_thread():
    kept.append(threading.Event())
    threading.Thread(target=kept[-1].wait, name="kept", daemon=True).start()

def test_leaves_listening_socket():
    kept.append(socket.create_server(("127.0.0.1", 0)))

def test_leaves_file():
    kept.append(open(os.devnull))

def test_leaves_child():
    kept.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))

def test_of_a_session(session_file):
    session_file.write("text")

def test_waits_for_what_ends():
    threading.Thread(target=time.sleep, args=(0.1,)).start()

def test_leaves_garbage_only():
    ends = socket.socketpair()
    cycle = [ends]
    cycle.append(cycle)

def test_ends_its_child():
    kept[-1].kill()
    kept[-1].wait()

def test_a_failure_is_not_reported_twice():
    kept.append(os.pipe())
    raise AssertionError("the body")
"""

# The tests from the first use of a fixture of the module to its end are compared together.
TESTS_OF_A_MODULE = """
import os

def test_opens_for_the_module(shared):
    shared += os.pipe()

def test_closes_what_another_opened(shared):
    os.close(shared.pop())
    os.close(shared.pop())
"""


def test_what_a_test_leaves_behind_is_named_and_what_ends_or_is_shared_is_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_those.py").write_text(TESTS)
    (tmp_path / "test_together.py").write_text(TESTS_OF_A_MODULE)
    options = ["-q", "-rfE", "-p", "no:cacheprovider", "-p", "no:randomly"]
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *options,
            "-c",
            "/dev/null",
            "--rootdir",
            tmp_path,
            tmp_path,
        ],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "1000"},  # pytest cuts its lines
        capture_output=True,
        text=True,
        check=False,
    )
    errors = dict(re.findall(r"^ERROR \S+::(\w+) - Failed: (.*)$", run.stdout, re.MULTILINE))
    assert sorted(errors) == [
        "test_leaves_child",
        "test_leaves_file",
        "test_leaves_listening_socket",
        "test_leaves_thread",
    ]
    assert errors["test_leaves_thread"] == "this test has left thread 'kept'"
    assert "socket, listens at ('127.0.0.1', " in errors["test_leaves_listening_socket"]
    assert re.search(r"has left child process \d+: ", errors["test_leaves_child"])
    assert re.findall(r"^FAILED \S+::(\w+)", run.stdout, re.MULTILINE) == [
        "test_a_failure_is_not_reported_twice"
    ]
