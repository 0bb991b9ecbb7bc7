"""The commands ``celery -A proj singleton ls | show | explain | release | doctor``.

They print what `inspection` and `doctor` return.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final

import click
from celery import Celery
from celery.bin.base import CeleryCommand

from .. import inspection
from ..core.store import operators_of
from ..doctor import Finding, Severity, diagnose
from ..errors import SingletonLockError
from ..inspection import AmbiguousKey, CallInQueue, Fate, Filter, HeldKey, SortBy
from ..inspection.keys import with_calls
from ..inspection.pauses import pauses_if_allowed
from ..runtime import Runtime
from ..typed_keys import forms_of, is_glob
from .act import Act, Target
from .table import COLUMNS, aligned, holder_of, rows_of, shown, since_of, state_of

# The risks of a release by an operator.
_RISKS: Final = {
    True: "Its message stays where it is, and an equal call can be published as well.",
    False: "If its holder is alive, another run may start before the holder notices, at its next "
    "heartbeat (a third of its ttl).",
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
            raise click.ClickException(runnable(str(exc))) from exc


def runnable(text: str) -> str:
    """``text`` with the ``-A`` of this process in its commands, so that they can be copied."""
    given = re.search(r" (?:-A|--app)[ =]?(\S+)", " ".join(sys.argv))
    app = given[1] if given else os.environ.get("APP")
    return text.replace("celery -A ...", f"celery -A {app}") if app else text


@contextmanager
def progress(app: Any, draw: Callable[[str], None] | None = None) -> Iterator[None]:
    """Show what a long search in the block has done so far.

    Args:
        app: The app.
        draw: Called with the text, at last with an empty one. None: it is shown if stderr is a
            terminal. Then the block must write nothing to stdout, which may be the same one.
    """
    if draw is None:
        if not sys.stderr.isatty():
            yield
            return
        draw = _draw_line
    runtime = Runtime.of(app)
    clock, store = runtime.clock, runtime.store
    next_at = clock.now() + _PROGRESS_AFTER
    is_shown = False

    def show(text: str) -> None:
        nonlocal next_at, is_shown
        if clock.now() >= next_at:
            next_at, is_shown = clock.now() + _PROGRESS_EVERY, True
            draw(text)

    operators = operators_of(store)
    operators.progress = show
    try:
        yield
    finally:
        operators.progress = None
        if is_shown:
            draw("")


def _draw_line(text: str) -> None:
    click.echo(f"{_ERASE}{text}", nl=False, err=True)


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
    """List what is held or claimed; PATTERN is part of a key, or a glob for the whole key.

    For a claim, WORKER, PID and SINCE are those of its message's publication.
    """
    app, chosen = ctx.obj.app, Filter(**conditions)
    found = inspection.held_keys(
        app, chosen, sort=SortBy(sort), counts_calls=True, report=report_foreign
    )
    with progress(app):
        first = next(found, None)  # after the search for all names
        text = "" if first is None or as_json else table(chain([first], found))
    if as_json:
        for piece in json_array(found if first is None else chain([first], found)):
            click.echo(piece, nl=False)
        click.echo()
    else:
        click.echo(text or _nothing(chosen))
        for one in pauses_if_allowed(app):
            click.echo(shown(str(one)))


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
        task_id = _task_id(app, key)
        held = inspection.find_key(app, key) or inspection.find_task(app, task_id)
        held = with_calls(app, held, key)
        call = None if held else inspection.find_call(app, task_id)
    if call is not None:
        text = json.dumps(row_of_call(call), indent=2) if as_json else calls_table([call])
        click.echo(text)
        ctx.exit(0)
    if as_json:
        click.echo(json.dumps(row_of(held) if held else None, indent=2))
    elif held:
        click.echo(describe(held))
    if not as_json:
        for one in pauses_if_allowed(app):
            if one.includes(held.key if held else key):
                click.echo(shown(str(one)))
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
    help="How long to wait for the workers' replies; two seconds at least for the holder's.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.argument("task_id")
@click.pass_context
def explain(ctx: click.Context, /, task_id: str, timeout: float, as_json: bool) -> None:
    """Say why the task of this id ran, did not run, or has not run yet.

    From the result backend, the lease, the claim, the completion records and the workers. Exit
    status 1 if none of them knows the id.
    """
    task_id = _task_id(ctx.obj.app, task_id)
    with progress(ctx.obj.app):
        found = inspection.explain(ctx.obj.app, task_id, timeout=timeout)
    if as_json:
        click.echo(json.dumps(asdict(found), indent=2, default=str))
    else:
        click.echo(shown(f"{task_id}: {found.fate}"))
        click.echo(runnable("\n".join(f"  {shown(sentence)}" for sentence in found.sentences)))
    ctx.exit(1 if found.fate is Fate.UNKNOWN else 0)


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
@click.argument("key")
@click.pass_context
def queue(ctx: click.Context, key: str, as_json: bool) -> None:
    """List the calls in the queue of KEY, in the order in which they run (on_conflict="queue").

    The first one runs, or is the next to run. `ls` shows how many calls wait for each key.
    """
    app = ctx.obj.app
    calls = _calls_of(app, key)
    if as_json:
        click.echo(json.dumps([row_of_call(call) for call in calls], indent=2))
    elif calls:
        click.echo(calls_table(calls))
    if not calls:
        click.echo(f"no call is in the queue of {key}", err=as_json)
    ctx.exit(0 if calls else 1)


@click.command(cls=Command)
@click.option("--key", default="", help="Instead of TASK_ID: all calls that wait for this key.")
@click.option("--first", is_flag=True, help="With --key: only the first call that does not run.")
@click.option("--dry-run", is_flag=True, help="Only list what would be cancelled.")
@click.option("--reason", default="", help="Why; the result has it, with your login.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
@click.argument("task_ids", nargs=-1, metavar="[TASK_ID]...")
@click.pass_context
def cancel(
    ctx: click.Context,
    /,
    task_ids: tuple[str, ...],
    key: str,
    first: bool,
    reason: str,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Take calls that wait out of the queue of their key (on_conflict="queue").

    They never run. Their result is REVOKED, and a chord that they belong to fails. A call that
    runs is left alone: revoke(terminate=True) ends it.
    """
    if bool(task_ids) == bool(key) or (first and not key):
        raise click.UsageError("give TASK_ID, or --key KEY, which --first restricts to one call")
    act = Act("cancelled", "cancels", dry_run=dry_run, yes=yes, as_json=as_json)
    app = ctx.obj.app
    with progress(app):
        calls, missing = _waiting(app, key, first=first) if key else _named(app, task_ids)
    listed = calls_table(calls)
    if calls:
        act.confirm(listed, f"Cancel {_these(len(calls), 'call')}?")
    cancelled = {} if dry_run else _cancel_all(app, calls, reason)
    targets = [
        Target(
            row_of_call(call),
            shown(call.task_id),
            cancelled.get(call.call_id, False),
            f"not cancelled, it runs or has left the queue: {shown(call.task_id)}",
        )
        for call in calls
    ]
    succeeded = act.report(targets, listed)
    for line in missing:
        click.echo(line, err=True)
    ctx.exit(0 if succeeded and not missing else 1)


def _waiting(app: Celery, key: str, *, first: bool) -> tuple[list[CallInQueue], list[str]]:
    """The calls that wait for ``key``, or only the first one; and the message that none does."""
    calls = [call for call in _calls_of(app, key) if call.state != "running"]
    return calls[:1] if first else calls, [] if calls else ["nothing waits"]


def _named(app: Celery, names: Iterable[str]) -> tuple[list[CallInQueue], list[str]]:
    """The calls of these tasks, and a message for each that is in no queue."""
    wanted = {_task_id(app, name) for name in names}
    calls = [*inspection.find_calls(app, wanted)]
    missing = sorted(wanted - {call.task_id for call in calls})
    return calls, [f"no such call waits in a queue: {shown(name)}" for name in missing]


def _cancel_all(app: Celery, calls: Sequence[CallInQueue], reason: str) -> dict[str, bool]:
    """Cancel calls; returns which were taken out of their queue, by the name of the call."""
    cancelled: dict[str, bool] = {}
    # The last one first: the end of the call at the head publishes the call behind it.
    for call in reversed(calls):
        try:
            cancelled[call.call_id] = inspection.cancel(app, call, reason=reason)
        except SingletonLockError:
            raise
        except Exception as exc:
            text = f"{call.task_id} never runs, but its result is not stored yet: {exc}"
            raise click.ClickException(f"{text}. Cancel it again") from exc
    return cancelled


@click.command(cls=Command)
@choose_keys
@click.option("--pattern", default="", help="Release all keys that match, as `ls` lists them.")
@click.option("--dry-run", is_flag=True, help="Only list what would be released.")
@click.option("--reason", default="", help="Why; the holder reports it with your login and host.")
@click.option("--token", help="Free it only if this token (see `show`) still has it.")
@click.option("--yes", is_flag=True, help="Do not ask.")
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
    as_json: bool,
    **conditions: Any,
) -> None:
    """Free KEY. Its holder notices at its next heartbeat, and is interrupted. The fence rises.

    If another holder has taken the key since it was shown, nothing is freed. The message of a claim
    stays where it is, and runs.

    Instead of KEY, --pattern, --scope, --task, --older-than and --waiting choose several keys.
    """
    chosen = Filter(**conditions)
    if (key is None) == (chosen == Filter()):
        raise click.UsageError("give KEY, or options that choose keys, such as --scope")
    act = Act("released", "releases", dry_run=dry_run, yes=yes, as_json=as_json)
    if key is not None:
        _release_one(ctx, act, key, token, reason)
    elif token:
        raise click.UsageError("--token is for one KEY")
    else:
        _release_all(ctx, act, chosen, reason)


def _release_one(ctx: click.Context, act: Act, key: str, token: str | None, reason: str) -> None:
    """Release one key, by ``token`` or by the one that was shown, and exit."""
    app = ctx.obj.app
    with progress(app):
        held = inspection.find_key(app, key)
    if held is None:
        if act.as_json:
            click.echo(json.dumps({"key": key, "released": False}))
        click.echo(_free_or_misspelled(app, key), err=True)
        ctx.exit(1)
    if not token:
        question = f"{_RISKS[held.is_claim]} Release?"
        act.confirm(describe(held), question, answers="--yes or --token TOKEN")
    freed = not act.dry_run and inspection.release(
        app, held.key, token or held.token, reason=reason
    )
    if act.as_json:
        click.echo(json.dumps({"key": held.key, "released": freed}))
    elif act.dry_run:
        click.echo(f"{describe(held)}\nnot released: --dry-run")
    elif freed:
        click.echo(f"released {held.key}")
    else:
        click.echo(f"not released: {held.key} is held by another token now", err=True)
    ctx.exit(0 if freed or act.dry_run else 1)


def _release_all(ctx: click.Context, act: Act, chosen: Filter, reason: str) -> None:
    """Release the chosen keys, each by the token that was listed, and exit."""
    app = ctx.obj.app
    with progress(app):
        found = [*inspection.held_keys(app, chosen, report=report_foreign)]
    if not found:
        click.echo("[]" if act.as_json else _nothing(chosen), err=not act.as_json)
        ctx.exit(1)
    listed = table(found)
    act.confirm(f"{listed}\n{_RISKS[False]}", f"Release {_these(len(found), 'key')}?")
    targets = [
        Target(
            {"key": held.key},
            held.key,
            not act.dry_run and inspection.release(app, held.key, held.token, reason=reason),
            f"not released: {held.key} is held by another token now, or free",
        )
        for held in found
    ]
    ctx.exit(0 if act.report(targets, listed) else 1)


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Look for what keeps locks from working, or will. Exit status 1 if something does."""
    app: Any = ctx.obj.app
    app.loader.import_default_modules()
    findings = list(diagnose(app))
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        click.echo(runnable("\n".join(map(_line, findings))))
    ctx.exit(1 if any(finding.severity is Severity.ERROR for finding in findings) else 0)


COMMANDS: dict[str, click.Command] = {
    command.name or "": command for command in (cancel, doctor, explain, ls, queue, release, show)
}


def _calls_of(app: Any, name: str) -> list[CallInQueue]:
    """The calls in the queue of the key that ``name`` means."""
    key = inspection.find_queue(app, name)
    return [*inspection.calls_in_queue(app, key)] if key else []


def _nothing(chosen: Filter) -> str:
    """The message that no key was found."""
    if chosen == Filter():
        return "nothing is held"
    wider = f"*{chosen.pattern.strip('*')}*"
    if not is_glob(chosen.pattern) or chosen.pattern == wider:
        return "nothing matches"
    return f"nothing matches: a glob is for the whole key; for a part of it write {shown(wider)!r}"


def _these(number: int, noun: str) -> str:
    return f"this {noun}" if number == 1 else f"these {number} {noun}s"


def report_foreign(key: str, reason: str) -> None:
    progress_ends = _ERASE if sys.stderr.isatty() else ""
    click.echo(f"{progress_ends}not ours: {key!r} {reason}; see `doctor`", err=True)


def _line(finding: Finding) -> str:
    is_loud = finding.severity in (Severity.WARNING, Severity.ERROR)
    mark = finding.severity.upper() if is_loud else finding.severity
    line = f"{mark:8} {finding.subject}: {finding.text}"
    return f"{line}\n{'':8} -> {finding.remedy}" if finding.remedy else line


def _free_or_misspelled(app: Any, key: str) -> str:
    """The message about a ``key`` that is not held: free, or unknown to this app."""
    if inspection.can_be_a_key(app, key):
        return f"{key} is free"
    forms = "".join(f"\n  {form}" for form in forms_of(app))
    known = forms or " none: it has no singleton task"
    return f"nothing is held under {key}: it is free, or misspelled. The keys of this app:{known}"


def row_of(held: HeldKey) -> dict[str, Any]:
    """The key as JSON data; ``ttl`` in seconds, ``since`` in ISO 8601.

    For a claim, ``worker``, ``pid`` and ``since`` are those of its message's publication.
    """
    return {
        "key": held.key,
        "state": held.state,
        "is_dead": held.is_dead,
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
        "calls": held.calls,
        "oldest_call": held.oldest_call and held.oldest_call.isoformat(timespec="seconds"),
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
    return aligned(rows_of(found, COLUMNS))


def calls_table(calls: Iterable[CallInQueue]) -> str:
    """The calls of queues as a table: one line per call."""
    heads = ["KEY", "POSITION", "CALL", "STATE", "PUBLISHED", "SINCE"]
    rows = (
        [
            shown(call.key),
            str(call.position),
            shown(f"{call.task}[{call.task_id}]" if call.task else call.task_id),
            call.state,
            str(call.copies),
            call.since.isoformat(timespec="seconds"),
        ]
        for call in calls
    )
    return aligned([heads, *rows])


def row_of_call(call: CallInQueue) -> dict[str, Any]:
    """The call of a queue as JSON data; ``since`` in ISO 8601."""
    return {**asdict(call), "since": call.since.isoformat(timespec="seconds")}


def describe(held: HeldKey) -> str:
    """The key as text, one field per line."""
    row = row_of(held)
    del row["phase"], row["is_dead"]  # the state contains them
    if held.is_dead:
        row["state"] = f"{state_of(held)} (its process no longer exists on this host)"
    for name in ("waiting", "calls", "oldest_call"):
        if not row[name] and (name != "waiting" or row[name] is None):
            del row[name]
    if held.is_free:
        row = {name: row[name] for name in ("key", "state", "calls", "oldest_call")}
        row["next call"] = holder_of(held)
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
