"""The public surface of the package: one line for each name on which code, data or people rely.

``python -m tests.harness.surface`` writes the lines to ``tests/public_surface.txt``, which is kept
in the repository. docs/reference/stability.md says what a change of each kind of line means.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import import_module
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

import click
from celery import Celery
from prometheus_client import CollectorRegistry

from celery_singleton_lock import CallOptions, LockOptions, OnConflict, hold, is_skipped
from celery_singleton_lock.beat import SCHEDULED_AT_HEADER
from celery_singleton_lock.cli import singleton
from celery_singleton_lock.cli.commands import row_of
from celery_singleton_lock.core.events import DATA, Event, EventName
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Holder, OperatorRelease, Token
from celery_singleton_lock.inspection import held_keys
from celery_singleton_lock.instrumentation import EventPipe, log_event, send_worker_event
from celery_singleton_lock.instrumentation.counts import COUNTS
from celery_singleton_lock.instrumentation.log import LEVELS
from celery_singleton_lock.instrumentation.metrics import COUNTERS, HISTOGRAMS
from celery_singleton_lock.instrumentation.prometheus import PrometheusMetrics
from celery_singleton_lock.instrumentation.signals import SIGNALS
from celery_singleton_lock.instrumentation.worker_events import DROPPED_EVENTS
from celery_singleton_lock.message.claim import Claim
from celery_singleton_lock.message.header import HEADER, Delivery
from celery_singleton_lock.message.skipped import skipped_value
from celery_singleton_lock.on_conflict import ACTIONS
from celery_singleton_lock.option_values import Unique
from celery_singleton_lock.policy import APP_OPTIONS, OPTIONS, Policy
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.serve.gauges import Gauges
from celery_singleton_lock.serve.listener import Listener
from celery_singleton_lock.serve.readings import Readings
from celery_singleton_lock.settings import Settings
from tests.harness.processes import ROOT

__all__ = ["COMMAND", "FILE", "PUBLIC", "difference", "surface"]

COMMAND: Final = "python -m tests.harness.surface"
FILE: Final = ROOT / "tests" / "public_surface.txt"

_PACKAGE: Final = "celery_singleton_lock"
#: The public modules below the package, each with its public names. Empty: those of its
#: ``__all__``, or else its own classes.
PUBLIC: Final[Mapping[str, tuple[str, ...]]] = {
    "": (),
    "beat": (),
    "core.clock": ("Clock",),
    "core.keyspace": ("Keyspace",),
    "core.lease": ("Holder", "Kind", "LossReason", "Phase", "Record", "Token"),
    "core.store_requests": (),
    "core.store": (),
    "errors": (),
    "inspection": (),
    "instrumentation": (
        *("Event", "EventName", "Holder", "add_sink"),
        *sorted(vars(signal)["name"] for signal in SIGNALS.values()),
    ),
    "instrumentation.opentelemetry": ("digest_of", "instrument"),
    "instrumentation.prometheus": ("PrometheusMetrics",),
    "migration": (),
    "stores": ("open_store",),
    "stores.transitions": ("Draft", "Entry", "TransitionStore", "format_value", "parse_value"),
    "testing": (),
    "testing.contract": (),
}
# What users set or override in classes that the page of the API does not describe.
_MEMBERS: Final[Mapping[str, set[str]]] = {
    "testing.contract.StoreContract": {"LONGER_THAN_SHORT", "SHORT", "elapse"},
}
# The extras with which this project is developed.
_DEVELOPMENT: Final = frozenset({"bench", "demo", "dev", "docs", "test"})
# Defaults of these types read the same in each process and each version of Python.
_PLAIN: Final = (str, int, float, bool, tuple, type(None))


def surface() -> list[str]:
    """The lines, sorted: a kind, and a name with what belongs to it."""
    kinds: dict[str, Callable[[], Iterator[str]]] = {
        "name": _names,
        "entry point": _entry_points,
        "setting": _settings,
        "option": _options,
        "event": _events,
        "log field": _log_fields,
        "worker event": _worker_events,
        "metric": _metrics,
        "command": lambda: _commands(singleton, "singleton"),
        "json": _json,
        "header": _headers,
        "key": _keys,
        "value": _values,
    }
    return sorted({f"{kind}: {line}" for kind, lines in kinds.items() for line in lines()})


def difference(kept: list[str], present: list[str]) -> str:
    """What to tell the author of a change; empty: there is none."""
    changed = [f"  added:   {line}" for line in sorted({*present} - {*kept})]
    changed += [f"  removed: {line}" for line in sorted({*kept} - {*present})]
    if not changed:
        return ""
    lines = "\n".join(changed)
    return (
        f"the public surface changed:\n{lines}\n"
        "docs/reference/stability.md says what users may expect of each kind of line. If the "
        f"change keeps to it, or the changelog announces it, rewrite the list with `{COMMAND}`"
    )


# Names of the package.


def _names() -> Iterator[str]:
    page = _Page()
    listed: dict[int, str] = {}
    for path, chosen in PUBLIC.items():
        module = import_module(f"{_PACKAGE}.{path}" if path else _PACKAGE)
        own = [
            name
            for name, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == module.__name__ and name[0] != "_"
        ]
        for one in chosen or getattr(module, "__all__", own):
            value, name = getattr(module, one), ".".join(filter(None, (path, one)))
            known = listed.setdefault(id(value), name)
            if known != name:
                yield f"{name}: {known}"
            elif inspect.isclass(value):
                yield from _class(name, value, page)
            else:
                yield f"{name}{_signature(value) if inspect.isfunction(value) else ''}"


class _Page:
    """The members of classes that the pages of the API and of own stores have."""

    def __init__(self) -> None:
        self._classes: dict[str, set[str] | None] = {}
        self._modules: set[str] = set()
        reference = ROOT / "docs" / "reference"
        text = "".join((reference / page).read_text() for page in ("api.md", "own-store.md"))
        within = ""
        pattern = r"^\.\. (\w+):: (\S+)\n(?: +:members:(.*)\n| +(:no-members:)\n)?"
        for kind, name, members, none in re.findall(pattern, text, re.MULTILINE):
            if kind == "currentmodule":
                within = name
            elif kind == "automodule":
                self._modules.add(name)
            elif kind == "autoclass":
                name = name.removesuffix("()")
                if "::" in name:  # a class that is a member of another one
                    cls, _, member = name.partition("::")[2].partition(".")
                    full = f"{within}.{cls}"
                    self._classes[full] = (self._classes.get(full) or set()) | {member}
                    continue
                full = name if name.startswith(_PACKAGE) else f"{within}.{name}"
                chosen = set(re.findall(r"\w+", members))
                self._classes[full] = chosen if chosen or none else None

    def members(self, name: str, cls: type) -> set[str] | None:
        """The members of the class ``name`` that the page names; None: all of them."""
        full = f"{_PACKAGE}.{name}"
        if full in self._classes:
            return self._classes[full]
        is_complete = {full.rpartition(".")[0], cls.__module__} & self._modules
        return (
            None
            if is_complete
            else _MEMBERS.get(name, set(getattr(cls, "__abstractmethods__", ())))
        )


def _class(name: str, cls: type, page: _Page) -> Iterator[str]:
    if issubclass(cls, Enum):
        yield from (f"{name}.{member.name} = {member.value!r}" for member in cls)
        return
    chosen = page.members(name, cls)
    yield name if chosen else f"{name}{_parameters_of(cls)}"
    for member in _members(cls) if chosen is None else chosen:
        found = inspect.getattr_static(cls, member, None)
        if isinstance(found, (staticmethod, classmethod)):
            found = getattr(cls, member)
        is_called = inspect.isfunction(found) or inspect.ismethod(found) or inspect.isclass(found)
        yield f"{name}.{member}{_signature(found) if is_called else ''}"


def _members(cls: type) -> set[str]:
    """The public attributes that the package defines for ``cls``."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith(_PACKAGE)]
    names = {name for base in bases for name in (*vars(base), *inspect.get_annotations(base))}
    return {name for name in names if not name.startswith("_")}


def _parameters_of(cls: type) -> str:
    """The parameters of the constructor, if the package defines it."""
    if is_dataclass(cls):
        return _signature(cls)
    for base in cls.__mro__:
        init = vars(base).get("__init__")
        if inspect.isfunction(init) and base.__module__.startswith(_PACKAGE):
            return _signature(init) if init.__module__.startswith(_PACKAGE) else ""
    return ""


def _signature(function: Any) -> str:
    """The parameters without types: a type that gets more precise breaks no caller."""
    signature = inspect.signature(function)
    shown = [
        parameter.replace(
            annotation=inspect.Parameter.empty,
            default=_Shown(parameter.default)
            if parameter.default is not inspect.Parameter.empty
            else inspect.Parameter.empty,
        )
        for parameter in signature.parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    return str(inspect.Signature(shown))


class _Shown:
    """A default, as it is listed."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __repr__(self) -> str:
        if isinstance(self._value, Enum):
            return repr(self._value.value)
        return repr(self._value) if isinstance(self._value, _PLAIN) else "..."


def _entry_points() -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for group, points in project["entry-points"].items():
        yield from (f"{group}: {name} = {target}" for name, target in points.items())
    yield from (f"extra: {name}" for name in {*project["optional-dependencies"]} - _DEVELOPMENT)


# Settings and options.


def _settings() -> Iterator[str]:
    yield "singleton_lock_url"
    own = {field.name: field.default for field in fields(Settings) if field.metadata}
    of_tasks = {field.name: field.default for field in fields(Policy) if field.name in APP_OPTIONS}
    for name, default in (own | of_tasks).items():
        yield f"singleton_lock_{name} = {_default(default)}"


def _options() -> Iterator[str]:
    defaults = {field.name: field.default for field in fields(Policy)}
    of_a_call = CallOptions.__annotations__
    hints = get_type_hints(LockOptions)
    for name in OPTIONS:
        where = "task and call" if name in of_a_call else "task"
        yield f"{name} ({where}) = {_default(defaults[name])}"
        yield from (f"{name}: {value!r}" for value in _literals(hints[name]))


def _literals(hint: Any) -> Iterator[Any]:
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    else:
        for part in get_args(hint):
            yield from _literals(part)


def _default(value: Any) -> str:
    if isinstance(value, OnConflict):
        return repr(value.to_header())
    return repr(_Shown(value))


# What happens.

_SAMPLE: Final = Event(
    name=EventName.FREED,
    key="key",
    task="task",
    task_id="id",
    lease="lease",
    holder=Holder(task="task", task_id="id", worker="worker"),
    data={"reason": "reason"},
)


def _events() -> Iterator[str]:
    for name in EventName:
        signal, level = vars(SIGNALS[name])["name"], logging.getLevelName(LEVELS[name])
        yield f"{name}: signal {signal}, level {level}"
        yield from (f"{name}: field {field}" for field in DATA[name])


def _log_fields() -> Iterator[str]:
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger, handler = logging.getLogger(_PACKAGE), Keep()
    logger.addHandler(handler)
    try:
        log_event(_SAMPLE)
    finally:
        logger.removeHandler(handler)
    [record] = records
    yield from (name for name in vars(record) if name.startswith("singleton_"))
    yield f"text {record.getMessage()}"


def _worker_events() -> Iterator[str]:
    yield from (COUNTS, DROPPED_EVENTS)
    before = EventPipe.running, EventPipe.switch
    EventPipe.running = pipe = EventPipe()
    EventPipe.switch = b"\1"
    try:
        send_worker_event(_SAMPLE)
        kind, sent = json.loads(os.read(pipe.reader, 4096))
    finally:
        EventPipe.running, EventPipe.switch = before
        os.close(pipe.reader)
        os.close(pipe._writer)
    prefix = str(kind).removesuffix(_SAMPLE.name)
    yield from (f"{prefix}{name}" for name in EventName)
    yield from (f"{prefix}*: field {name}" for name in sent if name not in _SAMPLE.data)


def _metrics() -> Iterator[str]:
    labels = {name: ("task", *more) for name, _, more in COUNTERS.values()}
    labels |= {f"{name}_seconds": ("task",) for name, _, _ in HISTOGRAMS.values()}
    app, registry = _app(), CollectorRegistry()
    readings = Readings(app)
    listener = Listener(app, readings.clock, PrometheusMetrics(registry))
    for family in [*registry.collect(), *Gauges(readings, listener, "name").collect()]:
        known = labels.get(family.name.removeprefix("celery_singleton_"))
        of_family = vars(family).get("_labelnames", ()) if known is None else known
        yield f"{family.type} {family.name}({', '.join(of_family)})"
    Runtime.of(app).close()


def _app() -> Celery:
    return Celery("surface", broker="memory://", set_as_current=False)


# Commands.


def _commands(command: click.Command, path: str) -> Iterator[str]:
    for parameter in command.params:
        shown = (
            "/".join(parameter.opts)
            if isinstance(parameter, click.Option)
            else f"argument {parameter.name}"
        )
        yield f"{path}: {shown}"
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield f"{path} {name}"
            yield from _commands(found, f"{path} {name}")


def _json() -> Iterator[str]:
    app = _app()
    with closing(Runtime.of(app)), hold("key", scope="scope", app=app):
        [held] = held_keys(app)
    yield from (f"ls, show: field {name}" for name in row_of(held))
    skipped = skipped_value("task", "key", Holder(), "queued")
    assert is_skipped(skipped)
    yield from (f"value of a skipped call: {name}" for name in skipped)


# The wire.


def _headers() -> Iterator[str]:
    yield from (HEADER, SCHEDULED_AT_HEADER)
    token = Token("id", 0, 0, "nonce", "call")
    header = Delivery(token=token, called_at=1.0, period="period").header()
    yield from (f"{HEADER}: field {name}" for name in header)
    claim = Claim(
        key="key", unique=Unique.UNTIL_DONE, unique_for=1.0, arguments="", admitted_until=1.0
    )
    yield from (f"{HEADER}: field claim.{name}" for name in claim.to_header())
    for action in ACTIONS:
        written = json.dumps(OnConflict.of(action).to_header(), sort_keys=True)
        yield f"{HEADER}: options.on_conflict {written}"


def _keys() -> Iterator[str]:
    """One key of each kind, as the store has it."""
    names = Keyspace(prefix="prefix", shards=1)
    lock = names.lock("scope", "rest")
    token = Token("id", 0, 0, "nonce", "call")
    claim = names.claim("task", lock)
    kinds = {
        "lease": lock,
        "second slot of a limit": names.slots(lock, 2)[1],
        "leader of beats": names.leader("name"),
        "last run of a beat's entry": names.last_run(names.leader("name"), "entry"),
        "shard": names.shard_hash(lock),
        "completion": names.completion(lock, token.attempt),
        "operator's note": names.release_note(lock),
        "wait queue": names.wait_queue(lock),
        "newest call": names.newest_call(lock),
        "claim": claim,
        "claim of a period": names.period("task", lock),
        "newest arguments": names.arguments(claim, token.call_id),
        "number of shards": names.shard_count(lock),
    }
    yield from (f"{kind}: {key}" for kind, key in kinds.items())


def _values() -> Iterator[str]:
    token = Token("id", 1, 2, "nonce", "call")
    holder = Holder(
        task="task",
        task_id="id",
        worker="worker",
        pid=1,
        since=2.0,
        first_try=1.0,
        expires=3.0,
        process="process",
    )
    yield f"token: {token}"
    yield f"holder: {holder.to_json()}"
    note = OperatorRelease(user="user", host="host", reason="reason", at=1.0, token="token")
    yield f"operator's note: {note.to_json()}"


if __name__ == "__main__":
    FILE.write_text("".join(f"{line}\n" for line in surface()))
