"""A fresh copy of a test app's module in the test's own process.

The apps of `tests.apps` read their URLs when they are imported, and Celery keeps connections per
app. So each test that publishes imports its app anew, under the environment of that test.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

from celery import _state

# What every new app of this process is given when it is first used; private, and not in the stubs.
_ON_APP_FINALIZE: set[object] = vars(_state)["_on_app_finalizers"]


@contextmanager
def fresh_module(name: str, env: Mapping[str, str]) -> Iterator[ModuleType]:
    """Import ``name`` again under ``env``; at the end its app is closed and the copy forgotten.

    The module's app must be its attribute ``app``.
    """
    environment = dict(os.environ)
    finalizers = set(_ON_APP_FINALIZE)
    os.environ.update(env)
    sys.modules.pop(name, None)
    try:
        module = importlib.import_module(name)
        module.app.finalize()
        # `@app.task` registers a task with every app that is made later in this process too. The
        # next copy would get this copy's functions under the same names.
        _ON_APP_FINALIZE.intersection_update(finalizers)
        yield module
        module.app.close()
    finally:
        sys.modules.pop(name, None)
        os.environ.clear()
        os.environ.update(environment)
