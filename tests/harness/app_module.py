"""A fresh copy of a test app's module in the test's own process.

The apps of `tests.apps` read their URLs when they are imported, and Celery keeps connections per
app. So each test that publishes imports its app again, under the environment of that test.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any
from weakref import ReferenceType

from celery import Celery, _state
from celery import signals as celery_signals
from celery.utils.dispatch import Signal

from celery_singleton_lock import instrumentation as our_signals

_SIGNALS = [
    signal
    for module in (celery_signals, our_signals)
    for signal in vars(module).values()
    if isinstance(signal, Signal)
]


def shared_task_finalizers() -> set[object]:
    """What every new app of this process is given when it is first used; private, not in the stubs.

    Celery's own fixture `celery_app` replaces the set at its end.
    """
    found: set[object] = vars(_state)["_on_app_finalizers"]
    return found


def _receivers_from(module: str, signal: Signal) -> list[Any]:
    functions = [ref() if isinstance(ref, ReferenceType) else ref for _, ref in signal.receivers]
    return [f for f in functions if getattr(f, "__module__", None) == module]


def _replaced_by(module: str) -> list[str]:
    """The package's functions and methods that ``module`` has replaced by its own."""
    ours = [m for name, m in list(sys.modules.items()) if name.startswith("celery_singleton_lock")]
    classes = [value for m in ours for value in vars(m).values() if isinstance(value, type)]
    owners: list[ModuleType | type] = [*ours, *classes]
    return [
        f"{owner.__name__}.{name}"
        for owner in owners
        for name, value in vars(owner).items()
        if getattr(value, "__module__", None) == module
    ]


# The copies that are in use.
_in_use: list[ModuleType] = []


def _end_results(app: Celery) -> None:
    """End the consumer of results: kombu keeps its channel, and so the app, until it is closed."""
    backend: Any = app.backend
    with suppress(AttributeError):  # there is none, or it has not started
        backend.result_consumer.stop()


def _unregister_from_other_apps(module: str, app: Celery) -> None:
    """Forget the tasks of ``module`` that Celery has made in other apps, as it does shared ones.

    Another copy of the module that is in use, such as that of a fixture, keeps its own.
    """
    copies = [app, *(copy.app for copy in _in_use if copy.__name__ == module)]
    for other in [each for each in vars(_state)["_apps"] if each not in copies and each.finalized]:
        for name, task in list(other.tasks.items()):
            if type(task).__module__ == module:
                other.tasks.unregister(name)


@contextmanager
def without_tasks_of_other_tests() -> Iterator[None]:
    """Give the apps that are made meanwhile none of the tasks that this process has shared.

    Celery makes those first, and of two tasks of one name the first one stays.
    """
    shared = {each for each in shared_task_finalizers() if each.__module__ != "celery.app.builtins"}
    shared_task_finalizers().difference_update(shared)
    try:
        yield
    finally:
        shared_task_finalizers().update(shared)


@contextmanager
def fresh_module(name: str, env: Mapping[str, str]) -> Iterator[ModuleType]:
    """Import ``name`` again under ``env``; at the end its app is closed and the copy forgotten.

    The module's app must be its attribute ``app``.
    """
    environment = dict(os.environ)
    finalizers = set(shared_task_finalizers())
    os.environ.update(env)
    sys.modules.pop(name, None)
    try:
        module = importlib.import_module(name)
        module.app.finalize()
        # `@app.task` registers a task with every app that is made later in this process too. The
        # next copy would get this copy's functions under the same names.
        shared_task_finalizers().intersection_update(finalizers)
        # A replacement would stay for all later tests of this process. An app makes it in its
        # worker or beat, by `worker_init` or `beat_init`.
        assert not (replaced := _replaced_by(name)), f"{name} has replaced {replaced} here"
        _in_use.append(module)
        try:
            yield module
        finally:
            _in_use.remove(module)
        _end_results(module.app)
        module.app.close()
        _unregister_from_other_apps(name, module.app)
    finally:
        # What the copy connected would observe other tests' workers, and keep their apps alive in
        # the tracebacks of what it raises there.
        for signal in _SIGNALS:
            for function in _receivers_from(name, signal):
                signal.disconnect(function)
        sys.modules.pop(name, None)
        package, _, own = name.rpartition(".")
        if package in sys.modules:  # whose attribute the copy is, too
            vars(sys.modules[package]).pop(own, None)
        os.environ.clear()
        os.environ.update(environment)
