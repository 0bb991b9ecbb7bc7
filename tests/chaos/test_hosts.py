"""The hosts of a campaign: what each has for itself, and what its network loses.

They are made in a process of its own, whose network they change. It needs root: without it, these
tests are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from tests.harness.processes import ROOT

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="hosts need root and ip (iproute2)"
)

_SITE = """
    import json, os, socket, subprocess, sys, time
    from pathlib import Path
    from tests.chaos.hosts import STORE, Host, Worker, enter_network
    from tests.harness.processes import Process

    enter_network()

    class Program(Worker):
        "Any program of Python on a host."
        def __init__(self, host, code):
            self._host, self._numbers = host, {}
            Process.__init__(self, [*host.prefix, sys.executable, "-c", code], name="program")

    def run(host, code):
        program = Program(host, code).start()
        program.wait()
        return json.loads(program.log)

    one, two = Host(1, "same", None), Host(2, "same", None)
    for host in (one, two):
        host.start()
    try:
        answer = main()
    finally:
        for host in (one, two):
            host.stop()
    print(json.dumps(answer))
"""


def on_two_hosts(main: str) -> Any:
    """What the function ``main`` returns, in which ``one`` and ``two`` are hosts of one name."""
    program = textwrap.dedent(main) + textwrap.dedent(_SITE)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_two_hosts_with_one_name_share_nothing_by_which_a_process_is_known() -> None:
    one, two = on_two_hosts("""
        FACTS = '''
        import json, os, time
        from celery_singleton_lock.core.process import identity_of_this_process
        open("/dev/shm/mine", "x").close()
        print(json.dumps({
            "name": os.uname().nodename, "identity": identity_of_this_process(),
            "boot": time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic(),
            "pids": [int(name) for name in os.listdir("/proc") if name.isdecimal()],
        }))
        '''
        def main():
            return [run(one, FACTS), run(two, FACTS)]
    """)
    assert one["name"] == two["name"] == "same"
    assert one["identity"][:9] != two["identity"][:9]
    assert abs(one["boot"] - two["boot"]) > 1000
    assert max(one["pids"] + two["pids"]) < 100, "the PIDs of another namespace are visible"


def test_a_mute_host_is_not_told_that_its_packets_are_lost() -> None:
    before, lost = on_two_hosts("""
        ASK = '''
        import json, socket
        try:
            with socket.create_connection((%r, %d), timeout=%r) as link:
                print(json.dumps(link.recv(100).decode()))
        except OSError as error:
            print(json.dumps(type(error).__name__))
        '''
        def main():
            with socket.create_server((STORE, 0)) as server:
                server.settimeout(60)
                port = server.getsockname()[1]
                before = Program(one, ASK % (STORE, port, 30.0)).start()
                server.accept()[0].sendall(b"hello")
                before.wait()
                with one.mute(STORE):
                    lost = run(one, ASK % (STORE, port, 0.5))
            return [json.loads(before.log), lost]
    """)
    assert before == "hello"
    assert lost == "TimeoutError", "an error at once is no lost packet"
