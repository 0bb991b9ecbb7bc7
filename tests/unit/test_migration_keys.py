"""The bridges write the names that the old packages write, and take or refuse their options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import celery_heimdall as old_heimdall
import celery_once as old_once
import celery_singleton as old_singleton
import pytest
from celery import Celery
from celery_heimdall.task import unique_key_for_task

from celery_singleton_lock.errors import SettingsError
from celery_singleton_lock.migration import HeimdallTask, QueueOnce, Singleton

CALLS: list[tuple[list[Any], dict[str, Any]]] = [
    (["a"], {}),
    (["a", 1], {}),
    ([], {"name": "a", "value": [1, 2.5, None, True, {"b": 1, "a": {"d": [], "c": "x"}}]}),
    (["ä b#%", {"b": 1, "a": {"d": [{"z": 1, "y": 2}], "c": "x=y\n"}}], {"flag": True}),
    (["{}", {"a": {}}], {}),
    (["a", "b"], {"flag": False}),
]


def run(name: Any, value: Any = None, flag: bool = False) -> None: ...


def app_with(**conf: Any) -> Celery:
    app = Celery("migrating", set_as_current=False, broker="redis://127.0.0.1:1/0")
    app.conf.ONCE = {
        "backend": "celery_once.backends.Redis",
        "settings": {"url": "redis://127.0.0.1:1/0"},
    }
    app.conf.update(conf)
    return app


def declared(base: Any, app: Celery | None = None, **options: Any) -> Any:
    found = (app or app_with()).task(run, base=base, name="a.task", shared=False, **options)
    assert found.name
    return found


def test_celery_onces_keys() -> None:
    for options in ({}, {"keys": ["name"]}, {"keys": []}):
        old = declared(old_once.QueueOnce, once=options)
        new = declared(QueueOnce, once=options)
        for args, kwargs in CALLS:
            assert new.get_key(args, kwargs) == old.get_key(args, kwargs)


def test_celery_singletons_keys() -> None:
    for options in ({}, {"unique_on": "name"}, {"unique_on": ["name"]}):
        old = declared(old_singleton.Singleton, **options)
        new = declared(Singleton, **options)
        for args, kwargs in CALLS:
            key = new.old_key(args, kwargs)
            assert key == old.generate_lock("a.task", args, kwargs)
            assert key.startswith("SINGLETONLOCK_")
    assert declared(Singleton, app_with(singleton_key_prefix="p:")).old_key([1], {})[:2] == "p:"


@pytest.mark.parametrize(
    "options", [{}, {"key": "k"}, {"key": lambda args, kwargs: f"{args!r}"}, {"lock_prefix": "p:"}]
)
def test_celery_heimdalls_keys(options: dict[str, Any]) -> None:
    heimdall = {"unique": True, **options}
    old = declared(old_heimdall.HeimdallTask, heimdall=heimdall)
    new = declared(HeimdallTask, heimdall=heimdall)
    for args, kwargs in CALLS:
        prefix = old.heimdall_config.lock_prefix
        assert new.old_key(args, kwargs) == unique_key_for_task(old, args, kwargs, prefix=prefix)


@pytest.mark.parametrize(
    ("declare", "error"),
    [
        (lambda: declared(QueueOnce, once={"gracefull": True}), "unknown option 'gracefull'"),
        (lambda: declared(QueueOnce, once={"keys": ["nam"]}), "nam"),
        (lambda: declared(Singleton, unique_on=["nam"]), "nam"),
        (lambda: declared(HeimdallTask, heimdall={"times": 1, "per": 2}), "'times' can't be taken"),
        (lambda: declared(HeimdallTask, heimdall={}), "no 'unique'"),
        (lambda: declared(HeimdallTask), "no 'unique'"),
        (lambda: declared(QueueOnce, singleton={"unique": "until_done"}), "decide 'unique'"),
        (lambda: declared(Singleton, singleton={"key": "{name}"}), "decide 'key'"),
        (
            lambda: declared(Singleton).apply_async(["a"], singleton={"unique_for": 5}),
            "decide 'unique_for'",
        ),
        (lambda: declared(QueueOnce).apply_async(["a"], once={"keys": ["name"]}), "task only"),
    ],
)
def test_options_that_cant_be_taken_are_refused(declare: Callable[[], Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        declare()


@pytest.mark.parametrize("bridge", [None, True, False])
@pytest.mark.parametrize("base", [QueueOnce, Singleton, HeimdallTask])
def test_the_old_options_become_a_policy(base: Any, bridge: bool | None) -> None:
    options: dict[str, Any] = {
        QueueOnce: {"once": {"timeout": 50}},
        Singleton: {"lock_expiry": 50},
        HeimdallTask: {"heimdall": {"unique": True, "unique_timeout": 50}},
    }[base]
    app = app_with(singleton_lock_old_locks=bridge, singleton_lock_unique="until_start")
    policy = declared(base, app, singleton={"ttl": 7}, **options).singleton_policy()
    assert policy.ttl == 7
    assert policy.on_conflict.max_wait is None
    if bridge is False:
        assert (policy.unique, policy.unique_for, policy.on_duplicate) == (
            "until_done",
            50,
            "raise",
        )
    else:
        assert policy.unique is None


def test_celery_singletons_claims_without_an_end_end_after_a_day() -> None:
    policy = declared(Singleton, app_with(singleton_lock_old_locks=False)).singleton_policy()
    assert policy.unique_for == 86400


@pytest.mark.parametrize("action", ["revoke", "cancel_running"])
def test_an_end_that_would_leave_the_old_key_is_refused(action: str) -> None:
    with pytest.raises(ValueError, match="would leave the old key"):
        declared(QueueOnce, singleton={"on_conflict": action}).singleton_policy()


@pytest.mark.parametrize(
    ("base", "conf", "error"),
    [
        (QueueOnce, {"ONCE": None}, "ONCE has backend None"),
        (QueueOnce, {"ONCE": {"backend": "celery_once.backends.File"}}, "File"),
        (
            QueueOnce,
            {"ONCE": {"backend": "celery_once.backends.Redis", "settings": {"url": "amqp://"}}},
            "names no Redis server",
        ),
        (Singleton, {"singleton_backend_class": "mine.Backend"}, "RedisBackend only"),
        (Singleton, {"broker_url": "amqp://x:secret@h"}, "names no Redis server"),
        (HeimdallTask, {"broker_url": "amqp://"}, "Override setup_redis"),
    ],
)
def test_a_server_that_the_old_package_could_not_use_is_refused(
    base: Any, conf: dict[str, Any], error: str
) -> None:
    options = {"heimdall": {"unique": True}} if base is HeimdallTask else {}
    with pytest.raises(SettingsError, match=error) as raised:
        declared(base, app_with(**conf), **options).singleton_policy()
    assert "secret" not in str(raised.value)
