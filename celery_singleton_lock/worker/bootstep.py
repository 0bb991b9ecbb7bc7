"""The worker's bootsteps: they check tasks and store, and prepare the prefork pool.

A bootstep that raises stops the worker; an exception in ``worker_init`` or ``worker_ready`` would
only be logged. Importing this module imports what bodies need, before the pool forks.

None of them handles SIGTERM. In a warm shutdown bodies run to their end and keep their leases: the
heartbeat of their process does not stop at exit (`runtime`), and the heartbeat of the worker's
parent stops after the pool.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Final

import click
from celery import Celery, bootsteps, signals

from ..celery_compat import bind_delayed_messages, forks, read_replies_to_sent_pops
from ..core import observers
from ..core.fork_locks import FORK_LOCKS
from ..core.heartbeat import MAX_TIMEOUT
from ..core.lease import Holder, Token
from ..core.rate import Rate
from ..core.store import Store
from ..core.store_requests import Acquire, Release
from ..errors import DOCS, SettingsError, StoreError, StoreUnavailable
from ..instrumentation import EventPipe
from ..key_queue.join import require_call_queue
from ..key_queue.sweep import QueueSweep
from ..message.header import mint_nonce
from ..on_conflict import CancelRunning, Queue
from ..option_values import OnDuplicate, Unique, seconds
from ..policy import OPTIONS, Policy
from ..publish.duplicate import RPC_CURE, sends_results_to_first_caller
from ..publish.replace import check_replaceable
from ..runtime import IN_MEMORY, Runtime, singleton_tasks
from ..settings import Settings
from ..stores import is_sentinel_url
from ..stores.eviction import REMEDY
from ..stores.remedies import fault_of
from .discarded import watch_discards
from .event_sender import EventSender
from .other_prefix import PAGE, leases_elsewhere, text_of
from .parent_heartbeat import ParentHeartbeat
from .shared_memory import SharedMemory

logger = logging.getLogger("celery_singleton_lock")

# The ttl, in seconds, of the lease with which a starting worker tests the store.
_TRIAL_TTL: Final = 10.0

#: What to know before the locks are switched off.
OFF: Final = f"{DOCS}how-to/switch.html"
# Seconds that the end of a process waits for each reply to a release whose event is awaited.
_LAST_REPLIES: Final = 0.5
# Seconds between two sweeps at whether remote control has switched task events on or off.
_LOOK_AT_EVENTS: Final = 1.0


@contextmanager
def exit_on_wrong_settings() -> Iterator[None]:
    """End ``celery worker`` or ``celery beat`` with one log line if a setting is wrong.

    The log line has no traceback. It is not written to stderr, which a daemon does not have.

    Raises:
        SettingsError: Worker or beat is embedded in another program, which may catch the error.
    """
    try:
        yield
    except SettingsError as exc:
        if click.get_current_context(silent=True) is None:
            raise
        logger.critical("singleton: %s", exc)
        raise SystemExit(1) from None


@signals.worker_process_shutdown.connect
def _flush_observers(**_: Any) -> None:
    """Wait for the observers of a pool child that ends. billiard's children run no `atexit`."""
    observers.flush()


class SingletonStep(bootsteps.StartStopStep):
    """Created before any step starts, so before the pool forks; started after the fork."""

    requires = ("celery.worker.components:Pool", "celery.worker.components:Timer")

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        self._app = app = worker.app
        signals.worker_process_shutdown.connect(self._wait_for_last_releases)
        signals.worker_shutdown.connect(self._wait_for_last_releases)
        Runtime.worker_name = worker.hostname
        Runtime.may_evict = False
        self._events = EventSender(app, EventPipe.open(), worker.hostname)
        EventPipe.turn(on=bool(worker.task_events))
        is_prefork = forks(worker.pool_cls)
        if is_prefork:
            Runtime.lease_notes = SharedMemory()
        with exit_on_wrong_settings():
            check_app(app, is_prefork=is_prefork)

    def start(self, worker: Any) -> None:
        """Called by Celery on the main thread, after the pool's first fork."""
        self._look_at_events(worker)
        worker.timer.call_repeatedly(_LOOK_AT_EVENTS, self._look_at_events, (worker,))
        runtime, memory = Runtime.of(worker.app), Runtime.lease_notes
        if runtime.settings.off_by:
            return  # no thread of this worker uses the store
        # In a warm shutdown, bodies run until the worker's last step has stopped.
        is_over = worker.blueprint.shutdown_complete.is_set
        in_memory = runtime.store.capabilities.name == "memory"
        open_store = (lambda: runtime.store) if in_memory else runtime.open_store
        runtime.locker.retry_queue.guard = FORK_LOCKS["retry"]
        if not runtime.store.capabilities.usable_before_fork:
            # A store of its own, because this process may fork again, to replace a child.
            with _reporting_faults(runtime), closing(runtime.open_store()) as store:
                _try_out(runtime, store)
        if runtime.store.call_queue is not None:
            has_queues = any(map(_may_queue, singleton_tasks(worker.app)))
            QueueSweep(worker.app, open_store, is_over, has_queues=has_queues).start()
        if isinstance(memory, SharedMemory) and runtime.store.capabilities.renews_for_others:
            heartbeat = ParentHeartbeat(memory, runtime.open_store(), runtime.clock)
            heartbeat.start(is_over)

    def stop(self, worker: Any) -> None:
        """Called by Celery when no more messages are received, before the pool ends."""
        Runtime.of(self._app).flush()

    def _wait_for_last_releases(self, **_: Any) -> None:
        """Wait a moment for the store's replies to releases, before a process ends.

        Called in each pool child, and in the worker's parent. The replies to asynchronous releases
        are read if events follow them.
        """
        runtime = Runtime.of(self._app)
        if EventPipe.switch[0]:
            runtime.drain(_LAST_REPLIES)
        runtime.end()
        if EventPipe.switch[0]:
            observers.flush()

    def _look_at_events(self, worker: Any) -> None:
        """Send events while the worker sends task events, which remote control may change."""
        dispatcher = getattr(getattr(worker, "consumer", None), "event_dispatcher", None)
        if dispatcher is not None:  # None: no broker connection; then the events wait
            groups = dispatcher.groups
            EventPipe.turn(on=bool(dispatcher.enabled and (not groups or "task" in groups)))
        if EventPipe.switch[0]:
            self._events.start()


class MessagesStep(bootsteps.StartStopStep):
    """Created with the worker's consumer, and started with each of its connections to the broker.

    A requeued message has a countdown. When a countdown ends, kombu's Redis transport may keep a
    message where the death of the worker loses it, and RabbitMQ may have no queue for it.
    """

    requires = (
        "celery.worker.consumer.tasks:Tasks",
        # Declares the exchange of the delayed messages.
        "celery.worker.consumer.delayed_delivery:DelayedDelivery",
    )

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        watch_discards(consumer)

    def start(self, consumer: Any) -> None:
        read_replies_to_sent_pops(consumer.task_consumer.channel)
        bind_delayed_messages(consumer)


def check_app(app: Celery, *, is_prefork: bool = False) -> None:
    """Check what a worker needs at its start, and log what may be wrong.

    Raises:
        SettingsError: The worker must not start.
    """
    runtime = Runtime.of(app)
    if by := runtime.settings.off_by:
        for task in singleton_tasks(app):
            task.singleton_preload()
        _warn(f"the locks are off ({by}): two runs may overlap: see {OFF}")
        return
    if is_prefork and runtime.store.capabilities.name == "memory":
        raise SettingsError(IN_MEMORY)
    check_tasks(app, runtime.store)
    for task in singleton_tasks(app):
        task.singleton_preload()
        _warn_of_durations(task, task.singleton_policy(), runtime.settings)
    for problem, remedy in check_results(app):
        _warn(f"{problem}. {remedy}")
    _check_store(runtime)


def check_tasks(app: Celery, store: Store) -> None:
    """Check each task's policy against the others' and the store.

    Raises:
        SettingsError: See :func:`task_problems`. The error names all of them.
    """
    # A wrong setting is a problem of each task that reads it, and is named once.
    problems = list(dict.fromkeys(task_problems(app, store)))
    if problems:
        count = f"{len(problems)} problems with tasks"
        raise SettingsError("\n* ".join([count, *problems] if problems[1:] else problems))


def task_problems(app: Celery, store: Store) -> Iterator[str]:
    """Yield why no worker starts with the tasks of ``app``.

    Tasks of one scope have unequal limits or rates, a task contradicts the app's settings, a task
    needs a capability that the store lacks, or a plain task has a singleton task as its function. A
    task that is switched off runs as a plain one, and needs no store.
    """
    yield from _problems_of_plain_tasks(app)
    limits: dict[str, tuple[int, str]] = {}
    rates: dict[str, tuple[Rate | None, str]] = {}
    queues: dict[str, tuple[bool, str]] = {}
    for task in singleton_tasks(app):
        try:
            policy = task.singleton_policy()
        except (TypeError, ValueError) as exc:
            # The option is valid by itself, but contradicts the app's settings.
            yield f"{exc} (with the defaults that singleton_lock_* sets)"
            continue
        if not policy.enabled:
            continue
        scope = policy.scope or task.name
        limit, other = limits.setdefault(scope, (policy.limit, task.name))
        if limit != policy.limit:
            yield (
                f"{task.name} has limit={policy.limit} and {other} has limit={limit}, but both are "
                f"in scope {scope!r}: give them one limit, or two scopes"
            )
        rate, other = rates.setdefault(scope, (policy.rate, task.name))
        if rate != policy.rate:
            yield (
                f"{task.name} has {_rate_of(policy.rate)} and {other} has {_rate_of(rate)}, but "
                f"both are in scope {scope!r}: give them one rate, or two scopes"
            )
        is_queued = isinstance(policy.on_conflict, Queue)
        queued, other = queues.setdefault(scope, (is_queued, task.name))
        if queued is not is_queued:
            names = (task.name, other) if is_queued else (other, task.name)
            yield (
                f'{names[0]} has on_conflict="queue" and {names[1]} has not, but both are in scope '
                f"{scope!r}: the calls of one would overtake those of the other. Give both the "
                "queue, or two scopes"
            )
        try:
            _check_capabilities(task.name, policy, store)
            if policy.unique and policy.on_duplicate is OnDuplicate.REPLACE:
                check_replaceable(
                    task.name, store, through_others=task.singleton_publishes_through_others
                )
        except SettingsError as exc:
            yield str(exc)


def _problems_of_plain_tasks(app: Celery) -> Iterator[str]:
    """Yield the tasks that take no lock, though they seem to.

    A decorator of Celery is above ours: a task calls the other as a function. Or a plain task has
    the options of a lock.
    """
    for task in app.tasks.values():
        body: Any = getattr(task, "run", None)
        options = getattr(task, "singleton", None)
        is_plain = not hasattr(task, "singleton_policy")
        if is_plain and isinstance(options, Mapping) and options and options.keys() <= OPTIONS:
            yield (
                f"the task {task.name} has singleton={dict(options)!r}, but no lock: use "
                "@singleton_task, or add base=SingletonTask to the decorator"
            )
        if hasattr(body, "singleton_policy"):
            yield (
                f"the task {task.name} calls the singleton task {body.name} as a function, without "
                "its lock: remove the decorator above @singleton_task, which takes its options "
                "(name=, bind= ...) too"
            )


def _check_capabilities(task: str, policy: Policy, store: Store) -> None:
    able = store.capabilities
    if policy.ttl < able.min_ttl:
        raise SettingsError(
            f"{task} has ttl={policy.ttl:g} s, but the store ({able.name}) keeps no lease for less "
            f"than {able.min_ttl:g} s: give the task a longer ttl, or choose another store"
        )
    if able.max_limit is not None and policy.limit > able.max_limit:
        raise SettingsError(
            f"{task} has limit={policy.limit}, but the store ({able.name}) looks through at most "
            f"{able.max_limit} slots in one step: give the task a lower limit"
        )
    if policy.needs_fence and not able.fence:
        raise SettingsError(
            f"{task} has needs_fence=True, but the store ({able.name}) has no fencing tokens: "
            "choose a store that has, or drop needs_fence"
        )
    if policy.rate is not None and not able.rates:
        raise SettingsError(
            f'{task} has rate="{policy.rate}", but the store ({able.name}) can\'t count the starts '
            "of a key in one step with its lock: use Redis, Valkey, Sentinel or Cluster"
        )
    if isinstance(policy.on_conflict, Queue):
        require_call_queue(task, store)
    if isinstance(policy.on_conflict, CancelRunning) and store.newest_calls is None:
        raise SettingsError(
            f'{task} has on_conflict="cancel_running", but the store ({able.name}) does not keep '
            'the order of calls: use Redis, Valkey, Sentinel or Cluster, or on_conflict="wait"'
        )


def _rate_of(rate: Rate | None) -> str:
    return "no rate" if rate is None else f'rate="{rate}"'


def _may_queue(task: Any) -> bool:
    """Whether calls of the task wait in queues of keys, by its rule or above its rate."""
    policy = task.singleton_policy()
    return isinstance(policy.on_conflict, Queue) or policy.rate is not None


def _warn_of_durations(task: Any, policy: Policy, settings: Settings) -> None:
    ttl, timeout, max_hold = policy.ttl, settings.visibility_timeout, policy.max_hold
    if timeout is not None and ttl > timeout and task.acks_late:
        _warn(
            f"{task.name} has ttl={ttl:g} s, longer than the broker's visibility_timeout of "
            f"{timeout:g} s: a dead worker's message comes back while its lease still stands, and "
            "waits. Set ttl below visibility_timeout."
        )
    longest, debounce = settings.longest_countdown, policy.debounce
    if timeout is not None and longest is not None and debounce is not None and debounce > timeout:
        _warn(
            f"{task.name} has debounce={debounce:g} s, longer than the broker's visibility_timeout "
            f"of {timeout:g} s: a worker requeues each message every {longest:g} s until it is "
            "due. With many such messages this delays them all. Set visibility_timeout above "
            "debounce."
        )
    if max_hold is not None and max_hold < ttl:
        _warn(
            f"{task.name} has max_hold={max_hold:g} s, shorter than its ttl of {ttl:g} s: each "
            "run that takes longer than max_hold loses its lease. Set max_hold above ttl, "
            "or ttl below max_hold."
        )


def _warn(text: str) -> None:
    logger.warning("singleton: %s", text)


def check_results(app: Celery) -> Iterator[tuple[str, str]]:
    """Yield problem and remedy of tasks whose duplicates get results that never arrive."""
    policies = [(task, task.singleton_policy()) for task in singleton_tasks(app)]
    if names := names_of(t for t, p in policies if sends_results_to_first_caller(app, t, p, {})):
        yield (
            f'{names}: on_duplicate="return_existing" or "replace" gives every caller the result '
            "of the first call, but rpc:// delivers it only to the process and thread of that "
            "call: anywhere else .get() waits forever",
            RPC_CURE,
        )
    expires = seconds("result_expires", app.conf.result_expires or 0) or float("inf")
    if names := names_of(t for t, p in policies if _outlasts_its_result(t, p, expires)):
        yield (
            f"{names}: unique_for is longer than result_expires ({expires:g} s). At the end of "
            "such a period, a duplicate's caller gets a result that the backend has deleted: "
            ".get() waits forever",
            'Raise result_expires, or set on_duplicate="skip" or "raise".',
        )


def _outlasts_its_result(task: Any, policy: Policy, expires: float) -> bool:
    return (
        policy.unique is Unique.UNTIL_EXPIRED
        and policy.on_duplicate is OnDuplicate.RETURN_EXISTING
        and policy.unique_for > expires
        and not task.ignore_result
    )


def names_of(tasks: Iterable[Any]) -> str:
    return ", ".join(task.name for task in tasks)


def _check_store(runtime: Runtime) -> None:
    """Refuse a store that splits its keys; log if it may evict leases, or can't be used now.

    Raises:
        SettingsError: Leases in this store would not exclude each other.
    """
    store = runtime.store
    with _reporting_faults(runtime):
        operators, key = store.operators, runtime.keyspace.lock("", "")
        if operators is not None and (problems := operators.problems(key)):
            raise SettingsError(problems[0])
        if reason := why_no_leases(runtime):
            runtime.refuse_evictable_leases(is_known=True)
            logger.error(
                "singleton: no locks: %s. Until then singleton tasks are requeued, and the "
                "worker's other tasks run",
                reason,
            )
        # Clients of etcd and ZooKeeper may start threads, and this process forks later.
        if store.capabilities.usable_before_fork:
            _try_out(runtime, store)
            _warn_of_another_prefix(runtime, store)


def _warn_of_another_prefix(runtime: Runtime, store: Store) -> None:
    """Log once if the leases of this worker's tasks are under other keys than its own."""
    if records := leases_elsewhere(runtime, store):
        _warn(f"{text_of(records, runtime)}: see {PAGE}")


@contextmanager
def _reporting_faults(runtime: Runtime) -> Iterator[None]:
    """Log an error of the store, with its remedy.

    It does not stop the worker: other tasks can run, and the store may be repaired meanwhile.
    """
    url = runtime.settings.safe_url
    try:
        yield
    except StoreError as exc:
        kind = "sentinel" if is_sentinel_url(url) else runtime.store.capabilities.name
        remedy = f"{fault_of(kind, exc).remedy}. `celery -A ... singleton doctor` shows more"
        if isinstance(exc, StoreUnavailable):
            runtime.refuse_evictable_leases(is_known=False)
            _warn(
                f"no locks now, because {url} can't be used ({exc}); tasks are requeued until it "
                f"can. To do: {remedy}"
            )
        else:
            logger.error(
                f"singleton: no locks, because {url} refuses them ({exc}); tasks are requeued "
                f"until this is corrected. To do: {remedy}"
            )


def _try_out(runtime: Runtime, store: Store) -> None:
    """Acquire and release a test lease, because a store may answer reads and refuse writes.

    Raises:
        StoreError: The store refuses the lease, or does not answer.
    """
    nonce = mint_nonce()
    key, token = runtime.keyspace.lock("singleton-start", nonce), Token(nonce, 0, 0, nonce)
    holder = Holder(task_id=nonce, worker=runtime.worker, since=runtime.clock.wall())
    call = Acquire(slots=(key,), token=token, holder=holder, ttl=_TRIAL_TTL)
    store.leases.acquire(call, timeout=MAX_TIMEOUT)
    store.leases.release(Release(keys=(key,), token=token), timeout=MAX_TIMEOUT)


def why_no_leases(runtime: Runtime) -> str:
    """Why the store grants no leases: its server may evict them; empty: it grants leases.

    A lesser risk is logged.

    Raises:
        SettingsError: Two addresses of a redlock:// URL lead to one server.
        StoreError: The server does not answer.
    """
    found = runtime.eviction()
    if found is None:
        return ""
    advice = f"{runtime.settings.safe_url}: {found.text}. To do: {REMEDY}"
    if found.forbids_leases(allow_eviction=runtime.settings.allow_eviction):
        return f"{advice}, or accept it with singleton_lock_allow_eviction = True"
    _warn(advice)
    return ""
