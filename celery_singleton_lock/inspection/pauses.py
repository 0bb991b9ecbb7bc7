"""Pause a key or a scope, resume it, and list what is paused.

Guarantees
    No call of a key begins after its pause has returned, and none is lost: the calls wait in the
    queues of their keys, in the store. A run that has begun goes on.

Non-guarantees
    A scope of a cluster is paused shard by shard. If the store fails meanwhile, some of its keys
    are paused, and others are not; the call can be repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from celery import Celery
from celery.utils.nodenames import gethostname

from ..celery_compat import real_app
from ..core.events import Event, EventName
from ..core.heartbeat import MAX_TIMEOUT
from ..core.keyspace import BEAT_SCOPE, Keyspace
from ..core.pauses import Pause, Pauses
from ..errors import LockKeyError, SettingsError, StoreError, StoreUnavailable
from ..known_keys import PAUSE, refuse_foreign_key, refuse_foreign_scope
from ..option_values import positive
from ..runtime import Runtime
from ..typed_keys import MAX_REASON_CHARS, is_in_scope, login, scope_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """A pause of a key, or of a scope with all its keys.

    Attributes:
        scope: The scope.
        key: The full key. None if the whole scope is paused.
        user: The login of whoever paused it.
        host: Their host.
        reason: Why, in their words. It may be empty.
        since: When it was paused. None if unknown.
        left: The seconds until the pause ends. None if it lasts until somebody resumes it.
    """

    scope: str
    key: str | None
    user: str
    host: str
    reason: str
    since: datetime | None
    left: float | None

    @classmethod
    def of(cls, pause: Pause) -> Paused:
        """Make a ``Paused`` of a pause in the store."""
        since = None
        with suppress(ValueError, OverflowError, OSError):  # written by another program
            since = datetime.fromtimestamp(pause.since, UTC)
        return cls(
            scope=scope_of(pause.name),
            key=pause.name if ":" in pause.name.partition("}:")[2] else None,
            user=pause.user,
            host=pause.host,
            reason=pause.reason,
            since=since,
            left=pause.left,
        )

    @property
    def name(self) -> str:
        """The key, or the scope."""
        return self.key or self.scope

    def includes(self, key: str) -> bool:
        """Whether calls of a full key are paused by it."""
        return Keyspace.lock_of(key) == self.key if self.key else is_in_scope(key, self.scope)

    def __str__(self) -> str:
        what = "key" if self.key else "scope"
        since = "" if self.since is None else f" since {self.since.isoformat(timespec='seconds')}"
        ends = "until it is resumed" if self.left is None else f"for {self.left:.0f} s more"
        why = f": {self.reason}" if self.reason else ""
        return f"{what} {self.name} is paused{since}, {ends}, by {self.user} on {self.host}{why}"


def pause(
    key: str | None = None,
    *,
    scope: str | None = None,
    duration: float | timedelta | None = None,
    reason: str = "",
    user: str = "",
    app: Celery | None = None,
) -> Paused:
    """Stop new calls of a key, or of a whole scope, from starting until you resume it.

    Running calls go on. New calls wait in the queue of their key, whatever their ``on_conflict``
    (those with ``debounce`` or ``on_duplicate="replace"`` are requeued). When the pause ends, the
    waiting calls run in the order in which they arrived, within ``limit`` and ``rate``. Calls that
    arrive later may overtake them, except with ``on_conflict="queue"``. Without a ``duration``, the
    pause lasts until ``resume()``.

    Example, in a task whose partner answers with 429::

        pause(current_lease().key, duration=retry_after, reason="429 from the partner")

    Args:
        key: The key without the scope, as for ``hold()``; or a full key, without ``scope``. None
            pauses all keys of ``scope``.
        scope: The ``scope`` of the tasks, or a task's name.
        duration: For how long, in seconds. By default until ``resume()``.
        reason: Why, for everybody who asks why a call doesn't run; cut to 500 characters.
        user: Who pauses it. By default the login of this process.
        app: The Celery app whose store is used. By default the current app.

    Returns:
        The pause in force. If it was paused for longer before, that pause stays.

    Raises:
        LockKeyError: No task can have this key, or the scope is Beat's own.
        SettingsError: The store can't pause.
        StoreError: The store refused the request, or can't be reached. The pause may be in
            force all the same.
        TypeError, ValueError: An argument is wrong.
    """
    app = real_app(app)
    runtime = Runtime.of(app)
    left = None if duration is None else positive("pause(duration)", duration, "leave it out")
    names = _names(runtime, key, scope, where="pause")
    who, why, since = user or login(), reason[:MAX_REASON_CHARS], runtime.clock.wall()
    part = _part(runtime)
    for name in names:
        new = Pause(name=name, user=who, host=gethostname(), reason=why, since=since, left=left)
        found = part.pause(new, timeout=MAX_TIMEOUT)
    paused = Paused.of(found)
    data = {"seconds": left, "by": f"{who} on {gethostname()}", "reason": why}
    _emit(runtime, EventName.PAUSED, paused, data)
    return paused


def resume(
    key: str | None = None,
    *,
    scope: str | None = None,
    user: str = "",
    app: Celery | None = None,
) -> Paused | None:
    """End a pause, so that the calls that wait for it run.

    If a resume was interrupted, call this again. A key whose scope is paused stays paused.

    Args:
        key: As for ``pause()``.
        scope: As for ``pause()``.
        user: Who resumes it. By default the login of this process.
        app: The Celery app whose store is used. By default the current app.

    Returns:
        The pause that was ended. None if there was none.

    Raises:
        LockKeyError: No task can have this key.
        SettingsError: The store can't pause.
        StoreError: The store refused the request, or can't be reached.
    """
    app = real_app(app)
    runtime = Runtime.of(app)
    found: Pause | None = None
    part = _part(runtime)
    for name in _names(runtime, key, scope, where="resume"):
        found = part.resume(name, timeout=MAX_TIMEOUT) or found
        _wake(runtime, name)
    if found is None:
        return None
    paused = Paused.of(found)
    _emit(runtime, EventName.RESUMED, paused, {"by": f"{user or login()} on {gethostname()}"})
    return paused


def pauses(app: Celery) -> list[Paused]:
    """List what is paused: scopes, then keys. Empty if the store can't pause.

    Raises:
        StoreError: The store refused the request, or can't be reached.
    """
    runtime = Runtime.of(app)
    if (part := runtime.store.pauses) is None:
        return []
    found: dict[str, Paused] = {}
    for shard in runtime.keyspace.all_shards():
        for one in map(Paused.of, part.of_shard(shard, timeout=MAX_TIMEOUT)):
            found.setdefault(one.name, one)
    return sorted(found.values(), key=lambda one: (one.key is not None, one.name))


def pauses_if_allowed(app: Celery) -> list[Paused]:
    """As `pauses`; empty if the login may not look.

    Raises:
        StoreUnavailable: The store can't be reached.
    """
    try:
        return pauses(app)
    except StoreUnavailable:
        raise
    except StoreError:
        return []


def row_of_pause(paused: Paused) -> dict[str, object]:
    """The pause as JSON data; ``since`` in ISO 8601, ``left`` in seconds."""
    return {
        "scope": paused.scope,
        "key": paused.key,
        "user": paused.user,
        "host": paused.host,
        "reason": paused.reason,
        "since": paused.since and paused.since.isoformat(timespec="seconds"),
        "left": paused.left and round(paused.left, 3),
    }


def _part(runtime: Runtime) -> Pauses:
    store = runtime.store
    if store.pauses is None:
        raise SettingsError(
            f"the store {store.capabilities.name!r} can't pause keys: use Redis, Valkey, Sentinel "
            "or Cluster"
        )
    return store.pauses


def _names(runtime: Runtime, key: str | None, scope: str | None, *, where: str) -> list[str]:
    """The full key; or what the keys of the scope begin with, in each shard."""
    keyspace, given = runtime.keyspace, f"{where}({key!r}, scope={scope!r})"
    if scope is None:
        if key is None or not (keyspace.is_full(key) and keyspace.is_lock(key)):
            raise LockKeyError(
                f"{given}: give the scope of the key, a scope alone, or a full key as "
                "current_lease().key"
            )
        scope, names = scope_of(key), [Keyspace.lock_of(key)]
    elif key is None:
        refuse_foreign_scope(runtime, scope, where=given)
        names = [Keyspace.scope_in(shard, scope) for shard in keyspace.all_shards()]
    else:
        refuse_foreign_key(runtime, key, scope, where=given, instead=PAUSE)
        names = [keyspace.lock(scope, key)]
    if scope == BEAT_SCOPE:
        raise LockKeyError(
            f"{given}: this is the scope in which Beat elects its leader, and without a leader no "
            "entry is sent. Pause the tasks that Beat sends"
        )
    return names


def _wake(runtime: Runtime, name: str) -> None:
    """Have the queues swept whose calls a pause has kept waiting."""
    queue = runtime.store.call_queue
    if queue is None:
        return
    for key in _queues(runtime, name):
        queue.defer(key, seconds=0.0, timeout=MAX_TIMEOUT)


def _queues(runtime: Runtime, name: str) -> Iterator[str]:
    if ":" in name.partition("}:")[2]:
        yield name
        return
    queue = runtime.store.call_queue
    assert queue is not None
    for key in queue.keys(Keyspace.shard(name), timeout=MAX_TIMEOUT):
        if Keyspace.scope_of(key) == name:
            yield key


def _emit(runtime: Runtime, name: EventName, paused: Paused, data: Mapping[str, object]) -> None:
    if runtime.events.observes(name):
        runtime.events.emit(Event(name=name, key=paused.name, data=data))
