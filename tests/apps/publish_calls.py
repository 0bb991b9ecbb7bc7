"""A publisher: sends calls of `tests.apps.headers`, as a web application would, and prints ids.

Its argument is a list of ``[task, args, options]`` as JSON; the environment is that app's.
"""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tests.apps import headers


def request() -> AbstractContextManager[Any]:
    """What a web application's agent has opened when a view publishes."""
    if headers.FOREIGN != "sentry":
        return nullcontext()
    import sentry_sdk

    return sentry_sdk.start_transaction(name="request")


if __name__ == "__main__":
    calls = json.loads(sys.argv[1])
    with request():
        ids = [
            getattr(headers, task).apply_async(args, **options).id for task, args, options in calls
        ]
    print(f"published {json.dumps(ids)}", flush=True)
