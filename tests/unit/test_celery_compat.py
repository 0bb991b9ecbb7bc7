"""Private and version-dependent names of other libraries are used in one module each."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement

import celery_singleton_lock

PACKAGE: Final = Path(celery_singleton_lock.__file__).parent
COMPAT: Final = "celery_compat.py"

# Names without an underscore that exist in some versions only, or that no manual mentions.
VERSION_DEPENDENT: Final = frozenset(
    {
        *("acks_on_failure", "acks_on_failure_or_timeout", "acks_on_timeout"),
        *("add_autoretry_behaviour", "connect_on_app_finalize", "connparams"),
        *(
            "detect_quorum_queues",
            "conn_or_acquire",
            "driver_type",
            "retry_on_worker_lost",
            "type_to_name",
        ),
        *("HIDDEN_SETTINGS", "ExceptionWithTraceback"),
    }
)
# Private names that a subclass would reach through `self`, where no other rule sees them.
OF_BASE_CLASSES: Final = frozenset(
    {
        *("_already_cancelled", "_already_revoked", "_request_dict"),
        *("_default_now", "_dirty", "_heap", "_initial_read", "_next_instance", "_unpack_options"),
        *("_orig_run", "_dump_pydantic_arguments"),
    }
)
# Private names of other libraries, by the only module that may use them. The module says in which
# versions they exist.
OF_OTHERS: Final[Mapping[str, frozenset[str]]] = {
    "stores/redis/connection.py": frozenset({"_sock"}),  # redis-py
    "stores/zookeeper/sessions.py": frozenset(  # kazoo
        {"_connect", "_connection", "_invoke", "_socket"}
    ),
    "task/hold.py": frozenset({"_get_running_loop"}),  # asyncio
    "task/interrupt.py": frozenset({"_current_frames", "_loop", "_signal"}),  # CPython, asyncio
}
# The packages whose private names, or undocumented parts of whose classes, are used.
BOUNDED: Final = frozenset(
    {"celery", "celery-redbeat", "django-celery-beat", "kazoo", "redis", "uvicorn"}
)
# Public in spite of their underscore: of namedtuples, and a documented module of Python.
PUBLIC: Final = frozenset({"_replace", "_thread"})


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_self(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def own_names(tree: ast.AST) -> Iterator[str]:
    """Private names that this module's own code defines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
            if isinstance(node, ast.ClassDef):
                for line in node.body:
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                        yield line.target.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if is_self(node.value) else []


def used_names(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """Line, name, and whether only a class of our own may have it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr, is_self(node.value)
        elif isinstance(node, ast.FunctionDef):
            yield node.lineno, node.name, True
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.lineno, node.target.id, True
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("getattr", "hasattr", "setattr", "delattr"):
                name = node.args[1]
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    yield node.lineno, name.value, False
        elif isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in (*modules, *(alias.name for alias in node.names)):
                yield from ((node.lineno, part, False) for part in name.split("."))


def violations(tree: ast.AST, own: frozenset[str], module: str = "") -> list[tuple[int, str]]:
    """Line and name of each use that belongs into celery_compat, or into another module."""
    others = OF_OTHERS.get(module, frozenset())
    elsewhere = frozenset().union(*OF_OTHERS.values()) - others
    allowed = (own - elsewhere) | others | PUBLIC
    return [
        (line, name)
        for line, name, of_self in used_names(tree)
        if name in VERSION_DEPENDENT
        or name in OF_BASE_CLASSES
        or (is_private(name) and not of_self and name not in allowed)
    ]


def parsed() -> dict[str, ast.AST]:
    return {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text())
        for path in PACKAGE.rglob("*.py")
    }


def test_private_names_of_a_library_are_used_in_one_module_only() -> None:
    trees = parsed()
    compat = trees.pop(COMPAT)
    trees.pop("task/option_types.py")  # names the options of all versions, for type checkers alone
    own = frozenset(name for tree in trees.values() for name in own_names(tree))
    found = {name: bad for name, tree in trees.items() if (bad := violations(tree, own, name))}
    assert not found
    used = {name: {used for _, used, _ in used_names(tree)} for name, tree in trees.items()}
    unused = {name: rest for name, names in OF_OTHERS.items() if (rest := names - used[name])}
    assert not unused
    assert len(violations(compat, frozenset())) > 10, "the rules see none of the names they are for"


def test_a_package_whose_private_names_are_used_has_an_upper_bound() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    users = extras.keys() - {"bench", "demo", "dev", "docs", "test"}
    needed = [*project["dependencies"], *(line for name in users for line in extras[name])]
    bounds = {found.name: str(found.specifier) for found in map(Requirement, needed)}
    assert {name for name, versions in bounds.items() if "<" in versions} == BOUNDED


@pytest.mark.parametrize(
    "code",
    [
        "from celery import _state",
        "from celery._state import get_current_app",
        "app._task_from_fun(fun)",
        "getattr(task, '_dump_pydantic_arguments', None)",
        "getattr(task, 'acks_on_failure', True)",
        "task.retry_on_worker_lost",
        "from celery.app.autoretry import add_autoretry_behaviour",
        "class Mine(Scheduler):\n    def tick(self):\n        self._heap = None",
        "class Mine(Request):\n    _already_revoked: bool",
        "class Mine(ModelEntry):\n    def _unpack_options(self): ...",
        "registry.type_to_name",
        "client._connection.ping()",
        "getattr(connection, '_socket', None)",
        "from kazoo.client import _sock",
        "from prometheus_client._private import name",
        "import _signal",
    ],
)
def test_a_private_name_elsewhere_is_found(code: str) -> None:
    assert violations(ast.parse(code), frozenset())


@pytest.mark.parametrize(
    "code",
    [
        "from celery import Celery\nCelery().tasks",
        "class Mine:\n    def __init__(self):\n        self._own = 1\n        self._own",
        "parts._replace(scheme='')",
        "super().__init__()",
        "class Mine:\n    def __init__(self):\n        self._connection = 1",
        "from __future__ import annotations",
        "import _thread",
    ],
)
def test_a_public_or_own_name_is_not_reported(code: str) -> None:
    assert not violations(ast.parse(code), frozenset())
