"""Sweeps the queues whose time has come: a hint is late, a lease has ended, a call is lost.

Overview
    One thread in each parent sweeps some shards once a second, in rounds over all, and at
    once at a key whose call this worker has taken out. It publishes a call that may run again if
    its message may be lost, and stores the failure of a call that was acknowledged early and whose
    worker has died. ``queue_due.lua`` and ``queue_sweep.lua`` say which keys and which calls.

Non-guarantees
    The failure of a lost call replaces no result that the backend has already. A call that has a
    result is not published again. Of two calls with one id, both made before the first had ended,
    the second may be taken for ended if its worker dies. The calls of apps with another broker are
    left to the workers there.
"""

from __future__ import annotations

import logging
import mmap
import random
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from queue import Empty
from typing import Any, Final, TypeVar

from celery import Celery

from ..core import native_threads, observers
from ..core.call_queue import CallQueue, Hint, Removal, Remove
from ..core.events import EventName
from ..core.fork_locks import FORK_LOCKS
from ..core.heartbeat import MAX_TIMEOUT
from ..core.lease import Token
from ..core.store import Store
from ..errors import StoreError, StoreUnavailable
from ..message.header import Delivery, is_random
from ..message.stored_message import StoredMessage
from ..runtime import Runtime
from .hint import (
    emit,
    free_claim,
    hint_connection,
    is_of_another_broker,
    publish_hint,
)
from .results import RESULT_TIMEOUT, TAKEN_OUT, fail_lost, has_ended, revoke

logger = logging.getLogger("celery_singleton_lock")

T = TypeVar("T")

# Seconds between two sweeps; and where no task has the option and no call of this worker was
# paused, but calls of others may wait, or such that were made before it was switched off.
_EVERY: Final = 1.0
_SELDOM: Final = 60.0
#: Its byte is 1 once a process of this worker has left a call to the queue of its key because the
#: key was paused. The pool's processes, which are forked later, share it.
PARKED: Final = mmap.mmap(-1, 1)
# Seconds until the next sweep at a key at which one has failed.
_AFTER_FAILURE: Final = 10.0
# The number of shards and keys that one sweeps. A request for a shard takes 13 us of Redis' time:
# 50 workers, each sweeping 12 of 256 shards a second, take less than a hundredth of a core.
_SHARDS: Final = 12
_KEYS: Final = 100
# The number of refused keys that the log names: with a missing right, it may be every key.
_MOST_REFUSED: Final = 100


class QueueSweep:
    """Sweeps queues, for one worker.

    Args:
        app: The worker's app.
        open_store: Opens the store of the thread.
        is_over: Whether the worker has ended.
        has_queues: Whether a task of the app has the option.
    """

    def __init__(
        self,
        app: Celery,
        open_store: Callable[[], Store],
        is_over: Callable[[], bool],
        *,
        has_queues: bool = True,
    ) -> None:
        self._app, self._open_store, self._is_over = app, open_store, is_over
        self._has_queues, self._seldom_at = has_queues, 0.0
        self._runtime = Runtime.of(app)
        # The app's producers belong to the worker's other threads or greenlets.
        self._producer: Any = None
        # The shards that are left of this round: each round has all, in a random order.
        self._shards: list[str] = []
        # The keys to sweep now.
        self._soon: Any = native_threads.make_queue()
        # Keys whose sweep the store has refused, as the log says; `_MOST_REFUSED` at most.
        self._refused: set[str] = set()
        # Locked until the result backend has answered the last request that it was given up on.
        self._unanswered: Any = native_threads.allocate_lock()

    def start(self) -> None:
        """Start the thread."""
        self._runtime.sweep_soon = self._soon.put
        native_threads.start_new_thread(self._run, "singleton-queue-sweep")

    def sweep(self) -> bool:
        """Sweep some shards once. Returns whether there is more to publish: a pause has ended.

        Raises:
            StoreError: The store does not answer.
        """
        if not self._shards:
            self._shards = self._runtime.keyspace.all_shards()
            random.shuffle(self._shards)
        some, self._shards, has_more = self._shards[:_SHARDS], self._shards[_SHARDS:], False
        try:
            for shard in some:
                keys = self._queue.due(shard, limit=_KEYS, timeout=MAX_TIMEOUT)
                published = sum(map(self._sweep_key, keys))
                # Not if all are refused, or of another broker: they stay due.
                has_more |= len(keys) == _KEYS and published > 0
            return has_more
        finally:
            # The broker may have lost bindings since: a new connection declares them again.
            self._disconnect()

    def _sweep_key(self, key: str) -> bool:
        """Sweep the queue of a key. Returns whether a call of it was published, or has ended."""
        try:
            found = self._queue.sweep(key, timeout=MAX_TIMEOUT)
            return sum([self._act_on(is_lost, hint) for is_lost, hint in found]) > 0
        except StoreUnavailable:
            raise
        except StoreError as exc:
            # What another program has written there, or a right that is missing. The others must
            # not wait for it.
            if key not in self._refused and len(self._refused) < _MOST_REFUSED:
                self._refused.add(key)
                logger.warning("singleton: can't check the queue of %s (%s)", key, exc)
            return False

    def _act_on(self, is_lost: bool, hint: Hint) -> bool:
        """Publish a call, or end one that is lost; False: it was left to a later sweep."""
        message = None
        with suppress(ValueError):  # it joined by running: the store has no message
            message = StoredMessage.from_bytes(hint.message)
        try:
            if message is not None and is_of_another_broker(self._app, message):
                self._queue.defer(hint.key, seconds=0.0, timeout=MAX_TIMEOUT, unpublished=hint)
                return False
            if is_lost:
                self._end(hint, message)
            else:
                self._hint_again(hint, message)
            return True
        except StoreError:
            raise
        except Exception:
            # The result backend does not answer. The other keys must not wait for it.
            logger.exception("singleton: a check of the queue of %s failed", hint.key)
            self._queue.defer(
                hint.key, seconds=_AFTER_FAILURE, timeout=MAX_TIMEOUT, unpublished=hint
            )
            return False

    def _hint_again(self, hint: Hint, message: StoredMessage | None) -> None:
        """Publish a call again, unless it has ended, and its worker has not told the store."""
        task_id = Token.task_id_of(hint.call_id)
        is_doubtful = hint.has_begun or (hint.copies > 1 and is_random(task_id))
        if message is None or not is_doubtful:
            self._publish(hint)
        elif self._within(lambda: has_ended(self._app, task_id, message)):
            task = str(message.headers.get("task") or "")
            self._remove(hint, Delivery.of(message.headers).token, task, "ended")
        else:
            self._publish(hint)

    def _publish(self, hint: Hint) -> None:
        if self._producer is None:
            connection = hint_connection(self._app)
            self._producer = self._app.amqp.Producer(connection, auto_declare=False)
        if not publish_hint(self._app, self._queue, hint, self._producer):
            self._disconnect()

    def _disconnect(self) -> None:
        if self._producer is not None:
            self._producer.connection.collect()  # without a dialogue, which might wait
            self._producer = None

    def _end(self, hint: Hint, message: StoredMessage | None) -> None:
        """Store the result of a call that never begins again, take it out, and publish the next.

        It was lost, or the process that cancelled it has died meanwhile.
        """
        reason = "lost" if hint.has_begun else "cancelled"
        task_id = Token.task_id_of(hint.call_id)
        if not self._within(lambda: has_ended(self._app, task_id, message)):
            if hint.has_begun:
                self._within(lambda: fail_lost(self._app, task_id, message, hint.begins))
            else:
                self._within(lambda: revoke(self._app, task_id, message, TAKEN_OUT))
        token, task = Token.parse(f"{hint.call_id}|0.0|-"), ""
        if message is not None:
            token, task = Delivery.of(message.headers).token, str(message.headers.get("task") or "")
            free_claim(self._runtime, message, timeout=MAX_TIMEOUT)
        self._remove(hint, token, task, reason)

    def _remove(self, hint: Hint, token: Token, task: str, reason: str) -> None:
        """Take out a call, and publish the next."""
        ttl, key = self._runtime.settings.completion_ttl, hint.key
        request = Remove(key=key, token=token, ended_ttl=ttl)
        removal, following = self._queue.remove(request, timeout=MAX_TIMEOUT)
        if removal is Removal.REMOVED:
            emit(self._runtime, EventName.REMOVED, key, token.task_id, task, reason=reason)
        if following is not None:
            self._publish(following)

    def _within(self, ask: Callable[[], T]) -> T:
        """The result of ``ask``, a request to the result backend, which a thread sends.

        The clients of result backends have no common option for how long they wait: Celery's for
        Redis waits for two minutes. The sweeps at other keys must not wait for it. This thread is
        native also where threads are patched, so it can't wait for `core.executor.within`. The
        request runs while the bodies do: it may publish error callbacks, with connections that the
        bodies use too.

        Raises:
            TimeoutError: There is none in time, or the request before has none yet.
            Exception: An exception of ``ask``.
        """
        if self._unanswered.locked():
            raise TimeoutError("the result backend has not answered the last request")
        running: Any = native_threads.allocate_lock()
        running.acquire()
        results: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                results.append(ask())
            except Exception as exc:
                errors.append(exc)
            finally:
                running.release()

        native_threads.start_beside_bodies(run, "singleton-queue-result")
        if not running.acquire(timeout=RESULT_TIMEOUT):
            self._unanswered = running
            raise TimeoutError(f"the result backend did not answer within {RESULT_TIMEOUT:g} s")
        if errors:
            raise errors[0]
        return results[0]

    @cached_property
    def _queue(self) -> CallQueue:
        queue = self._open_store().call_queue
        assert queue is not None
        return queue

    # A receiver of a signal that blocks must delay no sweep, and no fork.
    @observers.elsewhere()
    def _run(self) -> None:
        clock, due_at = self._runtime.clock, 0.0
        while not self._is_over():
            key, pause = None, _EVERY
            if (left := due_at - clock.now()) > 0:
                with suppress(Empty):
                    key = self._soon.get(timeout=left)
            try:
                with FORK_LOCKS["sweeps"]:
                    if key is not None:
                        self._sweep_key(key)
                    elif self._has_queues or PARKED[0] or clock.now() >= self._seldom_at:
                        self._seldom_at = clock.now() + _SELDOM
                        pause = 0.0 if self.sweep() else _EVERY
            except StoreError:
                pass  # swept again in a second; the workers report the outage
            except Exception:
                logger.exception("singleton: a check of the queues of keys failed")
            if key is None:
                due_at = clock.now() + pause
