"""The sinks of this process's events: the log, the sinks that were added, and the signals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ..core.events import Event, EventName, Sink
from ..core.observers import Observer
from .log import LEVELS, log_event, logger
from .signals import RECEIVERS, SIGNALS
from .worker_events import EventPipe

#: The sinks of all runtimes. An exception that ends a body while its receivers run, such as that of
#: a lost lease, ends the emission too, so the receivers come last.
SINKS: Final[list[Sink]] = [log_event, RECEIVERS]

# The signal and the level of each event. One table for all sinks, because each task asks several
# times.
_OBSERVERS: Final[dict[EventName, tuple[Any, int]]] = {
    name: (SIGNALS[name], LEVELS[name]) for name in EventName
}


class _Added:
    """Stands for the signal of each event where a sink was added: that uses all events."""

    receivers = True


def add_sink(sink: Callable[[Event], None]) -> None:
    """Call ``sink`` with each event of this process, and of the processes that it forks."""
    SINKS.insert(-1, Observer(sink, "singleton-sink"))
    for name, (_, level) in _OBSERVERS.items():
        _OBSERVERS[name] = _Added, level


def is_observed(name: EventName) -> Any:
    """Whether any sink currently uses events of this name."""
    signal, level = _OBSERVERS[name]
    return signal.receivers or logger.isEnabledFor(level) or EventPipe.switch[0]


def has_observers(name: EventName) -> Any:
    """Whether a sink that may block uses events of this name: all but the worker events."""
    signal, level = _OBSERVERS[name]
    return signal.receivers or logger.isEnabledFor(level)
