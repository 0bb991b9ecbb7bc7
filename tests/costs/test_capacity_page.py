"""The bytes of the formulas in docs/how-to/capacity.md, against a server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
import redis

from tests.costs.site import Site, open_site
from tests.harness.processes import ROOT

PAGE = (ROOT / "docs/how-to/capacity.md").read_text()


@pytest.fixture
def site(redis_url: str) -> Iterator[Site]:
    with open_site(redis_url) as site:
        yield site


def bytes_of(start: str) -> int:
    """The figure in the row of the table that begins so."""
    [row] = re.findall(rf"^\| {start}.*?\| (\d+) ", PAGE, flags=re.MULTILINE)
    return int(row)


def is_near(size: int, printed: int) -> bool:
    """Versions of the server differ by their allocators and encodings: Valkey 8.1 needs least."""
    return 0.6 * printed < size < 1.2 * printed


def test_the_keys_of_the_store_are_as_large_as_the_page_says(
    site: Site, redis_client: redis.Redis
) -> None:
    site.acquire("42", task=site.ours, process="ljpG_sF0i7c71f")
    site.publish(site.unique, "42")
    site.run(site.late, "43")
    site.drain()
    parts = {"a lease": ":costs.ours:", "a claim": ":claim|", "a completion record": ":done|"}
    for row, part in parts.items():
        [key] = [key for key in redis_client.scan_iter() if part in key]
        size = redis_client.memory_usage(key, samples=0)
        if size < len(key):  # Valkey 8.1 leaves out a key that is kept with its value
            size += len(key)
        assert is_near(size, bytes_of(row)), (row, size)
    constants = sum(
        redis_client.memory_usage(key, samples=0)
        for key in redis_client.scan_iter()
        if key.endswith((":shard", ":shards"))
    )
    assert constants <= bytes_of("the counter of")
    assert len(list(redis_client.scan_iter())) == len(parts) + 2, "no other key is left"


def test_a_waiting_call_takes_what_the_page_says_and_its_message(
    site: Site, redis_client: redis.Redis
) -> None:
    waiting = 100
    for _ in range(waiting):
        site.publish(site.queued, "42")
    with site.app.connection_for_write() as connection:
        message = len(json.dumps(connection.default_channel._get("celery")))
    keys = [key for key in redis_client.scan_iter() if ":queue|" in key or ":calls|" in key]
    size = sum(redis_client.memory_usage(key, samples=0) for key in keys) / waiting
    assert is_near(size, bytes_of("a waiting call") + message)


def test_the_page_uses_its_figures() -> None:
    formula = re.findall(r"^bytes = (.*)$", PAGE, flags=re.MULTILINE)[0]
    rows = ("a lease", "a claim", "a completion record")
    assert f"+ ({bytes_of('a waiting call')} + message) x waiting calls" in PAGE
    assert [int(number) for number in re.findall(r"(\d+) x", formula)] == [*map(bytes_of, rows)]
