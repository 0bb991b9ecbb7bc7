"""Looks at the queue of a key that come after two seconds, for the processes of a test."""

from __future__ import annotations

import hashlib

from celery_singleton_lock.stores.redis import scripts


def hasten_hints() -> None:
    """Let a hint be late after 2 s, and not after a minute: hints are lost in such a test."""
    hastened = {}
    for script in scripts.Script.known.values():
        script.source = script.source.replace(b"60000", b"2000")
        script.sha = hashlib.sha1(script.source, usedforsecurity=False).hexdigest()
        hastened[script.sha] = script
    scripts.Script.known.clear()
    scripts.Script.known.update(hastened)
