"""The commands ``celery -A app singleton ls | show | release | doctor``."""

from __future__ import annotations

import fnmatch
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import chain, islice
from typing import Any, Final

import click
from celery.bin.base import CeleryCommand

from ..core.key import Keyspace, PerTask, stored_names
from ..core.lease import Kind, Record
from ..core.store import HANDOFF_TASK
from ..doctor import Finding, Severity, diagnose
from ..errors import SingletonLockError
from ..runtime import Runtime, singleton_tasks

# The keys of the leases with which Beat processes elect a leader.
_KEYS_OF_BEAT: Final = "celery.beat:{name}"
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

_KINDS: Final = {
    Kind.LEASE: "running",
    Kind.RESERVED: "reserved for a retry",
    Kind.COOLING: "cooling down",
    Kind.DYING: "being killed",
}


class _Command(CeleryCommand):
    """Shows the library's errors as one line, with exit status 1 and without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            ctx.obj.app.finalize()
            return super().invoke(ctx)
        except SingletonLockError as exc:
            raise click.ClickException(str(exc)) from exc


@click.command(cls=_Command)
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
@click.argument("pattern", default="")
@click.pass_context
def ls(ctx: click.Context, pattern: str, as_json: bool) -> None:
    """List what is held or claimed; PATTERN is part of a key, or a glob with * and ?.

    For a claim, WORKER, PID and SINCE are those of its message's publication.
    """
    runtime, matches = Runtime.of(ctx.obj.app), _matcher(pattern)
    records = runtime.store.survey(runtime.keyspace.match_all(), _report_foreign)
    matching = (record for record in records if matches(record.key))
    if as_json:
        for piece in json_array(matching):
            click.echo(piece, nl=False)
        click.echo()
    elif (first := next(matching, None)) is not None:
        click.echo(table(chain([first], matching)))
    else:
        click.echo("nothing is held")


@click.command(cls=_Command)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, or null.")
@click.argument("key")
@click.pass_context
def show(ctx: click.Context, key: str, as_json: bool) -> None:
    """Show the holder of KEY: as `ls` prints it, or only the part after its scope.

    KEY may be percent-encoded, as `ls` prints it, or plain text.

    A claim is named as `ls` prints it, or without csl:{...}: alone.
    """
    runtime = Runtime.of(ctx.obj.app)
    record = _find(runtime, key)
    if as_json:
        click.echo(json.dumps(row_of(record) if record else None, indent=2))
    elif record:
        click.echo(describe(record))
    if record is None:
        click.echo(_free_or_misspelled(runtime, key), err=as_json)
    ctx.exit(0 if record else 1)


@click.command(cls=_Command)
@click.option("--token", help="Free it only if this token (see `show`) still has it.")
@click.option("--yes", is_flag=True, help="Do not ask. The token is compared nevertheless.")
@click.option("--force", is_flag=True, help="Free it for any token, without asking.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.argument("key")
@click.pass_context
def release(
    ctx: click.Context, key: str, token: str | None, yes: bool, force: bool, as_json: bool
) -> None:
    """Free KEY. Its holder notices at its next heartbeat, and is interrupted. The fence rises.

    Without --force the token is compared: if another one has the key meanwhile, nothing is freed.
    The message of a claim stays where it is, and runs.
    """
    runtime = Runtime.of(ctx.obj.app)
    record = _find(runtime, key)
    name, freed = record.key if record else key, False
    if record:
        if not (force or yes or token):
            _confirm(record, as_json)
        freed = runtime.store.free(name, None if force else token or record.token)
    if as_json:
        click.echo(json.dumps({"key": name, "released": freed}))
    elif freed:
        click.echo(f"released {name}")
    elif record:
        click.echo(f"not released: {name} is held by another token now", err=True)
    if record is None:
        click.echo(_free_or_misspelled(runtime, key), err=True)
    ctx.exit(0 if freed else 1)


@click.command(cls=_Command)
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


COMMANDS: dict[str, click.Command] = {"doctor": doctor, "ls": ls, "release": release, "show": show}


def _confirm(record: Record, as_json: bool) -> None:
    if as_json:
        raise click.UsageError("with --json give --yes, --token TOKEN or --force")
    click.echo(describe(record))
    try:
        confirmed = click.confirm(f"{_RISKS[record.kind is Kind.CLAIM]} Release?")
    except click.Abort:
        # Standard input has ended, because there is no terminal.
        message = "no answer, so nothing is released; --yes releases without asking"
        raise click.ClickException(message) from None
    if not confirmed:
        raise click.Abort


def _report_foreign(key: str, reason: str) -> None:
    click.echo(f"not ours: {key!r} {reason}; see `doctor`", err=True)


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


def _find(runtime: Runtime, key: str) -> Record | None:
    """The record that ``key`` names: in full, without ``csl:{...}:``, or also without its scope.

    A name may be percent-encoded, as it is stored, or the plain text that `hold()` takes. The slot
    may be omitted, as ``task.lock_key()`` omits it for a task with ``limit`` above 1. A claim must
    be named with everything after ``csl:{...}:``, because its name ends like that of its lease.
    """
    if key.startswith("csl:{") and (record := runtime.store.inspect(key)) is not None:
        return record
    names, found = stored_names(key), defaultdict[int, list[Record]](list)
    for record in runtime.store.scan(runtime.keyspace.match_all()):
        matching = [n for n, spelling in enumerate(_spellings(record)) if spelling in names]
        if matching:
            found[matching[0]].append(record)
    # A complete name of one record takes precedence over a shortened name of another.
    records = found[min(found)] if found else []
    if len(records) > 1:
        lines = "\n".join(f"  {record.key}" for record in records)
        raise click.UsageError(f"{key!r} names several keys; give one of them:\n{lines}")
    return records[0] if records else None


def _spellings(record: Record) -> list[str]:
    """The names of a record, the most complete first."""
    name = _without_prefix(record.key)
    if record.kind is Kind.CLAIM:
        return [name]
    rest = name.partition(":")[2]
    return [name, rest, *map(_without_slot, (record.key, name, rest))]


def _without_prefix(key: str) -> str:
    return key.partition("}:")[2]


def _without_slot(key: str) -> str:
    base, _, slot = key.rpartition("#")
    return base if slot.isdecimal() else key


def _free_or_misspelled(runtime: Runtime, key: str) -> str:
    """The message about a ``key`` that is not held.

    The store has no record of a free key, so only its spelling shows whether a task can have it.
    """
    app: Any = runtime.app
    app.loader.import_default_modules()
    forms = {_form_of(task) for task in singleton_tasks(app)}
    spellings, name = {*forms, _KEYS_OF_BEAT}, key
    if key.startswith(runtime.keyspace.match_all().partition("*")[0]):
        name = _without_prefix(key)
    else:
        # If the rest of a form is only a placeholder, every key without a scope would match it.
        rests = {form.partition(":")[2] for form in forms}
        spellings |= {rest for rest in rests if not rest.startswith("{")}
    if name.startswith("claim|"):
        name = name.split("|", 2)[-1]
    if any(_pattern_of(spelling).fullmatch(name) for spelling in spellings):
        return f"{key} is free"
    known = "".join(f"\n  {form}" for form in sorted(forms)) or " none: it has no singleton task"
    return f"nothing is held under {key}: it is free, or misspelled. The keys of this app:{known}"


def _form_of(task: Any) -> str:
    """The form of a task's keys after the shard, with the variable parts in braces."""
    options = task.singleton or {}
    spec = options.get("key")
    if isinstance(spec, PerTask):
        spec = "*"
    elif callable(spec):
        spec = f"{{what {getattr(spec, '__name__', 'its key function')} returns}}"
    elif not isinstance(spec, str):
        spec = f"{{digest of {', '.join(spec) if spec else 'all arguments'}}}"
    return f"{options.get('scope') or task.name}:{spec}"


def _pattern_of(form: str) -> re.Pattern[str]:
    pieces = re.split(r"\{[^}]*\}", form)
    return re.compile(f"(?s:{'.*'.join(map(re.escape, pieces))}(#\\d+)?)")


def _matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a key matches ``pattern``, written as it is stored or as text."""
    names = stored_names(pattern)
    if not any(c in pattern for c in "*?["):
        return lambda key: any(name in key for name in names)
    return lambda key: any(
        fnmatch.fnmatchcase(spelling, name)
        for name in names
        for spelling in (key, _without_prefix(key))
    )


def row_of(record: Record) -> dict[str, Any]:
    """The record as JSON data; ``ttl`` in seconds, ``since`` in ISO 8601.

    For a claim, ``worker``, ``pid`` and ``since`` are those of its message's publication.
    """
    return {
        "key": record.key,
        "state": _state(record),
        "phase": _phase(record),
        "task": record.holder.task,
        "task_id": record.holder.task_id,
        "worker": record.holder.worker,
        "pid": record.holder.pid,
        "since": _since(record),
        "ttl": round(record.ttl, 3),
        "fence": record.fence,
        "token": record.token,
    }


def json_array(records: Iterable[Record]) -> Iterator[str]:
    """The records as one JSON array, in pieces of text: memory may not hold all of them."""
    rows = (f"  {{\n    {_encode(row_of(record))[1:-1]}\n  }}" for record in records)
    before, after = "[\n", "[]"
    while some := [*islice(rows, _PIECE)]:
        yield before + ",\n".join(some)
        before, after = ",\n", "\n]"
    yield after


def table(records: Iterable[Record]) -> str:
    """The records as a table: one line per record, columns aligned."""
    rows = [["KEY", "STATE", "TTL", "HOLDER", "WORKER", "PID", "SINCE"]]
    for row in map(row_of, records):
        holder = f"{row['task']}[{row['task_id']}]" if row["task"] else row["task_id"]
        cells = [row["key"], row["state"], f"{row['ttl']:.1f}s", holder, row["worker"]]
        rows.append([*map(_shown, cells), str(row["pid"]), row["since"]])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def describe(record: Record) -> str:
    """The record as text, one field per line."""
    row = row_of(record)
    del row["phase"]  # the state contains it
    if record.kind is Kind.CLAIM:
        del row["fence"]
        # `worker` is the process that published the message, not the one that runs it.
        row = {"published by" if name == "worker" else name: value for name, value in row.items()}
    width = max(len(name) for name in row)
    return "\n".join(f"{name:>{width}}: {_shown(str(value))}" for name, value in row.items())


def _shown(text: str) -> str:
    """``text`` without control characters: a publisher may choose any text as a task's id."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def _state(record: Record) -> str:
    if record.token.startswith(f"{HANDOFF_TASK}|"):
        return "reserved for a waiting client"
    return f"claim, {_phase(record)}" if record.phase else _KINDS[record.kind]


def _phase(record: Record) -> str | None:
    """The state of a claim's message; in a period, the store does not know whether it has run."""
    return "published" if Keyspace.is_period(record.key) else record.phase


def _since(record: Record) -> str:
    if not record.holder.since:
        return ""  # no holder
    try:
        return datetime.fromtimestamp(record.holder.since, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return ""  # not a time: another program wrote this record
