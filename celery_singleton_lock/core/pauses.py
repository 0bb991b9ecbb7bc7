"""Pauses: while a key or its scope is paused, none of its calls begins.

Overview
    A pause is a record of a shard. The step that grants a lease looks for one, so a pause holds
    from the store's reply on. Calls that run go on, and keep renewing their leases.

Guarantees
    A pause with a duration ends by the store's clock, and needs nobody for that. A pause that ends
    later is never replaced by one that ends earlier.

Non-guarantees
    A store that has lost its data has lost its pauses too.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import UTC, datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A pause of a key, or of all keys of a scope.

    Attributes:
        name: The full key. For a scope, it's the text with which the scope's keys in this shard
            begin.
        user: The login of the person who paused it.
        host: The host of that person.
        reason: The reason that the person gave. It may be empty.
        since: When the pause began, in seconds since the epoch.
        left: Seconds until the pause ends. None means that it lasts until somebody resumes it.
    """

    name: str
    user: str
    host: str
    reason: str = ""
    since: float = 0.0
    left: float | None = None

    def to_json(self) -> str:
        """Return the text that the store keeps next to the time of the end."""
        names = ("user", "host", "reason", "since")
        return json.dumps({name: getattr(self, name) for name in names})

    @classmethod
    def of(cls, name: str, text: str, left: float | None) -> Pause:
        """Return the pause whose :meth:`to_json` is ``text``, as far as the text can be read."""
        try:
            get = json.loads(text).get
            words = {one: str(get(one, "")) for one in ("user", "host", "reason")}
            return cls(name=name, left=left, since=float(get("since", 0.0)), **words)
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            return cls(name=name, user="an unknown user", host="an unknown host", left=left)

    def ends_after(self, other: Pause) -> bool:
        """Whether this pause ends later than ``other``, or as late."""
        return self.left is None or (other.left is not None and self.left >= other.left)

    def __str__(self) -> str:
        try:
            since = datetime.fromtimestamp(self.since, UTC).isoformat(timespec="seconds")
        except (ValueError, OverflowError, OSError):
            since = "an unknown time"  # written by another program
        ends = "until it is resumed" if self.left is None else f"for {self.left:.0f} s more"
        why = f": {self.reason}" if self.reason else ""
        return f"paused {ends}, since {since}, by {self.user} on {self.host}{why}"


class Pauses(ABC):
    """The pauses in a store. If a scope has keys in several shards, it's paused in each shard."""

    @abstractmethod
    def pause(self, pause: Pause, /, *, timeout: float) -> Pause:
        """Pause ``pause.name`` for ``pause.left`` seconds. None means until somebody resumes it.

        Returns:
            The pause that applies now. If an earlier pause ends later, it stays.
        """

    @abstractmethod
    def resume(self, name: str, /, *, timeout: float) -> Pause | None:
        """End the pause of ``name`` and return it, or return None if there was none."""

    @abstractmethod
    def of_shard(self, shard: str, /, *, timeout: float) -> list[Pause]:
        """Return the pauses of a shard, sorted by name."""


def longest(pauses: list[Pause]) -> Pause | None:
    """Return the pause that ends last, or None if there is none."""
    found: Pause | None = None
    for one in pauses:
        if found is None or not found.ends_after(one):
            found = one
    return found
