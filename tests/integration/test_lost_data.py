"""A store that has lost its data with its connections: holders are notified at once.

The leases of these tests are renewed every 20 s. A body that ends much sooner was notified because
a connection had ended.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from celery_singleton_lock import LeaseLost, hold
from celery_singleton_lock.core.events import EventName
from example_project.private_server import PrivateServer
from tests.harness.deliveries import wait_until
from tests.harness.journal import Journal
from tests.harness.worker import CeleryWorker

LOSS = "tests.apps.loss"
TTL = 60

#: Seconds. The goal is 1 s after the store accepts connections; the rest is for a loaded machine,
#: and all of it is far less than the time until the next renewal.
SOON = 8.0

StartWorker = Callable[..., CeleryWorker]
LoadApp = Callable[..., ModuleType]


@pytest.mark.parametrize(
    "pool",
    [
        "prefork",
        *(
            pytest.param(pool, marks=pytest.mark.slow)
            for pool in ("threads", "solo", "gevent", "eventlet")
        ),
    ],
)
def test_a_body_is_interrupted_at_once_when_the_store_restarts_empty(
    pool: str,
    private_redis: PrivateServer,
    worker: StartWorker,
    load_app: LoadApp,
    environment: dict[str, str],
    journal: Journal,
) -> None:
    if pool in ("gevent", "eventlet"):
        pytest.importorskip(pool)
    environment |= {"LOCK_URL": private_redis.url(), "TTL": str(TTL)}
    loss = load_app(LOSS)
    process = worker(LOSS, pool=pool)
    loss.early.delay("k", "swallow", 60)
    journal.wait_for_starts(key="k")
    private_redis.restart(keep_data=False)
    lost = process.wait_for_event(EventName.LEASE_LOST, reason="gone", timeout=SOON)
    assert lost.fields["action"].startswith("interrupted")
    journal.wait_for_ends(key="k", timeout=SOON)


def test_a_block_of_hold_is_notified_at_once_when_the_store_restarts_empty(
    private_redis: PrivateServer, load_app: LoadApp, environment: dict[str, str]
) -> None:
    environment["LOCK_URL"] = private_redis.url()
    loss = load_app(LOSS)
    with hold("k", scope="loss", ttl=TTL, app=loss.app) as lease:
        private_redis.restart(keep_data=False)
        wait_until(lambda: lease.lost, "the lease is seen to be lost", timeout=SOON)
        with pytest.raises(LeaseLost, match="gone"):
            lease.check()
