"""Accounts in SQLite whose balance accepts a write only from the newest lease.

Each account remembers the fence of its last writer. Fences rise from lease to lease, so a writer
whose lease was replaced while it was frozen comes with a smaller fence than the one on record, and
is refused.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: A fence needs 64 bits.
ACCOUNTS = """CREATE TABLE IF NOT EXISTS accounts (
    account_id INTEGER PRIMARY KEY,
    balance INTEGER NOT NULL DEFAULT 0,
    last_fence BIGINT NOT NULL DEFAULT 0)"""
PAYMENTS = """CREATE TABLE IF NOT EXISTS payments (
    payment_id TEXT PRIMARY KEY,
    account_id INTEGER NOT NULL,
    cents INTEGER NOT NULL)"""

#: How long a writer waits for another one, in seconds; SQLite has one writer at a time.
BUSY_SECONDS = 10


class StaleFence(Exception):
    """The fence of a write is not above the account's last one: a newer lease has written."""


class Bank:
    def __init__(self, path: Path) -> None:
        self._path = path
        with self._transaction() as db:
            db.execute(ACCOUNTS)
            db.execute(PAYMENTS)

    def balance(self, account_id: int) -> int:
        """Cents; 0 before the first payment."""
        with self._transaction() as db:
            row = db.execute(
                "SELECT balance FROM accounts WHERE account_id = ?", (account_id,)
            ).fetchone()
        return int(row[0]) if row else 0

    def total(self) -> int:
        """Cents in all accounts."""
        with self._transaction() as db:
            return int(db.execute("SELECT COALESCE(SUM(balance), 0) FROM accounts").fetchone()[0])

    def settled(self, account_id: int) -> int:
        """Cents of all payments of the account: what its balance ought to be."""
        query = "SELECT COALESCE(SUM(cents), 0) FROM payments WHERE account_id = ?"
        with self._transaction() as db:
            return int(db.execute(query, (account_id,)).fetchone()[0])

    def settle(
        self, payment_id: str, account_id: int, *, balance: int, cents: int, fence: int | None
    ) -> bool:
        """Book a payment and write the balance it leads to, both or neither.

        Args:
            payment_id: A payment is booked once. A job that died after this write and before its
                acknowledgement runs again, and finds its payment here.
            account_id: Whose balance.
            balance: The new one in cents, computed from an old one that was read some time ago.
            cents: The payment itself.
            fence: The fence of the lease under which the old balance was read. None, as in the run
                without the lock, is no protection at all.

        Returns:
            False when this payment was booked before.

        Raises:
            StaleFence: A newer lease has written this account since.
        """
        with self._transaction() as db:
            if db.execute("SELECT 1 FROM payments WHERE payment_id = ?", (payment_id,)).fetchone():
                return False
            db.execute("INSERT OR IGNORE INTO accounts (account_id) VALUES (?)", (account_id,))
            db.execute("INSERT INTO payments VALUES (?, ?, ?)", (payment_id, account_id, cents))
            if fence is None:
                db.execute(
                    "UPDATE accounts SET balance = ? WHERE account_id = ?", (balance, account_id)
                )
                return True
            written = db.execute(
                "UPDATE accounts SET balance = ?, last_fence = ?"
                " WHERE account_id = ? AND last_fence < ?",
                (balance, fence, account_id, fence),
            )
            if written.rowcount == 0:
                raise StaleFence(
                    f"account {account_id}: a lease newer than fence {fence} has written already"
                )
            return True

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        # IMMEDIATE takes SQLite's write lock at once: no two transactions read first and then both
        # want to write.
        db = sqlite3.connect(self._path, timeout=BUSY_SECONDS, isolation_level=None)
        try:
            db.execute("BEGIN IMMEDIATE")
            yield db
            db.execute("COMMIT")
        finally:
            db.close()  # rolls back what is not committed
