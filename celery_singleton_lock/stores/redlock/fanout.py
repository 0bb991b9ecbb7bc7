"""Requests to all nodes at once: one FIFO queue and one worker thread per node."""

from __future__ import annotations

import atexit
import os
import queue
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakSet

import redis

from celery_singleton_lock.core import native
from celery_singleton_lock.core.clock import Clock
from celery_singleton_lock.core.lease import Token
from celery_singleton_lock.core.store import Acquire, Granted, Refused, Relation, Release
from celery_singleton_lock.errors import StoreError, StoreUnavailable
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.stores.redlock.url import NodeUrl
from celery_singleton_lock.stores.redlock.votes import GrantWithoutVote, Poll

T = TypeVar("T")

#: Seconds that a node has for one request. No caller waits longer. A connection that owes a reply
#: for longer is closed, and a request that was queued for longer is not sent any more.
NODE_TIMEOUT: Final = 2.0
# Bound of a node's queue. A stopped node drops old requests every NODE_TIMEOUT seconds, so this is
# reached above some 250 requests a second, or by as many callers at once.
_MAX_QUEUED: Final = 1024
# Seconds that the minority has once a majority has answered without a decision. Its answers could
# help to decide, but a silent node must not cost more.
_MINORITY_TIMEOUT: Final = 0.05
# Seconds after which a packet that got no reply cannot arrive any more.
_LONGEST_DELAY: Final = 60.0
# Seconds that close(), a fork and the end of the process wait for requests that are still queued.
_DRAIN_TIMEOUT: Final = 0.25


class Fanout:
    """All nodes. Nodes are created at first use, and again after close() or in a forked child.

    Args:
        urls: One for each node.
        clock: Measures timeouts and the age of servers.

    Attributes:
        majority: Number of answers that a decision needs.
    """

    def __init__(self, urls: Sequence[NodeUrl], clock: Clock) -> None:
        self.majority = len(urls) // 2 + 1
        self._urls = tuple(urls)
        self._clock = clock
        # By process id: threads do not survive a fork.
        self._nodes: dict[int, tuple[Node, ...]] = {}
        weakref.finalize(self, _end_threads, self._nodes).atexit = False
        _fanouts.add(self)
        _drain_at_fork_and_exit()

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of this process."""
        pid = os.getpid()
        nodes = self._nodes.get(pid)
        if nodes is None:
            # setdefault() is atomic: two threads that come first get the same nodes.
            nodes = tuple(Node(url, self._clock) for url in self._urls)
            nodes = self._nodes.setdefault(pid, nodes)
        return nodes

    def ask(
        self,
        operation: Callable[[Node], T],
        *,
        timeout: float,
        enough: Callable[[Poll[T]], object],
    ) -> Poll[T]:
        """Run ``operation`` for all nodes, and return when their answers are ``enough``.

        The requests of all callers reach each node in the order of their calls. A node that has not
        answered when this returns still gets the request.

        Args:
            operation: Runs in the node's thread.
            timeout: Seconds to wait. Errors of single nodes count as answers.
            enough: Whether the answers so far decide.
        """
        nodes = self.nodes
        deadline = self._clock.now() + timeout
        poll: Poll[T] = Poll(len(nodes), self.majority)
        inbox = native.inbox()
        for node in nodes:
            node.submit(operation, inbox.put)
        shortened = False
        while poll.pending and not enough(poll):
            now = self._clock.now()
            if poll.has_majority and not shortened:
                deadline, shortened = min(deadline, now + _MINORITY_TIMEOUT), True
            if now >= deadline:
                break
            try:
                poll.add(inbox.get(timeout=deadline - now))
            except queue.Empty:
                break
        return poll

    def drain(self) -> None:
        """Wait until the nodes have been sent what is queued, such as releases. A minority that
        does not answer is waited for briefly.
        """
        if os.getpid() in self._nodes:
            self.ask(lambda node: None, timeout=_DRAIN_TIMEOUT, enough=lambda poll: False)

    def close(self) -> None:
        """End the threads and close the connections, when what is queued has been sent."""
        self.drain()
        _end_threads(self._nodes)


_fanouts: WeakSet[Fanout] = WeakSet()
# With a thread in this process; also nodes of closed stores.
_started: WeakSet[Node] = WeakSet()


@cache
def _drain_at_fork_and_exit() -> None:
    # A child must not be forked while a thread is inside the client: locks that the thread holds
    # there (of imports, of the resolver, of OpenSSL) would stay locked in the child.
    os.register_at_fork(before=_drain_all, after_in_child=_started.clear)
    # Python stops daemon threads at exit. The last requests of a short script would reach a
    # majority only.
    atexit.register(_at_exit)


def _drain_all() -> None:
    for fanout in list(_fanouts):
        fanout.drain()


def _at_exit() -> None:
    _drain_all()
    if not native.is_patched():
        return
    # A thread that Python stops inside a gevent or eventlet hub crashes the process. So the threads
    # end before, though a silent node takes up to NODE_TIMEOUT seconds.
    for fanout in list(_fanouts):
        _end_threads(fanout._nodes)
    nodes = list(_started)
    for node in nodes:
        node.discard()
        node.stop()
    for node in nodes:
        node.join()


def _end_threads(nodes: dict[int, tuple[Node, ...]]) -> None:
    for node in nodes.pop(os.getpid(), ()):
        node.stop()


class _Job(NamedTuple):
    operation: Callable[[Node], Any]
    deliver: Callable[[Any], object]
    send_until: float


class Node:
    """One Redis master, and the thread that sends it one request after the other.

    Attributes:
        url: Where it is.
        store: Its connections. Operations other than operators' use it in the node's thread.
        run_id: Identifies this run of the server; empty if unknown.
    """

    def __init__(self, url: NodeUrl, clock: Clock) -> None:
        self.url = url
        self.store: RedisStore = _NodeStore(url.url, options={"redis_connect_func": self._greet})
        self.run_id = ""
        self._clock = clock
        # When the server was started, at the latest; None if unknown.
        self._started_at: float | None = None
        # Releases that were sent and got no reply, oldest first, with the time of failure.
        self._unconfirmed: dict[Token, float] = {}
        self._jobs: Any = native.make_queue()
        self._is_running = False
        self._running: Any = native.allocate_lock()  # held by the thread, and never released
        self._ended: Any = native.make_queue()

    def submit(self, operation: Callable[[Node], Any], deliver: Callable[[Any], object]) -> None:
        """Queue ``operation``. ``deliver`` is called once, with its result or exception."""
        if self._jobs.qsize() >= _MAX_QUEUED:
            deliver(StoreUnavailable(f"{self.url} does not answer, and its queue is full"))
            return
        if not self._is_running:
            try:
                native.start_new_thread(self._run, f"singleton-{self.url}")
            except RuntimeError as exc:  # too many threads, or the end of the interpreter
                deliver(StoreUnavailable(f"{self.url}: {exc}"))
                return
            self._is_running = True
            _started.add(self)
        self._jobs.put(_Job(operation, deliver, self._clock.now() + NODE_TIMEOUT))

    def acquire(self, request: Acquire, min_age: float) -> Granted | GrantWithoutVote | Refused:
        """As of the store. A grant does not count within ``min_age`` seconds of the server's start,
        nor while an earlier release by the same token may still arrive and delete it.
        """
        asked_at = self._clock.now()
        reply = self.store.acquire(request, timeout=NODE_TIMEOUT)
        if not isinstance(reply, Granted):
            return reply
        started_at = self._started_at
        is_young = bool(min_age) and started_at is not None and started_at > asked_at - min_age
        self._forget_arrived()
        if is_young or request.token in self._unconfirmed:
            return GrantWithoutVote(key=reply.key)
        return reply

    def release(self, request: Release) -> Relation:
        """As of the store."""
        try:
            return self.store.release(request, timeout=NODE_TIMEOUT)
        except StoreUnavailable as exc:
            if exc.was_sent:
                self._forget_arrived()
                self._unconfirmed.pop(request.token, None)  # to the end of the order
                self._unconfirmed[request.token] = self._clock.now()
            raise

    def stop(self) -> None:
        """End the thread when it has served the queue."""
        self._jobs.put(None)

    def discard(self) -> None:
        """Remove what is queued."""
        with suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()

    def join(self) -> None:
        """Wait until the thread has ended; at most for one silent request and its login."""
        with suppress(queue.Empty):
            self._ended.get(timeout=2 * NODE_TIMEOUT)

    def _forget_arrived(self) -> None:
        """Forget releases that have arrived by now, or never will."""
        oldest = self._clock.now() - _LONGEST_DELAY
        while self._unconfirmed:
            token, failed_at = next(iter(self._unconfirmed.items()))
            if failed_at > oldest:
                break
            del self._unconfirmed[token]

    def _run(self) -> None:
        """The node's thread."""
        # A signal's exception in submit() may start a second thread, which would break the order.
        if not self._running.acquire(False):
            return
        while (job := self._jobs.get()) is not None:
            # The thread that asked may have ended, and its gevent hub with it.
            with suppress(Exception):
                job.deliver(self._answer(job))
            del job  # else an idle thread keeps the caller's objects alive
        self.store.close()
        self._ended.put(None)

    def _answer(self, job: _Job) -> Any:
        try:
            return self._send(job)
        except StoreUnavailable as exc:
            return StoreUnavailable(f"{self.url}: {exc}")
        except StoreError as exc:
            return StoreError(f"{self.url}: {exc}")
        except Exception as exc:  # raised by the caller
            return exc

    def _send(self, job: _Job) -> Any:
        if self._clock.now() > job.send_until:
            raise StoreUnavailable("not sent, because earlier requests got no reply")
        try:
            return job.operation(self)
        except StoreUnavailable as exc:
            if not exc.was_idle or self._clock.now() > job.send_until:
                raise
            # A restarted server reports the end of an idle connection only when it is used.
            return job.operation(self)

    def _greet(self, connection: Any) -> None:
        """Log in, and read when the server was started; called by redis-py for new connections."""
        connection.on_connect()
        connection.send_command("INFO", "server")
        try:
            reply = connection.read_response()
        except redis.exceptions.ConnectionError:
            raise
        except redis.exceptions.ResponseError:
            return  # an ACL denies INFO, so the age is unknown
        text = reply.decode(errors="replace") if isinstance(reply, bytes) else str(reply)
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        self.run_id = fields.get("run_id", "")
        if fields.get("uptime_in_seconds", "").isdecimal():
            # The server rounds both times to seconds: it may be 1 s younger than it says.
            uptime = max(0, int(fields["uptime_in_seconds"]) - 1)
            self._started_at = self._clock.now() - uptime


class _NodeStore(RedisStore):
    """A store without the note of its shards: a client that knows the nodes has one shard."""

    def _check_shards(self, key: str, timeout: float) -> bool:
        """Nothing. The note would cost each node one more request before the first vote."""
        return False
