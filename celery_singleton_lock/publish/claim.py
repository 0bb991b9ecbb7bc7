"""The claim of a message (``unique``): its transitions, and its admission when it is published.

Overview
    A claim is a key in the store that represents one published message. Equal calls find it and are
    not published. Its key and terms are in the message's header, because the worker that settles
    the claim may have other code or settings than the publisher. The claim costs one round trip. A
    duplicate costs a second one, to the result backend, to find out whether the first call has
    ended.

Guarantees
    At most one of several equal calls is queued (``until_start``), queued or running
    (``until_done``), or published in a period (``until_expired``). A publish that fails frees its
    claim. A store that does not answer delays a call by a second at most: the message is published
    without a claim, and the lock still excludes two bodies. No call is answered with a call that is
    known to have ended, except in its period.

Non-guarantees
    Detection of a lost message (a purged queue, a failure of the broker, a crash between claim and
    publish): ``unique_for`` limits the time for which its claim blocks other calls.

State model, in the store::

    admit -> queued --acquire, until_done--> running --retry--> retrying --acquire--> running
               |  ^                             |  +--put back, requeued--> queued
               |  +--put back, retry            +--ended--> (free)
               +--acquire, until_start; discarded; ended without a run--> (free)

    The claim of a period (``until_expired``) stays queued until it expires. Its message does not
    name it, so no worker, of whatever version, changes it.

Failure handling
    If other messages wait for a message (chains, groups, chords, links), dropping it would block
    them. So such a duplicate is published and resolved when it runs, unless the call sets
    ``on_duplicate``. In a period, its message names the claim, and its worker asks for it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import datetime
from threading import Thread
from typing import Any, Final

from celery import Celery, states
from celery.backends.rpc import RPCBackend
from celery.exceptions import Ignore, Reject, Retry
from celery.result import AsyncResult
from celery.utils.time import maybe_iso8601, maybe_make_aware

from ..celery_compat import limit_backend_timeouts, result_meta
from ..core.events import Event, EventName
from ..core.key import KeyMaker, Keyspace
from ..core.lease import Holder, Phase, Record, Token
from ..core.store import ARGUMENTS_FOR, Admit, ClaimChange, ReplaceArguments, Replaced, Store
from ..errors import DuplicateTask, SettingsError, StoreError, StoreUnavailable
from ..policy import OnDuplicate, Policy, Unique, seconds
from ..runtime import Runtime
from .header import moment
from .values import SkippedResult, skipped_value

logger = logging.getLogger("celery_singleton_lock")

#: The remedy for results that only the first caller receives.
RPC_CURE: Final = (
    'Use a result backend that all processes share, such as redis://, or on_duplicate="skip" or '
    '"raise"; where no caller reads the result, ignore_result=True.'
)

#: A function that publishes a task id and options, as Celery's ``apply_async`` does.
Send = Callable[[str, dict[str, Any]], "AsyncResult[Any]"]

# Seconds to wait for one reply. A restart of the server breaks all idle connections, which is
# detected at once: a second request uses a new connection. After a timeout there is no second
# request, because a web request may be waiting. The store itself repeats a request that it sent on
# an idle connection, which may have been dropped.
_TIMEOUT: Final = 0.4
_SHOWS_AT_ONCE: Final = 0.1
# Options that Celery's canvas sets for messages that another message waits for.
_CANVAS_OPTIONS: Final = frozenset(
    ("chain", "chord", "group_id", "root_id", "parent_id", "link", "link_error")
)
# The task that publishes the bodies of chords if the result backend can't count their members.
_CHORD_UNLOCK: Final = "celery.chord_unlock"
# Seconds. A result that is older than its claim by more than this belongs to an earlier call with
# the same, explicit task id.
_MAX_CLOCK_DIFFERENCE: Final = 60.0
# The number of claims that a process could not free and remembers. More means that the store has
# been unreachable for a long time.
_MAX_ORPHANS: Final = 1000
# The number of results of eager calls that a process keeps for the duplicates of their periods.
_MAX_EAGER_RESULTS: Final = 1000
# How often a call tries to replace the arguments of messages that start meanwhile.
_TRIES_TO_REPLACE: Final = 5
# Names of the tasks whose rpc:// results this process has warned about.
_warned: Final[set[str]] = set()
#: Attribute of a running request that refers to its ``TaskRun``.
TASK_RUN: Final = "singleton_task_run"
#: Attribute of a running request: the key of the claim of the message that continues it.
CONTINUED: Final = "singleton_continued"


@dataclass(slots=True, kw_only=True)
class Claim:
    """The key and terms of a claim; never changed.

    Attributes:
        key: The key in the store.
        unique: The time for which the claim blocks equal calls.
        unique_for: Seconds after which the claim expires, unless its task is running.
        duplicate: Whether the message was published although another message has the claim.
        lasts: Whether the claim ends with its period only (``until_expired``). No worker changes
            it, so no header contains it.
        arguments: The name of the later call whose arguments the message has; empty: it has its
            own, which later calls may replace; None: they can't.
        admitted_until: The publisher's time, in seconds since the epoch, until which the claim was
            admitted; None: unknown. Arguments that no call has replaced expire then.
    """

    key: str
    unique: Unique
    unique_for: float
    duplicate: bool = False
    lasts: bool = False
    arguments: str | None = None
    admitted_until: float | None = None

    @classmethod
    def of(cls, policy: Policy, key: str) -> Claim:
        """The claim in ``key`` of a call; the policy has ``unique``."""
        assert policy.unique is not None
        return cls(key=key, unique=policy.unique, unique_for=policy.unique_for)

    def to_header(self) -> dict[str, Any]:
        """The form in a message's header; :meth:`from_header` reads it."""
        header = {
            "key": self.key,
            "unique": str(self.unique),
            "unique_for": self.unique_for,
            "duplicate": self.duplicate,
        }
        if self.arguments is not None:
            header["arguments"] = self.arguments
        if self.admitted_until is not None:
            header["admitted_until"] = self.admitted_until
        return header

    @classmethod
    def from_header(cls, value: Any, keyspace: Keyspace) -> Claim | None:
        """Read a claim; None if :meth:`to_header` did not write it or its key is foreign."""
        if value is None:
            return None  # the common case first: isinstance() with an ABC is slow
        if not isinstance(value, Mapping) or not keyspace.is_claim(value.get("key")):
            return None
        if Keyspace.is_period(value["key"]):
            return None  # no worker changes such a claim
        arguments = value.get("arguments")
        try:
            return cls(
                key=value["key"],
                unique=Unique(str(value.get("unique"))),
                unique_for=seconds("unique_for", value.get("unique_for")),
                duplicate=value.get("duplicate") is True,
                arguments=arguments if isinstance(arguments, str) else None,
                admitted_until=moment(value.get("admitted_until")),
            )
        except (TypeError, ValueError):
            return None

    @property
    def yields(self) -> bool:
        """Whether the message must not run while another message has the claim.

        With ``until_done`` it yields, because the other message does the work. With ``until_start``
        it never does: its caller needs a run that starts after the call, and its own run is one.
        """
        return self.duplicate and self.unique is Unique.UNTIL_DONE

    def admitted_for(self, delay: float, expires_in: float | None) -> float:
        """Seconds until the claim of a message that is published now expires.

        A period begins now, whenever the message runs and whatever becomes of it.

        Args:
            delay: Seconds until the message may run.
            expires_in: Seconds after which no worker will run the message; None: never.
        """
        if self.lasts:
            return self.unique_for
        bound = self.unique_for + delay
        return bound if expires_in is None else min(bound, max(expires_in, 0.0))

    def granted(self, ttl: float) -> ClaimChange:
        """The change when the task starts with a lease of ``ttl`` seconds.

        Each renewal prolongs the lease and the claim.
        """
        if self.unique is Unique.UNTIL_START:
            return ClaimChange(key=self.key, phase=None)
        return ClaimChange(key=self.key, phase=Phase.RUNNING, ttl=ttl)

    def queued(self, delay: float = 0.0) -> ClaimChange:
        """The change when the message is queued again, to run after ``delay`` seconds or later."""
        return ClaimChange(key=self.key, phase=Phase.QUEUED, ttl=self.unique_for + delay)

    def freed(self, message: str = "") -> ClaimChange:
        """The change when the message has ended.

        Args:
            message: The message's name (``Token.task``), if its newest arguments are deleted: it
                never comes back, and has ``on_duplicate="replace"``.
        """
        arguments = Keyspace.arguments(self.key, message) if message else ""
        return ClaimChange(key=self.key, phase=None, arguments=arguments)

    def may_have_arguments(self, policy: Policy) -> bool:
        """Whether the store may have newest arguments of the message.

        The policy says so in a retry that the worker parent publishes, the claim in a task that
        replaces itself.
        """
        return self.arguments is not None or policy.on_duplicate is OnDuplicate.REPLACE

    def after(
        self,
        state: str | None,
        retval: Any,
        *,
        comes_back: bool,
        retry_in: float | None,
        replaced: bool,
        message: str = "",
    ) -> ClaimChange:
        """The change when the task has ended.

        Args:
            state: Celery's state; None after SystemExit or similar.
            retval: The task's result, or the exception that ended it.
            comes_back: Whether the broker delivers an unacknowledged message again.
            retry_in: Seconds until the next attempt on the same key; None if there is none.
            replaced: Whether ``self.replace()`` published a successor with the same claim.
            message: See :meth:`freed`.
        """
        if isinstance(retval, Retry) and retry_in is not None:
            return replace(self.queued(retry_in), phase=Phase.RETRYING)
        if isinstance(retval, Ignore) and replaced:
            return self.queued()
        requeued = isinstance(retval, Reject) and bool(getattr(retval, "requeue", False))
        if comes_back and (requeued or (state is None and not isinstance(retval, Reject))):
            return self.queued()
        return self.freed(message)


@dataclass(slots=True, kw_only=True, eq=False)
class Publication:
    """A message about to be published with a claim.

    Attributes:
        runtime: The runtime of the publisher's app.
        task: Name of the task.
        task_id: The id of the message.
        key: The lock key that the call will need.
        policy: The task's policy, with this call's options.
        header: This library's header of the message; the claim is written into it.
        options: Celery's options; ``countdown``, ``eta`` and the options of its canvas are read.
        expires: Celery's ``expires`` of the call or the task.
        drops_in_canvas: Whether a duplicate is dropped even in a canvas, as the call requested.
    """

    runtime: Runtime
    task: str
    task_id: str
    key: str
    policy: Policy
    header: dict[str, Any]
    options: dict[str, Any]
    expires: Any = None
    drops_in_canvas: bool = False

    def publish(self, send: Send) -> AsyncResult[Any]:
        """Claim and ``send``, or answer with the call that has the claim.

        Raises:
            DuplicateTask: ``on_duplicate`` is ``"raise"``.
            StoreUnavailable: The store does not answer, and ``on_duplicate`` is ``"raise"``.
            Exception: ``send`` raised it; the claim is free then.
        """
        claim = self._claim()
        if not claim.lasts:  # a worker finds the claims that it changes in the header
            self.header["claim"] = claim.to_header()
        token = Token(self.task_id, 0, 0, "-", self.header["call"])
        try:
            existing = self._admit(claim, token)
        except BaseException as exc:
            if isinstance(exc, StoreError) and self.policy.on_duplicate is not OnDuplicate.RAISE:
                self.runtime.outages.report(
                    exc,
                    "published-without-claim",
                    key=claim.key,
                    task=self.task,
                    task_id=self.task_id,
                    repeats=True,
                )
                return send(self.task_id, self.options)
            # The request may have been carried out, for example if a soft time limit came before
            # the reply: the claim may exist although its message will not be published.
            self._free(claim, token)
            raise
        if existing is None:
            try:
                return send(self.task_id, self.options)
            except BaseException:
                self._free(claim, token)
                raise
        return self._resolve(claim, existing, send)

    def run(self, send: Send) -> AsyncResult[Any]:
        """As :meth:`publish` with ``task_always_eager``: ``send`` runs the call.

        The run takes the claim itself, so a call that fails before its run claims nothing.
        """
        claim, runtime = self._claim(), self.runtime
        existing, running = runtime.store.inspect(claim.key), runtime.app.current_worker_task
        if existing is not None and (
            claim.lasts or not continues(running, Token.task_id_of(existing.token))
        ):
            return self._resolve(claim, existing, send)
        result = send(self.task_id, self.options)
        if claim.lasts:
            # No result backend has it. The duplicates of the period get it from here.
            results = runtime.eager_results
            results[claim.key] = result
            if len(results) > _MAX_EAGER_RESULTS:
                del results[next(iter(results))]
        return result

    def _resolve(self, claim: Claim, existing: Record, send: Send) -> AsyncResult[Any]:
        """Answer a duplicate with the call that has the claim, or publish it as a duplicate."""
        if self._may_answer(existing, claim):
            return self._answer(claim, existing)
        if claim.lasts:
            # The options make a worker of an older version, which would run it, log a warning.
            terms = {"unique": str(claim.unique), "unique_for": claim.unique_for}
            self.header["options"] = {**self.header.get("options", {}), **terms}
            self.header["period"] = claim.key
        else:
            beside = replace(claim, duplicate=True, arguments=None)
            self.header["claim"] = beside.to_header()
        return send(self.task_id, self.options)

    def _claim(self) -> Claim:
        keyspace, policy = self.runtime.keyspace, self.policy
        if policy.unique is not Unique.UNTIL_EXPIRED:
            return Claim.of(policy, keyspace.claim(self.task, self.key))
        return replace(Claim.of(policy, keyspace.period(self.task, self.key)), lasts=True)

    def check_debounce(self) -> None:
        """Refuse Celery's options that contradict ``debounce``.

        Raises:
            ValueError: The call sets another time, or expires before it may run.
        """
        options, policy = self.options, self.policy
        for name in ("countdown", "eta"):
            if options.get(name) is not None:
                raise ValueError(
                    f"{self.task}: {name}={options[name]!r} with debounce={policy.debounce:g}: the "
                    f"debounce decides when the call runs. Leave {name} out, or turn debounce off "
                    'for this call: singleton={"debounce": None, "debounce_max": None}'
                )
        if self.expires is None:
            return
        where = f"{self.task}: expires={self.expires!r} with debounce={policy.debounce:g}"
        latest = policy.debounce_max
        if latest is None:
            raise ValueError(
                f"{where}: without debounce_max, later calls may postpone the run beyond any "
                "expires, and the newest arguments would be lost. Give a debounce_max, or no "
                "expires"
            )
        if _delay_until(self.expires, self.runtime.app) <= latest:
            raise ValueError(
                f"{where}: the message may expire before it runs, {latest:g} s after the call or "
                "later, and the newest arguments would be lost. Give a later expires, or none"
            )

    def first_countdown(self) -> float:
        """The countdown of a debounced message; a worker puts it back if it is not due then.

        As of a put-back message, it is shorter than the broker's visibility timeout.
        """
        debounce, longest = self.policy.debounce or 0.0, self.runtime.settings.longest_countdown
        return debounce if longest is None else min(debounce, longest)

    def _leaves_out_arguments(self) -> bool:
        """Whether calls with one key may have different arguments, if the task's code is here."""
        key_maker = getattr(self.runtime.app.tasks.get(self.task), "singleton_key_maker", None)
        return isinstance(key_maker, KeyMaker) and not key_maker.names_all

    def _may_answer(self, existing: Record, claim: Claim) -> bool:
        if self.options.get("retries"):
            return False  # the worker parent retries the task of a lost child: started work
        running = self.runtime.app.current_worker_task
        is_awaited = is_canvas(self.options) or is_chords_body(running, self.task_id)
        return _stands_for(existing, claim) and (self.drops_in_canvas or not is_awaited)

    def _admit(self, claim: Claim, token: Token, arguments: str = "") -> Record | None:
        """Take the claim, or return the record of the call that has it."""
        runtime, app = self.runtime, self.runtime.app
        # If both are given, Celery uses the countdown.
        start = self.options.get("countdown") or self.options.get("eta")
        delay = _delay_until(start, app) if start else 0.0
        due_in = (self.policy.debounce or 0.0) if arguments else 0.0
        expires_in = None if self.expires is None else _delay_until(self.expires, app)
        wall = runtime.clock.wall()
        call = Admit(
            key=claim.key,
            token=token,
            holder=Holder(
                task=self.task,
                task_id=self.task_id,
                worker=runtime.worker,
                pid=os.getpid(),
                since=wall,
                expires=0.0 if expires_in is None else wall + expires_in,
            ),
            ttl=claim.admitted_for(max(delay, due_in), expires_in),
            instead_of=runtime.orphans.get(claim.key, "") if runtime.orphans else "",
            prolongs=not claim.lasts,
            wants_ttl=self.policy.on_duplicate is OnDuplicate.RAISE,
            arguments=arguments,
            due_in=due_in,
        )
        if arguments:
            self.header["claim"]["admitted_until"] = wall + call.ttl
        existing = _ask(runtime, call)
        if runtime.outages.since:
            runtime.outages.end(claim.key)
        if runtime.orphans:
            runtime.orphans.pop(claim.key, None)
        if existing is None or claim.lasts or not _gives_way(runtime, existing, call.holder):
            return existing
        return _ask(runtime, replace(call, instead_of=existing.token))

    def _free(self, claim: Claim, token: Token) -> None:
        runtime, message = self.runtime, "" if claim.arguments is None else token.task
        try:
            runtime.store.settle_claim(token, claim.freed(message), timeout=_TIMEOUT)
        except StoreError as exc:
            # The next try in this process must not be answered with a call that was never
            # published.
            if len(runtime.orphans) < _MAX_ORPHANS:
                runtime.orphans[claim.key] = token.task
            logger.warning(
                "singleton: could not withdraw the claim %s of an unpublished call; it stays for "
                "at most %g s; free it with: celery -A ... singleton release '%s' (%s)",
                *(claim.key, claim.unique_for, claim.key, exc),
            )

    def _answer(self, claim: Claim, existing: Record) -> AsyncResult[Any]:
        """The result that the caller gets instead of publishing a message."""
        runtime, on_duplicate = self.runtime, self.policy.on_duplicate
        task_id, holder = Token.task_id_of(existing.token), existing.holder
        call = {"key": existing.key, "task": self.task, "task_id": self.task_id}
        # In a period, the store does not know whether the call still runs.
        phase = "published" if claim.lasts else str(existing.phase)
        data = {"outcome": str(on_duplicate), "phase": phase}
        if on_duplicate is not OnDuplicate.REPLACE and self._leaves_out_arguments():
            data["arguments"] = "dropped"  # the queued message has those of another call
        runtime.events.emit(Event(name=EventName.DUPLICATE, **call, holder=holder, data=data))
        if on_duplicate is OnDuplicate.SKIP:
            value = skipped_value(self.task, self.key, holder, existing.phase)
            return SkippedResult(self.task_id, value, states.SUCCESS, name=self.task)
        if on_duplicate is OnDuplicate.RAISE:
            age = max(0.0, runtime.clock.wall() - holder.since)
            end = f"in {existing.ttl:.0f} s"
            if claim.lasts:
                end += ", whatever becomes of it"
            else:
                end = f"when it does, or {end} if no worker reports its end"
            raise DuplicateTask(
                f"{self.task} is not published: {task_id} is {phase} with the same key, "
                f"since {age:.1f} s. Wait for that one, or set another on_duplicate. Its claim "
                f"ends {end}",
                task_id,
                existing.ttl,
            )
        self._warn_of_rpc(task_id)
        kept: AsyncResult[Any] | None = runtime.eager_results.get(claim.key)
        if kept is not None and kept.id == task_id:
            return kept
        return runtime.app.AsyncResult(task_id, task_name=self.task)

    def _warn_of_rpc(self, task_id: str) -> None:
        """Warn, once per process and task, about a result that this caller may never receive."""
        app, name = self.runtime.app, self.task
        task, policy = app.tasks.get(name), self.policy
        if sends_results_to_first_caller(app, task, policy, self.options) and name not in _warned:
            _warned.add(name)
            logger.warning(
                "singleton: a call of %s returns the result of %s, but rpc:// delivers a result "
                "only to the process and thread that published the message: anywhere else .get() "
                "waits for ever. %s",
                *(name, task_id, RPC_CURE),
            )


@dataclass(slots=True, kw_only=True, eq=False)
class ReplacingPublication(Publication):
    """A publication that replaces the arguments of the queued message that has the claim.

    Attributes:
        arguments: The packed arguments of the call.
        is_replaced: Whether the queued message has them.
    """

    arguments: bytes = b""
    is_replaced: bool = False

    @classmethod
    def of(cls, publication: Publication, arguments: bytes) -> ReplacingPublication:
        """``publication`` for a policy with ``on_duplicate="replace"``."""
        values = {one.name: getattr(publication, one.name) for one in fields(publication)}
        if publication.policy.debounce is not None:
            publication.check_debounce()
            publication.options["countdown"] = publication.first_countdown()
        return cls(**values, arguments=arguments)

    def _claim(self) -> Claim:
        return replace(Publication._claim(self), arguments="")

    def _admit(self, claim: Claim, token: Token, arguments: str = "") -> Record | None:
        # A worker that does not know the option logs that it ignores it.
        options = {**(self.header.get("options") or {}), "on_duplicate": "replace"}
        self.header["options"] = options
        existing = None
        for _ in range(_TRIES_TO_REPLACE):
            own = Keyspace.arguments(claim.key, token.task)
            existing = Publication._admit(self, claim, token, own)
            if existing is None or not Publication._may_answer(self, existing, claim):
                break
            reply = self._replace(existing, claim)
            self.is_replaced = reply is Replaced.YES
            if reply is not Replaced.NOT_QUEUED:
                break
        return existing

    def _replace(self, existing: Record, claim: Claim) -> Replaced:
        due_in = self.policy.debounce or 0.0
        request = ReplaceArguments(
            claim=claim.key,
            task=existing.token,
            key=Keyspace.arguments(claim.key, existing.token),
            arguments=self.arguments,
            ttl=claim.unique_for + due_in + ARGUMENTS_FOR,
            due_in=due_in,
            due_max=self.policy.debounce_max,
        )
        return self.runtime.store.replace_arguments(request, timeout=_TIMEOUT)

    def _may_answer(self, existing: Record, claim: Claim) -> bool:
        return self.is_replaced


def carry_claim(
    runtime: Runtime, request: Any, header: dict[str, Any], task: str, key: str, policy: Policy
) -> None:
    """Pass the claim of ``request`` to the message that continues it, without a request."""
    run = request.__dict__.get(TASK_RUN)
    claim = getattr(run, "claim", None)  # with the key that its publisher computed
    # The type is checked, because headers of foreign publishers become attributes of the request.
    if not isinstance(claim, Claim) or (run.task.name, run.key) != (task, key):
        if policy.unique is Unique.UNTIL_EXPIRED:
            return  # the period is that of its first message
        claim = Claim.of(policy, runtime.keyspace.claim(task, key))
    header["claim"] = claim.to_header()
    request.__dict__[CONTINUED] = claim.key


def continues(running: Any, task_id: str) -> bool:
    """Whether the message ``task_id`` continues the ``running`` task: a retry or replace."""
    return running is not None and str(running.request.id) == task_id


def is_canvas(options: Mapping[str, Any]) -> bool:
    """Whether Celery's canvas publishes this: a member of a group, chord or chain, or a link."""
    return any(options[name] for name in _CANVAS_OPTIONS.intersection(options))


def is_chords_body(running: Any, task_id: str) -> bool:
    """Whether ``running`` publishes its chord's body (since Celery 5.7 its options say so)."""
    if running is None:
        return False
    chord = running.request.chord
    options = chord.get("options") if isinstance(chord, Mapping) else None
    published_id = options.get("task_id") if isinstance(options, Mapping) else None
    return running.name == _CHORD_UNLOCK or published_id == task_id


def check_replaceable(task: str, store: Store, *, through_others: bool = False) -> None:
    """Refuse ``on_duplicate="replace"`` where it can't work.

    Args:
        task: The name of the task.
        store: The store of its claims.
        through_others: Whether a base class overrides the task's ``apply_async``.

    Raises:
        SettingsError: The store can't replace arguments, or a base class may change them.
    """
    if not store.capabilities.replaces_arguments:
        raise SettingsError(
            f'{task} has on_duplicate="replace", but the store ({store.capabilities.name}) can\'t '
            "replace the arguments of a queued message: use Redis or Valkey (alone, Sentinel, "
            "Cluster), or another on_duplicate"
        )
    if through_others:
        raise SettingsError(
            f'{task} has on_duplicate="replace", but a base class overrides apply_async, which may '
            "change the arguments of a message: those in the store would not be changed. Use "
            "another on_duplicate"
        )


def sends_results_to_first_caller(
    app: Celery, task: Any, policy: Policy, options: Mapping[str, Any]
) -> bool:
    """Whether only the thread of the first caller can read the result that a duplicate gets.

    The ``rpc://`` backend sends a result to a queue of the thread that published the message.
    """
    ignored = options.get("ignore_result", getattr(task, "ignore_result", False))
    return (
        policy.unique is not None
        and policy.on_duplicate in (OnDuplicate.RETURN_EXISTING, OnDuplicate.REPLACE)
        and isinstance(app.backend, RPCBackend)
        and not ignored
    )


def _ask(runtime: Runtime, call: Admit) -> Record | None:
    asked_at = runtime.clock.now()
    try:
        return runtime.store.admit(call, timeout=_TIMEOUT)
    except StoreUnavailable:
        if runtime.clock.now() - asked_at > _SHOWS_AT_ONCE:
            raise
        return runtime.store.admit(call, timeout=_TIMEOUT)


def _gives_way(runtime: Runtime, existing: Record, caller: Holder) -> bool:
    """Whether the caller takes over the claim, because the call that has it may not do the work.

    That call may expire while the caller's does not; or it is the running task, which publishes its
    own successor; or it has ended and its worker could not free the claim: the worker was killed
    after it had stored the result, or the store was unreachable.
    """
    # Two calls that expire count as equal: with expires=60 at the task, each call expires later
    # than the one before.
    if existing.phase is Phase.QUEUED and existing.holder.expires and not caller.expires:
        return True
    if continues(runtime.app.current_worker_task, Token.task_id_of(existing.token)):
        return True
    return _has_ended(runtime, existing)


def _stands_for(existing: Record, claim: Claim) -> bool:
    """Whether the call that has the claim does the work of the call that requests it.

    If the two calls have different terms, the first may be running already although the second
    needs a later run.
    """
    return claim.unique is not Unique.UNTIL_START or existing.phase is not Phase.RUNNING


def _has_ended(runtime: Runtime, existing: Record) -> bool:
    """Whether the result backend has a final state of the call that has the claim."""
    app = runtime.app
    if isinstance(app.backend, RPCBackend):
        return False  # reading a result removes it from the caller's queue
    try:
        meta = _result_meta(runtime, Token.task_id_of(existing.token))
        if meta.get("status") not in states.READY_STATES:
            return False
        done = meta.get("date_done")
        done = maybe_iso8601(done) if isinstance(done, str) else done
        if not isinstance(done, datetime):
            return True
        ended_at = maybe_make_aware(done).timestamp()
        return bool(ended_at > existing.holder.since - _MAX_CLOCK_DIFFERENCE)
    except Exception:
        return False  # there is no result backend, or it does not answer: the claim counts


def _result_meta(runtime: Runtime, task_id: str) -> Mapping[str, Any]:
    """The metadata of a result, or nothing if the result backend does not answer in time."""
    app = runtime.app
    if runtime.quick_backend is None:
        runtime.quick_backend = limit_backend_timeouts(app, _TIMEOUT)
    if runtime.quick_backend is not None:
        return result_meta(runtime.quick_backend, task_id)
    # Other clients have no common bound. Such a backend is asked on a thread, which the caller
    # leaves behind after a timeout. Until that thread ends, this process asks nothing else. (In a
    # forked child it is not alive.)
    if runtime.unanswered is not None and runtime.unanswered.is_alive():
        return {}
    answers: list[Mapping[str, Any]] = []

    def ask() -> None:
        with suppress(Exception):  # there is no result backend, or it fails
            answers.append(result_meta(app.backend, task_id))  # this thread's own backend

    # A daemon: the interpreter must not wait for it at its exit.
    thread = Thread(target=ask, name="singleton-result", daemon=True)
    thread.start()
    thread.join(_TIMEOUT)
    if thread.is_alive():
        runtime.unanswered = thread
    return answers[0] if answers else {}


def _delay_until(when: Any, app: Celery) -> float:
    """As :func:`seconds_until`; 0 for other values: Celery will raise an error for them.

    With an ``expires`` of 0 the claim of that message ends at once, even if it can't be freed.
    """
    try:
        return seconds_until(when, app)
    except (TypeError, ValueError):
        return 0.0


def seconds_until(when: Any, app: Celery) -> float:
    """Seconds from now to ``when`` (seconds, a datetime, or its text).

    Raises:
        TypeError, ValueError: ``when`` is something else.
    """
    moment = maybe_iso8601(when) if isinstance(when, str) else when
    if not isinstance(moment, datetime):
        return max(0.0, float(moment or 0))
    now: datetime = app.now()
    if moment.tzinfo is None:
        now = now.replace(tzinfo=None)
    return max(0.0, (moment - now).total_seconds())
