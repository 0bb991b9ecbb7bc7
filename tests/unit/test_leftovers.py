"""The check of what a test leaves behind: what it finds, and what it allows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

CONFTEST = """
import subprocess, sys
import pytest
from tests.harness import leftovers
from tests.harness.processes import Process

leftovers.PATIENCE = 0.2
pytest_configure = leftovers.pytest_configure

@pytest.fixture(scope="session")
def session_file(tmp_path_factory):
    with open(tmp_path_factory.mktemp("session") / "file", "w") as file:
        yield file

@pytest.fixture(scope="session")
def session_server():
    process = Process([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process.start()
    process.kill()
"""

TESTS = """
import gc, logging, os, socket, subprocess, sys, threading, time, types
import celery
import pytest

kept = []
unsubscribed = []

def test_leaves_thread():
    kept.append(threading.Event())
    threading.Thread(target=kept[-1].wait, name="kept", daemon=True).start()

def test_leaves_listening_socket():
    kept.append(socket.create_server(("127.0.0.1", 0)))

def test_leaves_file():
    kept.append(open(os.devnull))

def test_uses_celerys_own_fixture(celery_app):
    pass

def test_shares_a_task():
    @celery.shared_task(name="sync")
    def sync(): ...

def test_gets_no_task_that_another_has_shared():
    with celery.Celery("later", set_as_current=False) as app:
        assert "sync" not in app.tasks

def test_leaves_child():
    kept.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))

def test_of_a_session(session_file):
    session_file.write("text")

def test_starts_a_server_of_the_session_again(session_server):
    session_server.kill()
    session_server.start()

def test_waits_for_what_ends():
    threading.Thread(target=time.sleep, args=(0.1,)).start()

def test_leaves_garbage_only():
    ends = socket.socketpair()
    cycle = [ends]
    cycle.append(cycle)

class Slow:
    def __init__(self):
        self.ends, self.cycle = socket.socketpair(), self

    def __del__(self):
        time.sleep(0.3)
        again = [socket.socketpair()]
        again.append(again)

def test_waits_for_what_a_slow_destructor_leaves_to_the_next_collection():
    slow = Slow()
    gc.collect()
    gc.collect()

def test_deletes_a_result():
    with celery.Celery("ended", backend="redis://127.0.0.1:1", set_as_current=False) as app:
        result = app.AsyncResult("id")
        consumer = app.backend.result_consumer
        consumer.subscribed_to.add("celery-task-meta-id")
        consumer._pubsub = types.SimpleNamespace(unsubscribe=unsubscribed.append)
        cycle = [result, socket.socketpair()]
        cycle.append(cycle)

def test_no_result_is_unsubscribed_by_the_check():
    assert not unsubscribed

class Fails:
    def __init__(self):
        self.ends = socket.socketpair()

    def __del__(self):
        raise ValueError

@pytest.fixture
def fails():
    return Fails()

def test_is_in_the_error_of_a_destructor_only(fails):
    pass

def fail():
    ends = socket.socketpair()
    raise ValueError

@pytest.fixture
def logs_at_the_end():
    yield
    try:
        fail()
    except ValueError as exc:
        logging.warning("%s", exc)

def test_is_in_the_log_only(logs_at_the_end):
    pass

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
import pytest

@pytest.fixture(scope="module")
def shared():
    yield []

def test_opens_for_the_module(shared):
    shared += os.pipe()

def test_closes_what_another_opened(shared):
    os.close(shared.pop())
    os.close(shared.pop())
"""

# A fixture that stays gets the number of a descriptor that ends at its setup.
TESTS_OF_A_NUMBER = """
import os
import pytest

opened = []

@pytest.fixture(scope="module")
def shared():
    opened.append(os.open(os.devnull, os.O_RDONLY))

@pytest.fixture(scope="session")
def staying():
    os.close(opened.pop())
    return os.pipe()

def test_opens_for_the_module(shared):
    pass

def test_uses_what_stays(shared, request):
    request.getfixturevalue("staying")
"""


def test_what_a_test_leaves_behind_is_named_and_what_ends_or_is_shared_is_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_those.py").write_text(TESTS)
    (tmp_path / "test_together.py").write_text(TESTS_OF_A_MODULE)
    (tmp_path / "test_number.py").write_text(TESTS_OF_A_NUMBER)
    options = (
        "-q",
        "-rfE",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "-c",
        "/dev/null",
    )
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", tmp_path, tmp_path],
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
