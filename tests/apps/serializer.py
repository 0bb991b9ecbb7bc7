"""Serializers of our own, for apps and tests."""

from __future__ import annotations

import ast
import json

from kombu.serialization import register
from kombu.utils.encoding import bytes_to_str

#: A serializer that Celery doesn't use by itself, and that can do what JSON can't: sets.
SETS = "sets"
register(
    SETS,
    lambda value: json.dumps(value, default=lambda items: {"set": sorted(items)}),
    lambda text: json.loads(text, object_hook=lambda d: set(d["set"]) if "set" in d else d),
    content_type="application/x-sets",
    content_encoding="utf-8",
)

#: A serializer that changes no plain value, as pickle does, but which root may use in a worker.
LITERALS = "literals"
register(
    LITERALS,
    repr,
    lambda text: ast.literal_eval(bytes_to_str(text)),
    content_type="application/x-literals",
    content_encoding="utf-8",
)
