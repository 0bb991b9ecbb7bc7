"""The parts of the slow tests."""

from __future__ import annotations

from collections import Counter

from tests.ci import parts
from tests.ci.__main__ import parts as rest


def test_each_module_is_in_one_part_and_the_parts_take_about_as_long() -> None:
    seconds = {f"m{number}": float(number) for number in range(1, 41)}
    # A module without a record counts its tests.
    dealt = parts.deal({**dict.fromkeys(seconds, 1), "unknown": 10}, seconds, 4)
    load = Counter[int]()
    for name, number in dealt.items():
        load[number] += int(seconds.get(name, 40))
    assert set(dealt) == {*seconds, "unknown"}
    assert set(load) == {1, 2, 3, 4}
    assert max(load.values()) - min(load.values()) <= 2


def test_consecutive_commits_run_all_parts() -> None:
    found = rest()
    names = {step.name for step in found}
    assert {found[commits % len(found)].name for commits in range(77, 77 + len(found))} == names
    assert len(names) == len(found)
