"""A task of ours leaves nothing behind that only the garbage collector could find.

Else its arguments would stay until that comes, and each task's objects would lie in memory that no
task before it has warmed up.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from celery_singleton_lock import is_skipped
from celery_singleton_lock.core.lease import Lease
from celery_singleton_lock.message.claim import Claim
from celery_singleton_lock.option_values import Unique
from celery_singleton_lock.task.run import TaskRun
from tests.costs.site import TTL, Site, open_site

_TASKS: Final = 20
_TIMES: Final = 20


def run_with_newest_arguments(site: Site) -> None:
    """A run whose message says that later calls may replace its arguments."""
    claim = Claim(
        key=site.runtime.keyspace.claim(site.newest.name, site.newest.lock_key("k")),
        unique=Unique.UNTIL_START,
        unique_for=TTL,
        arguments="",
    )
    site.run(site.newest, header={"claim": claim.to_header()})


def run_watched(site: Site) -> None:
    """A run whose heartbeat looks for newer calls, and the sweep that forgets it."""
    site.run(site.cancelling)
    site.runtime.locker.heartbeat.sweep()


def run_without_scripts(site: Site) -> None:
    """A run whose store has been restarted, and has no scripts."""
    for server in site.runtime.store.servers():
        server.run([("SCRIPT", "FLUSH")], TTL)
    site.run(site.ours)


Work = Callable[[Site], Any]
WORKS: Final[dict[str, Work]] = {
    "task": lambda site: site.run(site.ours),
    "task, acknowledged late": lambda site: site.run(site.late),
    "task with a claim": lambda site: site.run(site.unique),
    "task with the newest arguments": run_with_newest_arguments,
    "task that cancels": run_watched,
    "task after a restart of the store": run_without_scripts,
    "skip": lambda site: site.run(site.ours, "held"),
}


@pytest.fixture
def site(redis_url: str) -> Iterator[Site]:
    with open_site(redis_url) as site, site.taken("held"):
        assert is_skipped(site.run(site.ours, "held"))
        yield site


def garbage(work: Callable[[], Any]) -> int:
    """Objects that only the collector finds, of some tasks."""
    # The least of some: the site of the test before may become garbage meanwhile, when its threads
    # end.
    found = _garbage(work)
    for _ in range(_TIMES - 1):
        if not found:
            break
        found = min(found, _garbage(work))
    return found


def _garbage(work: Callable[[], Any]) -> int:
    work()
    gc.collect()
    gc.disable()
    try:
        for _ in range(_TASKS):
            work()
        return gc.collect()
    finally:
        gc.enable()


@pytest.mark.parametrize("work", WORKS)
def test_a_task_leaves_no_garbage(work: str, site: Site) -> None:
    assert garbage(lambda: WORKS[work](site)) == 0


def test_a_task_that_kept_its_run_would_be_garbage(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = TaskRun.finish

    def finish_and_keep(self: TaskRun, state: str | None, retval: Any) -> None:
        request = self.request
        finish(self, state, retval)
        self.request = request

    monkeypatch.setattr(TaskRun, "finish", finish_and_keep)
    assert garbage(lambda: site.run(site.ours)) >= 4 * _TASKS


def test_what_is_remembered_of_a_release_is_not_its_lease(site: Site) -> None:
    for _ in range(_TASKS):
        site.run(site.ours, "remembered")
    site.drain()
    gc.collect()
    leases = [found for found in gc.get_objects() if type(found) is Lease]
    assert [lease for lease in leases if lease.key.endswith(":remembered")] == []
