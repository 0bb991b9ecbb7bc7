"""The list of mutants fits the package and the tests, without running them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.mutant import ROOT, Mutant, load

_MUTANTS = load()
# The tests of the contract are in the package, and run in the modules of its stores.
_CONTRACT = ROOT / "celery_singleton_lock" / "testing" / "contract"
_MOST_SLOW = 4


@pytest.mark.parametrize("mutant", _MUTANTS, ids=lambda mutant: mutant.name)
def test_the_text_that_a_mutant_replaces_occurs_once(mutant: Mutant) -> None:
    changed = mutant.changed()
    if mutant.file.endswith(".py"):
        compile(changed, mutant.file, "exec")


@pytest.mark.parametrize("mutant", _MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_of_a_mutant_exist(mutant: Mutant) -> None:
    assert mutant.tests
    for test in mutant.tests:
        path, _, name = test.partition("::")
        function = name.rpartition("::")[2].partition("[")[0]
        places = [ROOT / path, *_CONTRACT.glob("*.py")]
        assert any(f"def {function}(" in place.read_text() for place in places), test


def test_names_are_unique_and_few_mutants_are_slow() -> None:
    assert len({mutant.name for mutant in _MUTANTS}) == len(_MUTANTS)
    assert sum(mutant.slow for mutant in _MUTANTS) <= _MOST_SLOW


def test_a_text_that_does_not_occur_once_is_an_error(tmp_path: Path) -> None:
    mutant = Mutant(name="m", file="f", old="a", new="b", tests=())
    (tmp_path / "f").write_text("a a")
    with pytest.raises(ValueError, match="2 times in f"):
        mutant.changed(tmp_path)
