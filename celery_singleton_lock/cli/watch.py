"""``celery -A proj singleton watch``: the keys that are held or claimed, as they change.

Overview
    The store is read every second. A terminal shows the keys as a table, if rich is installed (the
    extra ``watch``). Anything else gets one line per change.

Guarantees
    A read begins as long after the last one as that took, or later. (The store itself paces a
    search through the keys of other programs.) An error of the store is shown until a read succeeds
    again.

Non-guarantees
    A key that is acquired and released between two reads is not seen. Log lines, signals and worker
    events show each.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Protocol

import click

from .. import inspection
from ..errors import StoreError, StoreUnavailable
from ..inspection import Filter, HeldKey, SortBy
from ..instrumentation.log import logfmt
from ..runtime import Runtime
from .commands import Command, Duration, choose_keys, progress, row_of, sort_keys
from .table import columns_at, rows_of, shown, state_of

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_NO_RICH: Final = (
    "rich is not installed, so this is one line per change; for a table: "
    "pip install 'celery-singleton-lock[watch]'"
)
# The columns that are never broken into several lines.
_NUMBERS: Final = {"TTL", "AGE", "WAITING", "CALLS"}


class _Display(Protocol):
    @property
    def draw_progress(self) -> Callable[[str], None] | None:
        """Shows what the first search, which may be long, has done; see `commands.progress`."""

    def show(self, found: Sequence[HeldKey], at: datetime) -> None:
        """Show the keys that were read."""

    def fail(self, error: StoreError, at: datetime) -> None:
        """Show that the keys could not be read."""


@click.command(cls=Command)
@choose_keys
@sort_keys
@click.option(
    "--interval",
    type=Duration(),
    default="1",
    show_default=True,
    metavar="TIME",
    help="How often the store is read.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per change.")
@click.argument("pattern", default="")
@click.pass_context
def watch(
    ctx: click.Context, /, sort: str, interval: float, as_json: bool, **conditions: Any
) -> None:
    """Show what is held or claimed, as it changes, until Ctrl-C.

    In a terminal a table, elsewhere one line per change: held, changed, gone (free, or no longer
    what the options choose), store-unreachable and store-back. PATTERN and the options are those of
    ls.
    """
    app, clock = ctx.obj.app, Runtime.of(ctx.obj.app).clock
    chosen, order = Filter(**conditions), SortBy(sort)
    with _until_interrupted() as goes_on, _view(Runtime.of(app).settings.safe_url, as_json) as view:
        while goes_on():
            begin, at = clock.now(), datetime.fromtimestamp(clock.wall(), UTC)
            try:
                with progress(app, view.draw_progress):
                    found = [*inspection.held_keys(app, chosen, sort=order, counts_calls=True)]
                view.show(found, at)
            except StoreError as exc:
                view.fail(exc, at)
            clock.sleep(max(interval, clock.now() - begin))


@contextmanager
def _until_interrupted() -> Iterator[Callable[[], bool]]:
    """Let SIGINT and SIGTERM end the block, which leaves the terminal as it was.

    The block also asks whether it goes on: a callback or destructor of a client library may swallow
    the exception.
    """
    received: list[int] = []

    def end(number: int, frame: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    with suppress(KeyboardInterrupt):
        yield lambda: not received


@contextmanager
def _view(store: str, as_json: bool) -> Iterator[_Display]:
    console = None if as_json or not sys.stdout.isatty() else _console()
    if console is None:
        yield _Lines(store, as_json)
    else:
        from rich.live import Live

        with Live(console=console, screen=True, auto_refresh=False) as live:
            yield _Table(store, live)


def _console() -> Console | None:
    """The terminal; None: rich is not installed, or the terminal can't move its cursor."""
    try:
        from rich.console import Console
    except ImportError:
        click.echo(_NO_RICH, err=True)
        return None
    console = Console()
    return None if console.is_dumb_terminal else console


def _failure(error: StoreError) -> str:
    return "store-unreachable" if isinstance(error, StoreUnavailable) else "store-refuses"


class _Lines:
    """One line per change; `key=value` pairs as in the log, or JSON."""

    draw_progress = None

    def __init__(self, store: str, as_json: bool) -> None:
        self._store, self._as_json = store, as_json
        self._known: dict[str, tuple[str, str, int | None, int | None]] = {}
        self._error = ""

    def show(self, found: Sequence[HeldKey], at: datetime) -> None:
        if self._error:
            self._error = ""
            self._print(at, "store-back", {"store": self._store})
        known = {held.key: (held.token, state_of(held), held.waiting, held.calls) for held in found}
        for key in self._known.keys() - known.keys():
            self._print(at, "gone", {"key": key})
        for held in found:
            before = self._known.get(held.key)
            if before != known[held.key]:
                self._print(at, "changed" if before else "held", self._fields(held))
        self._known = known

    def fail(self, error: StoreError, at: datetime) -> None:
        if self._error != str(error):
            self._error = str(error)
            self._print(at, _failure(error), {"store": self._store, "error": self._error})

    def _fields(self, held: HeldKey) -> dict[str, Any]:
        row = row_of(held)
        if self._as_json:
            return row
        names = ("key", "state", "task", "task_id", "worker", "pid", "since", "fence", "waiting")
        row["state"] = state_of(held)
        fields = {name: row[name] for name in names if row[name] not in (None, "")}
        return {**fields, "calls": held.calls} if held.calls else fields

    def _print(self, at: datetime, change: str, fields: dict[str, Any]) -> None:
        moment = at.isoformat(timespec="seconds")
        if self._as_json:
            click.echo(json.dumps({"at": moment, "change": change, **fields}))
        else:
            click.echo(f"{moment} {change} {logfmt(fields)}")


class _Table:
    """A table that fills the terminal at most; the first line counts all keys."""

    def __init__(self, store: str, live: Any) -> None:
        self._store, self._live = store, live
        self._rows: RenderableType = ""
        self._summary, self._read_at = "", ""

    def show(self, found: Sequence[HeldKey], at: datetime) -> None:
        claims, free = sum(one.is_claim for one in found), sum(one.is_free for one in found)
        self._summary = f"{len(found) - claims - free} held, {claims} claimed"
        if calls := sum(held.calls or 0 for held in found):
            self._summary += f", {calls} calls wait"
        # The title, a problem, and the head of the table with its rule need a line each.
        room = max(1, self._live.console.height - 4)
        if len(found) > room:
            self._summary += "; as many as fit are shown"
        self._rows, self._read_at = _table(found[:room], at), at.isoformat(timespec="seconds")
        self._draw("")

    def draw_progress(self, text: str) -> None:
        """Show ``text`` in place of the first table; later ones stay until the next is read."""
        if not self._read_at:
            self._summary = text
            self._draw("")

    def fail(self, error: StoreError, at: datetime) -> None:
        read = f"; below is what was read at {self._read_at}" if self._read_at else ""
        self._draw(f"{_failure(error)} at {at.isoformat(timespec='seconds')}: {error}{read}")

    def _draw(self, problem: str) -> None:
        from rich.console import Group
        from rich.text import Text

        title = Text(f"{self._store}  {self._read_at}  {self._summary}", style="bold")
        lines = [title, *([Text(shown(problem), style="bold red")] if problem else [])]
        self._live.update(Group(*lines, self._rows), refresh=True)


def _table(found: Sequence[HeldKey], at: datetime) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    heads, *rows = rows_of(found, columns_at(at))
    for head in heads:
        table.add_column(head, overflow="fold", no_wrap=head in _NUMBERS)
    for row in rows:
        # Text: a cell that is a str could have rich's markup, and a publisher chooses ids.
        table.add_row(*map(Text, row))
    return table
