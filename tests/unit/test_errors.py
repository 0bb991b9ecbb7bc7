"""What an error says must arrive where the result is read."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from celery import Celery
from celery.backends.base import Backend

from celery_singleton_lock import errors

MADE = [
    errors.SingletonLockError("a message"),
    errors.LockConflict("held by w", "csl:k", {"task": "app.sync", "worker": "w@ü"}),
    errors.LockConflict("only a message"),
    errors.DuplicateTask("t-1 is queued", "t-1", 3599.5),
    errors.QueueFull("2 calls are in the queue", 2),
    errors.LeaseLost("lost 1.8 s ago", "csl:k", "expired"),
    errors.NoLease("no lease is held here"),
    errors.FenceUnavailable("no fence"),
    errors.LockKeyError("no key"),
    errors.SettingsError("wrong"),
    errors.StoreError("refused"),
    errors.StoreUnavailable("away"),
]


def test_every_error_is_tried_here() -> None:
    assert {type(error).__name__ for error in MADE} == {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }


def same(one: BaseException, other: BaseException) -> bool:
    return (type(one), str(one), one.args, vars(one)) == (
        type(other),
        str(other),
        other.args,
        vars(other),
    )


@pytest.mark.parametrize("error", MADE, ids=repr)
def test_an_error_survives_pickle(error: Exception) -> None:
    assert same(pickle.loads(pickle.dumps(error)), error)


@pytest.mark.parametrize("serializer", ["json", "pickle"])
@pytest.mark.parametrize("error", MADE, ids=repr)
def test_an_error_survives_celerys_result_backend(error: Exception, serializer: str) -> None:
    app = Celery("app", set_as_current=False)
    backend: Any = Backend(app, serializer=serializer, accept=["json", "pickle"])
    stored = backend.decode(backend.encode(backend.prepare_exception(error)))
    read = backend.exception_to_python(stored)
    assert type(read) is type(error)
    assert str(read) == str(error)
    for name in ("key", "holder", "reason", "task_id", "remaining"):
        assert getattr(read, name, None) == getattr(error, name, None)


@pytest.mark.parametrize("error", MADE, ids=repr)
def test_an_errors_arguments_are_plain_data_and_the_first_is_its_sentence(error: Exception) -> None:
    assert json.loads(json.dumps(error.args)) == list(error.args)
    assert str(error) == error.args[0]


def test_errors_are_caught_by_the_names_people_know() -> None:
    assert issubclass(errors.StoreUnavailable, errors.StoreError)
    assert issubclass(errors.LockKeyError, ValueError)
    assert issubclass(errors.SettingsError, ValueError)
    assert issubclass(errors.NoLease, LookupError)
    assert all(issubclass(type(error), errors.SingletonLockError) for error in MADE)
    assert str(errors.SingletonLockError()) == "SingletonLockError"
