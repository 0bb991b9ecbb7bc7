"""The contract of stores: a test suite that every store passes.

To run it on a store of your own::

    from celery_singleton_lock.testing.contract import StoreContract

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self):
            store = MyStore(...)
            yield store
            store.close()

pytest collects the tests of the subclass. They use unique keys, so the server may be shared.
Call ``pytest.register_assert_rewrite("celery_singleton_lock.testing.contract")`` before the import
to see the values in a failure.
"""

from __future__ import annotations

from .claims import ClaimContract
from .leases import LeaseContract
from .operators import OperatorContract
from .steps import TIMEOUT, ask, lease_of, new_key, new_token

__all__ = ["TIMEOUT", "StoreContract", "ask", "lease_of", "new_key", "new_token"]


class StoreContract(LeaseContract, ClaimContract, OperatorContract):
    """The contract. A subclass provides the fixture ``store``, which may contain other data.

    Override :meth:`elapse` if the store's clock is manual, and ``SHORT`` and ``LONGER_THAN_SHORT``
    if the store can't keep a lease for only a twentieth of a second.
    """
