"""One delivery in its task: what all steps of its execution need to know, and putting it back."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from celery.exceptions import Ignore, SoftTimeLimitExceeded
from kombu.exceptions import EncodeError

from celery_singleton_lock.arrival import AGAIN, Pace
from celery_singleton_lock.core.events import Event, EventName
from celery_singleton_lock.core.lease import Holder
from celery_singleton_lock.core.policy import Policy
from celery_singleton_lock.delivery import Delivery
from celery_singleton_lock.put_back import backoff, put_back
from celery_singleton_lock.runtime import Runtime

__all__ = ["Case"]

logger = logging.getLogger("celery_singleton_lock")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A message that has arrived at its body.

    Attributes:
        task: The task.
        request: Its request (``celery.app.task.Context``).
        runtime: Of its app: the one without a server where ``task_always_eager`` is set.
        delivery: What is known of the message.
        policy: The task's, with this call's options on top.
        rest: What the key is made of behind the scope; None: no lock for this call.
        key: The lock key.
    """

    task: Any
    request: Any
    runtime: Runtime
    delivery: Delivery
    policy: Policy
    rest: str | None
    key: str

    @classmethod
    def of(cls, task: Any, request: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Case:
        """Read the running task.

        Raises:
            TypeError, LockKeyError: Its arguments make no key; it doesn't run without one.
        """
        delivery = Delivery.of(request)
        policy: Policy = task.singleton_policy(delivery.options)
        eager = bool(request.is_eager and task.app.conf.task_always_eager)
        runtime = Runtime.of(task.app, eager=eager)
        rest = task.singleton_rest(args, kwargs, as_sent=bool(request.is_eager))
        return cls(
            task=task,
            request=request,
            runtime=runtime,
            delivery=delivery,
            policy=policy,
            rest=rest,
            key=runtime.keyspace.lock(policy.scope or task.name, rest or ""),
        )

    @property
    def acks_late(self) -> bool:
        """Whether the message may come again once its work is done."""
        return bool(self.task.acks_late and not self.request.is_eager)

    def tell(self, name: EventName, *, holder: Holder | None = None, **data: Any) -> None:
        """Emit an event about this delivery."""
        self.runtime.events.emit(
            Event(
                name=name,
                key=self.key,
                task=self.task.name,
                task_id=str(self.request.id),
                holder=holder or Holder(),
                data=data,
            )
        )

    def put_back(self, delivery: Delivery, pace: Pace, reason: str) -> NoReturn:
        """Put back and give this delivery up; holds on to it until the broker has the copy."""
        tries = 0
        while True:
            self.try_to_put_back(delivery, pace, reason)
            self.runtime.clock.sleep(backoff(AGAIN.first, AGAIN.longest, tries))
            tries += 1

    def try_to_put_back(self, delivery: Delivery, pace: Pace, reason: str) -> None:
        """Raises Ignore once the broker has the copy; returns if it couldn't be published."""
        try:
            put_back(
                self.task,
                self.request,
                replace(delivery, tries=delivery.tries + 1),
                self.key,
                runtime=self.runtime,
                delay=backoff(pace.first, pace.longest, delivery.tries),
                reason=reason,
            )
        except (SoftTimeLimitExceeded, EncodeError):
            raise  # the user's bound on all this, or no use in trying again: it fails visibly
        except Exception:
            logger.warning(
                "singleton: %s[%s] can't be put back now; it is held here until the broker or the "
                "store answers",
                self.task.name,
                self.request.id,
                exc_info=True,
            )
            return
        raise Ignore
