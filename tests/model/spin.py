"""Running spin: a model with some definitions becomes a program, and that program a verdict."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from time import monotonic

__all__ = ["Run", "Search", "SpinFailed", "missing_programs", "verify"]

_PROGRAMS = ("spin", "gcc")
_BITS_OF_HASH_TABLE = 24
_MOST_MEGABYTES = 6000
_DEPTH = 5_000_000


class Search(StrEnum):
    """How the states are searched."""

    ALL = "all"  # every state, depth first
    SHORTEST = "shortest"  # breadth first: the first error has the shortest trail
    # Every cycle in which each process goes on that can: for what must happen, and for that alone.
    FAIR = "fair"


_COMPILED = {
    Search.ALL: ["-DSAFETY"],
    Search.SHORTEST: ["-DSAFETY", "-DBFS"],
    Search.FAIR: ["-DNFAIR=4"],
}
_ARGUMENTS = {
    Search.ALL: [f"-m{_DEPTH}"],
    Search.SHORTEST: [],
    Search.FAIR: ["-A", "-a", "-f", f"-m{_DEPTH}"],
}


class SpinFailed(RuntimeError):
    """There is no verdict: the model can't be compiled, or its search did not end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A search that has ended.

    Attributes:
        error: What was violated; empty: nothing is.
        states: How many states were stored.
        steps: The steps of the trail, or of the longest path.
        seconds: That the search took, without compiling.
        reached: Lines of the model that a path came by; of a search through everything.
        trail: The steps to the error, in spin's words.
    """

    error: str
    states: int
    steps: int
    seconds: float
    reached: frozenset[int]
    trail: str = ""


def missing_programs() -> list[str]:
    """What has to be installed first."""
    return [program for program in _PROGRAMS if shutil.which(program) is None]


def verify(
    model: Path, definitions: tuple[str, ...], search: Search, *, timeout: float = 900
) -> Run:
    """Search the states of ``model`` with its ``definitions`` (``"TTL=2"``).

    Args:
        model: A Promela file.
        definitions: For its preprocessor.
        search: How.
        timeout: Seconds for the search.

    Raises:
        SpinFailed: There is no verdict.
    """
    defined = [f"-D{definition}" for definition in definitions]
    with tempfile.TemporaryDirectory(prefix="model-") as name:
        directory = Path(name)
        source = directory / model.name
        shutil.copy(model, source)
        _run(["spin", "-a", *defined, source.name], directory, 60)
        limits = [f"-DMEMLIM={_MOST_MEGABYTES}"]
        _run(["gcc", "-O1", *_COMPILED[search], *limits, "-o", "pan", "pan.c"], directory, 300)
        began = monotonic()
        searched = ["./pan", f"-w{_BITS_OF_HASH_TABLE}", *_ARGUMENTS[search]]
        report = _run(searched, directory, timeout)
        seconds = monotonic() - began
        run = read_report(report, model.name, seconds)
        if run.error:
            trail = _run(["spin", "-t", "-p", *defined, source.name], directory, 60)
            return replace(run, trail=trail)
        compiled = _lines_of(r"// STATE \d+ - ", model.name, (directory / "pan.m").read_text())
        return replace(run, reached=compiled - _lines_of(r"^\t", model.name, report))


def read_report(report: str, model: str, seconds: float) -> Run:
    """What the search printed.

    Raises:
        SpinFailed: It says that it is not complete, or not what a search says.
    """
    found = re.search(r"depth reached (\d+), errors: (\d+)", report)
    states = re.search(r"(\d+) states, stored", report)
    truncated = re.search(r"max search depth too small|out of memory|reached -DMEMLIM", report)
    if found is None or states is None or truncated is not None:
        why = truncated[0] if truncated else report[-2000:]
        raise SpinFailed(f"the search of {model} is not complete: {why}")
    error = re.search(r"pan:\d+: (.*?) \(at depth (\d+)\)", report)
    if bool(error) != (found[2] != "0"):
        raise SpinFailed(f"the search of {model} contradicts itself: {report[-2000:]}")
    return Run(
        error=error[1] if error else "",
        states=int(states[1]),
        steps=int(error[2] if error else found[1]),
        seconds=seconds,
        reached=frozenset(),
    )


def _lines_of(before: str, model: str, text: str) -> frozenset[int]:
    found = re.findall(rf"{before}{re.escape(model)}:(\d+)", text, re.MULTILINE)
    return frozenset(int(line) for line in found)


def _run(command: list[str], directory: Path, timeout: float) -> str:
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise SpinFailed(f"{command[0]} took more than {timeout:g} s") from exc
    if done.returncode != 0:
        raise SpinFailed(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}")
    return done.stdout
