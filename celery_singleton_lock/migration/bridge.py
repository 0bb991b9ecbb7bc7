"""The part that the drop-in bases share: calls that are claimed in the old package's key.

Overview
    The old packages claim a call when it is published: they set a key in Redis, and delete it when
    the task has ended. They have no lock around the body. A bridge does both: it claims in the old
    key, and its body runs under a lease of this library.

    With ``singleton_lock_old_locks = False`` a call is claimed by ``unique``, and the
    old key is only freed. This is for the release after the last old process has stopped.

Guarantees
    An equal call is not published while another one is queued or runs, whichever of the two
    packages published it, and whichever runs it. Two bodies in workers with a bridge never overlap.
    A body that meets the lease of another is requeued; its call is never skipped.

Non-guarantees
    Everything that only the old key ensures ends when the old key expires: a body in an old worker
    may then overlap with one here, as with the old package alone. A task whose process is killed
    leaves the old key until it expires, also as with the old package alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from inspect import getattr_static
from typing import Any, Final, NamedTuple

from celery import Celery
from celery.app.task import Task as BaseTask
from celery.utils import uuid
from kombu.utils.encoding import bytes_to_str
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.lock import Lock

from ..core.store import Store
from ..errors import DuplicateTask, SettingsError, StoreError, StoreUnavailable
from ..policy import Policy, merge
from ..publish.continuation import continues
from ..task.base import SingletonTask, validate

logger = logging.getLogger("celery_singleton_lock")

#: Seconds until a claim expires if the old package set no expiry. A lost message blocks its key for
#: that time.
A_DAY: Final = 86400.0

# Deletes a key if it has the given value, or a value of the given length.
_FREE: Final = """
local value = redis.call('get', KEYS[1]) or ''
return (value == ARGV[1] or #value == tonumber(ARGV[2])) and redis.call('del', KEYS[1]) or 0
"""
# Options that the old package's own options decide.
_DECIDED: Final = frozenset(
    ("key", "scope", "limit", "unique", "unique_for", "on_duplicate", "debounce", "debounce_max")
)
# Seconds. The old packages wait for a server without a limit.
_TIMEOUT: Final = 5
_clients: Final[dict[str, Redis]] = {}


class Existing(NamedTuple):
    """The call that has the claim: its id (or the old package's token), and its seconds left."""

    task_id: str
    remaining: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The old package's options of one call.

    Attributes:
        timeout: Seconds until the claim expires; None: never.
        wait: Seconds for which a call waits for another one's claim; None: it does not wait.
        answer: What a duplicate's caller gets; may raise.
    """

    timeout: float | None
    wait: float | None = None
    answer: Callable[[Existing], Any]


class Bridge(SingletonTask[..., Any]):
    """Base of the drop-in bases. A subclass says what the old package does."""

    abstract = True
    #: Whether the old key is freed when the task has ended.
    frees_at_end = True
    #: Length of the random token that the old package writes as the value of its key, and which
    #: names no call; 0: it writes the id of the call, as the bridge does.
    token_length = 0

    # --- what a subclass defines -----------------------------------------------------------------

    @classmethod
    def lock_options(cls) -> dict[str, Any]:
        """This library's ``key`` and ``scope``; TypeError for options that can't be taken."""
        raise NotImplementedError

    def claim_options(self) -> dict[str, Any]:
        """This library's ``unique`` and ``unique_for`` for the old options."""
        raise NotImplementedError

    def terms(self, options: dict[str, Any]) -> Terms:
        """The terms of a call; takes the old package's own out of the call's ``options``."""
        raise NotImplementedError

    def old_key(self, args: Any, kwargs: Any) -> str:
        """The old package's key."""
        raise NotImplementedError

    def old_client(self) -> Redis:
        """A client of the server that has the old package's keys."""
        raise NotImplementedError

    # --- what all have ---------------------------------------------------------------------------

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Called by Celery when the class has its app: refuse options that can't be taken."""
        super().on_bound(app)
        if cls.run is BaseTask.run:
            return
        name = str(cls.name)
        _refuse_decided(cls.singleton, f"{name}: singleton")
        validate(cls.lock_options(), name, cls.run, is_bound=_is_bound(cls))

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        *rest: Any,
        **options: Any,
    ) -> Any:
        """As the old package's: claim and publish, or answer with the call that has the claim."""
        terms = self.terms(options)
        _refuse_decided(options.get("singleton"), f"apply_async(singleton=...) of {self.name}")
        mine = str(task_id) if task_id else uuid()
        again = options.get("retries") or continues(self.app.current_worker_task, mine)
        if again or not self._bridges or options.get("singleton") is False:
            return self._publish_claimed(terms, args, kwargs, mine, *rest, **options)
        key, client = self.old_key(args, kwargs), self.old_client()
        # An earlier call may have the same id, if the caller has given it.
        is_in_use = bool(task_id) and _value_of(client, key) == mine
        try:
            existing = claim(client, key, mine, terms.timeout, terms.wait)
            # A client may repeat a request without a reply: the first one has set the key then.
            if existing is None or (existing.task_id == mine and not is_in_use):
                return super().apply_async(args, kwargs, mine, *rest, **options)
        except BaseException:
            self._free(key, mine)
            raise
        logger.info(
            "singleton: duplicate: a call of %s is not published: %s has the old key %s for %g s",
            *(self.name, existing.task_id, key, existing.remaining),
        )
        return terms.answer(existing)

    def after_return(
        self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any
    ) -> None:
        """Release the lease, then free the old key: the next call must not meet the lease."""
        super().after_return(status, retval, task_id, args, kwargs, einfo)
        if self.frees_at_end:
            self.free_old_key(args, kwargs, task_id)

    def free_old_key(self, args: Any, kwargs: Any, task_id: str) -> None:
        """Free the claim of the call ``task_id``."""
        self._free(self.old_key(args, kwargs), task_id, self.token_length)

    def _free(self, key: str, task_id: str, token_length: int = 0) -> None:
        """Free the claim of the call ``task_id``; repeated until the old server answers."""

        def send(_: Store | None = None) -> None:
            try:
                self.old_client().eval(_FREE, 1, key, task_id, token_length)
            except (RedisConnectionError, RedisTimeoutError) as exc:
                raise StoreUnavailable(str(exc)) from exc
            except RedisError as exc:
                raise StoreError(str(exc)) from exc

        def give_up(why: object) -> None:
            logger.warning(
                "singleton: the old key %s of %s[%s] stays until it expires: %s",
                *(key, self.name, task_id, why),
            )

        try:
            send()
        except StoreUnavailable as exc:
            # The queue is made with the lock store, which a process may lack that only publishes.
            queue = self._runtime().locker.retry_queue
            if refusal := queue.put(send, A_DAY, give_up, error=exc):
                give_up(refusal)
        except StoreError as exc:
            give_up(exc)

    def _publish_claimed(self, terms: Terms, *args: Any, **options: Any) -> Any:
        """Publish with this library's claim, or a message that continues a claimed one."""
        policy, given = self._policy, options.get("singleton")
        is_claimed = policy.unique is not None and given is not False
        if is_claimed and terms.timeout not in (None, policy.unique_for):
            options["singleton"] = {**(given or {}), "unique_for": terms.timeout}
        try:
            return super().apply_async(*args, **options)
        except DuplicateTask as exc:
            existing = Existing(exc.task_id, exc.remaining)
        return terms.answer(existing)

    @cached_property
    def _bridges(self) -> bool:
        return self._runtime().settings.old_locks is not False

    @cached_property
    def _policy(self) -> Policy:
        self.old_client()  # a wrong setting stops the worker, not its first task
        options = {**self.lock_options(), "on_conflict": "retry"}
        if self._bridges:
            options["unique"] = None
        else:
            options |= {"on_duplicate": "raise", **self.claim_options()}
        where = f"the task {self.name}"
        policy = merge(self._runtime().settings.policy, options, where=where)
        policy = merge(policy, self.singleton or {}, where=where)
        # Without after_return, the old key would stay until it expires.
        if policy.on_conflict.revokes:
            raise ValueError(
                f'{where}: on_conflict="{policy.on_conflict.action}" would leave the old key of '
                'the call until it expires. Use "retry", "wait", "skip" or "raise"'
            )
        return policy


def claim(
    client: Redis, key: str, task_id: str, timeout: float | None, wait: float | None
) -> Existing | None:
    """Claim ``key`` as redis-py's Lock and the old packages do; else the call that has it."""
    while True:
        waits: dict[str, Any] = {"blocking": wait is not None, "blocking_timeout": wait}
        if Lock(client, key, timeout=timeout, thread_local=False, **waits).acquire(token=task_id):
            return None
        holder = _value_of(client, key)
        left: Any = client.pttl(key)
        if holder is not None:
            return Existing(holder, max(left, 0) / 1000)


def client_of(url: Any, where: str, **options: Any) -> Redis:
    """The client of this process for ``url``.

    Raises:
        SettingsError: It is no URL of a Redis server.
    """
    try:
        name = f"{url} {options!r}"
        if name not in _clients:
            timeouts = {"socket_timeout": _TIMEOUT, "socket_connect_timeout": _TIMEOUT}
            _clients[name] = Redis.from_url(url, **{**timeouts, **options})
        return _clients[name]
    except (AttributeError, ValueError) as exc:
        # The value is not shown, because it may contain a password.
        raise SettingsError(
            f"{where} names no Redis server, which has the keys of the old package: give a URL "
            "such as redis://localhost:6379/0"
        ) from exc


def refuse_unknown(given: Mapping[str, Any], known: Mapping[str, str], where: str) -> None:
    """Refuse options that can't be taken.

    Args:
        given: The old package's options.
        known: All its options; the value is empty, or says why one can't be taken.
        where: Their name in errors.

    Raises:
        TypeError: There is one.
    """
    for name in given:
        if name not in known:
            raise TypeError(f"{where}: unknown option {name!r} (known: {', '.join(known)})")
        if known[name]:
            raise TypeError(f"{where}: {name!r} can't be taken: {known[name]}")


def _value_of(client: Redis, key: str) -> str | None:
    value: Any = client.get(key)
    return None if value is None else str(bytes_to_str(value))


def _refuse_decided(given: Any, where: str) -> None:
    for name in sorted(_DECIDED.intersection(given or ())):
        raise TypeError(
            f"{where}: the old package's options decide {name!r}. Keep them as they are, or make "
            "the task a @singleton_task, which takes this library's options only"
        )


def _is_bound(cls: Any) -> bool:
    return not isinstance(getattr_static(cls, "run"), staticmethod)
