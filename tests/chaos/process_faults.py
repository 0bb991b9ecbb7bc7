"""What happens to workers: killed, stopped, shut down, in whole or in part."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import redis
from celery import Celery
from kombu.exceptions import OperationalError as KombuError

from tests.chaos.hosts import Worker
from tests.chaos.schedule import Fault
from tests.chaos.site import Post, Site, now, signal_all, stopped
from tests.chaos.stacks import stacks
from tests.harness.deliveries import wait_until
from tests.harness.processes import TIMEOUT, is_running

#: Seconds a shutdown may take: the longest body, a redelivery, a slow machine.
_LONGEST_SHUTDOWN = 40.0
#: Seconds to wait for a body to strike, and between two looks for one.
_PATIENCE = 2.0
_POLL = 0.01
#: The faults of pool processes.
_OF_CHILDREN = ("kill-child", "stop-child", "revoke-running")
#: Celery 5.7 then ends greenlets and acknowledges their messages: plain tasks are lost, too.
_HARD_SHUTDOWNS = ("shutdown-soft", "shutdown-cold")
#: How many of the newest waiting calls may be revoked: the older ones may be lost or over.
_NEWEST = 8


def kill_child(site: Site, post: Post, fault: Fault) -> None:
    """SIGKILL one pool process; the parent learns of it, and goes on."""
    worker = _working(post)
    pid = _working_child(site, worker, fault)
    if pid is None:
        return
    at = now()
    signal_all([pid], signal.SIGKILL)
    _gone([pid])
    site.write_deaths(worker, [pid], at)


def kill_worker(site: Site, post: Post, fault: Fault) -> None:
    """A power cut: parent and children at once; another worker takes the place."""
    worker = _working(post)
    pids = worker.group()
    at = worker.kill_group()
    site.write_deaths(worker, pids, at)
    site.start_worker(post)


def kill_parent(site: Site, post: Post, fault: Fault) -> None:
    """SIGKILL the parent alone; the kernel kills its children then, a moment later."""
    worker = _working(post)
    children = worker.children()
    at = worker.kill()
    with suppress(AssertionError):  # one that was just forked has not asked the kernel for it yet
        _gone(children, timeout=5)
    site.write_deaths(worker, [worker.pid, *children], at, until=now())
    # What the parent had given them may be gone with them, or with one that outlives it.
    site.history.write("down", worker=worker.hostname, how="parent killed", at=at, until=now())
    site.start_worker(post)


def stop_child(site: Site, post: Post, fault: Fault) -> None:
    """SIGSTOP one pool process for a while."""
    worker = _working(post)
    pid = _working_child(site, worker, fault)
    if pid is not None:
        stop(site, worker, [pid], fault.seconds)


def stop_parent(site: Site, post: Post, fault: Fault) -> None:
    """SIGSTOP the parent alone for a while."""
    worker = _working(post)
    stop(site, worker, [worker.pid], fault.seconds)


def stop_worker(site: Site, post: Post, fault: Fault) -> None:
    """SIGSTOP parent and children for a while."""
    worker = _working(post)
    stop(site, worker, worker.group(), fault.seconds)


def shutdown_warm(site: Site, post: Post, fault: Fault) -> None:
    """SIGTERM: the worker finishes what it does."""
    _shut_down(site, post, signal.SIGTERM, "warm")


def shutdown_cold(site: Site, post: Post, fault: Fault) -> None:
    """SIGQUIT: the worker ends what it does."""
    _shut_down(site, post, signal.SIGQUIT, "cold", next_soft=1.0)


def shutdown_soft(site: Site, post: Post, fault: Fault) -> None:
    """SIGQUIT to a worker that grants its bodies a second, if the one at the post is such."""
    _shut_down(site, post, signal.SIGQUIT, "soft")


def revoke_running(site: Site, post: Post, fault: Fault) -> None:
    """Revoke a call whose body runs: its worker ends the pool process."""
    worker = _working(post)
    inside = site.progress.inside(worker)
    if not inside:
        return
    pid, at = inside[0], now()
    number = ("SIGTERM", "SIGKILL")[int(fault.chance * 1009) % 2]
    if _revoke(site, site.progress.call_of(worker, pid), terminate=True, signal=number):
        with suppress(AssertionError):  # the body had just ended, or the command did not arrive
            _gone([pid], timeout=5)
        site.write_deaths(worker, [pid], at, until=now())


def revoke_waiting(site: Site, post: Post, fault: Fault) -> None:
    """Revoke a call that no body has begun: it waits in the broker, a worker or a queue."""
    waiting = site.progress.waiting()[-_NEWEST:]
    if waiting:
        _revoke(site, waiting[int(fault.chance * 1009) % len(waiting)])


FAULTS: dict[str, Callable[[Site, Post, Fault], None]] = {
    "kill-child": kill_child,
    "kill-worker": kill_worker,
    "kill-parent": kill_parent,
    "stop-child": stop_child,
    "stop-parent": stop_parent,
    "stop-worker": stop_worker,
    "shutdown-warm": shutdown_warm,
    "shutdown-soft": shutdown_soft,
    "shutdown-cold": shutdown_cold,
    "revoke-running": revoke_running,
    "revoke-waiting": revoke_waiting,
}


def strike(site: Site, fault: Fault) -> str:
    """Do it to one worker and undo it; returns whom it struck."""
    posts = struck_by(fault, site.posts)
    post = posts[int(fault.chance * len(posts)) % len(posts)]
    with post.busy:
        name = _working(post).name
        FAULTS[fault.name](site, post, fault)
    return name


def struck_by(fault: Fault, posts: Sequence[Post]) -> Sequence[Post]:
    """The workers to which the fault can be done: some faults are of pool processes."""
    if fault.name in _OF_CHILDREN:
        return [post for post in posts if post.pool == "prefork"]
    if fault.name in _HARD_SHUTDOWNS:
        return [post for post in posts if post.pool != "gevent"]
    return posts


def stop(site: Site, worker: Worker, pids: list[int], seconds: float) -> None:
    """SIGSTOP some processes of a worker for a while."""
    for pid in pids:
        site.history.write("stopped", pid=worker.number_of(pid))
    signal_all(pids, signal.SIGSTOP)
    wait_until(lambda: all(stopped(pid) or not is_running(pid) for pid in pids), "they stand still")
    time.sleep(seconds)  # how long it lasts, as the timetable has it
    signal_all(pids, signal.SIGCONT)
    for pid in pids:
        site.history.write("continued", pid=worker.number_of(pid))


def _working(post: Post) -> Worker:
    assert post.worker is not None
    return post.worker


def _working_child(site: Site, worker: Worker, fault: Fault) -> int | None:
    """A child that is in a body, if there is one soon; else any, if there is any."""
    deadline = now() + _PATIENCE
    while not (inside := site.progress.inside(worker)) and now() < deadline:
        time.sleep(_POLL)  # the pause between two looks at the history
    candidates = inside[:1] or worker.children()
    # Another part of the same chance than the one that chose the worker.
    return candidates[int(fault.chance * 1009) % len(candidates)] if candidates else None


def _shut_down(
    site: Site, post: Post, number: signal.Signals, how: str, *, next_soft: float = 0.0
) -> None:
    worker = _working(post)
    if "ready." not in worker.log:
        # Before that, Celery has no handlers, and the signal kills: another fault, done elsewhere.
        return
    pids, at = worker.group(), now()
    worker.send_signal(number)
    patience = "in time"
    try:
        worker.wait(_LONGEST_SHUTDOWN)
    except AssertionError:
        patience = f"not within {_LONGEST_SHUTDOWN:g} s"
        where = stacks(worker, site.history.directory)
        text = f"the {how} shutdown of {worker.name}; it is at:\n{where}"
        site.history.write("never-ends", text=text)
    pids = sorted({*pids, *worker.group()})
    worker.kill_group()
    site.write_deaths(worker, pids, at, until=now())
    if how != "warm":
        site.history.write("down", worker=worker.hostname, how=how, at=at, until=now())
    site.history.mine().note(f"{how} shutdown of {worker.name} ended {patience}")
    site.start_worker(post, soft=next_soft)


def _revoke(site: Site, call: str, **options: Any) -> bool:
    """Ask all workers to revoke a call; whether the broker took the command."""
    # Noted first: a worker may carry it out at once.
    site.history.write("revoked", task_id=call)
    transport = {"max_retries": 1, "socket_timeout": 1, "socket_connect_timeout": 1}
    with Celery(broker=site.broker.url(0), set_as_current=False) as app:
        app.conf.broker_transport_options = transport
        try:
            app.control.revoke(call, **options)
        except (KombuError, OSError, redis.RedisError):
            return False  # it is away
    return True


def _gone(pids: list[int], timeout: float = TIMEOUT) -> None:
    wait_until(lambda: not any(is_running(pid) for pid in pids), "they are dead", timeout=timeout)
