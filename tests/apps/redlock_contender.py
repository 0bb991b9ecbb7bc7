"""One process that wants a key again and again; prints when it had it.

    python -m tests.apps.redlock_contender <store url> <key> <grants> <quorum>

Each line is one hold: its begin and end on CLOCK_MONOTONIC. ``quorum`` replaces the majority, for a
variant that must fail; 0 leaves it. It begins when a line comes on its standard input, after it has
said "ready".
"""

from __future__ import annotations

import random
import sys
import time

from celery_singleton_lock.core.store_requests import Granted, Release
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.stores.redlock.store import RedlockStore
from celery_singleton_lock.testing.contract import ask, new_key, new_token

#: Seconds that a hold lasts, at most.
HOLD = 0.003
#: Seconds that a lease lasts: no stall of a busy machine is longer.
TTL = 60.0


def hold(store: RedlockStore, key: str) -> tuple[float, float] | None:
    """Try once; when it was held, if it was."""
    token = new_token()
    try:
        granted = isinstance(ask(store, key, token, ttl=TTL), Granted)
        begin = time.monotonic()
        if granted:
            time.sleep(random.uniform(0, HOLD))
    except StoreUnavailable:
        granted = False
    end = time.monotonic()
    try:
        store.leases.release(Release(keys=(key,), token=token), timeout=2)
    except StoreUnavailable:
        pass  # as the worker does: the ttl would free it
    return (begin, end) if granted else None


def main(url: str, key: str, grants: int, quorum: int) -> None:
    store = RedlockStore(url)
    if quorum:
        store._fanout.majority = quorum
    hold(store, new_key())  # the links are open
    print("ready", flush=True)
    sys.stdin.readline()
    while grants:
        held = hold(store, key)
        if held is None:
            time.sleep(random.uniform(0, HOLD))
        else:
            grants -= 1
            print(*held, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
