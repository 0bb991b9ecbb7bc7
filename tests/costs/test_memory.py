"""What a lease takes up: in the process that holds it, and in the store."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final

import pytest
import redis

from celery_singleton_lock import hold
from celery_singleton_lock.core.lease import Lease
from tests.costs.site import Site, open_site

# Bytes.
_IN_PROCESS: Final = 2048
_IN_STORE: Final = 300
_LEASES: Final = 256


@pytest.fixture
def site(redis_url: str) -> Iterator[Site]:
    with open_site(redis_url) as site:
        site.cycle()
        yield site


def block(site: Site, name: str, held: ExitStack) -> None:
    """A ``with hold()`` within all those before it."""
    held.enter_context(hold(f"account:{name}", scope=site.ours.name, app=site.app))


def bare(site: Site, name: str, held: ExitStack) -> None:
    """A lease as a task run has it, with its entry in the heartbeat."""
    held.enter_context(site.taken(name))


@pytest.mark.parametrize("take", [block, bare])
def test_a_lease_takes_less_than_two_kibibytes_of_its_process_however_many_there_are(
    take: Callable[[Site, str, ExitStack], Any], site: Site
) -> None:
    sizes = []
    with ExitStack() as held:
        for number in range(_LEASES):
            take(site, f"first-{number:06}", held)  # fills the caches, of so many names at most
        site.renew()
        tracemalloc.start()
        try:
            for lot in range(3):
                gc.collect()
                before, _ = tracemalloc.get_traced_memory()
                for number in range(_LEASES):
                    take(site, f"{lot}-{number:06}", held)
                site.renew()  # which keeps ready what it sends of each
                gc.collect()
                after, _ = tracemalloc.get_traced_memory()
                sizes.append((after - before) / _LEASES)
        finally:
            tracemalloc.stop()
    assert max(sizes) < _IN_PROCESS, sizes
    # A dictionary grows by leaps; but nothing grows with the number of those before.
    assert sizes[2] < 1.3 * min(sizes[:2]), sizes


def test_a_lease_takes_less_than_300_bytes_of_the_store(
    site: Site, redis_client: redis.Redis
) -> None:
    name, process = "7c1f8f6e-0d0b-4b6c-9a52", site.runtime.process
    lease = site.acquire(name, task=site.unique, process=process)
    assert isinstance(lease, Lease)
    assert 0 < redis_client.memory_usage(lease.key, samples=0) < _IN_STORE
    site.release(lease)
    assert redis_client.exists(lease.key) == 0
