"""What an import brings along, by name: which modules are there, not how long they take."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pkgutil import iter_modules
from typing import Final

from celery_singleton_lock import on_conflict
from tests.harness.processes import ROOT

PACKAGE: Final = "celery_singleton_lock"
# What Celery has imported once an app has a task: every app has that.
APP: Final = """
import json, sys
from celery import Celery
app = Celery("costs", broker="memory://")
@app.task(name="costs.plain")
def plain(): pass
app.finalize()
before = set(sys.modules)
"""
SHOW: Final = """
print(json.dumps(sorted(set(sys.modules) - before)))
"""
DECLARE: Final = """
from celery_singleton_lock import is_skipped, singleton_task
@singleton_task(app=app, name="costs.ours", key="account:{account_id}")
def ours(account_id): pass
ours.name
"""


def modules(*code: str) -> set[str]:
    """What a fresh interpreter has imported by the end of ``code``, beyond an app with a task."""
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent("".join((APP, *code, SHOW)))],
        capture_output=True,
        check=True,
        cwd=ROOT,
        text=True,
        timeout=60,
    )
    return set(json.loads(ran.stdout.splitlines()[-1]))


def test_declaring_a_task_imports_neither_what_runs_it_nor_a_client() -> None:
    found = modules(DECLARE)
    assert not {name for name in found if not name.startswith(PACKAGE)}
    assert {name.removeprefix(PACKAGE + ".") for name in found if name.startswith(PACKAGE)} == {
        PACKAGE,
        *(
            "core",
            "core.backoff",
            "core.key",
            "core.keyspace",
            "core.rate",
            "errors",
            "option_conflicts",
            "option_values",
            "option_names",
            "policy",
        ),
        *("celery_compat", "on_conflict"),
        *(f"on_conflict.{module.name}" for module in iter_modules(on_conflict.__path__)),
        *("message", "message.arguments", "message.skipped"),
        *("task", "task.base", "task.decorator", "task.keywords", "task.signature"),
    }


def test_a_worker_imports_no_part_that_is_optional_and_unused() -> None:
    command = f"""
    import {PACKAGE}.worker.bootstep
    import {PACKAGE}.worker.request
    import {PACKAGE}.instrumentation
    """
    found = modules(DECLARE, textwrap.dedent(command))
    assert f"{PACKAGE}.instrumentation" in found
    optional = ("opentelemetry", "prometheus_client", "rich", "uvicorn", "kazoo", "requests")
    assert not [name for name in found if any(part in name.split(".") for part in optional)]


def test_the_command_celery_imports_no_more_than_the_names_of_ours() -> None:
    """Every worker where the package is installed, singleton tasks or not, is started by it."""
    command = """
    from celery import signals
    from celery.bin.celery import celery
    assert "singleton" in celery.commands
    assert not signals.task_postrun.receivers, "a receiver is paid for by every task"
    """
    found = modules(textwrap.dedent(command))
    assert {name for name in found if name.startswith(PACKAGE)} == {PACKAGE, f"{PACKAGE}.cli"}


def test_pytest_imports_nothing_of_the_lock_before_the_fixture_is_used() -> None:
    """pytest imports the plugin in every project where the package is installed."""
    found = modules(f"import {PACKAGE}.pytest_plugin")
    ours = {name for name in found if name.startswith(PACKAGE)}
    assert ours == {PACKAGE, f"{PACKAGE}.pytest_plugin"}


def test_every_public_name_is_there_whatever_was_imported_before() -> None:
    check = """
    import importlib
    import celery_singleton_lock as package
    importlib.import_module("celery_singleton_lock.task.hold")
    import celery_singleton_lock.testing.singleton_store
    from celery_singleton_lock import *
    assert callable(hold) and Lease.__name__ == "Lease", (hold, Lease)
    assert set(package.__all__) <= set(dir(package))
    assert all(name in globals() for name in package.__all__)
    try:
        package.nothing
    except AttributeError as exc:
        assert "nothing" in str(exc)
    """
    modules(textwrap.dedent(check))


def test_a_started_worker_has_imported_what_its_bodies_need() -> None:
    run = """
    import celery_singleton_lock.worker.bootstep
    from celery_singleton_lock.runtime import Runtime
    from celery.app.trace import build_tracer
    app.conf.singleton_lock_url = "memory://"
    Runtime.of(app).store  # its bootstep asks it
    ours.singleton_preload()  # and calls this
    before = set(sys.modules)
    request = {"id": "1", "task": ours.name, "retries": 0, "replaced_task_nesting": 0}
    state = build_tracer(ours.name, ours, app=app)("1", ["k"], {}, request).info
    assert state is None, state
    ours.apply_async(("k",), singleton={"unique": "until_done"})
    """
    found = modules(DECLARE, textwrap.dedent(run))
    assert {name for name in found if name.startswith(PACKAGE)} == set()
