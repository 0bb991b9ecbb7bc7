"""The conditions of a benchmark: machine, servers, packages and seed."""

from __future__ import annotations

import os
import platform
import random
import re
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from example_project.private_server import ServerNotFound, find_binary, find_valkey
from tests.harness.etcd import find_etcd
from tests.harness.zookeeper import JAR


def seeded(given: int | None) -> int:
    """The seed that was given, or a new one."""
    return given if given is not None else random.SystemRandom().randrange(10**6)


def conditions(installed: Sequence[str], how: str, before: str | None = None) -> str:
    """The list that stands below a table; printed at once, so that it is there after an abort.

    Args:
        installed: The packages whose versions matter.
        how: Numbers of rounds and the like.
        before: The earlier revision that runs beside the present one.
    """
    lines = [_machine(), _servers(), _packages(installed), how]
    if before:
        lines.append(f"the earlier revision is {before}")
    text = "\n".join(f"- {line}" for line in lines)
    print(text, flush=True)
    return text


def _machine() -> str:
    """Processor, cores, and what they were doing."""
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    return (
        f"{_processor()}, {os.cpu_count()} cores; {platform.system()}, "
        f"{platform.python_implementation()} {platform.python_version()}; load before: {load}"
    )


def _packages(names: Sequence[str]) -> str:
    """Names and versions of what is installed."""
    return ", ".join(f"{name} {version(name)}" for name in names)


def _servers() -> str:
    """Names and versions of the servers that are there."""
    found = []
    for name, find in (("Redis", find_binary), ("Valkey", find_valkey)):
        try:
            found.append(f"{name} {_first_number(_output(find(), '--version'))}")
        except ServerNotFound:
            continue
    if etcd := find_etcd():
        found.append(f"etcd {_first_number(_output(etcd, '--version'))}")
    if JAR.exists():
        # Beside it are links with the version in their names.
        names = [path.name for path in JAR.parent.glob("zookeeper-[0-9]*.jar")]
        found.append(f"ZooKeeper {_first_number(' '.join(names))}")
    return ", ".join(found)


def _processor() -> str:
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match[1] if match else platform.processor() or platform.machine()


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _first_number(text: str) -> str:
    match = re.search(r"\d+\.\d+(\.\d+)?", text)
    return match[0] if match else "?"
