"""The state of a run: one value of a closed set.

::

    Asking --granted--> Holding --its message triggers more, or a loss--> ReleasedEarly
       |                   |                                                   |
       +--refused----------+--the task has ended-------------------------------+--> FINISHED

In FINISHED nothing is left to release: the lease is released, the message was requeued, or it is
left to another delivery.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeAlias

from celery.exceptions import Retry

from ..core.lease import Lease
from ..core.store_requests import Acquire
from ..core.waiter import Waiter


@dataclass(slots=True)
class Asking:
    """The run has no lease.

    Attributes:
        request: A request that may have been granted without a reply; None: there is none.
        waiter: The client that waits for the key; None: the run does not wait.
    """

    request: Acquire | None = None
    waiter: Waiter | None = None


@dataclass(slots=True)
class Holding:
    """The run has the lease, and its body runs or has ended.

    Attributes:
        lease: The lease.
        retry: The Retry that the body has raised.
        decisions: What was decided about the message after a loss of the lease.
    """

    lease: Lease
    retry: Retry | None = None
    decisions: list[bool] = field(default_factory=list)

    def first_decision(self, goes_back: bool) -> bool:
        """Whether the message of a lost lease is requeued: the first decision counts.

        The heartbeat's thread says it in the event, and the body's thread does it. Settings and
        queues may change between the two.
        """
        self.decisions.append(goes_back)  # one step of the interpreter
        return self.decisions[0]


@dataclass(slots=True)
class ReleasedEarly:
    """The lease was released before the result is stored.

    Attributes:
        lease: The lease.
        retry: The Retry that the body has raised.
        leaves_claim: Whether the claim was left to the retry, so that its change is still due.
    """

    lease: Lease
    retry: Retry | None = None
    leaves_claim: bool = False


@dataclass(slots=True)
class Finished:
    """Nothing is left to do."""


FINISHED: Final = Finished()
State: TypeAlias = Asking | Holding | ReleasedEarly | Finished
