"""What every store promises, as tests: the one suite that all of them pass.

A store of your own passes it like this::

    from celery_singleton_lock.testing.contract import StoreContract

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self):
            store = MyStore(...)
            yield store
            store.close()

pytest finds the tests in the subclass. They use keys of their own, so the server may be shared. Say
``pytest.register_assert_rewrite("celery_singleton_lock.testing.contract")`` before the import, and
a failure shows the values.
"""

from __future__ import annotations

from celery_singleton_lock.testing.contract.acquire import AcquireContract
from celery_singleton_lock.testing.contract.async_release import AsyncReleaseContract
from celery_singleton_lock.testing.contract.calls import TIMEOUT, ask, lease_of, new_key, new_token
from celery_singleton_lock.testing.contract.claimed_acquire import ClaimedAcquireContract
from celery_singleton_lock.testing.contract.claimed_release import ClaimedReleaseContract
from celery_singleton_lock.testing.contract.claims import ClaimContract
from celery_singleton_lock.testing.contract.markers import MarkerContract
from celery_singleton_lock.testing.contract.operators import OperatorContract
from celery_singleton_lock.testing.contract.release import ReleaseContract
from celery_singleton_lock.testing.contract.renewal import RenewalContract
from celery_singleton_lock.testing.contract.slots import SlotContract
from celery_singleton_lock.testing.contract.ticks import TickContract

__all__ = ["TIMEOUT", "StoreContract", "ask", "lease_of", "new_key", "new_token"]


class StoreContract(
    AcquireContract,
    SlotContract,
    RenewalContract,
    ReleaseContract,
    AsyncReleaseContract,
    MarkerContract,
    ClaimContract,
    ClaimedAcquireContract,
    ClaimedReleaseContract,
    TickContract,
    OperatorContract,
):
    """The contract. A subclass gives the fixture ``store``, open and with any other data in it.

    Where the store's clock is manual, override :meth:`elapse`; where it can't keep a lease for as
    short as a twentieth of a second, ``SHORT`` and ``LONGER_THAN_SHORT``.
    """
