"""The lock keys of a test's app, as an operator sees and frees them."""

from __future__ import annotations

from celery import Celery

from celery_singleton_lock.core.lease import Record
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.runtime import Runtime
from tests.harness.deliveries import wait_until
from tests.harness.processes import TIMEOUT


class Keys:
    """The keys in the store that an app's tasks use.

    Args:
        app: The app of the test's own process, as ``load_app("tests.apps.loss").app``.
    """

    def __init__(self, app: Celery) -> None:
        self.store = Runtime.of(app).store

    def held(self) -> dict[str, Record]:
        """Every key that is taken, in whatever way."""
        return {record.key: record for record in self.store.scan("csl:*")}

    def find(self, key: str) -> Record | None:
        """The holder of ``key``, if there is one."""
        try:
            return self.store.inspect(key)
        except StoreUnavailable:
            # The server was restarted, and an idle connection of ours is to the old one.
            return self.store.inspect(key)

    def record(self, key: str) -> Record:
        """The holder of ``key``.

        Raises:
            AssertionError: It has no holder.
        """
        record = self.find(key)
        assert record is not None, f"{key} is free"
        return record

    def free(self, key: str) -> None:
        """Take ``key`` from its holder.

        Raises:
            AssertionError: It had no holder.
        """
        assert self.store.free(key, None), f"{key} was free"

    def wait_until_free(self, key: str, *, timeout: float = TIMEOUT) -> None:
        """Wait until ``key`` has no holder."""
        wait_until(lambda: self.find(key) is None, f"{key} is free", timeout=timeout)
