"""Stands in for the package of this name in the processes that tests start (`tests/conftest.py`).

Celery imports it for the shell of ``celery amqp``, with a toolkit for terminals: a fifth of what
the start of a worker costs. No test opens that shell.
"""

from __future__ import annotations


def register_repl(*_: object, **__: object) -> None:
    """Register no command."""
