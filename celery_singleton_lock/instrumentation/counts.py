"""Counts of the events that each task run has: worker events of them would be too many.

Overview
    Of the events with a histogram, a worker sends numbers instead of single events: rows of the
    event, the task, a value in seconds and how often it was. The values of one bucket of the
    histogram are one row, with their mean. So the counters and the sums of a monitor are those of
    the single events, and so are its buckets if it has the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

from .metrics import BUCKETS, HISTOGRAMS

#: The type of the worker event that has the counts, as ``counts``: a list of rows.
COUNTS: Final = "singleton-counts"
#: The events that are counted, each with the field of its data that is measured, in seconds.
COUNTED: Final = {name: field for name, (_, _, field) in HISTOGRAMS.items()}

#: Event, task, seconds, and how often.
Row = tuple[str, str, float, int]


class Counts:
    """Numbers of events by event, task and bucket."""

    def __init__(self) -> None:
        # The number and the sum of the values.
        self._cells: dict[tuple[str, str, int], tuple[int, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._cells)

    def add(self, event: str, task: str, seconds: float, times: int = 1) -> None:
        """Count an event that was emitted ``times`` times."""
        cell = event, task, bisect_left(BUCKETS, seconds)
        number, total = self._cells.get(cell, (0, 0.0))
        self._cells[cell] = number + times, total + seconds * times

    def rows(self) -> Iterator[Row]:
        """One row for each event, task and bucket."""
        for (event, task, bucket), (number, total) in self._cells.items():
            mean = total / number
            if bucket < len(BUCKETS):
                mean = min(mean, BUCKETS[bucket])  # a rounding error could exceed it
            yield event, task, mean, number
