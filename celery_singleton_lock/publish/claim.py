"""The claim that a message carries, and what becomes of it at each step: pure decisions.

A claim stands for one published message (``unique``): equal calls find it and are not published.
Its name and its terms travel in the message's header, for the worker that settles it may have other
code, or other settings, than the publisher.

States, as the store holds them::

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

__all__ = ["CARRIED", "CONTINUED", "Carried", "Claim"]

#: Where a running request keeps what it carries.
CARRIED: Final = "singleton_claim"
#: Where it keeps the claim's key of the message that goes on with its work (retry, replace).
CONTINUED: Final = "singleton_continued"


@dataclass(slots=True, kw_only=True)
class Claim:
    """Name and terms of a claim. Not changed once it is made.

    Attributes:
        key: Its key in the store.
        unique: When it ends by itself.
        unique_for: Seconds after which it ends in any case, unless its task is running.
        duplicate: Whether the message was published although another has the claim.
    """

    key: str
    unique: Unique
    unique_for: float
    duplicate: bool = False

    def to_header(self) -> dict[str, Any]:
        """The form that travels in a message; :meth:`from_header` reads it."""
        return {
            "key": self.key,
            "unique": str(self.unique),
            "unique_for": self.unique_for,
            "duplicate": self.duplicate,
        }

    @classmethod
    def from_header(cls, value: Any, keyspace: Keyspace) -> Claim | None:
        """None for what :meth:`to_header` didn't write, and for keys outside of ``keyspace``."""
        if value is None:
            return None  # as most say; an ABC is slow to ask
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
        """Whether its message gives way to the one that has the claim, when it runs.

        Until that one is done there is nothing to do for this one. One that claims ``until_start``
        was published to have a run after it, and its own is as good as another's.
        """
        return self.duplicate and self.unique is Unique.UNTIL_DONE

    def admitted_for(self, delay: float, expires_in: float | None) -> float:
        """Seconds that the claim of a message stays that is published now.

        Args:
            delay: Seconds until the message may run.
            expires_in: Seconds after which no worker will run it; None: it doesn't expire.
        """
        bound = self.unique_for + delay
        return bound if expires_in is None else min(bound, max(expires_in, 0.0))

    def granted(self, ttl: float) -> ClaimChange:
        """Its task starts, under a lease of ``ttl`` seconds that prolongs both."""
        if self.unique is Unique.UNTIL_START:
            return self.freed()
        return ClaimChange(key=self.key, phase=Phase.RUNNING, ttl=ttl)

    def queued(self, delay: float = 0.0) -> ClaimChange:
        """Its message is in the queue again, to run in ``delay`` seconds at the earliest."""
        return ClaimChange(
            key=self.key,
            phase=Phase.QUEUED,
            ttl=self.unique_for + delay,
        )

    def freed(self) -> ClaimChange:
        """Its message has ended."""
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
        """What becomes of it when its task has ended as Celery says.

        Args:
            state: Celery's state; None when SystemExit or the like left the body.
            retval: The task's result, or the exception that ended it.
            comes_back: Whether an unacknowledged message is delivered again.
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
    """The claim of a running task, and what it stands for."""

    task: str
    lock_key: str
    claim: Claim
