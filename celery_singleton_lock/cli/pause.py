"""The commands ``celery -A proj singleton pause | resume | paused``."""

from __future__ import annotations

import json
from typing import Any

import click

from .. import inspection
from ..errors import LockKeyError
from ..inspection import Paused
from ..inspection.pauses import row_of_pause
from ..runtime import Runtime
from ..typed_keys import forms_of, scope_of
from .commands import Command, Duration
from .table import aligned, shown


@click.command(cls=Command)
@click.option("--scope", help="Instead of KEY: all keys of this scope, which is a task's name.")
@click.option(
    "--for",
    "duration",
    type=Duration(),
    metavar="TIME",
    help="How long: 90, 90s, 15m, 2h, 1d. By default until `resume`.",
)
@click.option("--reason", default="", help="Why, for everybody who asks why a call doesn't run.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.argument("key", required=False)
@click.pass_context
def pause(
    ctx: click.Context,
    /,
    key: str | None,
    scope: str | None,
    duration: float | None,
    reason: str,
    as_json: bool,
) -> None:
    """Let no call of KEY, or of a scope, begin. None is lost: they run when the pause ends.

    KEY is a full key, as `ls` prints it, or a scope and a key: tasks.sync:account:42. Calls that
    run go on.
    """
    app, names = ctx.obj.app, _chosen(ctx.obj.app, key, scope)
    found = inspection.pause(**names, duration=duration, reason=reason, app=app)
    if as_json:
        click.echo(json.dumps(row_of_pause(found), indent=2))
    else:
        click.echo(shown(str(found)))


@click.command(cls=Command)
@click.option("--scope", help="Instead of KEY: the pause of this scope.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object, or null.")
@click.argument("key", required=False)
@click.pass_context
def resume(ctx: click.Context, key: str | None, scope: str | None, as_json: bool) -> None:
    """End the pause of KEY, or of a scope. The calls that have waited run soon.

    Exit status 1 if it was not paused.
    """
    app, names = ctx.obj.app, _chosen(ctx.obj.app, key, scope)
    found = inspection.resume(**names, app=app)
    name = scope or key
    if as_json:
        click.echo(json.dumps(found and row_of_pause(found), indent=2))
    elif found is not None:
        click.echo(f"resumed {shown(found.name)}")
    if found is None:
        click.echo(f"not paused: {shown(str(name))}{_meant(app, names)}", err=True)
    ctx.exit(1 if found is None else 0)


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
@click.pass_context
def paused(ctx: click.Context, as_json: bool) -> None:
    """List what is paused, since when, by whom and why."""
    found = inspection.pauses(ctx.obj.app)
    if as_json:
        click.echo(json.dumps([row_of_pause(one) for one in found], indent=2))
    else:
        click.echo(table(found) if found else "nothing is paused")


def table(found: list[Paused]) -> str:
    """The pauses as a table: one line for each."""
    heads = ["PAUSED", "SINCE", "ENDS", "BY", "REASON"]
    rows = (
        [
            shown(one.name),
            one.since.isoformat(timespec="seconds") if one.since else "",
            "" if one.left is None else f"in {one.left:.0f}s",
            shown(f"{one.user} on {one.host}"),
            shown(one.reason),
        ]
        for one in found
    )
    return aligned([heads, *rows])


def _chosen(app: Any, key: str | None, scope: str | None) -> dict[str, Any]:
    """The arguments of `inspection.pause` that choose what to pause."""
    if (key is None) == (scope is None):
        raise click.UsageError("give KEY, or --scope")
    app.loader.import_default_modules()
    if key is None or Runtime.of(app).keyspace.is_full(key):
        return {"key": key, "scope": scope}
    task, colon, suffix = key.partition(":")
    if not (colon and suffix and task in Runtime.of(app).scopes):
        forms = "".join(f"\n  {form}" for form in forms_of(app))
        raise LockKeyError(
            f"{key!r}: give the full key, or its scope and its key. The keys of this app:{forms}"
        )
    return {"key": suffix, "scope": task}


def _meant(app: Any, names: dict[str, Any]) -> str:
    """The other pauses in the same scope, one on each line."""
    scope = names["scope"] or scope_of(str(names["key"]))
    others = [one for one in inspection.pauses(app) if one.scope == scope]
    return "".join(f"\n  {shown(str(one))}" for one in others)
