"""What happens to whole hosts: cut off, frozen, killed, with a clock that is wrong."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import redis

from tests.chaos.hosts import BROKER, STORE, Host
from tests.chaos.process_faults import stop
from tests.chaos.schedule import Fault
from tests.chaos.site import Post, Site, now

#: Seconds that an interface that flaps is up or down, at most.
_FLAP = 0.3
#: Seconds by which a wall clock is stepped, at most.
_STEP = 10.0


def unplugged(site: Site, post: Post, fault: Fault) -> None:
    """Its interface is down: it reaches nothing and nothing reaches it, without a reset."""
    host = _host(post)
    host.unplug()
    try:
        time.sleep(fault.seconds)
    finally:
        host.plug()


def off_store(site: Site, post: Post, fault: Fault) -> None:
    """All packets between it and the lock store are lost."""
    with _host(post).mute(STORE), _host(post).deaf(STORE):
        time.sleep(fault.seconds)


def off_broker(site: Site, post: Post, fault: Fault) -> None:
    """All packets between it and the broker are lost."""
    with _host(post).mute(BROKER), _host(post).deaf(BROKER):
        time.sleep(fault.seconds)


def mute(site: Site, post: Post, fault: Fault) -> None:
    """What it sends to the lock store is lost; what the store sends arrives."""
    with _host(post).mute(STORE):
        time.sleep(fault.seconds)


def deaf(site: Site, post: Post, fault: Fault) -> None:
    """What the lock store sends to it is lost: its requests are executed."""
    with _host(post).deaf(STORE):
        time.sleep(fault.seconds)


def flapping(site: Site, post: Post, fault: Fault) -> None:
    """Its interface goes up and down: packets are lost in bursts, and sent again by TCP."""
    host, chances, end = _host(post), random.Random(fault.chance), now() + fault.seconds
    try:
        while now() < end:
            for change in (host.unplug, host.plug):
                change()
                time.sleep(chances.uniform(0.0, _FLAP))
    finally:
        host.plug()


def frozen(site: Site, post: Post, fault: Fault) -> None:
    """All its processes stand still and its network goes on, as in a paused virtual machine."""
    with post.busy:
        assert post.worker is not None
        stop(site, post.worker, post.worker.group(), fault.seconds)


def killed(site: Site, post: Post, fault: Fault) -> None:
    """A power cut: no packet says so. It boots again with the same name and address."""
    host = _host(post)
    with post.busy:
        worker = post.worker
        assert worker is not None
        pids, at = worker.group(), now()
        host.kill()
        worker.kill_group()  # has been killed with its host: waits for its end
        site.write_deaths(worker, pids, at, until=now())
        time.sleep(fault.seconds)
        site.in_starter(host.start)
        _drop_connections(site, host)
        # Until then the broker may have sent messages to connections of the dead.
        site.history.write("cut-off", worker=worker.hostname, at=at, until=now())
        site.start_worker(post)


def wrong_clock(site: Site, post: Post, fault: Fault) -> None:
    """Its wall clock is stepped forward or back, and later to where it was."""
    clock = _host(post).clock
    if clock is None:
        return
    chances = random.Random(fault.chance)
    clock.step_to(chances.choice((-1, 1)) * chances.uniform(1.0, _STEP))
    time.sleep(fault.seconds)
    clock.step_to(0.0)


FAULTS: dict[str, Callable[[Site, Post, Fault], None]] = {
    "host-unplugged": unplugged,
    "host-off-store": off_store,
    "host-off-broker": off_broker,
    "host-mute": mute,
    "host-deaf": deaf,
    "host-flapping": flapping,
    "host-frozen": frozen,
    "host-killed": killed,
    "host-wrong-clock": wrong_clock,
}


def strike(site: Site, fault: Fault) -> str:
    """Do it to one host and undo it; the name of its post."""
    post = site.posts[int(fault.chance * len(site.posts)) % len(site.posts)]
    FAULTS[fault.name](site, post, fault)
    return post.name


def _host(post: Post) -> Host:
    assert post.host is not None
    return post.host


def _drop_connections(site: Site, host: Host) -> None:
    """Have the broker close the connections of a host that has lost them, as keepalive would."""
    with redis.Redis(port=site.broker.port) as broker:
        for client in broker.client_list():
            if client["addr"].startswith(f"{host.address}:"):
                broker.client_kill_filter(_id=client["id"])
