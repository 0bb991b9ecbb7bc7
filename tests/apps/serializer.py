"""A serializer of our own, for apps and tests."""

from __future__ import annotations

import json

from kombu.serialization import register

#: A serializer that Celery doesn't use by itself, and that can do what JSON can't: sets.
SETS = "sets"
register(
    SETS,
    lambda value: json.dumps(value, default=lambda items: {"set": sorted(items)}),
    lambda text: json.loads(text, object_hook=lambda d: set(d["set"]) if "set" in d else d),
    content_type="application/x-sets",
    content_encoding="utf-8",
)
