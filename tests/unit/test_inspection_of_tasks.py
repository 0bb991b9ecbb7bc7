"""Tasks and their signatures look to other code as those of Celery do, and keys fit the calls."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, chain, chord, group, shared_task
from celery.app.task import Task

from celery_singleton_lock import SingletonTask, hold, singleton_task
from celery_singleton_lock.celery_compat import real_app

app = Celery("inspected", broker="memory://", backend="cache+memory://", set_as_current=False)
app.conf.update(singleton_lock_url="memory://", task_always_eager=True)


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    """The app ends with the tests of this module."""
    yield
    app.close()


@pytest.fixture(autouse=True)
def current() -> Iterator[None]:
    """A pickled task is its name, which is looked up in the current app."""
    before = real_app()
    app.set_current()
    yield
    before.set_current()


FORMS: list[dict[str, Any]] = [
    {},
    {"bind": True},
    {"bind": True, "autoretry_for": (OSError,)},
    {"base": None},  # a class instead of a function, see `declared`
]


def sync(account_id: int, force: bool = False) -> str:
    """Synchronize an account."""
    return f"{account_id} {force}"


def sync_bound(self: Any, account_id: int, force: bool = False) -> str:
    """Synchronize an account."""
    return f"{account_id} {force}"


def declared(form: dict[str, Any], name: str, *, ours: bool) -> Any:
    """A task of ours, or Celery's own, in one of the forms."""
    if "base" in form:
        base: Any = SingletonTask if ours else Task
        body = {"name": name, "run": sync_bound, "__module__": __name__, "__doc__": sync.__doc__}
        return app.register_task(type("sync", (base,), body)())
    body = sync_bound if form.get("bind") else sync
    return (singleton_task(app=app, name=name, **form) if ours else app.task(name=name, **form))(
        body
    )


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """What a call may give; the annotations of a class's own ``__call__`` differ."""
    found = inspect.signature(function).parameters.values()
    return [(parameter.name, parameter.kind, parameter.default) for parameter in found]


def refused(delay: Callable[..., Any]) -> bool:
    """Whether wrong arguments fail, at the call or in the task."""
    try:
        return bool(delay(1, 2, 3).failed())
    except TypeError:
        return True


LOOKS: dict[str, Callable[[Any], Any]] = {
    "signature": parameters,
    "signature of run": lambda task: inspect.signature(task.run),
    "signature of delay": lambda task: list(inspect.signature(task.delay).parameters),
    "signature of a partial": lambda task: parameters(functools.partial(task, 1)),
    "getfullargspec": lambda task: inspect.getfullargspec(task)[:6],
    "type hints": lambda task: typing.get_type_hints(task.run),
    "annotations": lambda task: task.run.__annotations__,
    "doc": inspect.getdoc,
    "name": lambda task: getattr(task, "__name__", None),
    "qualified name": lambda task: getattr(task, "__qualname__", None),
    "module": lambda task: (task.__module__, inspect.getmodule(task)),
    "wrapped": lambda task: getattr(inspect.unwrap(task), "__name__", None),
    "wraps": lambda task: parameters(functools.wraps(task)(lambda *args: None)),
    "callable": lambda task: (callable(task), inspect.isroutine(task)),
    "coroutine": inspect.iscoroutinefunction,
    "registered": lambda task: app.tasks[task.name] == task,
    "hash": lambda task: hash(app.tasks[task.name]) == hash(task),
    "pickle": lambda task: pickle.loads(pickle.dumps(task)) == task,
    "copies": lambda task: (copy.copy(task) == task, copy.deepcopy(task) == task),
    "repr": lambda task: repr(task).partition(" at ")[0],
    "pickled signature": lambda task: pickle.loads(pickle.dumps(task.s(1))),
    "signature's type": lambda task: task.s(1).type == task,
    "call": lambda task: task(1),
    "delay": lambda task: task.delay(1).get(),
    "wrong arguments": lambda task: refused(task.delay),
    "chain": lambda task: chain(task.si(1), task.si(2)).delay().get(),
    "group": lambda task: group(task.s(1), task.s(2)).delay().get(),
    "chord": lambda task: chord([task.s(1)], task.si(2)).delay().get(),
    "map": lambda task: task.map([1, 2]).delay().get(),
}


def shown(look: Callable[[Any], Any], task: Any) -> str:
    try:
        return str(look(task))
    except Exception as error:
        return repr(error)


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("form", FORMS, ids=["function", "bound", "autoretry", "class"])
def test_a_task_looks_as_celery_s_own_does(form: dict[str, Any], look: str) -> None:
    kind = f"{FORMS.index(form)}.{look}"
    ours = declared(form, f"{kind}.ours", ours=True)
    celerys = declared(form, f"{kind}.celery's", ours=False)
    assert shown(LOOKS[look], ours).replace("ours", "celery's") == shown(LOOKS[look], celerys)


def test_a_shared_task_looks_as_celery_s_own_does() -> None:
    # An app of its own: Celery gives shared tasks to no app that was closed, and that of the module
    # is closed when another test follows, though one of the module's may come later.
    with Celery("sharing", broker="memory://") as sharing:
        ours, celerys = singleton_task(sync), shared_task(name="other.sync")(sync)
        sharing.finalize()
        for name in ("signature", "doc", "name", "qualified name", "module", "annotations"):
            assert shown(LOOKS[name], ours) == shown(LOOKS[name], celerys), name


def test_a_function_that_holds_looks_as_before() -> None:
    @functools.wraps(sync)
    def same(*args: Any) -> Any: ...

    held = hold("report", scope="reports")(sync)
    for name in ("signature", "doc", "name", "qualified name", "annotations"):
        assert shown(LOOKS[name], held) == shown(LOOKS[name], same), name
    assert inspect.unwrap(held) is sync


# Decorators of users below @singleton_task.


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


def logged_with_self(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return inner


def with_session(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(account_id: int, force: bool = False) -> Any:
        return function("session", account_id, force)

    return inner


def without_wraps(function: Callable[..., Any]) -> Callable[..., Any]:
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return inner


def of_session(session: str, account_id: int, force: bool = False) -> str:
    return f"{account_id} {force}"


KEYS = [None, "account:{account_id}", ("account_id",), lambda account_id, force=False: "x"]


@pytest.mark.parametrize("key", KEYS, ids=["all", "template", "names", "callable"])
@pytest.mark.parametrize(
    ("body", "bind"),
    [
        (logged(sync), False),
        (logged(logged(sync)), False),
        (logged(sync_bound), True),
        (logged_with_self(logged(sync_bound)), True),
        (with_session(of_session), False),
        (logged(with_session(of_session)), False),
    ],
    ids=["logged", "twice", "bound", "with self", "injected", "logged injected"],
)
def test_a_decorated_function_has_the_keys_of_its_calls(
    body: Callable[..., Any], bind: bool, key: Any
) -> None:
    tasks = Celery("decorated", set_as_current=False, task_always_eager=True)
    tasks.conf.singleton_lock_url = "memory://"
    task: Any = singleton_task(app=tasks, name="task", bind=bind, key=key)(body)
    plain: Any = singleton_task(app=tasks, name="same", key=key)(sync)
    for args, kwargs in (((42,), {}), ((42, True), {}), ((), {"force": True, "account_id": 7})):
        key_of_plain = plain.lock_key(*args, **kwargs)
        assert task.lock_key(*args, **kwargs) == key_of_plain.replace("same", "task")
        assert task.delay(*args, **kwargs).get() == sync(*args, **kwargs)


def test_a_wrapper_that_hides_the_names_of_a_key_is_refused() -> None:
    with pytest.raises(ValueError, match=r"functools\.wraps"):
        singleton_task(app=app, name="hidden", key=("account_id",))(without_wraps(sync))
