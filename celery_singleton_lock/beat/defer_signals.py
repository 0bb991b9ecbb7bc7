"""Holding SIGTERM and SIGINT back while something that has begun must end."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Final

__all__ = ["Shield"]

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Shield:
    """Between an entry's swap and its send, the signals that end a beat wait.

    Beat's handler raises SystemExit at whatever line it strikes; between the two it would lose that
    run. A second signal is let through at once: the send may be what hangs. On other threads than
    the main one no handler runs, so there is nothing to hold back.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._held: int | None = None

    def raise_(self) -> None:
        """Hold signals back until :meth:`lower`."""
        if self._handlers or threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):  # the default action needs no shield against our own frames
                self._handlers[number] = handler
                signal.signal(number, self._hold)

    def lower(self) -> None:
        """Let signals through again, first the one that was held back."""
        while self._handlers:
            signal.signal(*self._handlers.popitem())
        held, self._held = self._held, None
        if held is not None:
            signal.raise_signal(held)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._held is None:
            self._held = number
        else:
            self.lower()
