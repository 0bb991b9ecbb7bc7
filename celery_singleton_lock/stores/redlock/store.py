"""Leases by majority in several independent Redis masters (Redlock).

Overview
    The algorithm is that of redis.io, "Distributed Locks with Redis". Each node runs the same
    scripts as for a single RedisStore. A request goes to all nodes at once, and the client waits
    until the answers decide. ``votes`` has the decisions, ``fanout`` the threads and queues.
    Sequence of an acquire::

        t0 -> send to all --majority--> in time? -> change the claim on all -> Granted
               |   |   |                  +-- no --> give back on all -> StoreUnavailable
               |   |   +-- another holder has a majority, or a node knows (done, duplicate ...)
               |   |                    -> give back on all -> Refused
               |   +-- no majority answers -> give back on all -> StoreUnavailable
               +-- split vote -> give back on all -> random pause -> t0 again, until the timeout:
                     then Refused if another holder may have a majority, else StoreUnavailable

Guarantees
    A lease is granted by a majority of the nodes or not at all. Its validity is the ttl less the
    duration of the attempt and less the allowance for clock drift.
    While a majority answers, all operations go on. A minority may be down, slow or partitioned.
    A lost key is never written back on any node.
    A failed attempt is given back on all nodes, also on those that did not answer. Requests reach
    each node in the order in which they were made, so a release never overtakes its acquire, as
    long as the node answers within ``NODE_TIMEOUT`` seconds.

Non-guarantees
    Fencing tokens. Each node has its own counter, and a grant needs three of five nodes: the next
    grant may come from three others with lower counters. One number for all takes consensus. A
    process that stalls between ``check()`` and its write is not detected.
    Exclusion when a node forgets an acknowledged write. If a lease is on nodes 1, 2, 3 and node 3
    restarts empty, nodes 3, 4, 5 would grant the key again. So a server has no vote until it has
    been up for the ttl of the requested lease (``quarantine``; its uptime is read with INFO after
    each login, if an ACL allows it). A node whose clock is set forward forgets leases too.
    Completion records, claims and Beat's last runs may be lost by such a restart after the
    quarantine: a late redelivery may run again, a duplicate may be published, a tick may be sent
    again.

State model
    A vote on one node is absent, granted, or granted without counting (the server is too young, or
    an earlier release of the same token may still arrive there). A lease exists while a majority
    has it. Votes on a minority are given back, or expire.

Failure handling
    A node is down: its vote is missing. No request waits for it.
    A node does not answer: if a majority decides, no request waits for it. Otherwise a request
    waits 50 ms after a majority has answered. The node's queue is bounded, and requests older than
    ``NODE_TIMEOUT`` are dropped unsent.
    Releases that got no reply are sent again before the node's next acquire or release.
    A release without a reply: the node has no vote for the same token during the next minute,
    because the release may arrive after the grant.
    A majority is down: StoreUnavailable, as with one server. The heartbeat retries until the
    lease's deadline.
    An exception in the calling thread (a soft time limit, SIGTERM): the nodes that the request has
    reached carry it out. The locker releases by token, and that release follows the request in each
    node's queue.
"""

from __future__ import annotations

import math
import os.path
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Final, TypeVar

from ...core.clock import Clock, SystemClock
from ...core.lease import Lease, LossReason, OperatorRelease, Record, Token, drift
from ...core.store import (
    Acquire,
    Authorization,
    AuthorizeRun,
    Capabilities,
    ClaimChange,
    ClaimRequest,
    ConnectionWatch,
    Granted,
    Mark,
    Refused,
    Relation,
    Release,
    ReleaseReply,
    Renewal,
    Store,
    Trace,
)
from ...errors import SettingsError, StoreError, StoreUnavailable
from ...policy import seconds
from ..eviction import risk
from ..redis import scripts
from ..urls import StoreUrl
from . import votes
from .fanout import NODE_TIMEOUT, Fanout, Node
from .votes import Poll, Verdict, Votes

T = TypeVar("T")
D = TypeVar("D")

# Seconds to wait for the nodes that granted to confirm the give-back. Nothing depends on their
# replies.
_GIVE_BACK_TIMEOUT: Final = 0.25
# The pause after a split vote is random between zero and this, and the maximum doubles each time.
# With two contenders half of the pauses differ by more than an attempt takes; with many
# contenders, most do so soon.
_FIRST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 0.25
# A vote that stays split for more attempts may be split by holders, not by contenders.
_ATTEMPTS: Final = 3
# Not the global generator: processes that seed it alike would split their votes endlessly.
_RANDOM: Final = random.SystemRandom()

_MIN_NODES: Final = 3
_PORT: Final = 6379
_TLS_PATHS: Final = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
_TLS_OPTIONS: Final = frozenset(
    (*_TLS_PATHS, "ssl_ca_data", "ssl_password", "ssl_cert_reqs", "ssl_check_hostname")
)
_CERT_REQS: Final = ("required", "optional", "none")


class RedlockStore(Store):
    """A store on the nodes that a ``redlock://`` URL names. A majority of them decides.

    Raises:
        SettingsError: The URL cannot be read, or names an even number of nodes or fewer than three.
    """

    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        nodes, self._quarantine = read_nodes(url)
        self._clock = clock or SystemClock()
        self._fanout = Fanout(nodes, self._clock)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            fence=False, name="redlock", renews_for_others=True, usable_before_fork=True
        )

    def acquire(self, request: Acquire, *, timeout: float) -> Granted | Refused:
        """See `Store.acquire`. May make several attempts within ``timeout``, and one give-back.

        The caller reads its clock before the first attempt, so its deadline is earlier than the ttl
        of the attempt that won.
        """
        poll, verdict, asked_at = self._contend(request, request.slots, timeout, _ATTEMPTS)
        if isinstance(verdict, Granted):
            self._keep(request, verdict, poll, asked_at, timeout)
        return verdict

    def renew(self, leases: Sequence[Lease], *, timeout: float) -> list[Renewal]:
        """See `Store.renew`. A lease is renewed if a majority of the nodes still has it."""

        def decide(poll: Poll[list[Renewal]]) -> bool:
            replies = votes.renewed(poll, len(leases))
            return poll.has_majority() and LossReason.UNREACHABLE not in replies

        poll = self._ask_majority(
            lambda node: node.store.renew(leases, timeout=NODE_TIMEOUT), timeout, decide
        )
        return votes.renewed(poll, len(leases))

    def release(self, request: Release, *, timeout: float) -> ReleaseReply:
        """See `Store.release`. OURS if a majority had the lease; sent to all nodes in any case."""
        poll, reply = self._release(request, timeout, votes.released)
        if reply is None:
            raise poll.error()
        return reply

    def mark(self, request: Mark, *, timeout: float) -> None:
        """See `Store.mark`. A majority must write it. Any later majority includes such a node."""
        self._ask_majority(
            lambda node: node.store.mark(request, timeout=NODE_TIMEOUT), timeout, Poll.has_majority
        )

    def take_claim(self, request: ClaimRequest, *, timeout: float) -> Record | None:
        """See `Store.take_claim`. A majority must claim the key; a split vote is repeated.

        At the end of the timeout, a message that may have a majority counts as published. A
        withdrawal may take back an earlier claim of the same message, which is then published
        again. That claim had no majority, so it refused no other message.
        """

        _, verdict, _ = self._contend(request, (request.key,), timeout, math.inf)
        return verdict.record if isinstance(verdict, Refused) else None

    def change_claim(self, token: Token, change: ClaimChange, *, timeout: float) -> None:
        """See `Store.change_claim`. A majority must answer."""
        self._ask_majority(
            lambda node: node.store.change_claim(token, change, timeout=NODE_TIMEOUT),
            timeout,
            Poll.has_majority,
        )

    def authorize_run(self, request: AuthorizeRun, *, timeout: float) -> Authorization:
        """See `Store.authorize_run`. A majority must replace the last run.

        A node that was unreachable has an older last run, and refuses. While a majority has the
        leader's token, no other leader can have been authorized since this leader's election. So if
        the last run that counts is the one that the leader expects, the last run is also replaced
        on such nodes, on each only while it has the token.
        """
        poll = self._ask_majority(
            lambda node: node.store.authorize_run(request, timeout=NODE_TIMEOUT),
            timeout,
            votes.authorized,
        )
        verdict = votes.authorized(poll)
        if verdict is not None:
            return verdict
        deposed = poll.answers.count(Authorization.DEPOSED)
        if len(poll.answers) - deposed < poll.majority:
            raise poll.error()
        [last_run] = self.last_runs([request.entry], timeout=timeout)
        if last_run not in (request.expected, request.new):
            return Authorization.CHANGED

        def swap_whatever_stands(node: Node) -> Authorization:
            [stands] = node.store.last_runs([request.entry], timeout=NODE_TIMEOUT)
            current = replace(request, expected=stands)
            return node.store.authorize_run(current, timeout=NODE_TIMEOUT)

        poll = self._ask_majority(swap_whatever_stands, timeout, votes.authorized)
        verdict = votes.authorized(poll)
        if verdict is None:
            raise poll.error()
        return verdict

    def last_runs(self, keys: Sequence[str], *, timeout: float) -> list[str | None]:
        """See `Store.last_runs`. For each key, the last run that counts among a majority's."""
        poll = self._ask_majority(
            lambda node: node.store.last_runs(keys, timeout=NODE_TIMEOUT), timeout
        )
        return [votes.last_run(texts, poll.majority) for texts in zip(*poll.answers, strict=True)]

    def trace(self, key: str, *, timeout: float) -> Trace:
        return Trace(record=self.inspect(key))  # there are no fences, and each node has a clock

    def inspect(self, key: str) -> Record | None:
        """The record that a majority has, or may have if the silent nodes also have it."""
        poll = self._inspect(key, NODE_TIMEOUT)
        poll.check()
        return votes.standing(poll)

    def scan(self, pattern: str) -> Iterator[Record]:
        """See `Store.scan`; the records are those of :meth:`inspect`. Reads node after node."""
        nodes = self._fanout.nodes
        found: Poll[dict[str, Record]] = Poll(len(nodes), self._fanout.majority)
        for node in nodes:
            try:
                found.add({record.key: record for record in node.store.scan(pattern)})
            except StoreError as exc:
                found.add(exc)
        found.check()
        for key in sorted(set().union(*found.answers)):
            answers = [votes.answer(key, records.get(key)) for records in found.answers]
            record = votes.standing(Poll(found.nodes, found.majority, answers, found.errors))
            if record is not None:
                yield record

    def texts(self, pattern: str) -> Iterator[tuple[str, str, float]]:
        """See `Store.texts`. Of several nodes' texts of one key, the last in alphabetical order."""
        found: dict[str, tuple[str, float]] = {}
        for node in self._fanout.nodes:
            with suppress(StoreUnavailable):  # a minority may be unreachable
                for key, text, ttl in node.store.texts(pattern):
                    found[key] = max(found.get(key, ("", 0.0)), (text, ttl))
        yield from ((key, *found[key]) for key in sorted(found))

    def foreign_keys(self, pattern: str) -> Iterator[tuple[str, str]]:
        """See `Store.foreign_keys`. Reads all nodes: a foreign key on one node blocks its vote."""
        found: set[tuple[str, str]] = set()
        for node in self._fanout.nodes:
            with suppress(StoreUnavailable):  # a minority may be unreachable
                found.update(node.store.foreign_keys(pattern))
        yield from sorted(found)

    def free(self, key: str, token: str | None, by: OperatorRelease | None = None) -> bool:
        """See `Store.free`. True if any node had the key. A majority must answer."""
        return any(self._ask_majority(lambda node: node.store.free(key, token, by)).answers)

    def info(self, section: str) -> dict[str, str]:
        """One section of INFO, of the node that endangers leases most by evicting keys.

        Raises:
            SettingsError: Two addresses lead to one server, which would have two votes.
        """
        poll = self._ask_majority(lambda node: node.store.info(section))
        seen: dict[str, Node] = {}
        for node in self._fanout.nodes:
            first = seen.setdefault(node.run_id, node)
            if node.run_id and first is not node:
                raise SettingsError(
                    f"{first.url} and {node.url} of the redlock:// URL are one server: its vote "
                    "would count twice. Name servers that fail independently"
                )
        return max(poll.answers, key=risk)

    def watch_connections(self, watch: ConnectionWatch) -> None:
        self._fanout.report_to(watch)

    def close(self) -> None:
        self._fanout.close()

    def _ask_majority(
        self,
        operation: Callable[[Node], T],
        timeout: float = NODE_TIMEOUT,
        decide: Callable[[Poll[T]], object] = lambda poll: None,
    ) -> Poll[T]:
        """The answers that arrive until they decide or the timeout ends.

        Raises:
            StoreUnavailable, StoreError: A majority did not answer.
        """
        poll, _ = self._fanout.ask(operation, timeout, decide)
        poll.check()
        return poll

    def _inspect(self, key: str, timeout: float) -> Votes:
        return self._fanout.ask(
            lambda node: votes.answer(key, node.store.inspect(key)), timeout, lambda poll: None
        )[0]

    def _contend(
        self,
        request: Acquire | ClaimRequest,
        slots: tuple[str, ...],
        timeout: float,
        attempts: float,
    ) -> tuple[Votes, Granted | Refused, float]:
        """Vote, give back, pause and vote again until the votes decide.

        Args:
            request: The request.
            slots: The keys to choose from.
            timeout: Seconds.
            attempts: The number of split votes after which a task that may have a majority refuses;
                at the end of the timeout, it refuses in any case.

        Returns:
            The last votes, the decision, and the time at which the last attempt began.
        """
        deadline = self._clock.now() + timeout
        named = ""
        longest_pause = _FIRST_PAUSE
        for attempt in count():
            asked_at = self._clock.now()
            start = attempt % len(slots)  # the vote may be split on one slot only
            poll, verdict = self._vote(request, slots[start:] + slots[:start], deadline - asked_at)
            if isinstance(verdict, Granted):
                return poll, verdict, asked_at
            pause = _RANDOM.uniform(0, longest_pause)
            longest_pause = min(2 * longest_pause, _LONGEST_PAUSE)
            over = self._clock.now() + pause >= deadline
            differ = len(votes.holders(poll)) > 1
            if verdict and verdict.relation is Relation.OTHER and differ and not over:
                # The other holder's majority may consist of votes of two of its attempts, the first
                # of which was given back meanwhile. Only the same token twice counts.
                named, before = votes.holder(verdict), named
                verdict = verdict if named == before else None
            if verdict is None and poll.has_majority() and (over or attempt >= attempts):
                verdict = votes.suspect(poll) or self._all_taken(slots, str(request.token))
            self._give_back(request, poll, verdict)
            if verdict is not None:
                return poll, verdict, asked_at
            poll.check()
            if over:
                break
            self._clock.sleep(pause)
        raise StoreUnavailable(
            f"the votes for {slots[0]!r} are split: contenders came at once {attempt + 1} times, "
            "and none has a majority. No holder is known; try again"
        )

    def _vote(
        self, request: Acquire | ClaimRequest, slots: tuple[str, ...], timeout: float
    ) -> tuple[Votes, Verdict]:
        if isinstance(request, ClaimRequest):
            claim = request
            return self._fanout.ask(
                lambda node: node.take_claim(claim), timeout, partial(votes.acquired, slots)
            )
        if request.claim is not None or slots != request.slots:
            # The claim is changed after the vote: a grant by a minority must not free it.
            request = replace(request, slots=slots, frees_claim=False, keeps_claim=True)
        return self._acquire(request, timeout)

    def _acquire(self, request: Acquire, timeout: float) -> tuple[Votes, Verdict]:
        min_age = request.ttl if self._quarantine is None else self._quarantine
        command = scripts.acquire_command(request, fence_base="0")
        packed = scripts.pack(command)
        return self._fanout.ask(
            lambda node: node.acquire(request, command, packed, min_age),
            timeout,
            partial(votes.acquired, request.slots),
        )

    def _all_taken(self, slots: tuple[str, ...], token: str) -> Refused | None:
        """A refusal, if other tokens hold a majority of the nodes for every one of several slots.

        The votes do not show this. A node with a free slot grants it although all other nodes
        refuse that slot, and a node that refuses returns the holder of the first slot only.
        """
        records: list[Record] = []
        for slot in slots if len(slots) > 1 else ():
            record = votes.standing(self._inspect(slot, _GIVE_BACK_TIMEOUT))
            if record is None or record.token == token:
                return None
            records.append(record)
        if not records:
            return None
        return Refused(relation=Relation.OTHER, record=records[-1], others=tuple(records[:-1]))

    def _keep(
        self, request: Acquire, granted: Granted, poll: Votes, asked_at: float, timeout: float
    ) -> None:
        """Finish an acquire that a majority has granted."""
        unused = tuple(slot for slot in request.slots if slot != granted.key)
        if unused and (poll.silent or votes.given(poll) > votes.given(poll, granted.key)):
            self._undo(Release(keys=unused, token=request.token), 0)
        problem = ""
        if request.claim is not None:
            # The same token acquires the lease again on all nodes, so that a majority changes the
            # claim.
            again = replace(
                request, slots=(granted.key,), refused_if_claimed=False, frees_claim=False
            )
            if not isinstance(self._acquire(again, timeout)[1], Granted):
                problem = "the claim of its message could not be updated"
        took = self._clock.now() - asked_at
        if took >= request.ttl - drift(request.ttl):
            problem = f"the votes took {took:.3f} s, and its ttl is {request.ttl} s"
        if problem:
            self._undo(Release(keys=request.slots, token=request.token), 0)
            raise StoreUnavailable(f"the grant of {granted.key!r} was given back: {problem}")

    def _give_back(
        self, request: Acquire | ClaimRequest, poll: Votes, verdict: Refused | None
    ) -> None:
        """Give all votes back, and free the claim of an acquire whose refusal ends the message."""
        given = votes.given(poll)
        if isinstance(request, ClaimRequest):
            if given or poll.silent:
                self._withdraw(request, given)
            return
        claim = None
        ends = verdict is not None and verdict.relation is Relation.OTHER
        if ends and request.claim is not None and request.frees_claim:
            claim = ClaimChange(key=request.claim.key, phase=None)
        # If the token is a holder, the worker parent has turned the lease into a dying key, which
        # must stay.
        if (claim or given or poll.silent) and str(request.token) not in votes.holders(poll):
            release = Release(keys=request.slots, token=request.token, claim=claim)
            self._undo(release, max(given, poll.majority if claim else 0))

    def _withdraw(self, request: ClaimRequest, replies: int) -> None:
        change = ClaimChange(key=request.key, phase=None)
        self._fanout.ask(
            lambda node: node.store.change_claim(request.token, change, timeout=NODE_TIMEOUT),
            _GIVE_BACK_TIMEOUT,
            lambda poll: len(poll.answers) >= replies,
        )

    def _undo(self, request: Release, replies: int) -> None:
        """Release on all nodes, and wait a moment until so many ``replies`` have arrived."""
        self._release(request, _GIVE_BACK_TIMEOUT, lambda poll: len(poll.answers) >= replies)

    def _release(
        self, request: Release, timeout: float, decide: Callable[[Poll[ReleaseReply]], D]
    ) -> tuple[Poll[ReleaseReply], D]:
        command = scripts.release_command(request)
        packed = scripts.pack(command)
        return self._fanout.ask(
            lambda node: node.release(command, packed), timeout, decide, request
        )


# --- the URL --------------------------------------------------------------------------------------


def read_nodes(url: str) -> tuple[list[StoreUrl], float | None]:
    """The nodes that ``url`` names, and the quarantine.

    ::

        redlock://[user:password@]host[:port],host[:port],host[:port]/db?option=value&...

    A login before a host is for that host. Hosts without a login use the login of the first host.
    ``redlocks://`` uses TLS for all nodes. The database and the options apply to all nodes. The
    options are ``quarantine`` and, with TLS, the options of redis-py in ``_TLS_OPTIONS``.

    Returns:
        The nodes, and the seconds after its start in which a server has no vote; None: the ttl of
        the requested lease.

    Raises:
        SettingsError: The URL cannot be read, or does not name an odd number of nodes above 2. The
            message contains no password.
    """
    parsed = StoreUrl.parse(url, port=_PORT, host="", known=_TLS_OPTIONS | {"quarantine"})
    options = dict(parsed.options)
    text = options.pop("quarantine", None)
    try:
        quarantine = None if text is None else seconds("quarantine", float(text))
    except ValueError:
        raise SettingsError(f"quarantine={text!r} of redlock:// is no number of seconds") from None
    tls = parsed.scheme == "redlocks"
    if options and not tls:
        raise SettingsError(
            f"{', '.join(sorted(options))} in the URL of redlock:// have no effect without TLS: "
            "write redlocks://"
        )
    requirement = _check_tls(options)
    if tls:
        # redis-py checks the host's name by default since 6.0; without a certificate there is none.
        given = options.get("ssl_check_hostname", "true")
        options["ssl_check_hostname"] = "false" if requirement == "none" else given
    if parsed.path and not parsed.path.isdecimal():
        # The path is not shown: if a password contains a "/", the path is the rest of it.
        raise SettingsError(
            "what follows the nodes of the redlock:// URL is no number of a database (a '/' in a "
            "password is written %2F): write redlock://[user:password@]host:port,host:port,"
            "host:port/0"
        )
    _check_number([str(host) for host in parsed.hosts])
    nodes = [
        replace(parsed, hosts=(host,), logins=(login,), options=options)
        for host, login in zip(parsed.hosts, parsed.logins, strict=True)
    ]
    return nodes, quarantine


def _check_number(names: list[str]) -> None:
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise SettingsError(
            f"redlock:// names {', '.join(sorted(twice))} more than once: one server has one vote"
        )
    count = len(names)
    if count < _MIN_NODES:
        raise SettingsError(
            f"redlock:// names {count} node(s) ({', '.join(names)}), and a majority that survives "
            f"the loss of one takes {_MIN_NODES}. For one server, write redis://"
        )
    if count % 2 == 0:
        raise SettingsError(
            f"redlock:// names {count} nodes: no more of them may fail than of {count - 1}, and "
            "votes can be split into halves. Name an odd number"
        )


def _check_tls(options: dict[str, str]) -> str:
    """Check the TLS files, which redis-py reads only when it connects.

    Returns:
        Whether a certificate is required: one of ``_CERT_REQS``.
    """
    requirement = options.get("ssl_cert_reqs", "required").removeprefix("CERT_").lower()
    if requirement not in _CERT_REQS:
        raise SettingsError(f"ssl_cert_reqs is one of {', '.join(_CERT_REQS)}")
    for name in _TLS_PATHS:
        if name in options and not os.path.exists(options[name]):
            raise SettingsError(
                f"the TLS options of redlocks:// don't work: {name}: no file {options[name]!r}"
            )
    return requirement
