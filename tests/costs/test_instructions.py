"""The hot paths, in instructions of the interpreter: none becomes longer unnoticed.

`WRITTEN_DOWN` has what each path took on Python 3.11 when it was last looked at; later Pythons take
a tenth to a quarter less for the same source, so that there the bound is wider. The new number of
a path that has become shorter is written down; so is that of a longer one, if it is worth it:
``pytest tests/costs -rP -k written_down`` prints them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Final

import pytest

from celery_singleton_lock import is_skipped
from celery_singleton_lock.core.key import KeyMaker
from celery_singleton_lock.stores.redis import connection as connections
from tests.costs.instructions import Instructions, least
from tests.costs.site import Site, open_site

# One call of inspect.signature() is 700 instructions; it must not fit in on any path.
_TOLERANCE: Final = 0.03
_LEASES: Final = 200
_new = count()

Counting = Callable[[Site], Instructions]


def cycle(site: Site) -> Instructions:
    """Acquire and release, through the locker."""
    return least(site.cycle)


def refusal(site: Site) -> Instructions:
    """An acquire of what another client has."""
    with site.taken():
        return least(site.acquire)


def refusal_on_one_host(site: Site) -> Instructions:
    """The same, where the holder is a process of this host, which is looked for."""
    own = site.runtime.process
    lease = site.acquire(process=own)
    found = least(lambda: site.acquire(process=own))
    site.release(lease)
    return found


def key(site: Site) -> Instructions:
    """What a worker makes of the arguments of a call and a template."""
    return least(lambda: site.ours.singleton_key_maker.rest_of(["k"], {}))


def key_of_all(site: Site) -> Instructions:
    """The same where the key is made of all arguments: a number of each kind."""
    signature = inspect.signature(lambda number, seconds: None)
    make = KeyMaker(None, signature, json.dumps).rest_of
    return least(lambda: make((7, 0.5), {}))


def task(site: Site) -> Instructions:
    """A task that does nothing, beyond the same without a lease."""
    plain = least(lambda: site.run(site.plain))
    return least(lambda: site.run(site.ours), before=site.drain).beyond(plain)


def task_after_a_pause(site: Site) -> Instructions:
    """The same where the body and the time between tasks are longer: idle sockets are polled."""
    checked_after, connections._CHECKED_AFTER = connections._CHECKED_AFTER, -1.0
    try:
        return task(site)
    finally:
        connections._CHECKED_AFTER = checked_after


def skip(site: Site) -> Instructions:
    """A skipped call, beyond a task without a lease that does nothing."""
    plain = least(lambda: site.run(site.plain))
    with site.taken():
        assert is_skipped(site.run(site.ours))
        return least(lambda: site.run(site.ours), before=site.drain).beyond(plain)


def publishing(site: Site) -> Instructions:
    """A call without a claim, beyond one of a plain task."""
    plain = least(lambda: site.publish(site.plain))
    return least(lambda: site.publish(site.ours)).beyond(plain)


def claim(site: Site) -> Instructions:
    """A call with a claim that it gets, beyond one of a plain task."""
    plain = least(lambda: site.publish(site.plain))
    return least(lambda: site.publish(site.unique, f"{next(_new):06}")).beyond(plain)


def renewals(site: Site) -> Instructions:
    """The renewal of 200 leases."""
    leases = [site.acquire(f"{number:03}") for number in range(_LEASES)]
    found = least(site.sweep, times=2, before=site.make_due)
    for lease in leases:
        site.release(lease)
    return found


WRITTEN_DOWN: Final[dict[str, tuple[Counting, int]]] = {
    "acquire and release, memory": (cycle, 2416),
    "acquire and release, redis": (cycle, 1757),
    "refused acquire, redis": (refusal, 1322),
    "refused acquire on one host, redis": (refusal_on_one_host, 1548),
    "key of a template, redis": (key, 107),
    "key of all arguments, redis": (key_of_all, 160),
    "task, redis": (task, 2743),
    "task after a pause, redis": (task_after_a_pause, 2877),
    "skipped task, redis": (skip, 6840),
    "publish without a claim, redis": (publishing, 220),
    "publish with a claim, redis": (claim, 1806),
    "renewal of 200 leases, redis": (renewals, 23773),
}


@pytest.fixture
def open_for(redis_url: str) -> Iterator[Callable[[str], Site]]:
    with open_site(redis_url) as redis, open_site("memory://") as memory:
        yield lambda path: memory if path.endswith("memory") else redis


def check(path: str, found: Instructions, known: int) -> None:
    assert found.total <= known * (1 + _TOLERANCE), (
        f"{path}: {found.total} instructions, {found.total / known - 1:+.1%} over the {known} "
        f"written down. Most are in:\n{found.most()}"
    )


@pytest.mark.parametrize("path", WRITTEN_DOWN)
def test_no_hot_path_takes_more_instructions_than_are_written_down(
    path: str, open_for: Callable[[str], Site]
) -> None:
    counting, written_down = WRITTEN_DOWN[path]
    found = counting(open_for(path))
    print(f"{path}: {found.total}, written down {written_down}")
    check(path, found, written_down)


def _looking(original: Callable[..., Any]) -> Callable[..., Any]:
    """As ``original``, after a look at the signature of a task."""

    def call(*args: Any, **kwargs: Any) -> Any:
        inspect.signature(_declared)
        return original(*args, **kwargs)

    return call


def _declared(account_id: int, name: str = "", *, full: bool = False) -> None: ...


@pytest.mark.parametrize(
    "path", ["key of a template, redis", "task, redis", "publish with a claim, redis"]
)
def test_a_look_at_the_signature_in_each_call_does_not_pass(
    path: str, open_for: Callable[[str], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    counting, _ = WRITTEN_DOWN[path]
    site = open_for(path)
    known = counting(site).total  # of this Python, whichever it is
    for make in (site.ours.singleton_key_maker, site.unique.singleton_key_maker):
        monkeypatch.setattr(make, "rest_of", _looking(make.rest_of))
    with pytest.raises(AssertionError, match=r"inspect\.py: _signature_from_function"):
        check(path, counting(site), known)


def test_the_same_work_has_the_same_count_each_time(open_for: Callable[[str], Site]) -> None:
    site = open_for("redis")
    assert task(site).total == task(site).total
