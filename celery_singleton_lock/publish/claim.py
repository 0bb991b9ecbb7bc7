"""The claim of a message and its transitions, as pure functions.

A claim represents one published message (``unique``). Equal calls find it and are not published.
Its key and terms are in the message's header, because the worker that settles the claim may have
other code or settings than the publisher.

States in the store::

    admit -> queued --acquire, until_done--> running --retry--> retrying --acquire--> running
               |  ^                             |  +--put back, requeued--> queued
               |  +--put back, retry            +--ended--> (free)
               +--acquire, until_start; discarded; ended without a run--> (free)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from celery.exceptions import Ignore, Reject, Retry

from celery_singleton_lock.core.key import Keyspace
from celery_singleton_lock.core.lease import Phase
from celery_singleton_lock.core.store import ClaimChange
from celery_singleton_lock.policy import Unique, seconds

#: Attribute of a running request that contains its :class:`Carried` claim.
CARRIED: Final = "singleton_claim"
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
    """

    key: str
    unique: Unique
    unique_for: float
    duplicate: bool = False

    def to_header(self) -> dict[str, Any]:
        """The form in a message's header; :meth:`from_header` reads it."""
        return {
            "key": self.key,
            "unique": str(self.unique),
            "unique_for": self.unique_for,
            "duplicate": self.duplicate,
        }

    @classmethod
    def from_header(cls, value: Any, keyspace: Keyspace) -> Claim | None:
        """Read a claim; None if :meth:`to_header` did not write it or its key is foreign."""
        if value is None:
            return None  # the common case first: isinstance() with an ABC is slow
        if not isinstance(value, Mapping) or not keyspace.is_claim(value.get("key")):
            return None
        try:
            return cls(
                key=value["key"],
                unique=Unique(str(value.get("unique"))),
                unique_for=seconds("unique_for", value.get("unique_for")),
                duplicate=value.get("duplicate") is True,
            )
        except (TypeError, ValueError):
            return None

    @property
    def yields(self) -> bool:
        """Whether the message must not run while another message has the claim.

        With ``until_done`` the other message does the work. With ``until_start`` the message was
        published to cause a later run, and its own run is one.
        """
        return self.duplicate and self.unique is Unique.UNTIL_DONE

    def admitted_for(self, delay: float, expires_in: float | None) -> float:
        """Seconds until the claim of a message that is published now expires.

        Args:
            delay: Seconds until the message may run.
            expires_in: Seconds after which no worker will run the message; None: never.
        """
        bound = self.unique_for + delay
        return bound if expires_in is None else min(bound, max(expires_in, 0.0))

    def granted(self, ttl: float) -> ClaimChange:
        """The change when the task starts with a lease of ``ttl`` seconds.

        Each renewal prolongs the lease and the claim.
        """
        if self.unique is Unique.UNTIL_START:
            return self.freed()
        return ClaimChange(key=self.key, phase=Phase.RUNNING, ttl=ttl)

    def queued(self, delay: float = 0.0) -> ClaimChange:
        """The change when the message is queued again, to run after ``delay`` seconds or later."""
        return ClaimChange(key=self.key, phase=Phase.QUEUED, ttl=self.unique_for + delay)

    def freed(self) -> ClaimChange:
        """The change when the message has ended."""
        return ClaimChange(key=self.key, phase=None)

    def after(
        self,
        state: str | None,
        retval: Any,
        *,
        comes_back: bool,
        retry_in: float | None,
        replaced: bool,
    ) -> ClaimChange:
        """The change when the task has ended.

        Args:
            state: Celery's state; None after SystemExit or similar.
            retval: The task's result, or the exception that ended it.
            comes_back: Whether the broker delivers an unacknowledged message again.
            retry_in: Seconds until the next attempt on the same key; None if there is none.
            replaced: Whether ``self.replace()`` published a successor with the same claim.
        """
        if isinstance(retval, Retry) and retry_in is not None:
            return replace(self.queued(retry_in), phase=Phase.RETRYING)
        if isinstance(retval, Ignore) and replaced:
            return self.queued()
        requeued = isinstance(retval, Reject) and bool(getattr(retval, "requeue", False))
        if comes_back and (requeued or (state is None and not isinstance(retval, Reject))):
            return self.queued()
        return self.freed()


@dataclass(frozen=True, slots=True)
class Carried:
    """The claim of a running task, with the task and lock key for which it was created."""

    task: str
    lock_key: str
    claim: Claim
