"""What a call does when another call holds its key: the base class of all rules.

Each rule is a file of this folder: its options and their check, and what it decides. `ACTIONS`
lists them. A rule that also acts during a run has a feature as well (`run_feature`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ..core.backoff import AGAIN, Pace
from ..option_values import one_of

if TYPE_CHECKING:
    from ..message.header import Delivery
    from ..policy import Policy
    from .cancel_running import CancelRunning
    from .queue import Queue
    from .retry import Retry
    from .wait import Wait

#: The class of each rule, by its name; filled by the package.
ACTIONS: Final[dict[str, type[OnConflict]]] = {}


class Outcome(StrEnum):
    DROP = "drop"
    REQUEUED = "requeued"
    SKIP = "skip"
    REVOKE = "revoke"
    WAIT = "wait"
    RAISE = "raise"


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about a refused delivery.

    Attributes:
        outcome: The outcome.
        reason: The reason, for the log and the error.
        copy: The content of the header of the requeued message; set only if the outcome is
            REQUEUED.
        pace: The delay of a requeue.
        is_exact: Whether the delay is ``pace[0]``, without a backoff.
        queues_claim: Whether the message's claim is queued with the copy. False if another delivery
            or attempt of the task has the key, because that one changes the claim.
    """

    outcome: Outcome
    reason: str
    copy: Delivery | None = None
    pace: Pace = AGAIN
    queues_claim: bool = False
    is_exact: bool = False


@dataclass(frozen=True, slots=True)
class Conflict:
    """A delivery that was refused.

    Attributes:
        delivery: The delivery. A rule decides only if no run of it has begun.
        no_requeue: Why the message can't be requeued (LockConflict then); None: it can.
        wall: Seconds since the epoch, for ``max_wait``.
        waited: Seconds for which this delivery has blocked the worker, for ``timeout``.
        due_in: Seconds until the rate of the key lets a call start; 0 if another call holds it.
    """

    delivery: Delivery
    no_requeue: str | None
    wall: float
    waited: float
    due_in: float = 0.0


class OnConflict:
    """What a call does when another call holds its key, and the details of how it does that.

    A plain string, such as ``on_conflict="retry"``, is the same choice with its default options.
    ``"skip"``, ``"revoke"`` and ``"raise"`` have no options. To set those of the others, use
    ``OnConflict.retry(...)``, ``.wait(...)``, ``.queue(...)`` or ``.cancel_running(...)``. A call
    that has started is requeued instead of skipped (``"cancel_running"`` may revoke it).

    Example::

        @singleton_task(key="order:{order_id}", on_conflict=OnConflict.retry(max_wait=3600))
        def charge(order_id: int) -> None: ...
    """

    __slots__ = ()

    retry: ClassVar[type[Retry]]
    wait: ClassVar[type[Wait]]
    cancel_running: ClassVar[type[CancelRunning]]
    queue: ClassVar[type[Queue]]

    #: The name of the rule.
    action: ClassVar[str]
    #: Whether a refused call never runs, without an error.
    never_runs: ClassVar[bool] = False
    #: Whether a call ends as REVOKED, which runs no ``after_return``.
    revokes: ClassVar[bool] = False
    #: Whether a run has a feature for it.
    has_feature: ClassVar[bool] = False

    def __init__(self, *args: Any, **options: Any) -> None:
        names = ", ".join(f"OnConflict.{name}(...)" for name in ACTIONS if ACTIONS[name].options())
        raise TypeError(f"OnConflict has several kinds: write {names}")

    @property
    def raises(self) -> bool:
        """Whether a refused call may end with LockConflict, except for a full queue."""
        return False

    def decide(self, conflict: Conflict) -> Decision:
        """What becomes of a call that another one keeps from running."""
        raise NotImplementedError("each rule decides")

    def check(self, policy: Policy) -> None:
        """Raise ValueError if another option of the ``policy`` contradicts this rule."""

    @classmethod
    def options(cls) -> tuple[str, ...]:
        """The names of the rule's options."""
        return tuple(one.name for one in fields(cls))  # type: ignore[arg-type]

    @classmethod
    def of(cls, value: Any) -> OnConflict:
        """The rule that ``value`` is or names; also reads what :meth:`to_header` writes.

        Raises:
            TypeError, ValueError: ``value`` is no rule.
        """
        if isinstance(value, OnConflict):
            return value
        options = dict(value) if isinstance(value, Mapping) else {"action": value}
        action = options.pop("action", None)
        one_of("on_conflict", action, ACTIONS)
        kind = ACTIONS[action]
        if unknown := [name for name in options if name not in kind.options()]:
            known = ", ".join(kind.options()) or "no option"
            raise ValueError(
                f'on_conflict={value!r}: there is no {unknown[0]!r}; "{action}" has {known}'
            )
        return kind(**options)

    def to_header(self) -> str | dict[str, Any]:
        """The form in a message; :meth:`of` reads it."""
        if self == type(self)():
            return self.action
        return {"action": self.action, **{name: getattr(self, name) for name in self.options()}}

    #: Called by kombu's encoder: other messages may contain the options of a signature.
    __json__ = to_header

    def _set(self, **options: Any) -> None:
        for name, value in options.items():
            object.__setattr__(self, name, value)
