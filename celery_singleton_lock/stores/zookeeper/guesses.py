"""Whether a key is likely to be free, from what was found there the last time."""

from __future__ import annotations

from typing import Final

__all__ = ["Guesses"]

# Enough for the keys that are fought over at one time; what is forgotten costs one wrong guess.
_MAX_KEYS: Final = 1000


class Guesses:
    """Remembers the keys that were taken. Changed by single steps of the interpreter."""

    def __init__(self) -> None:
        self._taken: dict[str, None] = {}

    def is_free(self, key: str) -> bool:
        """Most keys are; one that was taken the last time is asked for before it is taken."""
        return key not in self._taken

    def learn(self, key: str, *, free: bool) -> None:
        """``key`` was read."""
        if free:
            self._taken.pop(key, None)
            return
        if len(self._taken) >= _MAX_KEYS:
            self._taken.clear()
        self._taken[key] = None
