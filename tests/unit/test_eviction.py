"""Which server of several endangers leases most by evicting keys."""

from __future__ import annotations

import pytest

from celery_singleton_lock.stores.eviction import eviction_of, risk


def memory(policy: str, limit: str = "1000") -> dict[str, str]:
    return {"maxmemory_policy": policy, "maxmemory": limit}


@pytest.mark.parametrize("policy", ["volatile-lru", "volatile-lfu"])
def test_a_server_that_evicts_leases_early_is_found_beside_one_that_evicts_them_last(
    policy: str,
) -> None:
    last, early = memory(policy), memory("volatile-ttl")
    assert max([memory("noeviction"), last, early, {}], key=risk) is early
    assert max([{}, last, memory("noeviction")], key=risk) is last


def test_without_a_limit_no_policy_evicts_anything_now() -> None:
    found = eviction_of(memory("allkeys-random", "0"))
    assert found is not None
    assert not found.endangers
    assert eviction_of(memory("noeviction")) is None
    assert eviction_of({}) is None, "a login that may not read INFO"


@pytest.mark.parametrize(
    ("policy", "refused"), [("allkeys-lru", True), ("volatile-lru", False), ("volatile-ttl", True)]
)
def test_leases_are_refused_where_renewed_ones_are_evicted_unless_that_is_allowed(
    policy: str, refused: bool
) -> None:
    found = eviction_of(memory(policy))
    assert found is not None
    assert found.forbids_leases(allow_eviction=False) is refused
    assert not found.forbids_leases(allow_eviction=True)


def test_an_unknown_policy_counts_as_one_that_evicts_leases_early() -> None:
    found = eviction_of(memory("volatile-lrm"))
    assert found is not None
    assert found.endangers
