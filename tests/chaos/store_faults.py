"""What happens to the lock store, the network before it, and the broker."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import redis

from example_project.private_server import PrivateServer
from tests.chaos import beats
from tests.chaos.proxy import Kind, Mode
from tests.chaos.schedule import Fault, Lane
from tests.chaos.site import Site, now
from tests.chaos.store_kinds import wall_fence
from tests.harness.busy import busy
from tests.harness.deliveries import wait_until
from tests.harness.sentinels import cut_replication

#: Rights that stay when the rest is taken.
_NO_RIGHTS = ("-@all", "+ping", "+hello", "+auth", "+select", "+client")


def strike_network(site: Site, fault: Fault) -> str:
    """Disturb the way from one worker, or (every third time) from all, to the lock store."""
    everyone = int(fault.chance * 997) % 3 == 0
    one = site.posts[int(fault.chance * len(site.posts)) % len(site.posts)]
    posts = site.posts if everyone else [one]
    modes = {
        "stall": Mode(kind=Kind.STALL),
        "cut": Mode(kind=Kind.CUT),
        "no-requests": Mode(kind=Kind.NO_REQUESTS),
        "no-replies": Mode(kind=Kind.NO_REPLIES),
        "refuse": Mode(kind=Kind.REFUSE),
        # Around the client's timeout of ttl/6: some replies come in time, others late.
        "slow": Mode(kind=Kind.SLOW, delay=site.plan.ttl * 0.12 * (0.2 + fault.chance)),
        "lose-replies": Mode(kind=Kind.LOSE_REPLIES, probability=0.1 + 0.5 * fault.chance),
    }
    proxies = [post.proxy for post in posts if post.proxy is not None]
    for proxy in proxies:
        proxy.set(modes[fault.name])
    try:
        time.sleep(fault.seconds)
    finally:
        for proxy in proxies:
            proxy.set(Mode())
    return "all" if everyone else one.name


def strike_store(site: Site, fault: Fault) -> str:
    """Disturb the lock store itself."""
    if site.members is not None:
        site.members.faults[fault.name](fault.seconds, fault.chance)
    else:
        STORE_FAULTS[fault.name](site, fault.seconds, fault.chance)
    return "store"


def strike_broker(site: Site, fault: Fault) -> str:
    """Kill the broker, and start it again after a while with what it had acknowledged."""
    at = now()
    site.in_starter(site.broker.kill)
    site.history.write("down", worker="broker", how="killed", at=at, until=now())
    time.sleep(fault.seconds)
    site.in_starter(site.broker.start)
    return "broker"


def client_pause(site: Site, seconds: float, chance: float) -> None:
    """CLIENT PAUSE: commands wait, half of the time writes alone."""
    mode = "ALL" if chance < 0.5 else "WRITE"
    with site.admin() as admin:
        admin.execute_command("CLIENT", "PAUSE", round(seconds * 1000), mode)
    time.sleep(seconds)


def freeze_server(site: Site, seconds: float, chance: float) -> None:
    """SIGSTOP: connections stay open, nothing answers; afterwards all is executed, late."""
    site.store.pause()
    try:
        time.sleep(seconds)
    finally:
        site.store.resume()


def busy_server(site: Site, seconds: float, chance: float) -> None:
    """A script that runs for too long: the server answers BUSY to all other requests."""
    with busy(site.admin):
        time.sleep(seconds)


def script_flush(site: Site, seconds: float, chance: float) -> None:
    """SCRIPT FLUSH."""
    with site.admin() as admin:
        admin.script_flush()


def restart_kept(site: Site, seconds: float, chance: float) -> None:
    """SIGKILL, and a start with all that was acknowledged."""
    site.in_starter(site.store.kill)
    time.sleep(seconds)
    site.in_starter(site.store.start)


def restart_empty(site: Site, seconds: float, chance: float) -> None:
    """SIGKILL, and a start with nothing."""
    killed, fence_from = now(), wall_fence()
    site.in_starter(site.store.kill)
    _write_loss(site, "restart-empty", fence_from)
    shutil.rmtree(site.store.directory / "appendonlydir", ignore_errors=True)
    # Longer than any client waits, so that no request from before can arrive afterwards.
    time.sleep(seconds)
    site.in_starter(site.store.start)
    site.history.write("emptied", killed=killed)


def out_of_memory(site: Site, seconds: float, chance: float) -> None:
    """maxmemory reached, and noeviction: no command is executed that needs memory."""
    with site.admin() as admin:
        admin.config_set("maxmemory-policy", "noeviction")
        admin.config_set("maxmemory", "1")
        time.sleep(seconds)
        admin.config_set("maxmemory", "0")


def read_only(site: Site, seconds: float, chance: float) -> None:
    """The store is a replica of a master that can't be reached: no write is executed."""
    with site.admin() as admin:
        admin.execute_command("REPLICAOF", "127.0.0.1", "1")
        time.sleep(seconds)
        admin.execute_command("REPLICAOF", "NO", "ONE")


def no_rights(site: Site, seconds: float, chance: float) -> None:
    """An ACL takes the workers' rights away, and gives them back."""
    with site.admin() as admin:
        admin.execute_command("ACL", "SETUSER", "default", *_NO_RIGHTS)
        time.sleep(seconds)
        admin.execute_command("ACL", "SETUSER", "default", "+@all")


def failover(site: Site, seconds: float, chance: float) -> None:
    """A replica that has missed the last writes becomes the store; the old one is gone."""
    old = site.store
    new = site.new_server()
    with site.admin(new) as admin:
        # Not by an argument: a later restart would make it a replica again.
        admin.execute_command("REPLICAOF", "127.0.0.1", str(old.port))
    wait_until(partial(_in_step, site, new), "the replica is in step", timeout=60)
    lost_from = now()
    cut_replication(old, [new])
    time.sleep(seconds)  # what is acknowledged meanwhile will be lost
    fence_from = wall_fence()
    site.in_starter(old.kill)
    _write_loss(site, "failover", fence_from, lost_from=lost_from)
    with site.admin(new) as admin:
        admin.execute_command("REPLICAOF", "NO", "ONE")
        admin.config_set("masterauth", "")
    site.replace_store(new)


def clock_step(site: Site, seconds: float, chance: float) -> None:
    """The server's wall clock is ahead or behind for a while; leases end early or late by it."""
    assert site.clock is not None, "this campaign has no stepped clock: --clock"
    ahead = (60.0 if chance < 0.5 else -30.0) * (0.1 + chance)
    for offset in (ahead, 0.0):
        fence_from = _highest_fence(site)
        site.clock.step_to(offset)
        if (ahead > 0) == (offset == ahead):  # forward: leases have ended that were trusted
            site.history.write(
                "loss",
                name="clock-step",
                fence_from=fence_from,
                fence_to=_highest_fence(site),
            )
        if offset:
            time.sleep(seconds)


STORE_FAULTS: dict[str, Callable[[Site, float, float], None]] = {
    "client-pause": client_pause,
    "freeze-server": freeze_server,
    "busy": busy_server,
    "script-flush": script_flush,
    "restart-kept": restart_kept,
    "restart-empty": restart_empty,
    "out-of-memory": out_of_memory,
    "read-only": read_only,
    "no-rights": no_rights,
    "failover": failover,
    "clock-step": clock_step,
}


def strike_beat(site: Site, fault: Fault) -> str:
    """Disturb one beat, or its way to the broker."""
    if site.beats is None:
        return "none"
    name, successor = beats.strike(site.beats, fault)
    if successor is not None:
        site.in_starter(successor.start)
    return name


STRIKES: dict[Lane, Callable[[Site, Fault], str]] = {
    Lane.NETWORK: strike_network,
    Lane.STORE: strike_store,
    Lane.BROKER: strike_broker,
    Lane.BEAT: strike_beat,
}


def _write_loss(site: Site, name: str, fence_from: int, **fields: float) -> None:
    fences = {"fence_from": fence_from, "fence_to": wall_fence()}
    site.history.write("loss", name=name, **fences, **fields)


def _highest_fence(site: Site) -> int:
    with site.admin() as admin:
        shards = list(admin.scan_iter("csl:*:shard"))
        values: list[Any] = [admin.hget(shard, "|fence") for shard in shards]
    return max((int(value) for value in values if value), default=0)


def _in_step(site: Site, server: PrivateServer) -> bool:
    with site.admin(server) as admin:
        try:
            info: Any = admin.info("replication")
        except redis.exceptions.RedisError:
            return False
    return bool(info.get("master_link_status") == "up")
