"""The four tasks: an importer per account, a nightly report, a payment, a refresh of rates.

`acks_late` and `reject_on_worker_lost` let a job survive its worker: the broker delivers it again.
The lock lets it run again, but never beside another run for the same key.
"""

import time
from typing import TYPE_CHECKING

from example_project import witness
from example_project.app import BANK_PATH, LOCKED, app
from example_project.bank import Bank

if TYPE_CHECKING or LOCKED:
    from celery_singleton_lock import OnConflict, current_lease, singleton_task
else:
    from example_project.unlocked import OnConflict, current_lease, singleton_task

#: Seconds a dead worker can block others. Every body below but the payment takes longer than this:
#: the heartbeat keeps its lease alive, so the time that a job takes need not be guessed.
TTL = 2

PAGES, PAGE_SECONDS = 10, 0.2
REPORT_SECONDS = 2.2
CARD_NETWORK_SECONDS = 0.6
RATES_SECONDS = 0.7


@singleton_task(
    app=app, key="account:{account_id}", ttl=TTL, acks_late=True, reject_on_worker_lost=True
)
def import_account(account_id: int) -> int:
    """Fetch one account's bookings, page by page. Other accounts are imported at the same time."""
    with witness.body(import_account, account_id):
        lease = current_lease()
        for _page in range(PAGES):
            lease.check()  # raises LeaseLost: another worker may be fetching these pages now
            time.sleep(PAGE_SECONDS)
        return PAGES


@singleton_task(app=app, ttl=TTL, acks_late=True, reject_on_worker_lost=True)
def nightly_report(region: str) -> int:
    """Sum up the bank. No `key`: all arguments are the key, so each region has its own lock."""
    with witness.body(nightly_report, region):
        time.sleep(REPORT_SECONDS)
        return Bank(BANK_PATH).total()


@singleton_task(
    app=app,
    key="account:{account_id}",
    ttl=TTL,
    # Two payments are two jobs, not one job twice: the second waits for its turn instead of being
    # skipped.
    on_conflict=OnConflict.retry(delay=0.2, max_delay=0.5),
    acks_late=True,
    reject_on_worker_lost=True,
)
def pay(account_id: int, payment_id: str, cents: int) -> None:
    """Read the balance, ask the card network, write the balance: wrong if two do it at once."""
    with witness.body(pay, account_id):
        lease = current_lease()
        bank = Bank(BANK_PATH)
        balance = bank.balance(account_id)
        time.sleep(CARD_NETWORK_SECONDS)
        lease.check()
        # Between this check and the write the process can still be frozen for longer than the ttl.
        # Only the bank can refuse then, and the fence is how it knows.
        bank.settle(payment_id, account_id, balance=balance + cents, cents=cents, fence=lease.fence)


@singleton_task(
    app=app,
    key="currency:{currency}",
    ttl=TTL,
    # One running, one waiting: a call finds the one that waits, or becomes it. So however many ask,
    # a run begins after the last of them.
    unique="until_start",
    on_conflict=OnConflict.retry(delay=0.1, max_delay=0.2),
    acks_late=True,
    reject_on_worker_lost=True,
)
def refresh_rates(currency: str) -> None:
    """Fetch the exchange rates. The feed asks for it at each change, many times a second."""
    with witness.body(refresh_rates, currency):
        time.sleep(RATES_SECONDS)
