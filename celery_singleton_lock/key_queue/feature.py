"""``on_conflict="queue"``: the calls of a key run in order, and no worker waits.

A call that has to wait gets a place in the queue of the key (`core.call_queue`), with its message,
and its delivery ends. It is published again when a call before it ends, or begins with room for it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from typing import Final, NoReturn

from celery.exceptions import Ignore

from ..core.call_queue import CallQueue, Hint, Join, Place, Remove
from ..core.events import EventName
from ..core.heartbeat import MAX_TIMEOUT, timeout_for
from ..core.keyspace import Keyspace
from ..core.lease import Lease
from ..core.store import Store
from ..core.store_requests import Acquire, QueuedAcquire, QueuedRelease, Refused, Relation, Release
from ..errors import LockConflict, StoreError, StoreUnavailable
from ..message.copy import publish_copy, why_not
from ..message.header import Delivery, header_of
from ..message.request_data import RequestData
from ..message.stored_message import Capture
from ..on_conflict import Queue
from ..run_feature import Ending, Feature, Run
from .hint import publish_hint
from .join import claim_of
from .sweep import PARKED

# Seconds by which the clocks of hosts with NTP usually differ at most.
_CLOCKS_DIFFER: Final = 0.1
# Seconds: the times of the store are in whole milliseconds.
_AFTER_THE_TIME: Final = 0.001


class QueueFeature(Feature):
    """The place of a run's call in the queue of its key."""

    keeps_place = True
    # Why a call of another rule waits here, until that is reported.
    _parked: Refused | None = None

    def __init__(self, run: Run, queue: CallQueue) -> None:
        super().__init__(run)
        # Celery publishes the links of a task after its end. If the process died between the two,
        # its call would have ended without them. The links of a task with another rule, which has
        # waited because its key was paused, would be refused by its lease.
        self.releases_early = not isinstance(run.policy.on_conflict, Queue)
        self._queue, self._timeout = queue, timeout_for(run.policy.ttl)
        run.runtime.note_broker(header_of(run.request.__dict__, run.delivery.token.task_id))
        named, keyspace = run.delivery.queue, run.runtime.keyspace
        # The key in whose queue the header says that the call is, if it is not that of the
        # arguments.
        self._named = named if named != run.key and keyspace.is_lock(named) else None
        # With which the lease was granted.
        self._nonce = run.delivery.token.nonce

    @classmethod
    def of(cls, run: Run) -> QueueFeature | None:
        """The queue of the run's key; None: the run has none. An eager call has no message.

        A call that has a place runs in its turn, though the option was switched off since.
        """
        is_queue = isinstance(run.policy.on_conflict, Queue)
        queue = None if run.eager else run.runtime.store.call_queue
        return cls(run, queue) if queue and (is_queue or run.delivery.queue) else None

    @classmethod
    def of_parked(cls, run: Run, request: Acquire, refused: Refused) -> QueueFeature | None:
        """The queue that keeps a call whose key is paused or above its rate; None: none can.

        It would keep the message without the arguments that later calls may give to it.
        """
        queue, claim = run.runtime.store.call_queue, request.claim
        is_replaceable = claim is not None and bool(claim.arguments)
        if queue is None or run.eager or request.queued or is_replaceable:
            return None
        if why_not(run.task, run.request) is not None:
            return None
        PARKED[0] = 1
        feature = cls(run, queue)
        feature._parked = refused
        return feature

    def prepare(self, request: Acquire) -> Acquire:
        """Ask for the lease as a call with a place.

        A claim decides which calls are published, not whose turn it is: its call may wait behind
        this one.
        """
        given = {f.name: getattr(request, f.name) for f in fields(request)}
        given |= {"refused_if_claimed": False}
        most = Queue.in_force(self.run.policy.on_conflict).max_crashes
        asked = self.run.delivery.asked
        return QueuedAcquire(**given, late=self.run.acks_late, most_begins=most, asked=asked)

    def granted(self, lease: Lease) -> None:
        """Publish the next call if the limit lets it run at the same time."""
        self._nonce = lease.token.nonce
        if (following := getattr(lease, "following", None)) is not None:
            publish_hint(self.run.task.app, self._queue, following)

    def before_asking(self, request: Acquire) -> None:
        """Ask for the key in whose queue the call is, whatever the key template says by now.

        A header is no evidence of a place: a foreign publisher may name any key.
        """
        if self._named is not None:
            call_id = request.token.call_id
            if self._queue.position(self._named, call_id, timeout=self._timeout) is not None:
                self.run.key = self._named
                request.slots = Keyspace.slots(self._named, len(request.slots))
            self._named = None

    def refused(self, refused: Refused) -> bool:
        """Join the queue, and end this delivery; a call whose turn it is asks again."""
        relation = refused.relation
        if relation is Relation.LOST:
            self._drop("lost")  # a sweep stores its failure, and publishes the next call
        if relation is Relation.QUEUED:
            self._report_parked()
            self._drop("queued")
        if relation is Relation.RATE and refused.hint is not None:
            return self._too_early(refused, refused.hint)
        if relation not in (Relation.UNQUEUED, Relation.PAUSED, Relation.RATE):
            return False
        if (obstacle := why_not(self.run.task, self.run.request)) is not None:
            state = "is in use" if refused.record else "lets no call start yet"
            self._refuse(f"{self.run.key!r} {state}, and {obstacle}", refused)
        place, depth = self._queue.join(self._request(self.run.delivery), timeout=self._timeout)
        self._report_parked()
        # What the store has of this id from now on is this call's, also if the message named none.
        data = RequestData.of(self.run.request)
        data.arrival = data.arrival._replace(is_unnamed=False)
        self.run.rewrite_header()
        if place is Place.HINTED:
            return True
        if place is Place.FULL:
            self._refuse(
                f"{depth} calls are in the queue of {self.run.key!r}, as many as may "
                "(OnConflict.queue(max_waiting=...))",
                refused,
            )
        if place is Place.WAITING:
            if depth:
                self.run.emit(EventName.JOINED, position=depth)
            raise Ignore
        self._drop("done")

    def _report_parked(self) -> None:
        refused, self._parked = self._parked, None
        if refused is None:
            return
        is_rate = refused.relation is Relation.RATE
        data = {"retry_after": round(refused.due_in, 3)} if is_rate else {}
        reason = str(refused.relation)
        self.run.emit(EventName.CONFLICT, outcome="parked", reason=reason, **data)

    def _too_early(self, refused: Refused, hint: Hint) -> bool:
        """The rate of the key lets no call start yet: have the message arrive when it does.

        One that has come with a delay may be early because clocks differ. It waits here for that
        moment.
        """
        run = self.run
        if run.request.eta and refused.due_in <= _CLOCKS_DIFFER:
            run.runtime.clock.sleep(refused.due_in + _AFTER_THE_TIME)
            return True
        publish_hint(run.task.app, self._queue, hint)
        self._drop("rate")

    def requeue(self, copy: Delivery) -> None:
        """Keep the copy in the store: copies of the older message are refused from now on."""
        with suppress(StoreError):
            self._queue.join(self._request(copy), timeout=self._timeout)

    def releasing(self, release: Release, ending: Ending) -> Release:
        """Release the key for the next call, or keep the place."""
        given = {f.name: getattr(release, f.name) for f in fields(release)}
        # With all slots, the store knows which of them are free.
        given["keys"] = Keyspace.slots(Keyspace.lock_of(release.keys[0]), self.run.policy.limit)
        ttl = self.run.runtime.settings.completion_ttl
        return QueuedRelease(
            **given,
            ended_ttl=None if ending.goes_on else ttl,
            due_in=ending.due_in,
            may_return_from=ending.may_return_from,
        )

    def finished(self, ending: Ending) -> None:
        """Take the call out whose lease was lost."""
        if not ending.goes_on:
            _take_out(self.run, self._queue, self.run.key, ending)

    def _request(self, delivery: Delivery) -> Join:
        run = self.run
        header = {**delivery.header(), "queue": run.key, "broker": run.runtime.broker}
        with run.task.app.producer_pool.acquire(block=True) as producer:
            capture = Capture(producer, str(run.request.id), at=run.runtime.clock.wall())
            publish_copy(run.task, run.request, header, 0.0, capture)
        assert capture.message is not None, "Celery publishes through the producer that it is given"
        claim, claim_ttl = claim_of(run.runtime, run.key, capture.message)
        rule = run.policy.on_conflict
        most = None  # a call that is parked is refused by no limit
        if isinstance(rule, Queue) and not delivery.started:
            most = rule.max_waiting
        return Join(
            key=run.key,
            token=delivery.token,
            message=capture.message.to_bytes(),
            late=run.acks_late,
            sequence=delivery.sequence,
            asked=(*run.delivery.asked, self._nonce),
            limit=run.policy.limit,
            max_waiting=most,
            claim=claim,
            claim_ttl=claim_ttl,
        )

    def _refuse(self, why: str, refused: Refused) -> NoReturn:
        run = self.run
        run.free_claim()
        text = f"{why}. The call has not run; send it again"
        holder = refused.holder.for_error() if refused.record else {}
        raise LockConflict(text, run.key, holder)

    def _drop(self, reason: str) -> NoReturn:
        self.run.emit(EventName.DROPPED, reason=reason)
        raise Ignore


def leave(run: Run, ending: Ending) -> None:
    """Take a call out that has ended without a lease, or a sweep would publish it again.

    Its key can't be computed any more, or it has none, or the store did not answer.
    """
    key, queue = run.delivery.queue, run.runtime.store.call_queue
    if queue is not None and run.runtime.keyspace.is_lock(key) and not ending.goes_on:
        _take_out(run, queue, key, ending)


def _take_out(run: Run, queue: CallQueue, key: str, ending: Ending) -> None:
    """Take out a call that has ended, and publish the next; repeated until the store answers."""
    runtime, ttl = run.runtime, run.runtime.settings.completion_ttl
    request = Remove(
        key=key,
        token=run.delivery.token,
        ended_ttl=ttl,
        sequence=run.delivery.sequence,
        may_return_from=ending.may_return_from,
    )
    try:
        _, hint = queue.remove(request, timeout=timeout_for(run.policy.ttl))
    except StoreUnavailable as exc:
        call = {"key": key, "task": run.task.name, "task_id": run.delivery.token.task_id}

        def again(store: Store) -> None:
            _, hint = queue.remove(request, timeout=MAX_TIMEOUT)
            if hint is not None:
                # The thread that repeats requests does not wait for a broker.
                queue.defer(key, seconds=0.0, timeout=MAX_TIMEOUT, unpublished=hint)

        def give_up(why: object) -> None:
            runtime.outages.report(why, "not-recorded", **call, repeats=True)

        if refusal := runtime.locker.retry_queue.put(again, ttl, give_up, error=exc):
            give_up(refusal)
        else:
            runtime.outages.report(exc, "recorded-later", **call, repeats=True)
        return
    if hint is not None:
        publish_hint(run.task.app, queue, hint)
