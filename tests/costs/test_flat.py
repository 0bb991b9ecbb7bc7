"""The cost of a task doesn't grow: not with the number of tasks, nor with that of held keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import redis

from celery_singleton_lock import is_skipped
from example_project.private_server import PrivateServer
from tests.costs.instructions import least
from tests.costs.site import Site, open_site

_TASKS: Final = 200
_KEYS: Final = 100_000
# As many held keys as are asked for, of one scope with the task's own.
_HOLD: Final = """
local value = redis.call('GET', KEYS[1])
for number = 1, tonumber(ARGV[1]) do
  redis.call('SET', KEYS[1] .. '-' .. number, value, 'PX', 600000)
end
"""

_OF_ONE_KEY: Final = {
    *("evalsha", "get", "set", "del", "pttl", "pexpire", "time", "hmget", "hset"),
    *("info", "config|resetstat", "keyspace_hits", "keyspace_misses"),  # of the counting itself
}

Work = Callable[[Site], Any]
WORKS: Final[dict[str, Work]] = {
    "task": lambda site: site.run(site.ours),
    "task, acknowledged late": lambda site: site.run(site.late),
    "task with a claim": lambda site: site.run(site.unique),
    "publish": lambda site: site.publish(site.ours),
    # The same each time: the first has the claim, the others find it.
    "publish a duplicate": lambda site: site.publish(site.unique, "dup"),
    "hold": lambda site: site.hold(),
    "skip": lambda site: site.run(site.ours, "held"),
}


@pytest.fixture
def site(redis_url: str) -> Iterator[Site]:
    with open_site(redis_url) as site, site.taken("held"):
        assert is_skipped(site.run(site.ours, "held"))
        yield site


@pytest.mark.parametrize("work", WORKS)
def test_a_task_costs_the_same_in_an_app_of_many(work: str, site: Site, redis_url: str) -> None:
    alone = least(lambda: WORKS[work](site), before=site.drain)
    with open_site(redis_url, others=_TASKS) as crowded:
        among = least(lambda: WORKS[work](crowded), before=crowded.drain)
    assert among.total == alone.total, f"more with {_TASKS} tasks:\n{among.beyond(alone).most()}"


class Watched:
    """A server that counts what commands it ran, those in scripts too, and what keys they met."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url, decode_responses=True)

    def hold(self, key: str, number: int) -> None:
        self._client.eval(_HOLD, 1, key, number)
        assert self._client.dbsize() > number

    def during(self, work: Callable[[], Any]) -> Counter[str]:
        self._client.config_resetstat()
        work()
        commands: Any = self._client.info("commandstats")
        keyspace: Any = self._client.info("stats")
        counts = Counter({name: one["calls"] for name, one in commands.items()})
        for name in ("keyspace_hits", "keyspace_misses"):
            counts[name] = keyspace[name]
        return counts


@pytest.fixture(scope="module")
def own_server() -> Iterator[PrivateServer]:
    """A server whose statistics no other client changes."""
    with PrivateServer() as server:
        yield server


@pytest.mark.slow
def test_a_task_asks_the_same_of_a_server_with_many_held_keys(own_server: PrivateServer) -> None:
    watched = Watched(own_server.url())
    with open_site(own_server.url()) as site, site.taken("held"):
        assert is_skipped(site.run(site.ours, "held"))
        costs = []
        for number in (0, _KEYS):
            if number:
                watched.hold(site.ours.lock_key("held"), number)
            costs.append({})
            for name, work in WORKS.items():
                work(site)  # a script's first run is sent otherwise
                instructions = least(lambda work=work: work(site), before=site.drain)
                site.drain()
                costs[-1][name] = instructions.total, watched.during(lambda work=work: work(site))
    few, many = costs
    assert many == few
    # One call of these looks at one key, whatever there is beside it.
    for _, commands in many.values():
        assert {name.removeprefix("cmdstat_") for name in commands} <= _OF_ONE_KEY
    assert few["task"][1]["keyspace_hits"] > 0
