"""``unique="until_expired"`` at the worker: calls that no publisher has checked.

A publisher asks for the period before it sends a call (`publish.publication`). Members of a canvas
and eager calls are published by Celery without this. Their run asks for the period before it asks
for the lease, and is refused if another call has the period.
"""

from __future__ import annotations

from ..core.heartbeat import MAX_TIMEOUT
from ..core.store_requests import Acquire, ClaimRequest, Refused, Relation
from ..option_values import Unique
from ..run_feature import Feature, Run


class Period(Feature):
    """The period that a run asks for."""

    def __init__(self, run: Run, key: str) -> None:
        super().__init__(run)
        self._key = key

    @classmethod
    def of(cls, run: Run) -> Period | None:
        """The period of a run that has not begun before; None: its publisher has asked."""
        delivery, keyspace, key = run.delivery, run.runtime.keyspace, ""
        if delivery.started:
            return None
        if not run.eager:
            if keyspace.is_claim(delivery.period) and keyspace.is_period(delivery.period):
                key = delivery.period
        elif run.policy.unique is Unique.UNTIL_EXPIRED and run.task.app.conf.task_always_eager:
            # Without task_always_eager it is task.apply(), next to real messages.
            key = keyspace.period(run.task.name, run.key)
        return cls(run, key) if key else None

    def before_asking(self, request: Acquire) -> Refused | None:
        """Refuse a duplicate of the call that has the period."""
        runtime = self.run.runtime
        claim = ClaimRequest(
            key=self._key,
            token=request.token,
            holder=request.holder,
            ttl=self.run.policy.unique_for,
            prolongs=False,
        )
        record = runtime.store.claims.take(claim, timeout=MAX_TIMEOUT)
        return Refused(relation=Relation.OTHER, record=record) if record else None
