"""Deferral of SIGTERM and SIGINT between the two steps of a tick."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Final

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class SignalDeferral:
    """Defers SIGTERM and SIGINT from the swap of a last run until the message is sent.

    Beat's signal handler raises SystemExit at any line; between the two steps it would lose that
    tick. A second signal is delivered at once, because the send itself may hang. Python runs
    handlers on the main thread only, so on other threads there is nothing to defer.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._deferred: int | None = None

    def begin(self) -> None:
        """Defer signals until :meth:`end`."""
        if self._handlers or threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):  # else the default action, which raises no exception
                self._handlers[number] = handler
                signal.signal(number, self._defer)

    def end(self) -> None:
        """Restore the handlers, then deliver the signal that was deferred."""
        while self._handlers:
            signal.signal(*self._handlers.popitem())
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            signal.raise_signal(deferred)

    def _defer(self, number: int, frame: FrameType | None) -> None:
        if self._deferred is None:
            self._deferred = number
        else:
            self.end()
