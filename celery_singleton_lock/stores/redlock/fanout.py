"""Requests to all nodes at once: one FIFO queue and one worker thread per node."""

from __future__ import annotations

import atexit
import math
import os
import queue
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakSet

import redis

from ...core import native_threads
from ...core.clock import Clock
from ...core.lease import Token
from ...core.process import Process, this_process
from ...core.store import ConnectionWatch
from ...core.store_requests import (
    Acquire,
    ClaimRequest,
    Granted,
    Refused,
    Relation,
    Release,
    ReleaseReply,
)
from ...errors import StoreError, StoreUnavailable
from ..redis.replies import slot_or_refusal
from ..redis.scripts import Command, release_command, with_source
from ..redis.store import RedisStore
from ..store_url import StoreUrl
from . import votes
from .votes import Poll

T = TypeVar("T")
D = TypeVar("D")

#: Seconds that a node has for one request. No caller waits longer. A connection without a reply for
#: this time is closed, and a request that was queued for longer is not sent any more.
NODE_TIMEOUT: Final = 2.0
# Bound of a node's queue. If a node stops, old requests are dropped every NODE_TIMEOUT seconds, so
# the bound is reached above some 250 requests per second, or by as many callers at once.
_MAX_QUEUED: Final = 1024
# Seconds to wait for the minority after a majority has answered without a decision. More answers
# could help to decide, but a silent node must not cost more.
_MINORITY_TIMEOUT: Final = 0.05
# Seconds after which a packet that got no reply cannot arrive any more.
_LONGEST_DELAY: Final = 60.0
# Seconds that close(), a fork and the end of the process wait for requests that are still queued.
_DRAIN_TIMEOUT: Final = 0.25


class Fanout:
    """All nodes. They are created at first use, and again after close() or in a forked child.

    Args:
        urls: One URL for each node.
        clock: Measures timeouts and the age of servers.

    Attributes:
        majority: The number of answers that a decision needs.
    """

    def __init__(self, urls: Sequence[StoreUrl], clock: Clock) -> None:
        self.majority = len(urls) // 2 + 1
        self._urls = tuple(urls)
        self._clock = clock
        # By process, because threads do not survive a fork.
        self._nodes: dict[Process, tuple[Node, ...]] = {}
        self._watch: ConnectionWatch | None = None
        weakref.finalize(self, _end_threads, self._nodes).atexit = False
        _fanouts.add(self)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of this process."""
        process = this_process()
        nodes = self._nodes.get(process)
        if nodes is None:
            # setdefault() is atomic: two concurrent first callers get the same nodes.
            nodes = tuple(Node(url, self._clock) for url in self._urls)
            nodes = self._nodes.setdefault(process, nodes)
            if self._watch is not None:
                self.report_to(self._watch)
        return nodes

    def report_to(self, watch: ConnectionWatch) -> None:
        """See `Store.watch_connections`."""
        self._watch = watch
        for node in self._nodes.get(this_process(), ()):
            node.store.watch_connections(watch)

    def ask(
        self,
        operation: Callable[[Node], T],
        timeout: float,
        decide: Callable[[Poll[T]], D],
        release: Release | None = None,
    ) -> tuple[Poll[T], D]:
        """Run ``operation`` for all nodes until the answers decide, and return the decision.

        The requests of all callers reach each node in the order of their calls. A node that has not
        answered when this returns still gets the request.

        Args:
            operation: Runs in the node's thread.
            timeout: Seconds to wait. Errors of single nodes count as answers.
            decide: The decision that follows from the answers so far; false: undecided.
            release: The release that a node has to repeat if it doesn't answer; None: none.
        """
        nodes = self.nodes
        now = self._clock.now()
        deadline = now + timeout
        poll: Poll[T] = Poll(len(nodes), self.majority)
        inbox = native_threads.inbox()
        job = Job(operation, inbox.put, now + NODE_TIMEOUT, release)
        for node in nodes:
            node.submit(job)
        while not (decision := decide(poll)) and poll.pending:
            now = self._clock.now()
            if poll.has_majority():
                deadline = min(deadline, now + _MINORITY_TIMEOUT)
            try:
                poll.add(inbox.get(timeout=max(0.0, deadline - now)))
            except queue.Empty:
                break
        return poll, decision

    def drain(self) -> None:
        """Wait until all queued requests, such as releases, have been sent to the nodes.

        The wait for a minority that does not answer is short.
        """
        if this_process() in self._nodes:
            self.ask(lambda node: None, _DRAIN_TIMEOUT, lambda poll: False)

    def close(self) -> None:
        """Send the queued requests, then end the threads and close the connections."""
        self.drain()
        _end_threads(self._nodes)


_fanouts: WeakSet[Fanout] = WeakSet()
# The nodes with a thread in this process, including nodes of closed stores.
_started: WeakSet[Node] = WeakSet()


def _drain_all() -> None:
    for fanout in list(_fanouts):
        fanout.drain()


def _at_exit() -> None:
    _drain_all()
    if not native_threads.is_patched():
        return
    # If Python stops a thread inside a gevent or eventlet hub, the process crashes. So the threads
    # are ended before, although a silent node takes up to NODE_TIMEOUT seconds.
    nodes = list(_started)
    for node in nodes:
        node.stop(at_once=True)
    for node in nodes:
        node.join()


# A child must not be forked while a thread is inside the client. Locks that the thread holds there
# (import, resolver, OpenSSL) would stay locked in the child.
os.register_at_fork(before=_drain_all, after_in_child=_started.clear)
# Python stops daemon threads at exit. Without the drain, the last requests of a short script would
# reach only a majority.
atexit.register(_at_exit)


def _end_threads(nodes: dict[Process, tuple[Node, ...]]) -> None:
    for node in nodes.pop(this_process(), ()):
        node.stop()


class Job(NamedTuple):
    operation: Callable[[Node], Any]
    deliver: Callable[[Any], object]  # called once, with the result or the exception
    send_until: float
    release: Release | None = None


class Node:
    """One Redis master, and the thread that sends it one request after the other.

    Attributes:
        url: The node's address.
        store: The node's store. Only operators use it outside the node's thread.
        run_id: Identifies this run of the server; empty if unknown.
    """

    def __init__(self, url: StoreUrl, clock: Clock) -> None:
        self.url = url
        self.store = _NodeStore(url, options={"redis_connect_func": self._greet})
        self.run_id = ""
        self._clock = clock
        # The latest possible time of the server's start; -inf if unknown.
        self._started_at = -math.inf
        # Releases that were sent and got no reply, oldest first, with the time of failure.
        self._unconfirmed: dict[Token, float] = {}
        # Releases that may not have been carried out, oldest first. They are sent before the next
        # acquire or release, so the order of requests is kept. Not before other requests: a fork
        # waits for an empty request, and must not find the thread inside the client.
        self._owed: dict[tuple[Token, tuple[str, ...]], Release] = {}
        self._jobs: Any = native_threads.make_queue()
        self._is_running = False
        self._running: Any = (
            native_threads.allocate_lock()
        )  # held by the thread, and never released
        self._ended: Any = native_threads.make_queue()

    def submit(self, job: Job) -> None:
        """Queue ``job``."""
        if self._jobs.qsize() >= _MAX_QUEUED:
            job.deliver(StoreUnavailable(f"{self.url} does not answer, and its queue is full"))
            return
        if not self._is_running:
            try:
                native_threads.start_new_thread(self._run, f"singleton-{self.url}")
            except RuntimeError as exc:  # too many threads, or the end of the interpreter
                job.deliver(StoreUnavailable(f"{self.url}: {exc}"))
                return
            self._is_running = True
            _started.add(self)
        self._jobs.put(job)

    def acquire(
        self, request: Acquire, command: Command, packed: bytes, min_age: float
    ) -> Granted | Refused:
        """See `Leases.acquire`.

        The ttl of a grant that does not count is 0: within ``min_age`` seconds of the server's
        start, and while an earlier release by the same token may still arrive and delete it.
        """
        self._send_owed()
        asked_at = self._clock.now()
        reply = self.store.send(command, packed)
        if isinstance(reply, bytes):
            answer: Granted | Refused = Granted(key=request.slots[0], fence=None)
        else:
            answer = slot_or_refusal(request.slots[0], reply)
        if isinstance(answer, Refused):
            # Redlock has no pauses. An app that uses this node alone may have paused the key there.
            paused = answer.relation is Relation.PAUSED
            relation = Relation.OTHER if paused else answer.relation
            return votes.refusal(relation, answer.record, answer.others)
        is_young = min_age > 0 and self._started_at > asked_at - min_age
        released_at = self._unconfirmed.get(request.token, -math.inf)
        if is_young or released_at > asked_at - _LONGEST_DELAY:
            return Granted(key=answer.key, fence=None, ttl=0.0)
        return answer

    def take_claim(self, request: ClaimRequest) -> Granted | Refused:
        """See `Claims.take`."""
        return votes.answer(request.key, self.store.claims.take(request, timeout=NODE_TIMEOUT))

    def release(self, command: Command, packed: bytes) -> ReleaseReply:
        """See `Leases.release`."""
        self._send_owed()
        return ReleaseReply(self.store.send(command, packed).decode())

    def stop(self, *, at_once: bool = False) -> None:
        """End the thread after all queued requests, or ``at_once``: after the current one."""
        with suppress(queue.Empty):
            while at_once:
                self._jobs.get_nowait()
        self._jobs.put(None)

    def join(self) -> None:
        """Wait until the thread has ended: at most for one request without a reply and a login."""
        with suppress(queue.Empty):
            self._ended.get(timeout=2 * NODE_TIMEOUT)

    def _owe(self, request: Release) -> None:
        """Note a release that got no reply. Otherwise the vote would stay until its ttl ends.

        Only the deletion is repeated. A completion record, a claim or a new kind may be outdated by
        then.
        """
        if request.become is not None:
            return
        owed = Release(keys=request.keys, token=request.token)
        self._owed[owed.token, owed.keys] = owed
        if len(self._owed) > _MAX_QUEUED:
            del self._owed[next(iter(self._owed))]

    def _send_owed(self) -> None:
        if not self._owed:
            return
        try:
            self.store.release_all(self._owed.values())
        except StoreUnavailable as exc:
            if exc.was_sent:
                self._note_unconfirmed(self._owed.values())
            exc.was_sent = False  # the request that follows
            raise
        except StoreError:
            pass  # the node would refuse a repeated release again
        self._owed.clear()

    def _note_unconfirmed(self, releases: Iterable[Release]) -> None:
        now = self._clock.now()
        recent = {t: at for t, at in self._unconfirmed.items() if at > now - _LONGEST_DELAY}
        self._unconfirmed = recent | {release.token: now for release in releases}

    def _run(self) -> None:
        """Serve the queue. Runs on the node's thread."""
        # An exception from a signal handler in submit() may lead to a second thread, which would
        # break the order.
        if not self._running.acquire(False):
            return
        while self._serve(self._jobs.get()):
            pass
        self.store.close()
        self._ended.put(None)

    def _serve(self, job: Job | None) -> bool:
        """Run ``job``. An idle thread must not keep it, nor the caller's objects, alive."""
        if job is None:
            return False
        try:
            if self._clock.now() > job.send_until:
                raise StoreUnavailable("not sent, because earlier requests got no reply")
            answer = self._answer(job)
        except StoreUnavailable as exc:
            if job.release is not None:
                self._owe(job.release)
            answer = StoreUnavailable(f"{self.url}: {exc}")
        except StoreError as exc:
            answer = StoreError(f"{self.url}: {exc}")
        except Exception as exc:  # raised again in the caller's thread
            answer = exc
        with suppress(Exception):  # the calling thread may have ended, and its gevent hub with it
            job.deliver(answer)
        return True

    def _answer(self, job: Job, *, again: bool = True) -> Any:
        try:
            return job.operation(self)
        except StoreUnavailable as exc:
            if exc.was_sent and job.release is not None:
                self._note_unconfirmed([job.release])
            if not (again and exc.was_idle) or self._clock.now() > job.send_until:
                raise
        # After a restart of the server, an idle connection fails only when it is used.
        return self._answer(job, again=False)

    def _greet(self, connection: Any) -> None:
        """Log in and read the time of the server's start. redis-py calls this when it connects."""
        connection.on_connect()
        connection.send_command("INFO", "server")
        try:
            text = connection.read_response().decode(errors="replace")
        except redis.exceptions.ResponseError:
            return  # an ACL denies INFO, so the age is unknown
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        self.run_id = fields.get("run_id", "")
        if fields.get("uptime_in_seconds", "").isdecimal():
            # The server rounds both times to seconds, so it may be 1 s younger than reported.
            uptime = max(0, int(fields["uptime_in_seconds"]) - 1)
            self._started_at = self._clock.now() - uptime


class _NodeStore(RedisStore):
    """A RedisStore whose number of shards is not compared: Redlock always has one.

    The check would cost each node one more request before the first vote.
    """

    shards = None

    def send(self, command: Command, packed: bytes) -> Any:
        """The reply to ``command``, which the caller has packed once for all nodes."""
        connections = self.runner.connections
        connection = connections.take(NODE_TIMEOUT)
        try:
            connection.send(packed, 1)
            replies = connection.replies()
        finally:
            connection.end()
        try:
            return connections.checked(replies)[0]
        except redis.exceptions.NoScriptError:
            return connections.run([with_source(command)], NODE_TIMEOUT)[0]

    def release_all(self, releases: Iterable[Release]) -> None:
        """Send all releases in one round trip. The replies are ignored."""
        self.runner.pipeline([*map(release_command, releases)], NODE_TIMEOUT)
