"""All that is known about one task id: its result, its keys and completion records, and its
workers' replies.

It reads only what is stored for other purposes: a task records nothing for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

from celery import Celery, states
from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend

from ..celery_compat import limit_backend_timeouts, result_meta
from ..core.executor import within
from ..core.heartbeat import interval_of, timeout_for
from ..core.lease import OperatorRelease, Token
from ..core.store import operators_of
from ..core.store_requests import CompletionState
from ..errors import LockConflict
from ..key_queue.inspection import CallInQueue, calls_before, find_call
from ..key_queue.results import RESULT_TIMEOUT
from ..message.skipped import is_skipped
from ..message.times import done_at, utc
from ..runtime import Runtime
from ..typed_keys import without_prefix
from .broker import InBroker, search_broker
from .keys import HeldKey, is_of_task, policies_by_task, reader, unique_for_by_task
from .pauses import Paused, pauses_if_allowed

# Seconds to wait for further replies of the workers that have answered once. The last reply ends
# the wait, and a worker takes up to a second for each.
_FURTHER_TIMEOUT: Final = 5.0
# Seconds to wait for the worker of a holder, at least.
_HOLDER_TIMEOUT: Final = 2.0
# Seconds to wait for the broker, on top of the time for the workers' replies.
_BROKER_TIMEOUT: Final = 3.0
# The share of the interval by which a heartbeat may be late: then the worker's parent renews.
_GRACE: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The content of the result backend.

    Attributes:
        state: Celery's state; PENDING also if the backend has no result.
        value: The result, or the exception.
        done_at: The time at which the result was stored; None: unknown.
        problem: Why the backend could not be read; empty: it was.
    """

    state: str = states.PENDING
    value: Any = None
    done_at: datetime | None = None
    problem: str = ""

    @property
    def is_final(self) -> bool:
        return self.state in states.READY_STATES


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """The completion record of an attempt. ``requeues`` counts those of this attempt."""

    state: CompletionState
    requeues: int

    @classmethod
    def parse(cls, text: str) -> AttemptRecord | None:
        """Read ``<state> <sequence> <nonce>``; None: something else wrote it."""
        state, sequence, *_ = [*text.split(" "), "", ""]
        if state not in [*CompletionState] or not sequence.isdigit():
            return None
        return cls(state=CompletionState(state), requeues=int(sequence))


@dataclass(frozen=True, slots=True, kw_only=True)
class InWorker:
    """A message in a worker.

    Attributes:
        worker: The worker's name.
        state: ``active`` (a process works on it), ``reserved`` (it waits for one), ``scheduled``.
        task: The task's name.
        key: The lock key of its arguments; None: it has none, or this app can't compute it.
        since: The time at which a process began with it; None: none has.
        pid: That process.
        eta: The time of a scheduled message; None: unknown.
    """

    worker: str
    state: str
    task: str
    task_id: str
    key: str | None
    since: datetime | None
    pid: int | None
    eta: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """See the module.

    Attributes:
        task_id: The id.
        now: The time at which the facts were read.
        result: The content of the result backend.
        holders_result: The result of the task that had the key instead; None: there was none.
        lease: The task's lease, or what is left of it: a reservation, a cooling key; None: none.
        claim: The claim of its message; None: none.
        completions: The completion records of its attempts.
        released: The note of an operator who released its key; None: none within an hour.
        message: The message in a worker; None: no worker that answered has it.
        pauses: What is paused.
        unique_for: The ``unique_for`` of the claim's task; None: unknown.
        ttls: The ttl of each singleton task, by name, unless a call sets another.
        trusted: See `Capabilities`.
        others: The keys of all others, by name.
        active: The messages of singleton tasks that processes of workers work on.
        workers: The workers that answered.
        broker_is_silent: Whether the broker did not answer, so that no worker was asked.
        is_revoked: Whether a worker will discard the message when it arrives.
        place: The task's call in the queue of its key; None: none is known.
        before: The call before it there.
        first: The first call there, if that is another.
        broker: What the broker has of its message; None: it was not searched.
        served: The names of the queues that the workers that answered consume.
        processes: The ids of the processes of each worker of a holder that was asked for them, by
            its name. None: it did not answer. Empty: its pool does not say.
        visibility_timeout: See `Settings`.
    """

    task_id: str
    now: datetime
    result: Result
    lease: HeldKey | None
    claim: HeldKey | None
    unique_for: float | None = None
    ttls: Mapping[str, float] = field(default_factory=dict)
    trusted: float = 1.0
    holders_result: Result | None = None
    others: Mapping[str, HeldKey] = field(default_factory=dict)
    completions: tuple[AttemptRecord, ...] = ()
    released: OperatorRelease | None = None
    message: InWorker | None = None
    active: tuple[InWorker, ...] = ()
    workers: tuple[str, ...] = ()
    broker_is_silent: bool = False
    is_revoked: bool = False
    place: CallInQueue | None = None
    before: CallInQueue | None = None
    first: CallInQueue | None = None
    broker: InBroker | None = None
    served: tuple[str, ...] = ()
    processes: Mapping[str, frozenset[int] | None] = field(default_factory=dict)
    visibility_timeout: float | None = None
    pauses: tuple[Paused, ...] = ()

    def pauses_of(self, key: str | None) -> list[Paused]:
        """The pauses of a key and of its scope. The one that ends last is the first."""
        found = [one for one in self.pauses if key and one.includes(key)]
        found.sort(key=lambda one: math.inf if one.left is None else one.left, reverse=True)
        return found

    @property
    def requeues(self) -> int:
        """How often the current attempt was requeued, as far as its completion record says."""
        return max(
            (m.requeues for m in self.completions if m.state is CompletionState.WAITING), default=0
        )

    def ttl_of(self, held: HeldKey) -> float | None:
        """The ttl of a lease; None: it is not known."""
        return held.call_ttl or self.ttls.get(held.task)

    def renewed_ago(self, held: HeldKey) -> float | None:
        """Seconds since a lease was acquired or renewed; None: its ttl is not known."""
        ttl = self.ttl_of(held)
        if ttl is None or held.since is None:
            return None
        ago, age = ttl - held.ttl, (self.now - held.since).total_seconds()
        # The clocks of the holder, which noted `since`, and of this host may differ a little.
        return ago if 0 <= ago <= age + 1 else None

    def overdue(self, held: HeldKey) -> float:
        """Seconds by which the renewal of a lease is overdue; 0: it is not, or it is unknown.

        A worker that answers that its process has the task is alive.
        """
        ago, ttl = self.renewed_ago(held), self.ttl_of(held)
        is_alive = any(one.task_id == held.task_id for one in self.active)
        if ago is None or ttl is None or held.state != "running" or is_alive:
            return 0.0
        interval = interval_of(ttl, self.trusted)
        return ago - interval if ago > interval * (1 + _GRACE) + timeout_for(ttl) else 0.0

    def is_unanswered(self, held: HeldKey) -> bool:
        """Whether the worker of a lease was asked, and did not answer."""
        return held.state == "running" and self.processes.get(held.worker, held) is None

    def is_of_no_process(self, held: HeldKey) -> bool:
        """Whether the worker of a task's lease answered without the process that holds it."""
        pids = self.processes.get(held.worker)
        return held.state == "running" and bool(held.task and pids) and held.pid not in (pids or ())

    def may_be_dead(self, held: HeldKey) -> bool:
        """Whether something says that the process that holds a lease is dead, or may be."""
        is_silent = self.is_unanswered(held) or self.is_of_no_process(held)
        return held.is_dead or is_silent or self.overdue(held) > 0

    @property
    def is_held(self) -> bool:
        """Whether the task has a lease, and nothing says that its process is dead."""
        return self.lease is not None and not self.may_be_dead(self.lease)


def gather(app: Celery, task_id: str, *, timeout: float) -> Facts:
    """Read all facts. ``timeout``: seconds to wait for the replies of workers.

    Raises:
        StoreError: The store refuses the request, or does not answer.
    """
    runtime, result = Runtime.of(app), _result(app, task_id)
    workers = _Workers(app, timeout)
    # A task moves from a worker to the store, and from there to the result backend. They are read
    # in this order, so that a task that moves meanwhile is found later.
    message: InWorker | None = None
    is_revoked = False
    if not result.is_final:
        message, is_revoked = workers.find(task_id), workers.is_revoked(task_id)
    stored = _Stored.of(runtime, task_id)
    place: CallInQueue | None = None
    if not result.is_final:
        place = find_call(app, task_id)
        result = _result(app, task_id)
    first, before = calls_before(app, place) if place else (None, None)
    instead = _holder_in(result.value)
    claim = stored.claim
    facts = Facts(
        task_id=task_id,
        now=datetime.fromtimestamp(runtime.clock.wall(), UTC),
        lease=stored.lease,
        ttls={name: policy.ttl for name, policy in policies_by_task(app).items()},
        trusted=runtime.store.capabilities.trusted,
        claim=claim,
        unique_for=unique_for_by_task(app).get(claim.task) if claim else None,
        others=stored.others,
        completions=tuple(stored.completions),
        released=stored.released,
        result=result,
        holders_result=_result(app, instead) if instead else None,
        message=message,
        workers=workers.names,
        broker_is_silent=workers.broker_is_silent,
        is_revoked=is_revoked,
        place=place,
        before=before,
        first=first,
        visibility_timeout=runtime.settings.visibility_timeout,
        pauses=() if result.is_final else tuple(pauses_if_allowed(app)),
    )
    facts = replace(facts, processes=workers.processes(_workers_to_ask(facts, instead)))
    if not (result.is_final or message or facts.is_held):
        facts = _with_broker(facts, app, workers)
    is_active = facts.message is not None and facts.message.state == "active"
    if is_active or any(map(facts.overdue, [*stored.own, *stored.others.values()])):
        facts = replace(facts, active=workers.active())
    return facts


def _with_broker(facts: Facts, app: Celery, workers: _Workers) -> Facts:
    """``facts`` with what the broker has of a message that no worker has named."""
    broker = None if workers.broker_is_silent else _in_broker(app, facts.task_id)
    facts = replace(facts, broker=broker, served=workers.served())
    if broker is None or broker.taken_at is None:
        return facts
    # A worker may have taken it meanwhile.
    message = workers.find(facts.task_id)
    return replace(facts, message=message, workers=workers.names)


def _workers_to_ask(facts: Facts, instead: str) -> set[str]:
    """The workers of the leases that keep the task or another call from the key."""
    keys = {one.key for one in (facts.message, facts.place) if one is not None}
    leases = [
        held
        for held in facts.others.values()
        if held.key in keys or (instead and held.task_id == instead)
    ]
    if facts.lease is not None:
        leases.append(facts.lease)
    return {
        held.worker
        for held in leases
        # Outside of workers, the name is that of the host.
        if held.state == "running" and not held.is_dead and "@" in held.worker
    }


def _in_broker(app: Celery, task_id: str) -> InBroker | None:
    try:
        return within(_BROKER_TIMEOUT, lambda: search_broker(app, task_id))
    except Exception:
        return None  # the login may not search, or the broker does not answer


def _result(app: Celery, task_id: str) -> Result:
    if isinstance(app.backend, RPCBackend):
        return Result(problem="rpc:// delivers a result to its caller alone")
    if isinstance(app.backend, DisabledBackend):
        return Result(problem="the app has no result backend")
    try:
        if (backend := limit_backend_timeouts(app, RESULT_TIMEOUT)) is not None:
            meta = result_meta(backend, task_id)
        else:
            meta = within(RESULT_TIMEOUT, lambda: result_meta(app.backend, task_id))
        return Result(
            state=str(meta.get("status", states.PENDING)),
            value=meta.get("result"),
            done_at=done_at(meta.get("date_done"), app),
        )
    except Exception as exc:
        return Result(problem=f"the result backend failed: {exc!r}")


def _holder_in(value: Any) -> str:
    """The id of the task that a skipped or refused call names as the holder; empty: none."""
    holder: Any = None
    if is_skipped(value):
        holder = value.get("holder")
    elif isinstance(value, LockConflict):
        holder = value.holder
    return str(holder.get("task_id") or "") if isinstance(holder, Mapping) else ""


@dataclass(slots=True)
class _Stored:
    """What the lock store has of a task, and the keys of all others, by name."""

    own: list[HeldKey] = field(default_factory=list)
    others: dict[str, HeldKey] = field(default_factory=dict)
    completions: list[AttemptRecord] = field(default_factory=list)
    released: OperatorRelease | None = None

    @property
    def lease(self) -> HeldKey | None:
        return next((held for held in self.own if not held.is_claim), None)

    @property
    def claim(self) -> HeldKey | None:
        return next((held for held in self.own if held.is_claim), None)

    @classmethod
    def of(cls, runtime: Runtime, task_id: str) -> _Stored:
        """Search the store once: its keys may be few among millions of others."""
        found = cls()

        def read(key: str, text: str) -> None:
            name = without_prefix(key)
            if name.startswith("done|"):
                owner = name.removeprefix("done|").partition("|")[0]
                if Token.task_id_of(owner) == task_id and (completion := AttemptRecord.parse(text)):
                    found.completions.append(completion)
            elif name.startswith("freed|"):
                by = OperatorRelease.parse(text)
                if by and Token.task_id_of(by.token.partition("|")[0]) == task_id:
                    found.released = found.released or by

        every, held_key = runtime.keyspace.match_all(), reader(runtime)
        for record in operators_of(runtime.store).survey(
            every, lambda key, reason: None, texts=read
        ):
            held = held_key(record)
            if is_of_task(record, task_id):
                found.own.append(held)
            else:
                found.others[held.key] = held
        return found


class _Workers:
    """The workers that answer within ``timeout`` seconds.

    The first request waits for all of that time; the others until these workers have answered.
    """

    def __init__(self, app: Celery, timeout: float) -> None:
        self._app, self._timeout = app, timeout
        self.names: tuple[str, ...] = ()
        self.broker_is_silent = False

    def find(self, task_id: str) -> InWorker | None:
        """The message of ``task_id``; if workers have several copies, the one that a process has.

        A worker's index by id loses a message that was requeued, because the copy arrives before
        the worker has finished with the original. Its schedule has the copy.
        """
        replies = self._ask("query_task", task_id)
        self.names = tuple(sorted(replies))
        found = [
            self._message(worker, state, info)
            for worker, messages in replies.items()
            for state, info in messages.values()
        ]
        if not any(message.state == "active" for message in found):
            found = [*self._scheduled(task_id), *found]
        return min(found, key=lambda message: message.state != "active", default=None)

    def _scheduled(self, task_id: str) -> Iterator[InWorker]:
        for worker, entries in self._ask("scheduled").items():
            for entry in entries:
                info, eta = entry.get("request") or {}, entry.get("eta")
                if info.get("id") == task_id:
                    message = self._message(worker, "scheduled", info)
                    yield replace(message, eta=utc(eta) if eta else None)

    def active(self) -> tuple[InWorker, ...]:
        """The messages that processes work on, the longest first."""
        found = [
            self._message(worker, "active", info)
            for worker, messages in self._ask("active").items()
            for info in messages
        ]
        return tuple(sorted(found, key=lambda one: one.since.timestamp() if one.since else 0.0))

    def served(self) -> tuple[str, ...]:
        """The names of the queues that the workers consume, sorted."""
        replies = self._ask("active_queues").values()
        return tuple(sorted({str(queue.get("name")) for each in replies for queue in each or ()}))

    def processes(self, names: set[str]) -> Mapping[str, frozenset[int] | None]:
        """See `Facts`. Nothing if workers of this app take no commands."""
        takes_commands = self._app.conf.worker_enable_remote_control
        if not names or not takes_commands or not self._can_broadcast():
            return {}
        replies = self._ask("stats", to=sorted(names))
        if self.broker_is_silent:
            return {}
        return {name: _pids_in(replies[name]) if name in replies else None for name in names}

    def _can_broadcast(self) -> bool:
        with self._app.connection_for_read() as connection:  # opens nothing
            return bool(connection.supports_exchange_type("fanout"))

    def is_revoked(self, task_id: str) -> bool:
        return any(task_id in ids for ids in self._ask("revoked").values())

    def _ask(self, method: str, *arguments: Any, to: Sequence[str] = ()) -> Mapping[str, Any]:
        if self.names == () and method != "query_task" and not to:
            return {}
        if self.broker_is_silent:
            return {}
        control: Any = self._app.control
        limit, timeout = len(to or self.names) or None, self._timeout
        if to:
            timeout = max(timeout, _HOLDER_TIMEOUT)
        elif limit:
            timeout = max(timeout, _FURTHER_TIMEOUT)

        def ask() -> Mapping[str, Any]:
            inspector = control.inspect(to or None, timeout=timeout, limit=limit)
            return getattr(inspector, method)(*arguments) or {}

        try:
            return within(timeout + _BROKER_TIMEOUT, ask)
        except Exception:
            self.broker_is_silent = True
            return {}

    def _message(self, worker: str, state: str, info: Mapping[str, Any]) -> InWorker:
        since = info.get("time_start")
        return InWorker(
            worker=worker,
            state=state,
            task=str(info.get("name")),
            task_id=str(info.get("id")),
            key=_key_of(self._app, info),
            since=datetime.fromtimestamp(since, UTC) if since else None,
            pid=info.get("worker_pid"),
        )


def _pids_in(stats: Any) -> frozenset[int]:
    """The ids of a worker's processes in its `stats`. Empty: its pool does not name them."""
    try:
        pool, pid = stats["pool"], stats["pid"]
        if "processes" in pool:
            return frozenset({pid, *pool["processes"]})
        is_one_process = pool["implementation"].startswith("celery.concurrency.")
        return frozenset({pid}) if is_one_process else frozenset()
    except (KeyError, TypeError, AttributeError):
        return frozenset()  # an error, or the reply of another version


def _key_of(app: Celery, info: Mapping[str, Any]) -> str | None:
    task: Any = app.tasks.get(str(info.get("name")))
    if not hasattr(task, "lock_key"):
        return None
    try:
        key: str | None = task.lock_key(*info["args"], **info["kwargs"])
        return key
    except Exception:
        return None  # the arguments are those of another version of the task
