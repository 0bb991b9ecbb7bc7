"""A keyword or a value that means nothing here is refused with what means the same, or accepted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, Task

from celery_singleton_lock import SingletonTask, TaskOptions, singleton_task
from celery_singleton_lock.celery_compat import NEWER_OPTIONS
from celery_singleton_lock.on_conflict import ACTIONS
from celery_singleton_lock.option_names import OTHER_OPTIONS, suggestion
from celery_singleton_lock.option_values import OnDuplicate, OnLost, Unique
from celery_singleton_lock.policy import OPTIONS
from celery_singleton_lock.settings import _NAMES, SettingsError, read_settings


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("unit-names", broker="memory://", set_as_current=False)
    yield app
    app.close()


def sync(account_id: int) -> None: ...


def by_our_decorator(app: Celery, **options: Any) -> Any:
    return singleton_task(app=app, name="sync", shared=False, **options)(sync)


def by_celery_s_decorator(app: Celery, **options: Any) -> Any:
    return app.task(base=SingletonTask, name="sync", shared=False, lazy=False, **options)(sync)


DECORATORS = pytest.mark.parametrize("declare", [by_our_decorator, by_celery_s_decorator])


@DECORATORS
@pytest.mark.parametrize(("name", "older"), NEWER_OPTIONS.items())
def test_an_option_of_a_newer_celery_is_refused_with_its_version(
    monkeypatch: pytest.MonkeyPatch,
    app: Celery,
    declare: Callable[..., Any],
    name: str,
    older: str,
) -> None:
    """This Celery would ignore it, and with it what is to become of a killed job."""
    monkeypatch.delattr(Task, name, raising=False)
    with pytest.raises(
        TypeError, match=rf"no option '{name}' in Celery .* new in 5\.7. Use {older}"
    ):
        declare(app, **{name: True})


@DECORATORS
@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        # What a typo costs: a lost job, a job without a limit.
        ("reject_on_worker_late", " (did you mean 'reject_on_worker_lost'?)"),
        ("reject_on_worker_loss", " (did you mean 'reject_on_worker_lost'?)"),
        ("task_reject_on_worker_lost", " (did you mean 'reject_on_worker_lost'?)"),
        ("CELERY_TASK_ACKS_LATE", " (did you mean 'acks_late'?)"),
        ("late_acks", " (did you mean 'acks_late'?)"),
        ("timelimit", " (did you mean 'time_limit'?)"),
        ("task_soft_time_limit", " (did you mean 'soft_time_limit'?)"),
        ("hard_time_limit", ": write time_limit="),
        ("countdown", ": give it to apply_async()"),
        # Words of other locks.
        ("timeout", ": elsewhere it is how long a lock lasts: write ttl="),
        ("lock_timeout", ": write ttl="),
        ("expire", ": write ttl="),
        ("wait", ': write on_conflict="wait"'),
        ("blocking", ': write on_conflict="wait"'),
        ("blocking_timeout", ": write on_conflict=OnConflict.wait(timeout=...)"),
        ("sleep", ": leave it out"),
        ("graceful", ': write unique="until_done", on_duplicate="skip"'),
        ("unique_key", ": write key="),
        ("max_concurrency", ": write limit=..., and key=PER_TASK"),
        # Of a lock, certainly, but of none that is known.
        ("lock_colour", ". The options of the lock are debounce, "),
        ("singleton_lock_enabled", " (did you mean 'enabled'?)"),
        ("singleton_lock_url", ". The options of the lock are debounce, "),
    ],
)
def test_a_keyword_without_effect_is_refused_with_what_to_write(
    app: Celery, declare: Callable[..., Any], name: str, remedy: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(f"there is no option {name!r}{remedy}")):
        declare(app, **{name: True})


@DECORATORS
@pytest.mark.parametrize(
    "name",
    ["colour", "priority_class", "max_items", "on_site", "tenant", "retry_hint", "compression"],
)
def test_a_keyword_that_resembles_no_option_is_an_attribute(
    app: Celery, declare: Callable[..., Any], name: str
) -> None:
    assert getattr(declare(app, **{name: 7}), name) == 7


def test_a_base_of_the_user_may_have_any_attribute(app: Celery) -> None:
    class Own(SingletonTask[..., Any]):
        abstract = True
        timeout = 5
        reject_on_worker_late = False

    assert by_our_decorator(app, base=Own, timeout=6).timeout == 6


@pytest.mark.parametrize("name", sorted(OTHER_OPTIONS))
def test_a_word_of_another_lock_is_no_option_of_ours_or_celery_s(name: str) -> None:
    assert name not in OPTIONS | set(TaskOptions.__annotations__)
    known = (
        OPTIONS
        | set(TaskOptions.__annotations__)
        | {name for rule in ACTIONS.values() for name in rule.options()}
    )
    for written in re.findall(r"(\w+)=", OTHER_OPTIONS[name]):
        assert written in known | {"timeout"}


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({"unique": "until_executed"}, "until_done"),
        ({"unique": "until_finished"}, "until_done"),
        ({"unique": "until_and_while_executing"}, "until_start"),
        ({"unique": "until_expire"}, "until_expired"),
        ({"unique": "until_started"}, "until_start"),
        ({"on_conflict": "ignore"}, "skip"),
        ({"on_conflict": "requeue"}, "retry"),
        ({"on_conflict": "fail"}, "raise"),
        ({"on_lost": "raise"}, None),
        ({"on_lost": "error"}, "fail"),
        ({"on_lost": "ignore"}, None),
        ({"on_store_error": "error"}, "raise"),
        ({"unique": "whatever"}, None),
        ({"unique": "while_executing"}, None),
    ],
)
def test_a_value_of_another_lock_is_refused_with_ours(
    app: Celery, options: dict[str, str], meant: str | None
) -> None:
    said = f"(did you mean {meant!r}?)" if meant else "(known: "
    with pytest.raises(ValueError, match=re.escape(f"={next(iter(options.values()))!r} {said}")):
        by_our_decorator(app, **options)


def test_every_typo_of_one_letter_is_understood_and_only_as_that() -> None:
    kinds: tuple[Any, ...] = (ACTIONS, OnDuplicate, OnLost, Unique)
    for known in ([*OPTIONS], *([str(member) for member in kind] for kind in kinds)):
        for name in known:
            for at in range(1, len(name)):
                typo = name[:at] + name[at + 1 :]
                if typo not in known and len(typo) > 2:
                    assert repr(name) in suggestion(typo, known), typo


@pytest.mark.parametrize("name", ["enabled", "tls", "password", "timeout", "host", "db"])
def test_a_setting_that_resembles_none_gets_no_suggestion(app: Celery, name: str) -> None:
    if name in _NAMES:
        pytest.skip("it is a setting")
    app.conf[f"singleton_lock_{name}"] = 1
    with pytest.raises(SettingsError, match=r"unknown setting 'singleton_lock_\w+' \(known: "):
        read_settings(app)


@pytest.mark.parametrize("name", ["ttl", "on_conflict", "unique", "key", "debounce"])
def test_an_option_of_the_lock_beside_the_arguments_of_a_call_is_refused(
    app: Celery, name: str
) -> None:
    task = by_our_decorator(app)
    said = re.escape(f"Write singleton={{{name!r}: ...}}")
    with pytest.raises(TypeError, match=said):
        task.apply_async((1,), **{name: 5})
    with pytest.raises(TypeError, match=said):
        task.s(1).set(**{name: 5}).delay()
