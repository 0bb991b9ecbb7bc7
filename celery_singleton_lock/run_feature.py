"""The interface between a task run and the options that only some tasks have.

Such an option is a `Feature`. A run calls its features at fixed points, and a run without them
touches none of their code. `task.acquire.FEATURES` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from .core.events import EventName
from .core.lease import Lease
from .core.store_requests import Acquire, Refused, Release
from .message.claim import Claim
from .message.header import Delivery
from .policy import Policy
from .runtime import Runtime


@dataclass(frozen=True, slots=True)
class Ending:
    """What becomes of a call whose lease is released.

    Attributes:
        goes_on: Whether another message of it follows: a retry, or this one comes back.
        due_in: Seconds until that message is due.
        may_return_from: The retries of the earliest attempt whose message may still arrive at this
            key: those of this attempt if Celery rejects it, because the broker may dead-letter it,
            or those of the next one if that has another key. None: none may, the call has ended.
    """

    goes_on: bool = False
    due_in: float = 0.0
    may_return_from: int | None = None


class Run(Protocol):
    """The members of a run that its features use; `run.TaskRun` describes them."""

    task: Any
    request: Any
    runtime: Runtime
    delivery: Delivery
    policy: Policy
    key: str
    claim: Claim | None
    eager: bool
    acks_late: bool

    def rewrite_header(self) -> None: ...

    def has_key_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool: ...

    def stop_waiting(self) -> None: ...

    def interrupt(self) -> None: ...

    def revoke(self, reason: str) -> None: ...

    def free_claim(self) -> None: ...

    def emit(self, name: EventName, **data: Any) -> None: ...

    def requeue_in(self, delivery: Delivery, seconds: float, reason: str) -> NoReturn: ...

    def start_over(self, lease: Lease, reason: str) -> NoReturn: ...

    def end_for_good(self, lease: Lease | None, *, began: bool) -> NoReturn: ...


class Feature:
    """What an option adds to a run.

    Each method is called at one point of the run. By default it adds nothing. A method that raises
    `celery.exceptions.Ignore` has ended the delivery: it has requeued the message, or stored a
    result.

    Attributes:
        releases_early: Whether the lease is released before Celery publishes the links of the task.
        keeps_key_for_retry: Whether a retry may reserve the key (``hold_on_retry``).
        keeps_place: Whether the call has a place in the queue of its key, which its retries keep.
    """

    releases_early = True
    keeps_key_for_retry = True
    keeps_place = False

    def __init__(self, run: Run) -> None:
        self.run = run

    def prepare(self, request: Acquire) -> Acquire:
        """Complete the first request for the lease. Returns the request."""
        return request

    def before_asking(self, request: Acquire) -> Refused | None:
        """The store is about to be asked for the lease. Returns a refusal in its place, or None.

        Raises:
            StoreError: The store did not answer.
        """
        return None

    def granted(self, lease: Lease) -> None:
        """The lease was granted.

        Raises:
            Ignore: The delivery has ended.
            StoreError: The store did not answer; the run releases the lease.
        """

    def refused(self, refused: Refused) -> bool:
        """The lease was refused. Returns whether to ask for it again at once.

        Raises:
            Ignore: The delivery has ended.
            StoreError: The store did not answer.
        """
        return False

    def begin(
        self, lease: Lease | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The body is about to begin. Returns its arguments.

        Args:
            lease: The lease; None: the body runs without one (``on_store_error="run"``).
            args, kwargs: The arguments so far.

        Raises:
            Ignore: The delivery has ended.
        """
        return args, kwargs

    def requeue(self, copy: Delivery) -> None:
        """The message is about to be requeued, as ``copy``."""

    def releasing(self, release: Release, ending: Ending) -> Release:
        """Complete the request that releases the lease. Returns the request."""
        return release

    def ended(self, lease: Lease, error: BaseException | None) -> None:
        """The body has returned, or has raised ``error``, which is no Retry, Ignore or Reject.

        Raises:
            Ignore: The delivery has ended.
        """

    def finished(self, ending: Ending) -> None:
        """The task has ended, and its lease was lost or released before.

        Raises:
            StoreError: The store did not answer.
        """
