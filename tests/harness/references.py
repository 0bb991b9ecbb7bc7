"""References to the package's code from prose and models: ``path`` or ``path name``."""

from __future__ import annotations

import ast
from pathlib import Path

import celery_singleton_lock

__all__ = ["PACKAGE", "exists"]

PACKAGE = Path(celery_singleton_lock.__file__).parent


def exists(reference: str) -> bool:
    """Whether a file of the package is there, and has the function, class or ``Class.method``."""
    path, _, name = reference.partition(" ")
    file = PACKAGE / path
    return file.is_file() and (not name or name in _names_in(file.read_text()))


def _names_in(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names.update(
                f"{node.name}.{inner.name}"
                for inner in node.body
                if isinstance(inner, ast.FunctionDef)
            )
    return names
