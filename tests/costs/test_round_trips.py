"""What each step asks of the lock store, in exact numbers, counted at the sockets of this process.

The broker is in memory, and there is no result backend but where the test says so: what is on the
wire is the locks' alone.
`tests/integration/test_round_trips.py` has the same of real workers, by the server's own count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any, Final
from urllib.parse import urlsplit

import pytest

from celery_singleton_lock import hold, is_skipped
from example_project.private_server import (
    PrivateServer,
    ServerNotFound,
    find_binary,
    find_valkey,
)
from tests.conftest import missing
from tests.costs.site import Site, open_site
from tests.harness.wire import Count, Wire

NONE: Final = Count(requests=0, round_trips=0)
ONE: Final = Count(requests=1, round_trips=1)
TWO: Final = Count(requests=2, round_trips=2)
THREE: Final = Count(requests=3, round_trips=3)

Take = Callable[[], Count]
STORES: Final = {"redis": find_binary, "valkey": find_valkey}


@pytest.fixture(scope="module", params=STORES)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    try:
        binary = STORES[request.param]()
    except ServerNotFound as exc:
        missing(str(exc))
    with PrivateServer(binary=binary) as server:
        yield server.url().replace("redis:", f"{request.param}:")


@pytest.fixture
def site(url: str) -> Iterator[Site]:
    with open_site(url) as site:
        # The connection stands, the server knows the scripts, and the number of shards is checked.
        site.publish(site.unique, "warm")
        site.run(site.late, **linked(site))
        with site.taken():
            site.renew()
        yield site


@pytest.fixture
def take(url: str, site: Site) -> Iterator[Take]:
    """What has been asked since it was last called."""
    wire = Wire({urlsplit(url).port or 0})
    with wire.listening():
        yield wire.take


def linked(site: Site) -> dict[str, Any]:
    """The options of a message with a callback: it releases before that one is sent."""
    return {"callbacks": [site.plain.si("next")]}


def test_each_end_of_a_task_costs_what_is_promised(site: Site, take: Take) -> None:
    counts = {}
    for name, run in {
        "plain Celery": lambda: site.run(site.plain),
        "a task": lambda: site.run(site.ours),
        "acknowledged late": lambda: site.run(site.late),
        "with a claim": lambda: site.run(site.unique),
        "released early": lambda: site.run(site.ours, **linked(site)),
        "released early, acknowledged late": lambda: site.run(site.late, **linked(site)),
    }.items():
        assert run() is None
        counts[name] = take()
    assert counts == {
        "plain Celery": NONE,
        "a task": TWO,  # acquire, release
        "acknowledged late": TWO,  # the release writes the completion record
        "with a claim": TWO,  # both scripts carry it
        "released early": TWO,
        "released early, acknowledged late": THREE,  # the work is done once the callbacks are sent
    }


def test_a_call_in_a_queue_costs_one_round_trip_more_to_publish_and_none_to_run(
    site: Site, take: Take
) -> None:
    with site.taken(task=site.queued):
        site.run(site.queued)  # the server gets to know the scripts
    site.publish(site.queued, "warm")
    site.run(site.queued, "warm too")
    take()
    site.publish(site.queued, "first")
    assert take() == ONE
    site.publish(site.queued, "first")  # it waits
    assert take() == ONE
    site.run(site.queued, "free")
    assert take() == TWO
    with site.taken(task=site.queued):
        take()
        site.run(site.queued)
        assert take() == TWO  # refused; joined, with its message


def test_a_conflict_costs_one_round_trip_and_a_requeued_a_second(site: Site, take: Take) -> None:
    with site.taken():
        take()
        assert is_skipped(site.run(site.ours))
        assert take() == ONE
    with site.taken(task=site.patient):
        take()
        site.run(site.patient)
        assert take() == TWO  # refused; and the mark that the copy is the newer one


def test_a_call_costs_one_round_trip_with_a_claim_and_none_without(site: Site, take: Take) -> None:
    site.publish(site.ours, "new")
    assert take() == NONE
    first = site.publish(site.unique, "new")
    assert take() == ONE
    assert site.publish(site.unique, "new").id == first.id  # a duplicate
    assert take() == ONE


def test_only_a_duplicate_asks_the_result_backend_and_does_so_once(url: str) -> None:
    with (
        PrivateServer() as results,
        open_site(url, results=results.url()) as site,
    ):
        servers = {"store": Wire({urlsplit(url).port or 0}), "results": Wire({results.port})}

        def costs(call: Callable[[], Any]) -> dict[str, Count]:
            # A deleted result unsubscribes, before Celery 5.7 also if it was never subscribed.
            counts, kept = {}, []
            for name, wire in servers.items():
                with wire.listening():
                    kept.append(call())
                    counts[name] = wire.take()
            return counts

        for _ in range(2):  # the connections stand, and the backend's claim is taken
            site.publish(site.unique, "taken")
        site.publish(site.plain)
        names = count()
        plain = costs(lambda: site.publish(site.plain))
        assert plain["store"] == NONE
        claimed = costs(lambda: site.publish(site.unique, f"new-{next(names)}"))
        assert claimed == {"store": ONE, "results": plain["results"]}
        duplicate = costs(lambda: site.publish(site.unique, "taken"))
        assert duplicate == {"store": ONE, "results": ONE}


def test_a_hold_costs_two_round_trips(site: Site, take: Take) -> None:
    with hold("account:k", scope=site.ours.name, app=site.app):
        assert take() == ONE
    assert take() == ONE


@pytest.mark.parametrize("leases", [1, 300])
def test_leases_are_renewed_in_one_request_whatever_their_number(
    leases: int, site: Site, take: Take
) -> None:
    with ExitStack() as held:
        for number in range(leases):
            held.enter_context(site.taken(str(number)))
        take()
        site.renew()
        assert take() == ONE
