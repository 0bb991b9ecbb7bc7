"""What is broken on purpose is there to be broken: names and texts of the package change."""

from __future__ import annotations

import os

import pytest

from tests.chaos.broken import BREAKAGES, break_on_purpose


@pytest.mark.parametrize("part", BREAKAGES)
def test_a_part_that_a_variant_breaks_exists(part: str) -> None:
    pid = os.fork()
    if pid == 0:
        break_on_purpose(part)  # ends the process with 70 if it fails
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
