"""What a check of the doctor receives, the context, and what it yields, findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, partial
from typing import Any, Final, TypeVar

from celery import Celery

from celery_singleton_lock.core.heartbeat import timeout_for
from celery_singleton_lock.runtime import Runtime, singleton_tasks
from celery_singleton_lock.stores import is_sentinel_url

T = TypeVar("T")

# A lease waits up to ttl/6 for a reply. A reply that usually takes more than a tenth of that
# leaves little for a bad day.
_COMFORTABLE_SHARE: Final = 0.1


class Severity(StrEnum):
    OK = "ok"
    NOTE = "note"  # a choice, or unknown; nothing has to be done
    WARNING = "warning"  # works today, and will cause trouble
    ERROR = "error"  # locks don't work, or two bodies can run at once


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check, with its values.

    Attributes:
        severity: How bad it is.
        subject: What was checked, in a word or two.
        text: What was found.
        remedy: What to do; empty where nothing has to be done.
    """

    severity: Severity
    subject: str
    text: str
    remedy: str = ""


#: What a check yields.
Findings = Iterator[Finding]

ok = partial(Finding, Severity.OK)
note = partial(Finding, Severity.NOTE)
warning = partial(Finding, Severity.WARNING)
error = partial(Finding, Severity.ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What one visit to a server of the store reported.

    Attributes:
        name: Address of the server; empty where the store is this server alone.
        link: The connection of the visit, for further questions.
        error: Why there is no answer; empty if there is one.
        is_denied: Whether there is an error because it refuses this client.
        grants: Whether leases are taken on this server: not on a replica.
        product: Redis, Valkey, etcd or ZooKeeper; empty where the server may not say.
        version: Of the product.
        info: Fields of the server's report; empty where the report is denied.
        clock_ahead: Seconds that its clock is ahead of this host's; None where it is unknown.
        reply_time: Seconds that a reply takes; the clock is known to half of that.
    """

    name: str
    link: Any = None
    error: str = ""
    is_denied: bool = False
    grants: bool = True
    product: str = ""
    version: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)
    clock_ahead: float | None = None
    reply_time: float = 0.0


class Context:
    """One app, its store and the servers of that store.

    Args:
        app: The app to check.
        visits: For each kind of store, the function that visits its servers.

    Raises:
        SettingsError: The app's settings are wrong, or its store can't be opened.

    Attributes:
        kind: The name of the store in its capabilities, or ``sentinel``.
        stack: Closes the connections of the visits.
    """

    def __init__(
        self, app: Celery, visits: Mapping[str, Callable[[Context], list[Server]]]
    ) -> None:
        self.app = app
        self.runtime = Runtime.of(app)
        self.settings = self.runtime.settings
        # Each check is applied to stores that have the operations it uses.
        self.store: Any = self.runtime.store
        self.clock = self.runtime.clock
        self.kind = self.store.capabilities.name
        if is_sentinel_url(self.settings.url):
            self.kind = "sentinel"
        self.stack = ExitStack()
        self._visits = visits
        self._results: dict[Any, Any] = {}

    @cached_property
    def servers(self) -> list[Server]:
        """The servers of the store, each visited once."""
        visit = self._visits.get(self.kind)
        return visit(self) if visit else []

    @property
    def granting(self) -> list[Server]:
        """The servers that answer and take leases."""
        return [server for server in self.servers if server.grants and not server.error]

    def once(self, ask: Callable[[Context], T]) -> T:
        """The result of ``ask``, which is called once, however many checks use its result."""
        if ask not in self._results:
            self._results[ask] = ask(self)
        result: T = self._results[ask]
        return result

    @cached_property
    def ttls_by_task(self) -> dict[str, float]:
        """Seconds, for each task whose policy agrees with the settings."""
        ttls: dict[str, float] = {}
        for task in singleton_tasks(self.app):
            try:
                ttls[task.name] = task.singleton_policy().ttl
            except (TypeError, ValueError):
                pass  # a worker refuses this task; check_tasks reports it
        return ttls

    @cached_property
    def ttls(self) -> list[float]:
        """Seconds, of all tasks and of the leader of Beat; the shortest first."""
        return sorted({self.settings.beat_ttl, *self.ttls_by_task.values()})


def is_slow(reply_time: float, ttl: float) -> bool:
    """Whether replies that take ``reply_time`` seconds are slow for a lease of ``ttl`` seconds."""
    return reply_time > timeout_for(ttl) * _COMFORTABLE_SHARE
