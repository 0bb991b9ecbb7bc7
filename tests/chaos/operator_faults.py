"""What operators do: they pause a key or a scope, and resume it."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from celery import Celery

from celery_singleton_lock import pause, resume
from celery_singleton_lock.errors import StoreError
from tests.chaos.schedule import Fault
from tests.chaos.site import Site, now

#: The scopes that are paused, and keys of each that a campaign has.
SCOPES = {
    "chaos": tuple(f"k{number}" for number in range(8)),
    "chaos-limit": ("limited",),
    "chaos-queue": tuple(f"queue{number}" for number in range(3)),
    "chaos-several": ("queued_several",),
    "chaos-rate": tuple(f"rate{number}" for number in range(3)),
}
#: Seconds between two tries while the store is away.
_AGAIN = 0.2


def strike(site: Site, fault: Fault) -> str:
    """Pause a key or a scope for a while; returns what was paused.

    Half of the pauses end by themselves. The history has the time in which nothing may begin: from
    the return of `pause` to the call of `resume`, or to the end of the duration.
    """
    draw = int(fault.chance * 1009)
    scope, keys = list(SCOPES.items())[draw % len(SCOPES)]
    key = keys[draw // 7 % len(keys)] if fault.name == "pause-key" else None
    has_end = bool(draw % 2)
    begin = now()
    duration = fault.seconds if has_end else None
    _until_it_answers(site, partial(pause, key, scope=scope, duration=duration))
    at = now()
    until = begin + fault.seconds if has_end else at + fault.seconds
    threading.Event().wait(max(0.0, until - now()))
    until = min(until, now())
    site.history.write("pause", key=key or "", at=at, until=until, scope=scope)
    asked = now()
    _until_it_answers(site, partial(resume, key, scope=scope))
    site.history.write("resumed", key=key or "", scope=scope, since=asked)
    return f"{scope}:{key or '*'}"


def _until_it_answers(site: Site, ask: Any) -> None:
    while True:
        # Another server may be the store by now.
        with Celery("operator", broker="memory://", set_as_current=False) as app:
            app.conf.singleton_lock_url = site.lock_url
            try:
                ask(app=app)
                return
            except StoreError:
                threading.Event().wait(_AGAIN)
