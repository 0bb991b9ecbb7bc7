"""Whose death is proven: real processes, in this PID namespace and in others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from celery_singleton_lock.core import process
from celery_singleton_lock.core.process import (
    identity_of_this_process,
    is_proven_dead,
    this_process,
)
from tests.harness.deliveries import wait_until

OWN = identity_of_this_process()
pytestmark = pytest.mark.skipif(not OWN, reason="needs Linux's /proc, of this PID namespace")

# The module alone: its package imports Celery, which takes most of the time of such a process.
NAMED = f"""
import os, runpy
identity_of_this_process = runpy.run_path({process.__file__!r})["identity_of_this_process"]
print(os.getpid(), identity_of_this_process(), flush=True)
"""
WAITS = f"{NAMED}\nimport time\ntime.sleep(600)"
# The main thread ends by the system call of that name; the other one runs on.
WITHOUT_MAIN_THREAD = f"""{NAMED}
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).syscall(60, 0)
"""


class Child:
    """A process that has printed its PID and its identity."""

    def __init__(self, code: str, prefix: Sequence[str] = ()) -> None:
        self.popen = subprocess.Popen(
            [*prefix, sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
        )
        assert self.popen.stdout is not None
        with self.popen.stdout as out:
            pid, _, self.identity = out.readline().rstrip("\n").partition(" ")
        self.pid = int(pid or 0)

    def state(self) -> str:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def is_dead(self, own: str = OWN) -> bool:
        return is_proven_dead(self.identity, self.pid, own)

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()


Start = Callable[..., Child]


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as ends:

        def begin(code: str = WAITS, prefix: Sequence[str] = ()) -> Child:
            child = Child(code, prefix)
            ends.callback(child.end)
            return child

        yield begin


def in_namespaces(*options: str) -> list[str]:
    """The command that runs another one in new namespaces; skips the test where it may not."""
    prefix = ["unshare", *options]
    try:
        subprocess.run([*prefix, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as exc:
        pytest.skip(f"new namespaces are not permitted here: {exc}")
    return prefix


def test_a_killed_process_is_dead_and_a_running_or_stopped_one_is_not(start: Start) -> None:
    child = start()
    assert not child.is_dead()
    child.popen.send_signal(signal.SIGSTOP)
    wait_until(lambda: child.state() == "T", "it is stopped")
    assert not child.is_dead()
    child.end()
    assert child.is_dead()


def test_a_zombie_is_dead_unless_another_of_its_threads_lives(start: Start) -> None:
    zombie, partial = start(), start(WITHOUT_MAIN_THREAD)
    zombie.popen.kill()
    for child in (zombie, partial):
        wait_until(lambda child=child: child.state() == "Z", "it is a zombie")
    assert zombie.is_dead()
    assert not partial.is_dead()


def test_the_former_process_of_a_reused_pid_is_dead_on_this_host_alone(start: Start) -> None:
    child = start()
    start_time = int(child.identity[-5:], 16)
    child.identity = f"{child.identity[:-5]}{(start_time - 1) % 0x100000:05x}"
    assert child.is_dead()
    child.identity = f"elsewhere{child.identity[-5:]}"
    assert not child.is_dead()


@pytest.mark.parametrize(
    "identity",
    ["", "x", OWN[:9], f"{OWN}0", f"{'x' * 9}00000"],
    ids=["none", "short", "host alone", "long", "another host"],
)
def test_an_identity_of_another_host_or_of_no_host_proves_nothing(
    identity: str, start: Start
) -> None:
    child = start()
    child.end()
    assert child.is_dead()
    assert not is_proven_dead(identity, child.pid, OWN)
    assert not child.is_dead(own="")


@pytest.mark.parametrize(
    "pid", [0, -1, -os.getpid(), 2**70], ids=["zero", "all", "own group", "huge"]
)
def test_a_number_that_is_no_pid_proves_nothing(pid: int) -> None:
    assert not is_proven_dead(OWN, pid, OWN)


def test_a_process_that_exists_but_cannot_be_read_is_not_dead(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another user's is where /proc is mounted with hidepid."""
    child = start()
    monkeypatch.setattr(process, "_stat_of", lambda pid: None)
    assert not child.is_dead()


def test_a_fork_has_an_identity_of_its_own_and_proves_nothing_by_its_parents(start: Start) -> None:
    dead = start()
    dead.end()
    assert dead.is_dead()
    pid = os.fork()
    if not pid:
        # The parent waits for the exit status alone.
        is_same = identity_of_this_process()[:9] != OWN[:9]
        os._exit(is_same or dead.is_dead())
    assert os.waitpid(pid, 0)[1] == 0


def test_without_proc_there_is_no_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on other systems than Linux."""
    monkeypatch.setattr(process, "_BOOT_ID", "/proc/no/such/file")
    assert identity_of_this_process() == ""


@pytest.mark.parametrize(
    "options",
    [
        ["--pid", "--fork", "--mount-proc"],
        ["--uts", "--", "sh", "-c", 'hostname another && exec "$@"', "sh"],
        ["--time", "--fork"],
        [
            "--mount",
            "--",
            "sh",
            "-c",
            f'mount --bind {__file__} {process._BOOT_ID} && exec "$@"',
            "sh",
        ],
    ],
    ids=["pid", "hostname", "time", "boot"],
)
def test_a_process_of_another_namespace_boot_or_hostname_is_never_dead(
    options: list[str], start: Start
) -> None:
    child = start(NAMED, in_namespaces(*options))
    child.popen.wait()
    assert len(child.identity) == len(OWN)
    assert child.identity[:9] != OWN[:9]
    assert not child.is_dead()


def test_the_proc_of_another_pid_namespace_gives_no_identity(start: Start) -> None:
    """There /proc/<pid> is another process than kill(pid) means."""
    child = start(NAMED, in_namespaces("--pid", "--fork"))
    assert child.identity == ""


# A process forks a child and ends; its child forks, and that fork gets the number of the first.
NUMBER_GIVEN_AGAIN = """
import os, time
from celery import Celery
from celery_singleton_lock import hold
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.worker.shared_memory import SharedMemory

app, memory = Celery(broker="memory://", set_as_current=False), SharedMemory()
app.conf.singleton_lock_url = "memory://"
if not os.fork():
    first, runtime = os.getpid(), Runtime.of(app)
    block = hold("k", scope="s", app=app)
    lease = block.__enter__()
    if os.fork():
        os._exit(0)
    # init reaps it
    while os.path.exists(f"/proc/{first}"):
        time.sleep(0.01)
    with open("/proc/sys/kernel/ns_last_pid", "w") as last:
        last.write(str(first - 1))
    if (child := os.fork()) == 0:
        print(os.getpid() == first, Runtime.of(app) is runtime, lease.held_here, flush=True)
    else:
        os.waitpid(child, 0)
    os._exit(0)
try:
    while True:
        os.wait()
except ChildProcessError:
    pass
"""


def test_a_fork_takes_nothing_of_an_ancestor_for_its_own_though_it_has_its_number() -> None:
    prefix = in_namespaces("--pid", "--fork", "--mount-proc")
    done = subprocess.run(
        [*prefix, sys.executable, "-c", NUMBER_GIVEN_AGAIN],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "ns_last_pid" in done.stderr:
        pytest.skip("the number of the next process can't be chosen here")
    assert done.stdout.split() == ["True", "False", "False"], done.stderr


def test_a_process_knows_itself_and_not_its_fork_though_no_hook_has_run() -> None:
    """A server in C that embeds Python may fork without its hooks."""
    mark = this_process()
    assert this_process() is mark
    fork = """
import ctypes, os
from celery_singleton_lock.core.process import this_process
before = this_process()
if ctypes.CDLL(None).fork() == 0:
    print(this_process() is before, flush=True)
    os._exit(0)
os.wait()
"""
    done = subprocess.run([sys.executable, "-c", fork], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr
