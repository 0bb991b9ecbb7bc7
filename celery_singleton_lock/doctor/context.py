"""A check of the doctor, the context that it receives, and the findings that it yields."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, partial
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, cast

from celery import Celery

from ..errors import StoreError, StoreUnavailable
from ..inspection.keys import policies_by_task
from ..on_conflict import Queue
from ..policy import Policy
from ..runtime import Runtime
from ..stores import is_sentinel_url

#: The scope of the doctor's own keys.
SCOPE: Final = "singleton-doctor"

T = TypeVar("T")


class Severity(StrEnum):
    OK = "ok"
    NOTE = "note"  # a choice, or unknown; no action is needed
    WARNING = "warning"  # works now, but will cause trouble
    ERROR = "error"  # locks don't work, or two bodies can run at once


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check, with its values.

    Attributes:
        severity: The severity.
        subject: The subject of the check, in a word or two.
        text: The result.
        remedy: The action to take; empty if none is needed.
    """

    severity: Severity
    subject: str
    text: str
    remedy: str = ""


#: The findings that a check yields.
Findings = Iterator[Finding]

ok = partial(Finding, Severity.OK)
note = partial(Finding, Severity.NOTE)
warning = partial(Finding, Severity.WARNING)
error = partial(Finding, Severity.ERROR)


@dataclass(slots=True, kw_only=True)
class Server:
    """The result of one visit to a server of the store.

    Attributes:
        name: Address of the server; empty if the store has only this server.
        link: The connection of the visit, for further requests.
        error: The reason for a missing answer; None if the server answered.
        grants: Whether leases are granted on this server, which they are not on a replica.
        product: Redis, Valkey, etcd or ZooKeeper; empty if unknown.
        version: The version of the product.
        info: Fields of the server's report; empty if the report is denied.
        clock_ahead: Seconds that its clock is ahead of this host's clock; None: unknown.
        reply_time: Seconds that a reply takes. The error of ``clock_ahead`` is up to half of it.
    """

    name: str
    link: Any = None
    error: Exception | None = None
    grants: bool = True
    product: str = ""
    version: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    clock_ahead: float | None = None
    reply_time: float = 0.0

    @property
    def refuses(self) -> bool:
        """Whether the server answered, but not to this login."""
        return isinstance(self.error, StoreError) and not isinstance(self.error, StoreUnavailable)

    @contextmanager
    def visited(self) -> Iterator[None]:
        """Note an exception as the reason for a missing answer."""
        try:
            yield
        except (StoreError, OSError) as exc:
            self.error = exc if str(exc) else OSError(repr(exc))


#: Visits the servers of a store.
Visit: TypeAlias = "Callable[[Context], Iterator[Server]]"


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

    def __init__(self, app: Celery, visits: Mapping[str, Visit]) -> None:
        self.app = app
        self.runtime = Runtime.of(app)
        self.settings = self.runtime.settings
        # Any: each check is applied only to stores that have the operations it uses.
        self.store: Any = self.runtime.store
        self.clock = self.runtime.clock
        is_sentinel = is_sentinel_url(self.settings.url)
        self.kind = "sentinel" if is_sentinel else self.store.capabilities.name
        self.stack = ExitStack()
        self._visits = visits
        self._results: dict[Any, Any] = {}

    @cached_property
    def servers(self) -> list[Server]:
        """The servers of the store, each visited once."""
        return list(self._visits[self.kind](self))

    @property
    def granting(self) -> list[Server]:
        """The servers that answer and grant leases."""
        return [server for server in self.servers if server.grants and not server.error]

    def once(self, ask: Callable[[Context], T]) -> T:
        """The result of ``ask``, which is called once for all checks."""
        if ask not in self._results:
            self._results[ask] = ask(self)
        return cast(T, self._results[ask])

    @cached_property
    def policies(self) -> dict[str, Policy]:
        """The policy of each task, by name; check_policies reports those that have none."""
        return policies_by_task(self.app)

    @property
    def off_tasks(self) -> list[str]:
        """The names of the tasks that run without a lock, because they are switched off."""
        return sorted(name for name, policy in self.policies.items() if not policy.enabled)

    @property
    def queue_tasks(self) -> str:
        """The names of the tasks whose calls may wait in the store; empty: none."""
        is_queue = (
            name
            for name, policy in self.policies.items()
            if policy.enabled and isinstance(policy.on_conflict, Queue)
        )
        return ", ".join(sorted(is_queue))

    @property
    def ttls_by_task(self) -> dict[str, float]:
        """The ttl of each task, in seconds, by name."""
        return {name: policy.ttl for name, policy in self.policies.items()}

    @cached_property
    def ttls(self) -> list[float]:
        """The ttls, in seconds, of all tasks and of the beat leader; the shortest first."""
        return sorted({self.settings.beat_ttl, *self.ttls_by_task.values()})


class Check(NamedTuple):
    """A row of the table of checks.

    Attributes:
        findings: The function that checks. It takes the context.
        stores: The kinds of store that it applies to; None: every store.
        per_server: Whether the function also takes a server, and is called for each that grants
            leases.
        needs_locks: Whether the check is skipped after another check has found an error.
        denied: The finding if the login lacks a right that the check needs.
    """

    findings: Callable[..., Findings]
    stores: Collection[str] | None
    per_server: bool = False
    needs_locks: bool = False
    denied: Finding | None = None

    def run(self, context: Context) -> Findings:
        """Yield the findings; an error of the store is one of them."""
        try:
            yield from self._of_each(context) if self.per_server else self.findings(context)
        except StoreError as exc:
            if self.denied and not isinstance(exc, StoreUnavailable):
                yield self.denied
            else:
                yield warning("store", str(exc), "run doctor again")

    def _of_each(self, context: Context) -> Findings:
        """The findings about each server; equal findings become one."""
        names: dict[Finding, list[str]] = {}
        for server in context.granting:
            for finding in self.findings(context, server):
                names.setdefault(finding, []).append(server.name)
        for finding, where in names.items():
            prefix = f"{', '.join(where)}: " if any(where) else ""
            yield replace(finding, text=f"{prefix}{finding.text}")
