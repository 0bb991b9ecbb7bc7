"""Serializers and a compression whose messages are not decoded, or only in some processes.

kombu keeps their functions for the life of the process. They are here, so that it keeps no app.
"""

from __future__ import annotations

import json
from typing import Any

import billiard.process
from kombu import compression
from kombu.serialization import register

#: No process decodes it, as a serializer or as a compression. As msgpack: some of what it writes,
#: it refuses to read.
ONE_WAY = "one-way"
#: The children of a worker do not decode it.
NOT_IN_CHILDREN = "not-in-children"


def _refuse(data: Any) -> Any:
    raise ValueError("encoded, but not to be decoded")


def _refuse_in_children(data: Any) -> Any:
    if billiard.process.current_process().name != "MainProcess":
        _refuse(data)
    return json.loads(data)


register(ONE_WAY, json.dumps, _refuse, "application/x-one-way", "utf-8")
register(NOT_IN_CHILDREN, json.dumps, _refuse_in_children, "application/x-not-in-children", "utf-8")
compression.register(lambda data: data, _refuse, "application/x-one-way-compressed", [ONE_WAY])
