"""Who holds or claims what, and freeing it by hand."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Final

import click
from celery.bin.base import CeleryCommand, CLIContext

from celery_singleton_lock.cli.doctor import doctor
from celery_singleton_lock.cli.table import describe, json_array, row_of, table
from celery_singleton_lock.core.key import PerTask, stored_names
from celery_singleton_lock.core.lease import Kind, Record
from celery_singleton_lock.core.store import Store
from celery_singleton_lock.errors import SingletonLockError
from celery_singleton_lock.runtime import Runtime, singleton_tasks

__all__ = ["COMMANDS"]


@click.command(cls=CeleryCommand)
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
@click.argument("pattern", default="")
@click.pass_context
def ls(ctx: click.Context, pattern: str, as_json: bool) -> None:
    """List what is held or claimed; PATTERN is part of a key, or a glob with * and ?.

    Of a claim, WORKER, PID and SINCE tell who published its message, and when.
    """
    runtime = _runtime(ctx)
    with _errors_for_people():
        glob = runtime.keyspace.match_all()
        records = _listed(runtime.store, glob)
        matches = _matcher(pattern)
        matching = (record for record in records if matches(record.key))
        if as_json:
            for piece in json_array(matching):
                click.echo(piece, nl=False)
            click.echo()
        elif (first := next(matching, None)) is not None:
            click.echo(table(chain([first], matching)))
        else:
            click.echo("nothing is held")


@click.command(cls=CeleryCommand)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, or null.")
@click.argument("key")
@click.pass_context
def show(ctx: click.Context, key: str, as_json: bool) -> None:
    """Show who holds KEY: as `ls` prints it, or only what stands behind its scope.

    KEY may be percent-encoded, as `ls` prints it, or plain text.

    A claim is named as `ls` prints it, or without csl:{...}: alone.
    """
    runtime = _runtime(ctx)
    with _errors_for_people():
        record = _find(runtime, key)
    if as_json:
        click.echo(json.dumps(row_of(record) if record else None, indent=2))
    elif record:
        click.echo(describe(record))
    if record is None:
        click.echo(_free_or_misspelled(runtime, key), err=as_json)
    ctx.exit(0 if record else 1)


@click.command(cls=CeleryCommand)
@click.option("--token", help="Free it only if this token (see `show`) still has it.")
@click.option("--force", is_flag=True, help="Whoever has it, without asking. The fence rises.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.argument("key")
@click.pass_context
def release(ctx: click.Context, key: str, token: str | None, force: bool, as_json: bool) -> None:
    """Free KEY. Its holder hears of it at its next heartbeat, and is interrupted.

    Without --force the token is compared: if somebody else has got the key meanwhile, nothing is
    freed. A claim's message stays where it is, and runs.
    """
    runtime = _runtime(ctx)
    with _errors_for_people():
        record = _find(runtime, key)
        if record is None:
            freed = False
        else:
            if not force and token is None:
                _confirm(record, as_json)
            freed = runtime.store.free(record.key, None if force else token or record.token)
    if as_json:
        click.echo(json.dumps({"key": record.key if record else key, "released": freed}))
    elif freed:
        click.echo(f"released {record.key if record else key}")
    elif record is not None:
        click.echo(f"not released: {record.key} is held by another token now", err=True)
    if record is None:
        click.echo(_free_or_misspelled(runtime, key), err=True)
    ctx.exit(0 if freed else 1)


COMMANDS: Final[dict[str, click.Command]] = {
    "doctor": doctor,
    "ls": ls,
    "release": release,
    "show": show,
}


def _confirm(record: Record, as_json: bool) -> None:
    if as_json:
        raise click.UsageError("with --json give --token TOKEN or --force")
    click.echo(describe(record))
    warning = _OF_A_CLAIM if record.kind is Kind.CLAIM else _OF_A_LEASE
    click.confirm(f"{warning} Release?", abort=True)


# What a release leads to.
_OF_A_LEASE: Final = (
    "If its body still runs, another may start beside it until the holder's next heartbeat "
    "(a third of its ttl)."
)
_OF_A_CLAIM: Final = "Its message stays where it is, and an equal call can be published beside it."


def _listed(store: Store, glob: str) -> Iterator[Record]:
    """All records in order; what isn't ours under the same names is told to stderr."""

    def tell(key: str, what: str) -> None:
        click.echo(f"not ours: {key!r} {what}; see `doctor`", err=True)

    return store.survey(glob, tell)


def _runtime(ctx: click.Context) -> Runtime:
    context: CLIContext = ctx.obj
    app: Any = context.app
    app.finalize()
    return Runtime.of(app)


def _find(runtime: Runtime, key: str) -> Record | None:
    """The record that ``key`` names: whole, without ``csl:{...}:``, or without its scope too.

    A name may be percent-encoded, as it is stored, or the plain text that `hold()` takes. The slot
    may be omitted, as ``task.lock_key()`` omits it for a task with ``limit`` above 1. A claim has
    to be named with everything after ``csl:{...}:``, because its name ends as that of its lease.
    """
    if key.startswith("csl:{"):
        record = runtime.store.inspect(key)
        if record is not None:
            return record
    records = list(runtime.store.scan(runtime.keyspace.match_all()))
    names = stored_names(key)
    for shorten in _SPELLINGS:
        found = [record for record in records if shorten(record.key) in names]
        if shorten is not _without_prefix:
            found = [record for record in found if record.kind is not Kind.CLAIM]
        if len(found) > 1:
            lines = "\n".join(f"  {record.key}" for record in found)
            raise click.UsageError(f"{key!r} names several keys; give one of them:\n{lines}")
        if found:
            return found[0]
    return None


def _without_prefix(key: str) -> str:
    return key.partition("}:")[2]


def _without_scope(key: str) -> str:
    return _without_prefix(key).partition(":")[2]


def _without_slot(key: str) -> str:
    base, _, slot = key.rpartition("#")
    return base if slot.isdecimal() else key


# The more a spelling leaves out, the later its turn: what is named whole is meant.
_SPELLINGS: Final[tuple[Callable[[str], str], ...]] = (
    _without_prefix,
    _without_scope,
    _without_slot,
    lambda key: _without_slot(_without_prefix(key)),
    lambda key: _without_slot(_without_scope(key)),
)


def _free_or_misspelled(runtime: Runtime, key: str) -> str:
    """The message about ``key``, under which nothing is held.

    The store has no record of a free key, so only its spelling shows whether a task can have it.
    """
    app: Any = runtime.app
    app.loader.import_default_modules()
    forms = {_form_of(task) for task in singleton_tasks(app)}
    spellings = {*forms, _OF_BEATS}
    if key.startswith(runtime.keyspace.match_all().partition("*")[0]):
        name = _without_prefix(key)
    else:
        name = key
        # A key without its scope shows nothing if the rest is a placeholder alone.
        rests = {form.partition(":")[2] for form in forms}
        spellings |= {rest for rest in rests if not rest.startswith("{")}
    if name.startswith("claim|"):
        name = name.split("|", 2)[-1]
    if any(_pattern_of(spelling).fullmatch(name) for spelling in spellings):
        return f"{key} is free"
    known = "".join(f"\n  {form}" for form in sorted(forms)) or " none: it has no singleton task"
    return f"nothing is held under {key}: it is free, or misspelled. The keys of this app:{known}"


# The keys of the leases by which beats elect a leader.
_OF_BEATS: Final = "celery.beat:{name}"


def _form_of(task: Any) -> str:
    """The form of a task's keys after the shard; the parts that differ between calls in braces."""
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


class _errors_for_people:
    """The library's errors as one line and exit status 1, without a traceback."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, SingletonLockError):
            raise click.ClickException(str(error)) from error
