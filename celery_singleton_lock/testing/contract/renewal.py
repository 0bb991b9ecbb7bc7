"""What a heartbeat prolongs, and what it hears."""

from __future__ import annotations

from celery_singleton_lock.core.lease import Kind, LossReason
from celery_singleton_lock.core.store import RENEWED, Store
from celery_singleton_lock.testing.contract.calls import (
    LONG,
    Part,
    become,
    lease_of,
    new_key,
    new_token,
    record_of,
    renew,
    take,
)

__all__ = ["RenewalContract"]


class RenewalContract(Part):
    """See StoreContract."""

    def test_a_renewal_prolongs_to_the_ttl_of_the_lease(self, store: Store) -> None:
        key = new_key()
        token = take(store, key, ttl=LONG)
        assert renew(store, [lease_of(key, token, 2 * LONG)]) == [RENEWED]
        assert record_of(store, key).ttl > 2 * LONG - 60

    def test_a_renewal_never_writes_a_lost_key_back(self, store: Store) -> None:
        key = new_key()
        token = take(store, key, ttl=self.SHORT)
        self.elapse(self.LONGER_THAN_SHORT)
        assert renew(store, [lease_of(key, token)]) == [LossReason.GONE]
        assert store.inspect(key) is None

    def test_a_renewal_leaves_anothers_lease_alone(self, store: Store) -> None:
        key = new_key()
        holder = take(store, key, ttl=LONG)
        for other in (new_token(), new_token(holder.task_id), new_token(holder.task_id, retries=1)):
            assert renew(store, [lease_of(key, other, 2 * LONG)]) == [LossReason.REPLACED]
        record = record_of(store, key)
        assert record.token == str(holder)
        assert record.ttl <= LONG

    def test_a_renewal_touches_no_reservation_no_cooling_and_no_dying_key(
        self, store: Store
    ) -> None:
        for kind in (Kind.RESERVED, Kind.COOLING, Kind.DYING):
            key = new_key()
            token = take(store, key)
            become(store, key, token, kind, LONG)
            late = lease_of(key, token, self.SHORT)
            following = lease_of(key, token.next_attempt(), self.SHORT)
            # A process that is being killed hears so: it has nothing more to do.
            heard = LossReason.DYING if kind is Kind.DYING else LossReason.REPLACED
            assert renew(store, [late, following]) == [heard, LossReason.REPLACED]
            record = record_of(store, key)
            assert record.kind is kind
            assert record.ttl > LONG - 60

    def test_renewals_are_answered_in_the_order_given(self, store: Store) -> None:
        leases = [lease_of(new_key(), new_token(f"t{number}")) for number in range(600)]
        assert renew(store, leases) == [LossReason.GONE] * 600
        for lease in leases[::7]:
            take(store, lease.key, lease.token)
        for lease in leases[3::7]:
            take(store, lease.key)
        expected = [
            {0: RENEWED, 3: LossReason.REPLACED}.get(number % 7, LossReason.GONE)
            for number in range(600)
        ]
        assert renew(store, leases) == expected

    def test_renewing_nothing_is_answered_with_nothing(self, store: Store) -> None:
        assert renew(store, []) == []
