"""`python -m tests.benchmarks instructions`: the hot paths, in instructions of the interpreter.

The counts depend on no clock and no load, so that a change of a few percent shows in one run. They
are a report and not a test, because any ``if`` on a hot path changes them. A path that takes more
than its budget is named, with the functions that have most of its instructions.
"""

from __future__ import annotations

import argparse
import inspect
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from celery_singleton_lock import is_skipped
from celery_singleton_lock.core.key import KeyMaker
from celery_singleton_lock.stores.redis import connection as connections
from example_project.private_server import PrivateServer, find_binary
from tests.benchmarks.machine import conditions
from tests.benchmarks.publication import publish, published
from tests.costs.instructions import Instructions, least
from tests.costs.site import Site, open_site

__all__ = ["Path", "add_options", "as_table", "benchmark"]

_PACKAGES: Final = ("celery-singleton-lock", "celery", "redis")
# Percent more than the published number: a call of inspect.signature(), 700 instructions, exceeds
# it on a path of up to 7,000.
_BUDGET: Final = 10
_LEASES: Final = 200
_new = count()


@dataclass(frozen=True, slots=True)
class Path:
    """One row of the table.

    Attributes:
        found: The instructions of this run.
        known: The published number; None for a path that was never published.
    """

    found: Instructions
    known: int | None

    @property
    def more(self) -> float:
        """Than is published, as a share of it."""
        return self.found.total / self.known - 1 if self.known else 0.0

    @property
    def exceeds(self) -> bool:
        """Whether it is over its budget."""
        return self.known is not None and self.found.total * 100 > self.known * (100 + _BUDGET)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of this benchmark."""
    parser.add_argument(
        "--only", action="append", choices=list(_PATHS), metavar="PATH", help="may be repeated"
    )
    parser.add_argument(
        "--functions", type=int, default=0, help="how many functions of each path are listed"
    )
    parser.add_argument(
        "--save", action="store_true", help="write the table into docs/dev/architecture.md"
    )


def benchmark(options: argparse.Namespace) -> None:
    """Run it; the table goes to standard output, and with ``--save`` into the docs."""
    about = conditions(_PACKAGES, "the least of several counts")
    known: Mapping[str, Any] = published("instructions") or {"paths": {}}
    paths: dict[str, Path] = {}
    with (
        PrivateServer(binary=find_binary()) as server,
        open_site(server.url()) as redis,
        open_site("memory://") as memory,
    ):
        for name in options.only or _PATHS:
            found = _PATHS[name](memory if name.endswith("memory") else redis)
            paths[name] = Path(found, known["paths"].get(name))
    table = as_table(paths)
    print(f"\n{table}")
    python = ".".join(platform.python_version_tuple()[:2])
    if known.get("python", python) != python:
        print(f"The published numbers are those of Python {known['python']}; this is {python}.\n")
    for name, path in paths.items():
        if path.exceeds:
            print(f"{name} takes {path.more * 100:.0f} % more than is published.")
        if listed := options.functions or (20 if path.exceeds else 0):
            print(f"The functions with most of {name}:\n{path.found.most(listed)}\n")
    if options.save:
        totals = {name: path.found.total for name, path in paths.items()}
        data = {"python": python, "paths": {**known["paths"], **totals}}
        publish("instructions", f"{table}\n{about}\n", data=data)


def as_table(paths: Mapping[str, Path]) -> str:
    """Markdown: a row per path."""
    rows = ["| path | instructions | published before | budget |", "|---|---:|---:|---|"]
    for name, path in paths.items():
        verdict = f"{path.more * 100:+.1f} %, at most {_BUDGET:+} %: "
        verdict += "**exceeded**" if path.exceeds else "kept"
        before = ("", "") if path.known is None else (str(path.known), verdict)
        rows.append(f"| {name} | {path.found.total} | {' | '.join(before)} |")
    return "\n".join(rows) + "\n"


def _cycle(site: Site) -> Instructions:
    """Acquire and release, through the locker."""
    return least(site.cycle)


def _refusal(site: Site) -> Instructions:
    """An acquire of what another client has."""
    with site.taken():
        return least(site.acquire)


def _refusal_on_one_host(site: Site) -> Instructions:
    """The same, where the holder is a process of this host, which is looked for."""
    own = site.runtime.process
    lease = site.acquire(process=own)
    found = least(lambda: site.acquire(process=own))
    site.release(lease)
    return found


def _key(site: Site) -> Instructions:
    """What a worker makes of the arguments of a call and a template."""
    return least(lambda: site.ours.singleton_key_maker.key_suffix(["k"], {}))


def _key_of_all(_: Site) -> Instructions:
    """The same where the key is made of all arguments: a number of each kind."""
    signature = inspect.signature(lambda number, seconds: None)
    make = KeyMaker(None, signature, json.dumps).key_suffix
    return least(lambda: make((7, 0.5), {}))


def _task(site: Site) -> Instructions:
    """A task that does nothing, beyond the same without a lease."""
    plain = least(lambda: site.run(site.plain))
    return least(lambda: site.run(site.ours), before=site.drain).beyond(plain)


def _task_after_a_pause(site: Site) -> Instructions:
    """The same where the body and the time between tasks are longer: idle sockets are polled."""
    checked_after, connections._CHECKED_AFTER = connections._CHECKED_AFTER, -1.0
    try:
        return _task(site)
    finally:
        connections._CHECKED_AFTER = checked_after


def _skip(site: Site) -> Instructions:
    """A skipped call, beyond a task without a lease that does nothing."""
    plain = least(lambda: site.run(site.plain))
    with site.taken():
        assert is_skipped(site.run(site.ours))
        return least(lambda: site.run(site.ours), before=site.drain).beyond(plain)


def _publishing(site: Site) -> Instructions:
    """A call without a claim, beyond one of a plain task."""
    plain = least(lambda: site.publish(site.plain))
    return least(lambda: site.publish(site.ours)).beyond(plain)


def _claim(site: Site) -> Instructions:
    """A call with a claim that it gets, beyond one of a plain task."""
    plain = least(lambda: site.publish(site.plain))
    return least(lambda: site.publish(site.unique, f"{next(_new):06}")).beyond(plain)


def _renewals(site: Site) -> Instructions:
    """The renewal of 200 leases."""
    leases = [site.acquire(f"{number:03}") for number in range(_LEASES)]
    found = least(site.sweep, times=2, before=site.make_due)
    for lease in leases:
        site.release(lease)
    return found


_PATHS: Final[dict[str, Callable[[Site], Instructions]]] = {
    "acquire and release, memory": _cycle,
    "acquire and release, redis": _cycle,
    "refused acquire, redis": _refusal,
    "refused acquire on one host, redis": _refusal_on_one_host,
    "key of a template, redis": _key,
    "key of all arguments, redis": _key_of_all,
    "task, redis": _task,
    "task after a pause, redis": _task_after_a_pause,
    "skipped task, redis": _skip,
    "publish without a claim, redis": _publishing,
    "publish with a claim, redis": _claim,
    f"renewal of {_LEASES} leases, redis": _renewals,
}
