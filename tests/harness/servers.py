"""What the server of the tests is: Redis and Valkey differ between versions."""

from __future__ import annotations

import re
import subprocess
from functools import cache

from example_project.private_server import find_binary


@cache
def server_version() -> tuple[int, int]:
    """The version of the server that tests start. Valkey has all that Redis 7 has."""
    text = subprocess.run(
        [find_binary(), "--version"], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"v=(\d+)\.(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])
