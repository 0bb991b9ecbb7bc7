"""Which tests end differently with singletons, and which of them fail without them as often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

#: The outcome of a test that one of the two runs did not have.
ABSENT = "absent"

_FAILURES = frozenset({"failed", "error"})


def suspects(plain: Mapping[str, str], singleton: Mapping[str, str]) -> list[str]:
    """The tests that differ, and those that failed in both: there a difference may be hidden."""
    return [
        test
        for test in sorted({*plain, *singleton})
        if _differs(test, plain, singleton) or plain[test] in _FAILURES
    ]


def _differs(test: str, plain: Mapping[str, str], singleton: Mapping[str, str]) -> bool:
    return plain.get(test, ABSENT) != singleton.get(test, ABSENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """The outcomes of one test: of the whole suite, and of the test alone, in both modes."""

    plain: Counter[str]
    singleton: Counter[str]

    @property
    def differs(self) -> bool:
        """Whether the singletons are to blame: without them the test did not fail as often."""
        if ABSENT in self.plain + self.singleton:
            return True
        return _not_passed(self.singleton) > _not_passed(self.plain)

    def __str__(self) -> str:
        return f"plain {_text(self.plain)}; singleton {_text(self.singleton)}"


def _not_passed(outcomes: Counter[str]) -> int:
    return outcomes.total() - outcomes["passed"]


def _text(outcomes: Counter[str]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
