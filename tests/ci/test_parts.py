"""The parts of the slow tests."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.ci import parts
from tests.ci.__main__ import ALONE_PARTS, SLOW_PARTS, VERSIONS


def test_each_module_is_in_one_part_and_the_parts_take_about_as_long() -> None:
    seconds = {f"m{number}": float(number) for number in range(1, 41)}
    dealt = parts.deal(dict.fromkeys(seconds, 1), seconds, 4)
    load = Counter[int]()
    for name, number in dealt.items():
        load[number] += int(seconds[name])
    assert set(dealt) == set(seconds)
    assert set(load) == {1, 2, 3, 4}
    assert max(load.values()) - min(load.values()) <= 2


def test_a_module_without_a_record_counts_its_tests() -> None:
    dealt = parts.deal({"a": 1, "b": 1, "long": 100}, {"a": 10.0, "b": 10.0}, 2)
    assert dealt["a"] == dealt["b"] != dealt["long"]


@pytest.mark.parametrize("text", ["", "3", "0/3", "4/3", "a/b"])
def test_a_part_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write K/N"):
        parts._part(text)


def test_consecutive_commits_run_all_parts() -> None:
    from tests.ci.__main__ import parts as rest

    found = rest()
    assert (
        len({step.name for step in found})
        == len(found)
        >= SLOW_PARTS + ALONE_PARTS + len(VERSIONS) + 1
    )
    assert {found[commits % len(found)].name for commits in range(77, 77 + len(found))} == {
        step.name for step in found
    }
