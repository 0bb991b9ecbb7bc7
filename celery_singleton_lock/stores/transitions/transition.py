"""Transitions: pure functions from the entries of some keys to a reply and changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from celery_singleton_lock.core.lease import Holder, Record
from celery_singleton_lock.core.store import ClaimChange
from celery_singleton_lock.stores.transitions.entries import Claim, Entry, Held, LastRun, Marker

Reply = TypeVar("Reply")
SomeValue = TypeVar("SomeValue", Held, Claim, Marker, LastRun)


@dataclass(slots=True)
class Draft:
    """The entries that a transition reads, and the changes that it decides on.

    Attributes:
        entries: The entries that were read; a key without an entry is free.
        changes: The entry to write for each changed key; None: delete the key.
        read: The keys that the decision depends on.
    """

    entries: Mapping[str, Entry]
    changes: dict[str, Entry | None] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)

    def get(self, key: str) -> Entry | None:
        self.read.add(key)
        return self.changes[key] if key in self.changes else self.entries.get(key)

    def value(self, key: str, kind: type[SomeValue]) -> SomeValue | None:
        """The value of ``key`` if it is of ``kind``."""
        entry = self.get(key)
        return entry.value if entry and isinstance(entry.value, kind) else None

    def record(self, key: str) -> Record | None:
        entry = self.get(key)
        return entry.record(key) if entry else None

    def change_claim(
        self,
        change: ClaimChange,
        task: str,
        *,
        holder: Holder | None = None,
        lease_ttl: float | None = None,
    ) -> None:
        """Change the claim of ``task``, or write it if the key is free. Keep any other entry.

        Args:
            change: The change.
            task: The owner of the claim.
            holder: The holder in a claim that is written to a free key.
            lease_ttl: The ttl of the lease with which the claim is renewed; None: there is none.
        """
        claim = self.value(change.key, Claim)
        is_own = claim is not None and claim.owner == task
        if not is_own and self.get(change.key) is not None:
            return
        if change.phase is None:
            if is_own:
                self.changes[change.key] = None
            return
        publisher = claim.holder if claim else holder or Holder()
        ttl = change.ttl if lease_ttl is None else lease_ttl
        value = Claim(task, change.phase, publisher)
        self.changes[change.key] = Entry(value, ttl, renewed=lease_ttl is not None)


@dataclass(frozen=True, slots=True)
class Transition(Generic[Reply]):
    """One operation of a store.

    Attributes:
        keys: The keys to read.
        decide: Returns the reply and puts the changes into the draft. It reads no clock: the ttl of
            an entry is the number of seconds from now.
        likely_free: One of the keys. If it is free, the other keys are most likely free too, so a
            store may try the write before it reads. Empty: the store has to read first.
    """

    keys: tuple[str, ...]
    decide: Callable[[Draft], Reply]
    likely_free: str = ""
