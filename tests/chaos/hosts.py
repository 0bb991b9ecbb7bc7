"""Several hosts on one machine: namespaces that are joined by veth pairs and a bridge.

Each host has a network with an address, PIDs, a ``/proc``, a ``/dev/shm``, a host name, IPC
objects, mounts, a boot time and, with libfaketime, a wall clock of its own. It shares the files
with the others, among them the program and the history, and the CPUs. The kernel's boot id is
shared as well, as between copies of one virtual machine.

The campaign's process enters a network namespace of its own first. That is the servers' machine: it
has the bridge, and an address for the lock store and another one for the broker. So nothing of the
network is left on the machine when the campaign has ended, and two campaigns do not meet.

What the network loses, it loses below TCP: an interface is down, or a routing rule drops packets
from one address to another. Neither end is notified.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from tests.chaos.clocks import HostClock
from tests.chaos.history import BOOT, PIDS_PER_BOOT
from tests.harness.processes import Process, is_running
from tests.harness.worker import CeleryWorker

#: The addresses of the lock store and the broker; those of the hosts follow `_FIRST_HOST`.
STORE, BROKER = "10.26.0.2", "10.26.0.3"
_NETWORK, _FIRST_HOST = "10.26.0", 11
_BRIDGE = "servers"
#: From linux/sched.h.
_CLONE_NEWNET, _CLONE_NEWPID = 0x40000000, 0x20000000
#: Seconds by which the boot times of two hosts differ.
_BOOT_TIME = 100_000
#: Seconds until a host runs, or is gone.
_TIMEOUT = 30.0
_POLL = 0.01

# The first process of a host. SIGCHLD is ignored, so that the kernel reaps its children.
_BOOT = "hostname {name} && mount -t tmpfs tmpfs /dev/shm && trap '' CHLD && exec sleep infinity"

_boots = count(1)
_libc = ctypes.CDLL(None, use_errno=True)


class HostsUnavailable(Exception):
    """This process cannot make hosts; the message is one line and says why."""


def enter_network() -> None:
    """Put this process into a new network with a bridge; to be called before it has threads.

    Raises:
        HostsUnavailable: It is not root, or the system lacks what hosts are made of.
    """
    for program in ("ip", "unshare", "nsenter"):
        if shutil.which(program) is None:
            raise HostsUnavailable(f"--hosts needs {program} (Debian: iproute2, util-linux)")
    try:
        _call("unshare", _CLONE_NEWNET)
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")  # without it, drops send ICMP errors
        _ip("link set lo up", f"link add {_BRIDGE} type bridge")
        _ip(*(f"address add {address}/24 dev {_BRIDGE}" for address in (STORE, BROKER)))
        _ip(f"link set {_BRIDGE} up")
        # The rules that drop packets come before the one that delivers them here.
        _ip("rule add pref 100 lookup local", "rule delete pref 0")
        trial = ["unshare", "--pid", "--fork", "--uts", "--mount", "--ipc", "--time", "true"]
        subprocess.run(trial, check=True, capture_output=True, text=True)
    except (OSError, AttributeError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", None) or error
        raise HostsUnavailable(f"--hosts needs root and namespaces: {str(why).strip()}") from None


class Host:
    """One host; the same name and address over its restarts.

    Args:
        number: 1, 2, 3 ...
        name: Its host name; two hosts may have the same.
        clock: Its wall clock; None for the machine's.
    """

    def __init__(self, number: int, name: str, clock: HostClock | None) -> None:
        self.number, self.name, self.clock = number, name, clock
        self.address = f"{_NETWORK}.{_FIRST_HOST + number}"
        self._interface = f"host{number}"
        self._process: Process | None = None
        self._boot = self._first_pid = 0

    def start(self) -> None:
        """Boot it. To be called by a thread that lives as long as the host."""
        if self._first_pid:
            _wait_until_gone(self._first_pid)
        self._boot = next(_boots)
        kinds = ["--net", "--pid", "--uts", "--ipc", "--time", "--mount-proc", "--kill-child"]
        offset = ["--boottime", str(self.number * _BOOT_TIME)]
        boot = ["sh", "-c", _BOOT.format(name=self.name)]
        command = ["unshare", "--fork", *kinds, *offset, *boot]
        self._process = Process(command, name=f"host-{self.number}").start()
        self._first_pid = self._wait_for_first_process(self._process)
        with suppress(subprocess.CalledProcessError):  # the kernel may have removed it by itself
            _ip(f"link delete {self._interface}")
        pair = f"{self._interface} type veth peer name eth0 netns {self._first_pid}"
        _ip(f"link add {pair}", f"link set {self._interface} master {_BRIDGE} up")
        inside = "link set lo up", f"address add {self.address}/24 dev eth0", "link set eth0 up"
        _ip(*inside, prefix=self._enter())

    def kill(self) -> None:
        """SIGKILL everything on it, while its network is down: a power cut.

        Its first process, and with it the host, is gone when all workers that were started there
        have been waited for.
        """
        assert self._process is not None
        self.unplug()
        self._process.kill()

    def stop(self) -> None:
        """End it, if it runs."""
        if self._process is not None and self._process.alive:
            self.kill()

    # --- its network ------------------------------------------------------------------------------

    def unplug(self) -> None:
        """No packet leaves or reaches it."""
        _ip(f"link set {self._interface} down")

    def plug(self) -> None:
        """Undo `unplug`."""
        _ip(f"link set {self._interface} up")

    @contextmanager
    def mute(self, server: str) -> Iterator[None]:
        """What it sends to the address ``server`` is lost."""
        with _dropped(self.address, server):
            yield

    @contextmanager
    def deaf(self, server: str) -> Iterator[None]:
        """What the address ``server`` sends to it is lost."""
        with _dropped(server, self.address):
            yield

    # --- processes on it --------------------------------------------------------------------------

    @property
    def prefix(self) -> list[str]:
        """What runs a program there; `children_here` adds the PID namespace."""
        environment = {BOOT: str(self._boot), **(self.clock.environment if self.clock else {})}
        return [*self._enter(), "env", *(f"{name}={value}" for name, value in environment.items())]

    @contextmanager
    def children_here(self) -> Iterator[None]:
        """Processes that this thread starts are in the host's PID namespace.

        Not by nsenter: it would fork, and its own process would get the signals. Meanwhile the
        thread cannot start threads.
        """
        with open("/proc/self/ns/pid") as ours, open(f"/proc/{self._first_pid}/ns/pid") as its:
            _call("setns", its.fileno(), _CLONE_NEWPID)
            try:
                yield
            finally:
                _call("setns", ours.fileno(), _CLONE_NEWPID)

    def number_of(self, pid: int) -> int:
        """The number by which a process of this host appears in the history.

        Args:
            pid: Its id in the campaign's PID namespace.
        """
        status = Path(f"/proc/{pid}/status").read_text()
        [pids] = [line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")]
        return self._boot * PIDS_PER_BOOT + int(pids[-1])

    def _enter(self) -> list[str]:
        kinds = ["--net", "--uts", "--mount", "--ipc", "--time"]
        return ["nsenter", "--target", str(self._first_pid), *kinds, "--wd"]

    @staticmethod
    def _wait_for_first_process(unshare: Process) -> int:
        """Its id here, once it has set up the host."""
        children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children")
        deadline = time.monotonic() + _TIMEOUT
        while time.monotonic() < deadline and unshare.alive:
            for pid in children.read_text().split():
                with suppress(OSError):
                    if Path(f"/proc/{pid}/comm").read_text() == "sleep\n":
                        return int(pid)
            time.sleep(_POLL)
        raise HostsUnavailable(f"a host did not boot: {unshare.tail()}")


class Worker(CeleryWorker):
    """A worker of a campaign, on a host or, without one, beside the campaign.

    Its ``pid`` and those of its children are the ones of the campaign's PID namespace. In the
    history, processes have numbers that are unique over all hosts.
    """

    def __init__(self, app: str, *, host: Host | None = None, **options: Any) -> None:
        self._host = host
        self._numbers: dict[int, int] = {}
        super().__init__(app, prefix=host.prefix if host else (), **options)

    def children(self) -> list[int]:
        return self._noted(super().children())

    def group(self) -> list[int]:
        return self._noted(super().group())

    def number_of(self, pid: int) -> int:
        """The number of one of its processes, which may be dead, in the history."""
        return self._numbers.get(pid, pid)

    def _launch(self, command: Sequence[str]) -> subprocess.Popen[str]:
        if self._host is None:
            return super()._launch(command)
        with self._host.children_here():
            popen = super()._launch(command)
        self._noted([popen.pid])
        return popen

    def _noted(self, pids: list[int]) -> list[int]:
        """Note the numbers while the processes live; ``pids``."""
        if self._host is not None:
            for pid in pids:
                with suppress(OSError, ValueError):  # it has just died
                    self._numbers[pid] = self._host.number_of(pid)
        return pids


def _call(function: str, *arguments: int) -> None:
    if getattr(_libc, function)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")


def _ip(*commands: str, prefix: Sequence[str] = ()) -> None:
    """Run ``ip`` once for all ``commands``."""
    batch = "\n".join(commands)
    program = [*prefix, "ip", "-batch", "-"]
    subprocess.run(program, input=batch, text=True, check=True, capture_output=True)


@contextmanager
def _dropped(source: str, target: str) -> Iterator[None]:
    rule = f"pref 10 from {source} to {target} blackhole"
    _ip(f"rule add {rule}")
    try:
        yield
    finally:
        _ip(f"rule delete {rule}")


def _wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + _TIMEOUT
    while is_running(pid):
        if time.monotonic() > deadline:
            raise AssertionError(f"process {pid} of a killed host still runs")
        time.sleep(_POLL)
