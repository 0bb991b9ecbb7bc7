"""A look for leases of this app's tasks under another ``global_keyprefix``.

When the prefix changes, or is set in one process and not in another, two workers of one deployment
have different keys for one resource.

Non-guarantees
    The look is bounded: it finds what is under the prefixes in `Settings.other_keyprefixes`, if
    the login may read it, and if a fence was granted there within a day. A store whose fences are
    no times (Redlock, etcd, ZooKeeper, memory) is not searched.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final
from urllib.parse import unquote

from ..core.heartbeat import MAX_TIMEOUT
from ..core.keyspace import Keyspace
from ..core.lease import Kind, Record
from ..core.store import Store
from ..errors import DOCS, StoreError
from ..runtime import Runtime, singleton_tasks

#: Where the documentation says what a change of the prefix means.
PAGE: Final = f"{DOCS}how-to/change.html#change-the-prefix"
# Seconds. Workers of another prefix that have taken no lease for so long are gone.
_FRESH: Final = 86400.0
# Seconds that the search for keys may delay the start of a worker.
_MAX_SEARCH: Final = 1.0


class _TooLong(Exception):
    """Raised by the store's report of progress, to end its search."""


def leases_elsewhere(runtime: Runtime, store: Store) -> list[Record]:
    """The leases of this app's tasks and beats under another prefix.

    Most processes have none to look for, and send nothing. The others read the last fence of
    each shard, which is the time of the last grant, and search only if one is fresh.
    """
    if (operators := store.operators) is None:
        return []
    end = runtime.clock.now() + _MAX_SEARCH

    def check(_: str) -> None:
        if runtime.clock.now() > end:
            raise _TooLong

    found: list[Record] = []
    for prefix in runtime.settings.other_keyprefixes:
        keyspace = runtime.keyspace_under(prefix)
        # The login may be one for this prefix alone.
        with suppress(StoreError, _TooLong):
            if _is_fresh(keyspace, store):
                operators.progress = check
                records = operators.scan(keyspace.match_all())
                found += [one for one in records if _is_ours(one, runtime)]
    operators.progress = None
    return found


def text_of(records: list[Record], runtime: Runtime) -> str:
    """What the leases of `leases_elsewhere` mean, in a sentence."""
    first = records[0]
    return (
        f"{first.holder.task}[{first.holder.task_id}] on {first.holder.worker} holds "
        f"{first.key!r} ({len(records)} such leases in all), and keys here begin with "
        f"{runtime.keyspace.start!r}. If its process belongs to this deployment (with "
        "another global_keyprefix), it and this one do not exclude each other"
    )


def _is_fresh(keyspace: Keyspace, store: Store) -> bool:
    """Whether a lease was granted under this prefix within a day."""
    for shard in keyspace.all_shards():
        trace = store.leases.trace(f"{shard}::", timeout=MAX_TIMEOUT)
        if trace.fence and trace.now - trace.fence / 1e6 < _FRESH:
            return True
    return False


def _is_ours(record: Record, runtime: Runtime) -> bool:
    name = record.key.partition("}:")[2]
    if record.kind is not Kind.LEASE:
        return False
    leader = runtime.keyspace.leader(runtime.settings.beat_name).partition("}:")[2]
    scopes = {task.singleton_scope for task in singleton_tasks(runtime.app)}
    return name == leader or unquote(name.partition(":")[0]) in scopes
