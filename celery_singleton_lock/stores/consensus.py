"""The base class of stores in a cluster whose server can't expire keys one by one.

The server expires all keys of an etcd lease or of a ZooKeeper session at once. So the process that
wrote a key deletes it when its ttl is over, if the process keeps other such keys alive.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

from ..core.clock import Clock, SystemClock
from ..core.lease import Lease
from ..core.process import this_process
from .store_url import StoreUrl
from .transitions import Changes, Draft, Transition, TransitionStore

#: A key and its owner: the token of a lease or the task of a claim. Two acquires of one key may
#: both lack a reply, and either may have been carried out. So each has a note of its own.
Name = tuple[str, str]
Own = TypeVar("Own")


class OwnKeys(Generic[Own]):
    """The notes of one process on keys that it wrote, or may have written, by name.

    Any thread may change notes; each change is one step of the interpreter.
    """

    def __init__(self) -> None:
        self.all: dict[Name, Own] = {}
        # The owner of the last write of each key that was acknowledged.
        self._written: dict[str, str] = {}

    def add(self, notes: Mapping[Name, Own]) -> dict[Name, Own | None]:
        """Add notes before the write is sent; return the notes that they replace."""
        before = {name: self.all.get(name) for name in notes}
        self.all.update(notes)
        return before

    def restore(self, notes: Mapping[Name, Own], before: Mapping[Name, Own | None]) -> None:
        """Undo :meth:`add` after the store has refused the write."""
        for name, note in notes.items():
            # Otherwise another thread has written the key meanwhile.
            if self.all.get(name) is note:
                if (old := before[name]) is None:
                    self.all.pop(name, None)
                else:
                    self.all[name] = old

    def acknowledge(self, notes: Mapping[Name, Own], replaced: Changes) -> None:
        """Note that the store has acknowledged the write of ``notes`` in place of ``replaced``."""
        for key, old in replaced.items():
            if old is not None and old.renewed and (key, old.owner) not in notes:
                self.forget((key, old.owner))
        for key, owner in notes:
            self._written[key] = owner

    def of(self, lease: Lease) -> list[Own]:
        """The notes on ``lease`` and its claim."""
        return [own for name in names_of(lease) if (own := self.all.get(name)) is not None]

    def written(self, key: str) -> Own | None:
        """The note on the last write of ``key`` that was acknowledged."""
        return self.all.get((key, self._written.get(key, "")))

    def forget(self, name: Name) -> None:
        """Remove the note: this process no longer has to expire the key."""
        self.all.pop(name, None)
        if self._written.get(name[0]) == name[1]:
            self._written.pop(name[0], None)


def names_of(lease: Lease) -> tuple[Name, Name]:
    """The names of a lease and its claim, if it has one."""
    return (lease.key, str(lease.token)), (lease.claim_key, lease.token.call_id)


class ConsensusStore(TransitionStore):
    """A store in an etcd cluster or a ZooKeeper ensemble.

    Args:
        url: See the subclass.
        clock: The clock of the deadlines.
        fence_base: Fences are above this number.
        options: Further options, as in the query of the URL.

    Raises:
        SettingsError: The URL can't be read.
    """

    port: ClassVar[int]
    options: ClassVar[frozenset[str]]

    def __init__(
        self,
        url: str,
        *,
        clock: Clock | None = None,
        fence_base: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        #: Members, login and options.
        self.url = StoreUrl.parse(url, port=self.port, host="", known=self.options, options=options)
        self._clock = clock or SystemClock()
        self._fence_base = fence_base
        self._start()

    def _start(self) -> None:
        """Create what a process can't share with its parent. Each forked process calls this."""
        self._process = this_process()

    def _deadline(self, timeout: float) -> float:
        """The deadline of an operation that begins now."""
        if self._process is not this_process():
            self._start()
        return self._clock.now() + timeout

    def _left(self, deadline: float) -> float:
        return max(0.0, deadline - self._clock.now())

    def _expire(self, name: Name, timeout: float) -> None:
        """Delete the lease or claim ``name``, whose heartbeat has ended.

        An entry that no longer depends on a heartbeat is kept.
        """
        key, owner = name

        def decide(draft: Draft) -> None:
            entry = draft.get(key)
            if entry and entry.renewed and entry.owner == owner:
                draft.changes[key] = None

        self.transact(Transition((key,), decide), timeout)
