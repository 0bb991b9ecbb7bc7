"""Polls for newer calls of held keys; a newer call cancels the running one (`cancel_running`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from dataclasses import dataclass

from ..errors import StoreError
from .clock import Clock
from .lease import Lease
from .store import Store
from .store_requests import NewestCall

logger = logging.getLogger("celery_singleton_lock")


@dataclass(slots=True)
class _Watch:
    """See `NewestCallPolls.watch`. ``due`` is the time of the next poll."""

    within: float
    on_newest: Callable[[NewestCall], None]
    due: float


class NewestCallPolls:
    """The leases that a newer call may cancel. Bodies add them; the heartbeat's thread polls.

    Args:
        store: The store of the calls.
        clock: The clock of the polls.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store, self._clock = store, clock
        self._watches: dict[Lease, _Watch] = {}

    def watch(self, lease: Lease, within: float, on_newest: Callable[[NewestCall], None]) -> float:
        """Poll for the newest call of the key; returns the time of the first poll.

        Args:
            lease: The lease.
            within: Seconds between two polls.
            on_newest: Called with the newest call, at each poll.
        """
        due = self._clock.now() + within
        self._watches[lease] = _Watch(within, on_newest, due)
        return due

    def due_times(self) -> list[float]:
        """The times of the next polls."""
        # list() is one step of the interpreter: a body may add a watch meanwhile.
        return [watch.due for watch in list(self._watches.values())]

    def poll(self, renewed: Container[Lease], patience: Callable[[float], float]) -> bool:
        """Ask for the newest calls of all watched keys if one is due: one command, not many.

        Args:
            renewed: The leases that are being renewed; others are watched no longer.
            patience: Returns the seconds to wait for the reply, from a time.

        Returns:
            Whether the store was asked.
        """
        now, newest_calls = self._clock.now(), self._store.newest_calls
        for lease in [one for one in list(self._watches) if one not in renewed]:
            del self._watches[lease]
        watches = dict(self._watches)
        if not any(watch.due <= now for watch in watches.values()):
            return False
        for watch in watches.values():
            watch.due = now + watch.within
        if newest_calls is None:
            return False
        keys = [lease.key for lease in watches]
        try:
            found = newest_calls.of(keys, timeout=patience(now))
            for watch, newest in zip(watches.values(), found, strict=True):
                if newest is not None:
                    watch.on_newest(newest)
        except StoreError:
            pass  # the renewals report a store that does not answer; the next poll is soon
        except Exception:
            logger.exception("singleton: looking for newer calls failed")
        return True
