"""What a rule is: the keys that it reads, and a decision from what stands in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from celery_singleton_lock.core.lease import Holder, Record
from celery_singleton_lock.core.store import ClaimChange
from celery_singleton_lock.stores.transitions.entries import Claim, Entry, Held, LastRun, Marker

__all__ = ["Draft", "Outcome", "Rule", "View", "numbered", "same_ttl"]

#: What stands in the keys; a key that is absent is free.
View = Mapping[str, Entry]

Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Reply]):
    """What a rule decided.

    Attributes:
        reply: The answer.
        changes: What shall stand in the keys (None: nothing).
        seen: The keys that it was decided from: those that it looked at.
    """

    reply: Reply
    changes: Mapping[str, Entry | None]
    seen: Collection[str]


@dataclass(frozen=True, slots=True)
class Rule(Generic[Reply]):
    """The keys that a decision is made from, and the decision.

    Attributes:
        keys: Those that are read.
        likely_free: One of them. If nothing stands there, most likely nothing stands in the others
            either; empty: no guess is better than reading.
    """

    keys: tuple[str, ...]
    _decide: Callable[[Draft], Reply]
    likely_free: str = ""

    def decide(self, view: View) -> Outcome[Reply]:
        draft = Draft(view)
        reply = self._decide(draft)
        return Outcome(reply, draft.changes, draft.seen)


@dataclass(slots=True)
class Draft:
    """What stands in the keys, and what a decision in the making has changed of it."""

    view: View
    changes: dict[str, Entry | None] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def get(self, key: str) -> Entry | None:
        self.seen.add(key)
        return self.changes[key] if key in self.changes else self.view.get(key)

    def put(self, key: str, entry: Entry) -> None:
        self.changes[key] = entry

    def delete(self, key: str) -> None:
        self.changes[key] = None

    def record(self, key: str) -> Record | None:
        entry = self.get(key)
        return entry.record(key) if entry else None

    def claim(self, key: str) -> Claim | None:
        entry = self.get(key)
        return entry.value if entry and isinstance(entry.value, Claim) else None

    def marker(self, key: str) -> Marker | None:
        entry = self.get(key)
        return entry.value if entry and isinstance(entry.value, Marker) else None

    def last_run(self, key: str) -> str | None:
        entry = self.get(key)
        return entry.value.text if entry and isinstance(entry.value, LastRun) else None

    def change_claim(
        self,
        change: ClaimChange,
        task: str,
        ttl: float = 0.0,
        holder: Holder | None = None,
        *,
        kept: bool = False,
    ) -> None:
        """Change the claim of a task, or make it anew; another's is never touched."""
        claim = self.claim(change.key)
        ours = claim is not None and claim.task == task
        if not ours and self.get(change.key) is not None:
            return
        if change.phase is None:
            if ours:
                self.delete(change.key)
            return
        publisher = claim.holder if claim else holder or Holder()
        self.put(change.key, Entry(Claim(task, change.phase, publisher), ttl, kept))


def numbered(entry: Entry, number: int) -> Entry:
    """``entry`` as it will be read once the store has given ``number`` to the write: fenced."""
    value = entry.value
    if isinstance(value, Held) and value.fence is None:
        return replace(entry, value=replace(value, fence=number))
    return entry


def same_ttl(found: float, new: float) -> bool:
    """Whether a ttl that was read is ``new``: texts round it."""
    return math.isclose(found, new, rel_tol=1e-3)
