"""The commands ``celery -A app singleton ls | show | explain | release | doctor``.

They print what `inspection` and `doctor` return.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final

import click
from celery.bin.base import CeleryCommand

from .. import inspection
from ..doctor import Finding, Severity, diagnose
from ..errors import SingletonLockError
from ..inspection import AmbiguousKey, Fate, Filter, HeldKey, SortBy
from ..runtime import Runtime
from .table import Columns, holder_of, rows_of, shown, since_of

# The risks of a release by an operator.
_RISKS: Final = {
    True: "Its message stays where it is, and an equal call can be published beside it.",
    False: "If its body still runs, another may start beside it until the holder's next heartbeat "
    "(a third of its ttl).",
}

# json.dumps(indent=2) runs in Python. This encoder runs in C, and its separators indent a flat
# object as a part of an array.
_encode: Final = json.JSONEncoder(separators=(",\n    ", ": ")).encode
# Records per piece of text.
_PIECE: Final = 200
# Seconds after which progress is shown, and between two updates.
_PROGRESS_AFTER: Final = 1.0
_PROGRESS_EVERY: Final = 0.2
# Erases the terminal's line.
_ERASE: Final = "\r\x1b[K"
_COLUMNS: Final[Columns] = {
    "KEY": lambda held: held.key,
    "STATE": lambda held: held.state,
    "TTL": lambda held: f"{held.ttl:.1f}s",
    "HOLDER": holder_of,
    "WORKER": lambda held: held.worker,
    "PID": lambda held: str(held.pid),
    "SINCE": since_of,
}
_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


if TYPE_CHECKING:
    _ParamType = click.ParamType[float]
else:
    _ParamType = click.ParamType  # not generic in click 8.1


class Command(CeleryCommand):
    """Shows the library's errors as one line: exit status 1, or 2 if the usage is wrong."""

    def invoke(self, ctx: click.Context) -> Any:
        # A command sets up no logging, and Python then writes warnings to stderr: kazoo's about
        # each try to connect again hide what the command says about the store.
        logging.getLogger("kazoo").addHandler(logging.NullHandler())
        try:
            ctx.obj.app.finalize()
            return super().invoke(ctx)
        except AmbiguousKey as exc:
            raise click.UsageError(str(exc)) from exc
        except SingletonLockError as exc:
            raise click.ClickException(str(exc)) from exc


@contextmanager
def progress(app: Any) -> Iterator[None]:
    """Show what a long search in the block has done so far, if stderr is a terminal.

    The block must write nothing to stdout, which may be the same terminal.
    """
    if not sys.stderr.isatty():
        yield
        return
    runtime = Runtime.of(app)
    clock, store = runtime.clock, runtime.store
    next_at = clock.now() + _PROGRESS_AFTER
    is_shown = False

    def show(text: str) -> None:
        nonlocal next_at, is_shown
        if clock.now() >= next_at:
            next_at, is_shown = clock.now() + _PROGRESS_EVERY, True
            click.echo(f"{_ERASE}{text}", nl=False, err=True)

    store.progress = show
    try:
        yield
    finally:
        store.progress = None
        if is_shown:
            click.echo(_ERASE, nl=False, err=True)


class Duration(_ParamType):
    """A number of seconds, or of the unit behind it: 90, 90s, 15m, 2h, 1d."""

    name = "duration"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", str(value))
        if match is None:
            self.fail(f"{value!r} is no duration: write 90, 90s, 15m, 2h or 1d", param, ctx)
        return float(match[1]) * _UNITS[match[2]]


sort_keys: Final = click.option(
    "--sort",
    type=click.Choice([str(one) for one in SortBy]),
    default=str(SortBy.KEY),
    show_default=True,
    help="age: the oldest first. ttl: the next to expire first. waiting: the longest queue first.",
)


def choose_keys(command: Any) -> Any:
    """The options that choose keys."""
    for option in (
        click.option("--waiting", is_flag=True, help="Only keys for which clients wait."),
        click.option(
            "--older-than",
            type=Duration(),
            default=0.0,
            metavar="TIME",
            help="Only keys held for so long: 90, 90s, 15m, 2h, 1d.",
        ),
        click.option("--scope", default="", help="Only keys in this scope."),
        click.option("--task", default="", help="Only keys of the task of this name."),
    ):
        command = option(command)
    return command


@click.command(cls=Command)
@choose_keys
@sort_keys
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
@click.argument("pattern", default="")
@click.pass_context
def ls(ctx: click.Context, /, sort: str, as_json: bool, **conditions: Any) -> None:
    """List what is held or claimed; PATTERN is part of a key, or a glob with * and ?.

    For a claim, WORKER, PID and SINCE are those of its message's publication.
    """
    app, chosen = ctx.obj.app, Filter(**conditions)
    found = inspection.held_keys(app, chosen, sort=SortBy(sort), report=report_foreign)
    with progress(app):
        first = next(found, None)  # after the search for all names
        text = "" if first is None or as_json else table(chain([first], found))
    if as_json:
        for piece in json_array(found if first is None else chain([first], found)):
            click.echo(piece, nl=False)
        click.echo()
    else:
        click.echo(text or ("nothing is held" if chosen == Filter() else "nothing matches"))


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, or null.")
@click.argument("key", metavar="KEY|TASK_ID")
@click.pass_context
def show(ctx: click.Context, key: str, as_json: bool) -> None:
    """Show the holder of KEY: as `ls` prints it, or only the part after its scope.

    KEY may be percent-encoded, as `ls` prints it, or plain text. With the id of a task, the key is
    the one that the task holds.

    A claim is named as `ls` prints it, or without csl:{...}: alone.
    """
    app = ctx.obj.app
    with progress(app):
        held = inspection.find_key(app, key) or inspection.find_task(app, _task_id(app, key))
    if as_json:
        click.echo(json.dumps(row_of(held) if held else None, indent=2))
    elif held:
        click.echo(describe(held))
    if held is None:
        click.echo(_free_or_misspelled(app, key), err=as_json)
    ctx.exit(0 if held else 1)


@click.command(cls=Command)
@click.option(
    "--timeout",
    type=Duration(),
    default="1",
    show_default=True,
    metavar="TIME",
    help="How long to wait for the workers' replies, unless the result is final.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.argument("task_id")
@click.pass_context
def explain(ctx: click.Context, /, task_id: str, timeout: float, as_json: bool) -> None:
    """Say why the task of this id ran, did not run, or has not run yet.

    From the result backend, the lease, the claim, the markers and the workers. Exit status 1 if
    none of them knows the id.
    """
    task_id = _task_id(ctx.obj.app, task_id)
    with progress(ctx.obj.app):
        found = inspection.explain(ctx.obj.app, task_id, timeout=timeout)
    if as_json:
        click.echo(json.dumps(asdict(found), indent=2, default=str))
    else:
        click.echo(shown(f"{task_id}: {found.fate}"))
        click.echo("\n".join(f"  {shown(sentence)}" for sentence in found.sentences))
    ctx.exit(1 if found.fate is Fate.UNKNOWN else 0)


@click.command(cls=Command)
@choose_keys
@click.option("--pattern", default="", help="Release all keys that match, as `ls` lists them.")
@click.option("--dry-run", is_flag=True, help="Only list what would be released.")
@click.option("--reason", default="", help="Why; the holder reports it with your login and host.")
@click.option("--token", help="Free it only if this token (see `show`) still has it.")
@click.option("--yes", is_flag=True, help="Do not ask. The token is compared nevertheless.")
@click.option("--force", is_flag=True, help="Free KEY for any token, without asking.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object; of several keys, an array.")
@click.argument("key", required=False)
@click.pass_context
def release(
    ctx: click.Context,
    /,
    key: str | None,
    token: str | None,
    reason: str,
    dry_run: bool,
    yes: bool,
    force: bool,
    as_json: bool,
    **conditions: Any,
) -> None:
    """Free KEY. Its holder notices at its next heartbeat, and is interrupted. The fence rises.

    Without --force the token is compared: if another one has the key meanwhile, nothing is freed.
    The message of a claim stays where it is, and runs.

    Instead of KEY, --pattern, --scope, --task, --older-than and --waiting choose several keys. Each
    is freed only if the token that was listed still has it.
    """
    chosen, app = Filter(**conditions), ctx.obj.app
    if (key is None) == (chosen == Filter()):
        raise click.UsageError("give KEY, or options that choose keys, such as --scope")
    if key is None:
        if token or force:
            raise click.UsageError("--token and --force are for one KEY; --yes does not ask")
        _release_all(ctx, chosen, reason, dry_run=dry_run, yes=yes, as_json=as_json)
    if token and force:
        raise click.UsageError("--token compares and --force does not: give one of them")
    with progress(app):
        held = inspection.find_key(app, key or "")
    name, freed = held.key if held else str(key), False
    if held and not dry_run:
        if not (force or yes or token):
            _confirm(describe(held), f"{_RISKS[held.is_claim]} Release?", as_json)
        expected = None if force else token or held.token
        freed = inspection.release(app, name, expected, reason=reason)
    if as_json:
        click.echo(json.dumps({"key": name, "released": freed}))
    elif held and dry_run:
        click.echo(f"{describe(held)}\nnot released: --dry-run")
    elif freed:
        click.echo(f"released {name}")
    elif held:
        click.echo(f"not released: {name} is held by another token now", err=True)
    if held is None:
        click.echo(_free_or_misspelled(app, name), err=True)
    ctx.exit(0 if freed or (held and dry_run) else 1)


def _release_all(
    ctx: click.Context, chosen: Filter, reason: str, *, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Release the chosen keys, each by the token that was listed, and exit."""
    app = ctx.obj.app
    with progress(app):
        found = [*inspection.held_keys(app, chosen, report=report_foreign)]
    if found and not (yes or dry_run):
        lines = f"{table(found)}\n{_RISKS[False]}"
        _confirm(lines, f"Release these {len(found)} keys?", as_json)
    freed = {
        held.key: not dry_run and inspection.release(app, held.key, held.token, reason=reason)
        for held in found
    }
    if as_json:
        rows = [{"key": key, "released": released} for key, released in freed.items()]
        click.echo(json.dumps(rows, indent=2))
    elif not found:
        click.echo("nothing matches", err=True)
    elif dry_run:
        click.echo(f"{table(found)}\nnothing is released: --dry-run")
    for key, released in freed.items() if not (as_json or dry_run) else ():
        changed = f"not released: {key} is held by another token now, or free"
        click.echo(f"released {key}" if released else changed, err=not released)
    ctx.exit(0 if found and (dry_run or all(freed.values())) else 1)


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Look for what keeps locks from working, or will. Exit status 1 if something does."""
    app: Any = ctx.obj.app
    app.loader.import_default_modules()
    findings = list(diagnose(app))
    if as_json:
        click.echo(json.dumps([_row(finding) for finding in findings], indent=2))
    else:
        click.echo("\n".join(map(_line, findings)))
    ctx.exit(1 if any(finding.severity is Severity.ERROR for finding in findings) else 0)


COMMANDS: dict[str, click.Command] = {
    command.name or "": command for command in (doctor, explain, ls, release, show)
}


def _confirm(what: str, question: str, as_json: bool) -> None:
    if as_json:
        raise click.UsageError("with --json give --yes, --token TOKEN or --force")
    click.echo(what)
    try:
        confirmed = click.confirm(question)
    except click.Abort:
        # Standard input has ended, because there is no terminal.
        message = "no answer, so nothing is released; --yes releases without asking"
        raise click.ClickException(message) from None
    if not confirmed:
        raise click.Abort


def report_foreign(key: str, reason: str) -> None:
    progress_ends = _ERASE if sys.stderr.isatty() else ""
    click.echo(f"{progress_ends}not ours: {key!r} {reason}; see `doctor`", err=True)


def _row(finding: Finding) -> dict[str, str]:
    row = asdict(finding)
    # Programs read this field by its original name.
    row["cure"] = row.pop("remedy")
    return row


def _line(finding: Finding) -> str:
    is_loud = finding.severity in (Severity.WARNING, Severity.ERROR)
    mark = finding.severity.upper() if is_loud else finding.severity
    line = f"{mark:8} {finding.subject}: {finding.text}"
    return f"{line}\n{'':8} -> {finding.remedy}" if finding.remedy else line


def _free_or_misspelled(app: Any, key: str) -> str:
    """The message about a ``key`` that is not held: free, or unknown to this app."""
    if inspection.can_be_a_key(app, key):
        return f"{key} is free"
    forms = "".join(f"\n  {form}" for form in inspection.forms_of(app))
    known = forms or " none: it has no singleton task"
    return f"nothing is held under {key}: it is free, or misspelled. The keys of this app:{known}"


def row_of(held: HeldKey) -> dict[str, Any]:
    """The key as JSON data; ``ttl`` in seconds, ``since`` in ISO 8601.

    For a claim, ``worker``, ``pid`` and ``since`` are those of its message's publication.
    """
    return {
        "key": held.key,
        "state": held.state,
        "phase": held.phase,
        "task": held.task,
        "task_id": held.task_id,
        "worker": held.worker,
        "pid": held.pid,
        "since": since_of(held),
        "ttl": round(held.ttl, 3),
        "fence": held.fence,
        "token": held.token,
        "waiting": held.waiting,
    }


def json_array(found: Iterable[HeldKey]) -> Iterator[str]:
    """The keys as one JSON array, in pieces of text: memory may not hold all of them."""
    rows = (f"  {{\n    {_encode(row_of(held))[1:-1]}\n  }}" for held in found)
    before, after = "[\n", "[]"
    while some := [*islice(rows, _PIECE)]:
        yield before + ",\n".join(some)
        before, after = ",\n", "\n]"
    yield after


def table(found: Iterable[HeldKey]) -> str:
    """The keys as a table: one line per key, columns aligned."""
    rows = rows_of(found, _COLUMNS)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def describe(held: HeldKey) -> str:
    """The key as text, one field per line."""
    row = row_of(held)
    del row["phase"]  # the state contains it
    if held.waiting is None:
        del row["waiting"]
    if held.is_claim:
        del row["fence"]
        # `worker` is the process that published the message, not the one that runs it.
        row = {"published by" if name == "worker" else name: value for name, value in row.items()}
    width = max(len(name) for name in row)
    return "\n".join(f"{name:>{width}}: {shown(str(value))}" for name, value in row.items())


def _task_id(app: Any, text: str) -> str:
    """The id in ``text``, which may be a call as log lines print it: ``proj.sync[id]``."""
    name, _, rest = text.partition("[")
    return rest[:-1] if rest.endswith("]") and name in app.tasks else text
