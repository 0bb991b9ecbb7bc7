"""The publication of a call with ``unique``: it claims its key, or an earlier call answers it.

Overview
    A claim costs one round trip. A duplicate costs a second one, to the result backend, to find out
    whether the first call has ended (`duplicate`).

Guarantees
    A publish that fails frees its claim. A store that does not answer delays a call by a second at
    most: the message is published without a claim, and the lock still excludes two bodies.

Failure handling
    If other messages wait for a message (chains, groups, chords, links), dropping it would block
    them. So such a duplicate is published and resolved when it runs, unless the call sets
    ``on_duplicate``. In a period, its message names the claim, and its worker asks for it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from celery.result import AsyncResult

from ..core.keyspace import Keyspace
from ..core.lease import Holder, Record, Token
from ..core.store import Store
from ..core.store_requests import ClaimRequest, Replaced
from ..errors import StoreError, StoreUnavailable
from ..key_queue.join import Send
from ..message.arguments import pack_arguments
from ..message.claim import Claim
from ..message.times import seconds_until
from ..option_values import OnDuplicate, Unique
from ..policy import Policy
from ..runtime import Runtime
from .continuation import continues
from .debounce import check_debounce, first_countdown
from .duplicate import ENOUGH, answer, does_the_work_of, takes_over
from .replace import Replacement, check_replaceable

logger = logging.getLogger("celery_singleton_lock")

# Seconds to wait for one reply. A restart of the server breaks all idle connections, which is
# detected at once: a second request uses a new connection. After a timeout there is no second
# request, because a web request may be waiting. The store itself repeats a request that it sent on
# an idle connection, which may have been dropped.
_TIMEOUT: Final = 0.4
_SHOWS_AT_ONCE: Final = 0.1
# Seconds from the claim of a call to its place in the queue of its key, two requests later.
_JOINS_WITHIN: Final = 10.0
# Seconds from the claim of a call to its message, if a base class publishes it later.
_PUBLISHED_WITHIN: Final = 60.0
# Options that Celery's canvas sets for messages that another message waits for.
_CANVAS_OPTIONS: Final = frozenset(
    ("chain", "chord", "group_id", "root_id", "parent_id", "link", "link_error")
)
# The task that publishes the bodies of chords if the result backend can't count their members.
_CHORD_UNLOCK: Final = "celery.chord_unlock"
# The number of claims that a process could not free and remembers. More means that the store has
# been unreachable for a long time.
_MAX_ORPHANS: Final = 1000
# The number of results of eager calls that a process keeps for the duplicates of their periods.
_MAX_EAGER_RESULTS: Final = 1000
# How often a call tries to replace the arguments of messages that start meanwhile.
_TRIES_TO_REPLACE: Final = 5


@dataclass(slots=True, kw_only=True, eq=False)
class Publication:
    """A call of a task with ``unique`` that is about to be published.

    Attributes:
        runtime: The runtime of the publisher's app.
        task: Name of the task.
        task_id: The id of the message.
        key: The lock key that the call will need.
        policy: The task's policy, with this call's options.
        options: Celery's options; ``countdown``, ``eta`` and the options of its canvas are read.
        expires: Celery's ``expires`` of the call or the task.
        header: This library's header of the message; the claim is written into it.
        drops_in_canvas: Whether a duplicate is dropped even in a canvas, as the call requested.
        newest: The arguments of this call, which the queued message gets (``on_duplicate`` is
            ``"replace"``); None: it keeps its own.
        joins: Whether ``send`` gives the call a place in the queue of its key. The claim is then
            admitted for a moment, and the join prolongs it. A publisher that dies between the two
            must not have duplicates answered with a call that was never made.
        waited: Seconds for which it has waited for the result backend.
    """

    runtime: Runtime
    task: str
    task_id: str
    key: str
    policy: Policy
    options: dict[str, Any]
    header: dict[str, Any]
    expires: Any = None
    drops_in_canvas: bool = False
    newest: Replacement | None = None
    joins: bool = False
    waited: float = 0.0

    def replace_arguments(
        self, args: Any, kwargs: Any, serializer: str, *, through_others: bool = False
    ) -> None:
        """Let the queued message that has the claim get the arguments of this call.

        The options get the countdown of a debounced message.

        Args:
            args, kwargs: The arguments of the call.
            serializer: kombu's name of the call's serializer.
            through_others: Whether a base class overrides the task's ``apply_async``.

        Raises:
            SettingsError: See :func:`check_replaceable`.
            ValueError: The arguments are too large, or an option contradicts ``debounce``.
        """
        policy, options, runtime = self.policy, self.options, self.runtime
        check_replaceable(self.task, runtime.store, through_others=through_others)
        packed = pack_arguments(self.header["call"], args, kwargs, serializer, options)
        if policy.debounce is not None:
            check_debounce(self.task, policy, options, self.expires, runtime.app)
            options["countdown"] = first_countdown(
                policy.debounce, runtime.settings.longest_countdown
            )
        self.newest = Replacement(policy, packed)

    def publish(self, send: Send) -> AsyncResult[Any]:
        """Claim and ``send``, or answer with the call that has the claim.

        Raises:
            DuplicateTask: ``on_duplicate`` is ``"raise"``.
            StoreUnavailable: The store does not answer, and ``on_duplicate`` is ``"raise"``.
            Exception: ``send`` raised it; the claim is free then.
        """
        claim = self._claim()
        if not claim.is_period:  # a worker finds the claims that it changes in the header
            self.header["claim"] = claim.to_header()
        if self.newest is not None:
            # A worker that does not know the option logs that it ignores it.
            options = {**(self.header.get("options") or {}), "on_duplicate": "replace"}
            self.header["options"] = options
        token = Token(self.task_id, 0, 0, "-", self.header["call"])
        try:
            existing, answers = self._admit_or_find(claim, token)
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
                return self._send(claim, token, send)
            # The request may have been carried out, for example if a soft time limit came before
            # the reply: the claim may exist although its message will not be published.
            self._free(claim, token)
            raise
        if existing is None:
            return self._send(claim, token, send)
        return self._resolve(claim, existing, answers, send)

    def run(self, send: Send) -> AsyncResult[Any]:
        """As :meth:`publish` with ``task_always_eager``: ``send`` runs the call.

        The run takes the claim itself, so a call that fails before its run claims nothing.
        """
        claim, runtime = self._claim(), self.runtime
        existing, running = runtime.store.leases.inspect(claim.key), runtime.app.current_worker_task
        if existing is not None and (
            claim.is_period or not continues(running, Token.task_id_of(existing.token))
        ):
            answers = self._may_answer(existing, claim)
            return self._resolve(claim, existing, answers, send)
        result = send(self.task_id, self.options)
        if claim.is_period:
            # No result backend has it. The duplicates of the period get it from here.
            results = runtime.eager_results
            results[claim.key] = result
            if len(results) > _MAX_EAGER_RESULTS:
                del results[next(iter(results))]
        return result

    def await_message(self) -> None:
        """Shorten the claim of a call that a base class has not published.

        It may publish the message later, such as at the commit of a transaction, or never, because
        that was rolled back. Until then equal calls are answered with it.
        """
        claim = self._claim()
        if claim.is_period or self.joins:  # a call that has not joined was admitted for a moment
            return
        token = Token(self.task_id, 0, 0, "-", self.header["call"])
        change = replace(claim.queued(), ttl=min(claim.unique_for, _PUBLISHED_WITHIN))

        def send(store: Store) -> None:
            store.claims.change(token, change, timeout=_TIMEOUT)

        self.runtime.locker.retry_queue.ask(send, change.ttl, lambda why: None)

    def _resolve(
        self, claim: Claim, existing: Record, answers: bool, send: Send
    ) -> AsyncResult[Any]:
        """Answer a duplicate with the call that has the claim, or publish it as a duplicate."""
        if answers:
            return answer(self, claim, existing)
        if claim.is_period:
            self.header["period"] = claim.key
        else:
            other = replace(claim, duplicate=True, arguments=None)
            self.header["claim"] = other.to_header()
        return send(self.task_id, self.options)

    def _claim(self) -> Claim:
        keyspace, policy = self.runtime.keyspace, self.policy
        if policy.unique is not Unique.UNTIL_EXPIRED:
            claim = Claim.of(policy, keyspace.claim(self.task, self.key))
            return claim if self.newest is None else replace(claim, arguments="")
        return replace(Claim.of(policy, keyspace.period(self.task, self.key)), is_period=True)

    def _may_answer(self, existing: Record, claim: Claim) -> bool:
        if self.options.get("retries"):
            return False  # the worker parent retries the task of a lost child: started work
        running = self.runtime.app.current_worker_task
        is_awaited = is_canvas(self.options) or is_chords_body(running, self.task_id)
        return does_the_work_of(existing, claim) and (self.drops_in_canvas or not is_awaited)

    def _admit_or_find(self, claim: Claim, token: Token) -> tuple[Record | None, bool]:
        """Take the claim, or return the record of the call that has it.

        Returns:
            The record, and whether that call answers this one; None: this call has the claim.
        """
        existing = None
        for _ in range(_TRIES_TO_REPLACE):
            existing = self._admit(claim, token)
            if existing is None or not self._may_answer(existing, claim):
                return existing, False
            if self.newest is None:
                return existing, True
            reply = self.newest.replace(self.runtime.store, existing, claim)
            if reply is not Replaced.NOT_QUEUED:
                return existing, reply is Replaced.YES
        return existing, False  # each message that had the claim started meanwhile

    def _admit(self, claim: Claim, token: Token) -> Record | None:
        """Take the claim, or return the record of the call that has it."""
        runtime, request = self.runtime, self._request(claim, token)
        if request.arguments:
            self.header["claim"]["admitted_until"] = request.holder.since + request.ttl
        existing = _ask(runtime, request)
        if runtime.outages.since:
            runtime.outages.end(claim.key)
        runtime.orphans.pop(claim.key, None)
        if existing is None or claim.is_period:
            return existing
        asked_at = runtime.clock.now()
        takes = takes_over(runtime, existing, request.holder, asks=self.waited < ENOUGH)
        self.waited += runtime.clock.now() - asked_at
        if not takes:
            return existing
        return _ask(runtime, replace(request, instead_of=existing.token))

    def _request(self, claim: Claim, token: Token) -> ClaimRequest:
        """The request for the claim of this call."""
        runtime, app, newest = self.runtime, self.runtime.app, self.newest
        # If both are given, Celery uses the countdown.
        start = self.options.get("countdown") or self.options.get("eta")
        # With an ``expires`` that is no time, the claim ends at once, even if it can't be freed.
        delay = (seconds_until(start, app) or 0.0) if start else 0.0
        expires_in = None if self.expires is None else seconds_until(self.expires, app) or 0.0
        arguments, due_in = "", 0.0
        if newest is not None:
            arguments, due_in = Keyspace.arguments(claim.key, token.call_id), newest.due_in
        ttl, wall = claim.admitted_for(max(delay, due_in), expires_in), runtime.clock.wall()
        return ClaimRequest(
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
            ttl=min(ttl, _JOINS_WITHIN) if self.joins else ttl,
            instead_of=runtime.orphans.get(claim.key, ""),
            prolongs=not claim.is_period,
            wants_ttl=self.policy.on_duplicate is OnDuplicate.RAISE,
            arguments=arguments,
            due_in=due_in,
        )

    def _send(self, claim: Claim, token: Token, send: Send) -> AsyncResult[Any]:
        """Publish the message that has the claim, or may have it: a reply of the store was lost."""
        try:
            return send(self.task_id, self.options)
        except BaseException:
            self._free(claim, token)
            raise

    def _free(self, claim: Claim, token: Token) -> None:
        runtime, message = self.runtime, "" if claim.arguments is None else token.call_id

        def send(store: Store) -> None:
            store.claims.change(token, claim.freed(message), timeout=_TIMEOUT)

        def note_orphan() -> None:
            # The next try in this process must not be answered with a call that was never
            # published.
            if len(runtime.orphans) < _MAX_ORPHANS:
                runtime.orphans[claim.key] = token.call_id

        def give_up(why: object) -> None:
            note_orphan()
            logger.warning(
                "singleton: could not withdraw the claim %s of an unpublished call; it stays for "
                "at most %g s; free it with: celery -A ... singleton release '%s' (%s)",
                *(claim.key, claim.unique_for, claim.key, why),
            )

        if runtime.locker.retry_queue.ask(send, claim.unique_for, give_up) is not None:
            note_orphan()  # until the store answers


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


def _ask(runtime: Runtime, call: ClaimRequest) -> Record | None:
    asked_at = runtime.clock.now()
    try:
        return runtime.store.claims.take(call, timeout=_TIMEOUT)
    except StoreUnavailable:
        if runtime.clock.now() - asked_at > _SHOWS_AT_ONCE:
            raise
        return runtime.store.claims.take(call, timeout=_TIMEOUT)
