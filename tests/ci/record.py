"""The recorded seconds of the slow tests, by module; the parts are dealt by them.

The record is in the repository, so that the parts are the same on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

#: Seconds that the slow tests of each module took together, as `make test-all` measured them.
SECONDS = Path(__file__).with_name("seconds.json")


def read() -> dict[str, float]:
    """The record."""
    seconds: dict[str, float] = json.loads(SECONDS.read_text())
    return seconds


def update(modules: Mapping[str, float]) -> None:
    """Replace what the record has for ``modules``."""
    seconds = read() | {name: round(took, 1) for name, took in modules.items()}
    SECONDS.write_text(json.dumps(dict(sorted(seconds.items())), indent=1) + "\n")
