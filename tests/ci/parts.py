"""``pytest --part=2/10``: a share of the tests, cut between modules, about as long as the others.

Modules are dealt out by their recorded seconds, the longest first, each to the part that has least
so far. The same tests and the same record give the same parts, on every machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest

from tests.ci import record

#: Seconds for a test of a module that has no record.
_UNKNOWN = 4.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option of the command line."""
    parser.addoption("--part", metavar="K/N", type=_part, help="the K-th of N parts of the tests")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is in another part; after `-m` and `-k`, so that what they leave is dealt."""
    if (part := config.getoption("part")) is None:
        return
    number, count = part
    tests = Counter(_module(item) for item in items)
    dealt = deal(tests, record.read(), count)
    others = [item for item in items if dealt[_module(item)] != number]
    items[:] = [item for item in items if dealt[_module(item)] == number]
    config.hook.pytest_deselected(items=others)


def deal(tests: Mapping[str, int], seconds: Mapping[str, float], count: int) -> dict[str, int]:
    """The part of each module, from 1 to `count`; `tests` is how many tests a module has."""
    estimates = {name: seconds.get(name, _UNKNOWN * tests[name]) for name in tests}
    load = dict.fromkeys(range(1, count + 1), 0.0)
    dealt = {}
    for name in sorted(tests, key=lambda name: (-estimates[name], name)):
        dealt[name] = min(load, key=lambda number: (load[number], number))
        load[dealt[name]] += estimates[name]
    return dealt


def _module(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ValueError(f"--part={text}: write K/N, as 2/10")
    return int(number), int(count)
