"""The pauses in the memory of this process; see `core.pauses`."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Final

from ..core.clock import Clock
from ..core.keyspace import Keyspace
from ..core.pauses import Pause, Pauses, longest

_NEVER: Final = float("inf")


class MemoryPauses(Pauses):
    """See `Pauses`.

    Args:
        clock: The clock of the store.
        guard: The lock of the store.
    """

    def __init__(self, clock: Clock, guard: threading.RLock) -> None:
        self._clock, self._guard = clock, guard
        # By name: the pause, and when it ends on the clock.
        self._pauses: dict[str, tuple[Pause, float]] = {}

    def pause(self, pause: Pause, *, timeout: float) -> Pause:
        with self._guard:
            stands = self._read(pause.name)
            if stands is not None and stands.ends_after(pause):
                return stands
            ends = _NEVER if pause.left is None else self._clock.now() + pause.left
            self._pauses[pause.name] = (pause, ends)
            return pause

    def resume(self, name: str, *, timeout: float) -> Pause | None:
        with self._guard:
            stands = self._read(name)
            self._pauses.pop(name, None)
            return stands

    def of_shard(self, shard: str, *, timeout: float) -> list[Pause]:
        with self._guard:
            found = [self._read(name) for name in sorted(self._pauses)]
            return [one for one in found if one and Keyspace.shard(one.name) == shard]

    def of(self, key: str) -> Pause | None:
        """The pause of a key, or of its scope: the one that ends last."""
        if not self._pauses:
            return None
        with self._guard:
            found = [self._read(name) for name in (key, Keyspace.scope_of(key))]
            return longest([one for one in found if one is not None])

    def _read(self, name: str) -> Pause | None:
        pause, ends = self._pauses.get(name, (None, 0.0))
        if pause is None or ends == _NEVER:
            return pause
        if (left := ends - self._clock.now()) <= 0:
            del self._pauses[name]
            return None
        return replace(pause, left=left)
