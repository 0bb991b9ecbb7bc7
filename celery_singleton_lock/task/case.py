"""One delivery in its task: what all steps of its execution need to know, and putting it back."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

from celery.exceptions import Ignore, Retry, SoftTimeLimitExceeded
from kombu.exceptions import EncodeError

from celery_singleton_lock.core.events import Event, EventName
from celery_singleton_lock.core.heartbeat import MAX_TIMEOUT
from celery_singleton_lock.core.lease import Holder, Phase
from celery_singleton_lock.core.store import ClaimChange
from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.policy import Policy, Unique
from celery_singleton_lock.publish.claim import CARRIED, CONTINUED, Carried, Claim
from celery_singleton_lock.publish.header import HEADER, UNNAMED_KEY, Delivery
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.task.conflict import AGAIN, Pace
from celery_singleton_lock.task.outcome import countdown_of
from celery_singleton_lock.task.put_back import backoff, put_back, why_not

__all__ = ["Case", "settle_claim_of"]

logger = logging.getLogger("celery_singleton_lock")

# What a message raises that can't be copied: its headers are anybody's. (An OSError among them is
# the network's, such as a certificate that can't be verified.) Clients raise the like once, too,
# from a connection that broke in their hands: the next try has another.
_UNSENDABLE: Final = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
_TRIES_OF_THE_UNSENDABLE: Final = 3


@dataclass(slots=True, kw_only=True, eq=False)
class Case:
    """A message that has arrived at its body. Immutable, except for :meth:`rename`.

    Attributes:
        task: The task.
        request: Its request (``celery.app.task.Context``).
        runtime: Of its app: the one without a server where ``task_always_eager`` is set.
        delivery: What is known of the message.
        policy: The task's, with this call's options on top.
        rest: What the key is made of behind the scope; None: no lock for this call.
        key: The lock key.
        claim: The message's, or the one that its policy makes for it; None: none.
    """

    task: Any
    request: Any
    runtime: Runtime
    delivery: Delivery
    policy: Policy
    rest: str | None
    key: str
    claim: Claim | None = None

    @classmethod
    def of(cls, task: Any, request: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Case:
        """Read the running task.

        Raises:
            TypeError, LockKeyError: Its arguments make no key; it doesn't run without one.
        """
        delivery = Delivery.of(request)
        policy: Policy = task.singleton_policy(delivery.options)
        is_eager = bool(request.is_eager)
        local = is_eager and bool(task.app.conf.task_always_eager)
        runtime = Runtime.of(task.app, eager=local)
        rest = task.singleton_rest(args, kwargs, as_sent=is_eager)
        key = runtime.keyspace.lock(policy.scope or task.name, rest or "")
        claim = None
        if not is_eager:
            claim = Claim.from_header(delivery.claim, runtime.keyspace)
            if claim is None and rest is not None:
                claim = _unclaimed(task.name, key, policy, runtime)
        if claim is not None:
            request.__dict__[CARRIED] = Carried(task.name, key, claim)
        return cls(
            task=task,
            request=request,
            runtime=runtime,
            delivery=delivery,
            policy=policy,
            rest=rest,
            key=key,
            claim=claim,
        )

    def rename(self) -> None:
        """Give the message a name of its own, which its retries and copies keep."""
        self.delivery = self.delivery.named()
        self.request.__dict__[HEADER] = self.delivery.header()
        self.request.__dict__.pop(UNNAMED_KEY, None)

    @property
    def acks_late(self) -> bool:
        """Whether the message may come again once its work is done."""
        return bool(self.task.acks_late and not self.request.is_eager)

    @property
    def no_put_back(self) -> str | None:
        """Why this message can't be put back; None: it can."""
        if self.request.is_eager:
            return "this call is eager, so it can't be put back"
        return why_not(self.task.app, self.request)

    def retry_in(self, retval: Any) -> float | None:
        """Seconds until the next attempt on the same key; None if ``retval`` announces none."""
        if not (isinstance(retval, Retry) and self._same_key(retval)):
            return None
        return countdown_of(retval, self.task.app.now())

    def claim_after(
        self, state: str | None, retval: Any, retry_in: float | None
    ) -> ClaimChange | None:
        """What becomes of the message's claim now that its task has ended; see `Claim.after`."""
        if self.claim is None:
            return None
        return self.claim.after(
            state,
            retval,
            comes_back=self.acks_late,
            retry_in=retry_in,
            replaced=self.request.__dict__.get(CONTINUED) == self.claim.key,
        )

    def settle_claim(self, state: str | None, retval: Any) -> None:
        """Change the claim of a message that ended without a lease. Never raises."""
        try:
            change = self.claim_after(state, retval, self.retry_in(retval))
        except Exception:
            logger.exception("singleton: the claim of %s is freed", self.request.id)
            change = self.claim.freed() if self.claim else None
        if change is not None:
            _settle(self.runtime, self.delivery, change)

    def _same_key(self, retry: Retry) -> bool:
        """Whether the next attempt has this key; ``self.retry(args=...)`` may have changed it."""
        signature = getattr(retry, "sig", None)
        if signature is None:
            return True
        try:
            rest = self.task.singleton_rest(signature.args, signature.kwargs, as_sent=True)
        except (TypeError, ValueError):
            return False
        return bool(rest == self.rest)

    def tell(self, name: EventName, *, holder: Holder | None = None, **data: Any) -> None:
        """Emit an event about this delivery."""
        if not self.runtime.events.hears(name):
            return
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

    def drop_claim(self) -> None:
        """Free the claim that was made for a copy of a message that had ended before.

        What published it ran twice. A claim that waits for a later attempt is left alone.
        """
        if self.claim is None:
            return
        try:
            record = self.runtime.store.inspect(self.claim.key)
        except StoreError:
            return
        if record is not None and record.phase is Phase.QUEUED:
            _settle(self.runtime, self.delivery, self.claim.freed())

    def put_back(
        self, delivery: Delivery, pace: Pace, reason: str, *, queues_claim: bool = True
    ) -> NoReturn:
        """Put back and give this delivery up; holds on to it until the broker has the copy."""
        tries = 0
        while True:
            self.try_to_put_back(delivery, pace, reason, queues_claim=queues_claim)
            self.runtime.clock.sleep(backoff(AGAIN.first, AGAIN.longest, tries))
            tries += 1

    def try_to_put_back(
        self, delivery: Delivery, pace: Pace, reason: str, *, queues_claim: bool = True
    ) -> None:
        """Raises Ignore once the broker has the copy; returns if it couldn't be published.

        What no broker would take raises, so that the task fails visibly: with that in hand, this
        process would wait for ever.
        """
        for tries_left in reversed(range(_TRIES_OF_THE_UNSENDABLE)):
            try:
                put_back(
                    self.task,
                    self.request,
                    replace(delivery, tries=delivery.tries + 1),
                    self.key,
                    runtime=self.runtime,
                    delay=backoff(pace.first, pace.longest, delivery.tries),
                    reason=reason,
                    claim=self.claim if queues_claim else None,
                )
            except (SoftTimeLimitExceeded, EncodeError):
                raise  # the user's bound on all this, or no use in trying again
            except Exception as exc:
                if isinstance(exc, _UNSENDABLE) and not isinstance(exc, OSError):
                    if not tries_left:
                        raise
                    continue
                logger.warning(
                    "singleton: %s[%s] can't be put back now; it is held here until the broker or "
                    "the store answers",
                    self.task.name,
                    self.request.id,
                    exc_info=True,
                )
                return
            raise Ignore


def settle_claim_of(task: Any, request: Any, state: str | None, retval: Any) -> None:
    """As `Case.settle_claim`, where a task ended before there was a case; never raises.

    Its ``before_start`` failed, or its arguments made no key.
    """
    runtime = Runtime.of(task.app)
    delivery = Delivery.of(request)
    claim = Claim.from_header(delivery.claim, runtime.keyspace)
    if claim is None or request.is_eager:
        return
    change = claim.after(
        state,
        retval,
        comes_back=bool(task.acks_late),
        # Of a retry: as long as if it came at once. Its own start settles the claim.
        retry_in=0.0 if isinstance(retval, Retry) else None,
        replaced=False,
    )
    _settle(runtime, delivery, change)


def _unclaimed(task: str, key: str, policy: Policy, runtime: Runtime) -> Claim | None:
    """The claim that is made when the task runs, of a message that nobody claimed."""
    if policy.unique is not Unique.UNTIL_DONE:
        return None
    return Claim(
        key=runtime.keyspace.claim(task, key),
        unique=policy.unique,
        unique_for=policy.unique_for,
    )


def _settle(runtime: Runtime, delivery: Delivery, change: ClaimChange) -> None:
    try:
        runtime.store.settle_claim(delivery.token, change, timeout=MAX_TIMEOUT)
    except StoreError as exc:
        logger.warning("singleton: %s stays until it expires: %s", change.key, exc)
