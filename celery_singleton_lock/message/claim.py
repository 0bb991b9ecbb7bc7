"""The claim of a message (``unique``): its key, its terms and its transitions.

Overview
    A claim is a key in the store that represents one published message. Equal calls find it and are
    not published (`publish.publication`). Its key and terms are in the message's header, because
    the worker that changes the claim may have other code or settings than the publisher.

Guarantees
    At most one of several equal calls is queued (``until_start``), queued or running
    (``until_done``), or published in a period (``until_expired``).

Non-guarantees
    Detection of a lost message (a purged queue, a failure of the broker, a crash between claim and
    publish): ``unique_for`` limits the time for which its claim blocks other calls.

State model, in the store::

    take -------> queued --acquire, until_done--> running --retry--> retrying --acquire--> running
               |  ^                             |  +--requeued-----------> queued
               |  +--requeued, retry            +--ended--> (free)
               +--acquire, until_start; discarded; ended without a run--> (free)

    The claim of a period (``until_expired``) stays queued until it expires. Its message does not
    name it, so no worker, of whatever version, changes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from celery.exceptions import Ignore, Reject, Retry

from ..core.keyspace import Keyspace
from ..core.lease import Phase, Token
from ..core.store_requests import ClaimChange
from ..option_values import OnDuplicate, Unique, seconds
from ..policy import Policy
from .header import Delivery, header_of, moment


@dataclass(slots=True, kw_only=True)
class Claim:
    """The key and terms of a claim; never changed.

    Attributes:
        key: The key in the store.
        unique: The time for which the claim blocks equal calls.
        unique_for: Seconds after which the claim expires; a running task renews it.
        duplicate: Whether the message was published although another message has the claim.
        is_period: Whether nothing ends the claim before it expires (``until_expired``). No worker
            changes it, so no header contains it.
        arguments: Name of the call whose arguments the message has, if a later call has replaced
            them. Empty: none has yet. None: they can't be replaced.
        admitted_until: The publisher's time, in seconds since the epoch, until which the claim was
            admitted; None: unknown. Arguments that no call has replaced expire then.
    """

    key: str
    unique: Unique
    unique_for: float
    duplicate: bool = False
    is_period: bool = False
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
    def refused_if_claimed(self) -> bool:
        """Whether the message must not run while another message has the claim.

        With ``until_done``, the other message does the work. With ``until_start`` it runs: its
        caller needs a run that starts after the call, and its own run is one.
        """
        return self.duplicate and self.unique is Unique.UNTIL_DONE

    def admitted_for(self, delay: float, expires_in: float | None) -> float:
        """Seconds until the claim of a message that is published now expires.

        A period begins now, whenever the message runs and whatever becomes of it.

        Args:
            delay: Seconds until the message may run.
            expires_in: Seconds after which no worker will run the message; None: never.
        """
        if self.is_period:
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
            message: The message's name (``Token.call_id``), if its newest arguments are deleted: it
                never comes back, and has ``on_duplicate="replace"``.
        """
        arguments = Keyspace.arguments(self.key, message) if message else ""
        return ClaimChange(key=self.key, phase=None, arguments=arguments)

    def may_have_arguments(self, policy: Policy) -> bool:
        """Whether the store may have newest arguments of the message.

        Both have to be asked. The claim does not say so in a retry that the worker parent
        publishes, nor the policy in a task that replaces itself.
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


def claim_in(headers: Mapping[str, Any], keyspace: Keyspace) -> tuple[Token, Claim | None]:
    """The token of the first delivery of a message with these headers, and the claim in them."""
    token = Delivery.of(headers).token
    header = header_of(headers, token.task_id)
    return token, Claim.from_header(header.get("claim"), keyspace)
