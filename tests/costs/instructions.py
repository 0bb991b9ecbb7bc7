"""Instructions of the interpreter, counted per function: a cost that no load of a machine changes.

Counted is the bytecode that the calling thread executes while some work is done, in all Python
functions but those of the packages left out. Not callgrind: what that counts depends on how Python
and the C library were built, so its numbers would hold on one machine. The price: what a C function
does (a hash, the JSON encoder) counts as much as the call of it.

Python 3.12 and later need fewer instructions for the same source than 3.11 does.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePath
from types import CodeType, FrameType
from typing import Any, Final

__all__ = ["Instructions", "least"]

# A client library's own reading and writing differ from version to version, and aren't ours.
_LEFT_OUT: Final = ("redis",)
# How often the same work is counted. What interferes (a heartbeat's thread that has to be woken, a
# reply that comes in two parts) adds instructions and takes none away.
_TIMES: Final = 7


@dataclass(frozen=True, slots=True)
class Instructions:
    """How many were executed, by function."""

    by_function: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.by_function.total()

    def beyond(self, other: Instructions) -> Instructions:
        """What this has more than ``other``; a function may have less, which counts too."""
        difference = Counter(self.by_function)
        difference.subtract(other.by_function)
        return Instructions(difference)

    def each(self, number: int) -> float:
        """The total, for one of ``number`` things that were done."""
        return self.total / number

    def most(self, number: int = 80) -> str:
        """The functions with the most, for an error message."""
        rows = self.by_function.most_common(number)
        return "\n".join(f"{count:7} {name}" for name, count in rows)


def least(
    work: Callable[[], Any],
    times: int = _TIMES,
    before: Callable[[], Any] = lambda: None,
    left_out: Collection[str] = _LEFT_OUT,
) -> Instructions:
    """The count of ``work`` that had the least of several; it is done once before, to warm up.

    Args:
        work: What is counted.
        times: How often.
        before: Done before each, and not counted.
        left_out: Packages that aren't counted.
    """
    work()
    counts = []
    for _ in range(times):
        before()
        counts.append(_count(work, left_out))
    return min(counts, key=lambda found: found.total)


def _count(work: Callable[[], Any], left_out: Collection[str]) -> Instructions:
    collects = gc.isenabled()
    gc.disable()  # finalizers run on whatever thread collects
    try:
        by_code = _monitored(work) if sys.version_info >= (3, 12) else _traced(work)
    finally:
        if collects:
            gc.enable()
    by_function: Counter[str] = Counter()
    for code, number in by_code.items():
        if not _is_left_out(code, left_out):
            by_function[_name(code)] += number
    return Instructions(by_function)


def _traced(work: Callable[[], Any]) -> Counter[CodeType]:
    """Up to Python 3.11; later ones don't call a trace function at every instruction."""
    by_code: Counter[CodeType] = Counter()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            by_code[frame.f_code] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return by_code


def _monitored(work: Callable[[], Any]) -> Counter[CodeType]:
    by_code: Counter[CodeType] = Counter()
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    instruction, thread = monitoring.events.INSTRUCTION, threading.get_ident()

    def note(code: CodeType, _: int) -> None:
        if threading.get_ident() == thread:
            by_code[code] += 1

    monitoring.use_tool_id(monitoring.PROFILER_ID, __name__)
    monitoring.register_callback(monitoring.PROFILER_ID, instruction, note)
    monitoring.set_events(monitoring.PROFILER_ID, instruction)
    try:
        work()
    finally:
        monitoring.set_events(monitoring.PROFILER_ID, 0)
        monitoring.register_callback(monitoring.PROFILER_ID, instruction, None)
        monitoring.free_tool_id(monitoring.PROFILER_ID)
    return by_code


def _is_left_out(code: CodeType, left_out: Collection[str]) -> bool:
    parts = PurePath(code.co_filename).parts
    packages = [within for parent, within in pairwise(parts) if parent == "site-packages"]
    # Whether a thread that was started has to be waited for is up to the scheduler.
    waits = code.co_qualname.startswith(("Condition.", "Event."))
    return (
        code.co_filename == __file__
        or (waits and code.co_filename == threading.__file__)
        or any(name in left_out for name in packages)
    )


def _name(code: CodeType) -> str:
    path = PurePath(code.co_filename)
    return f"{path.parent.name}/{path.name}: {code.co_qualname}"
