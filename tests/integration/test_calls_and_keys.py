"""Which calls are one key, on a real worker."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from celery_singleton_lock import is_skipped
from celery_singleton_lock.core.keyspace import Keyspace
from tests.harness.keys import EVERY_NAME, name_in_store
from tests.harness.worker import CeleryWorker
from tests.integration.stage import Stage, wait_until


@pytest.fixture(scope="module", autouse=True)
def worker(stage: Stage) -> CeleryWorker:
    return stage.worker(concurrency=4)


def skipped_among(results: list[Any], count: int) -> list[Any]:
    """Wait until ``count`` of the results say "skipped"."""
    return wait_until(
        lambda: (
            found
            if len(found := [r for r in results if r.ready() and is_skipped(r)]) >= count
            else []
        ),
        f"{count} of {len(results)} calls are skipped",
    )


def test_of_ten_equal_calls_one_runs_and_nine_are_skipped(stage: Stage, name: str) -> None:
    results = [stage.app.by_arguments.delay(name, gate=name) for _ in range(10)]
    assert len(skipped_among(results, 9)) == 9
    stage.open(name)
    values = [result.get(timeout=20) for result in results]
    assert sum(map(is_skipped, values)) == 9
    assert values.count(name) == 1
    assert {result.state for result in results} == {"SUCCESS"}
    assert len(stage.starts(name)) == 1


def test_a_skipped_call_names_the_running_task(stage: Stage, name: str) -> None:
    running = stage.occupy(name)
    value = stage.app.work.delay(name, gate=name).get(timeout=20)
    assert is_skipped(value)
    assert value["key"] == stage.key(name)
    assert value["holder"]["task_id"] == running.id
    assert value["holder"]["task"] == stage.app.work.name
    stage.open(name)
    assert not is_skipped(running.get(timeout=20))


def test_different_arguments_run_in_parallel(stage: Stage, name: str) -> None:
    results = [stage.app.by_arguments.delay(name, account=n, gate=name) for n in range(3)]
    # No body passes the gate before all three are in their bodies.
    stage.journal.wait_for_starts(3, key=name)
    stage.open(name)
    assert [result.get(timeout=20) for result in results] == [name] * 3


def test_the_key_is_free_after_the_run(stage: Stage, name: str) -> None:
    key = stage.app.by_arguments.lock_key(name)
    for _ in range(3):
        assert stage.app.by_arguments.delay(name).get(timeout=20) == name
        wait_until(lambda: stage.redis.exists(key) == 0, f"{key} is free")
    assert len(stage.starts(name)) == 3


def test_equal_calls_written_five_ways_are_one_key(stage: Stage, name: str) -> None:
    task, gate = stage.app.by_arguments, name
    ways: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((name, 7, {"a": 1, "b": [2, None]}, [], gate), {}),  # positional
        ((), {"gate": gate, "options": {"a": 1, "b": [2, None]}, "account": 7, "name": name}),
        ((name, 7, {"a": 1, "b": [2, None]}), {"gate": gate}),  # default left out
        ((name, 7, {"b": [2, None], "a": 1}, (), gate), {}),  # dict order
        ((name, 7, {"a": 1, "b": (2, None)}, (), gate), {}),  # tuple for list
    ]
    assert len({task.lock_key(*args, **kwargs) for args, kwargs in ways}) == 1
    results = [task.apply_async(args, kwargs) for args, kwargs in ways]
    assert len(skipped_among(results, 4)) == 4
    stage.open(name)
    assert [result.get(timeout=20) for result in results].count(name) == 1
    [start] = stage.starts(name)
    assert start.data["held"] == task.lock_key(*ways[0][0])


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, "1"), (1, True), (0, False), (None, "null"), ([1], [[1]]), ("a", "A"), ({}, [])],
    ids=repr,
)
def test_values_that_differ_in_type_or_shape_are_two_keys(
    stage: Stage, name: str, one: Any, other: Any
) -> None:
    results = [stage.app.by_arguments.delay(name, account, gate=name) for account in (one, other)]
    first, second = stage.journal.wait_for_starts(2, key=name)
    assert first.data["held"] != second.data["held"]
    stage.open(name)
    assert [result.get(timeout=20) for result in results] == [name] * 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (((1,), {"account": 2}), ((5,), {"account": 2})),
        (((1,), {"y=1\nz": 2}), ((1,), {"y": 1, "z": 2})),
        (((1,), {"self": 2}), ((1,), {"self": 3})),
    ],
    ids=["positional-only", "newline", "self"],
)
def test_arguments_that_share_a_name_are_two_keys(
    stage: Stage, name: str, one: Any, other: Any
) -> None:
    task, given = stage.app.by_collected, {"name": name, "gate": name}
    results = [task.apply_async(args, given | collected) for args, collected in (one, other)]
    starts = stage.journal.wait_for_starts(2, key=name)
    assert {start.data["held"] for start in starts} == {
        task.lock_key(*args, **given, **collected) for args, collected in (one, other)
    }
    again = [task.apply_async(args, given | collected) for args, collected in (one, other)]
    assert all(is_skipped(result.get(timeout=20)) for result in again)
    stage.open(name)
    assert [result.get(timeout=20) for result in results] == [name] * 2


VALUES: dict[str, Any] = {
    "uuid": UUID("b2a5a7a2-6f8e-4c4b-9d5a-1f0f6a1c2d3e"),
    "datetime": datetime(2024, 2, 29, 23, 59, 59, 123456),
    "datetime with zone": datetime(2024, 2, 29, 23, 59, 59, tzinfo=UTC),
    "date": date(2024, 2, 29),
    "decimal": Decimal("12345678901234567890.10"),
    "bytes": b"\x00\xff\xfe lock",
    "dict with int keys": {1: "a", 2: {3: "b"}, 10: None},
    "unicode": "Zoë \N{SNOWMAN} \u202e\U0001f512 a:b c\n",
    "float": 0.1 + 0.2,
    "big int": 2**80,
    "nested": {"a": [UUID(int=1), (Decimal("1.0"), b"x")], "b": {"c": datetime(2024, 1, 1)}},
    "tuple": ("a", ("b", 1)),
}


@pytest.mark.parametrize("kind", VALUES)
def test_the_publisher_knows_the_key_that_the_worker_holds(
    stage: Stage, name: str, kind: str
) -> None:
    task, value = stage.app.by_arguments, VALUES[kind]
    first = task.delay(name, value, {"inside": value}, [value], gate=name)
    [start] = stage.journal.wait_for_starts(1, key=name)
    assert start.data["held"] == task.lock_key(name, value, {"inside": value}, [value], gate=name)
    assert stage.redis.get(start.data["held"]).startswith(f"l {first.id}+")
    assert is_skipped(
        task.delay(name, value, {"inside": value}, [value], gate=name).get(timeout=20)
    )
    stage.open(name)
    assert first.get(timeout=20) == name


@pytest.mark.parametrize("kind", ["uuid", "unicode", "decimal", "big int", "date"])
def test_a_template_renders_alike_on_both_sides(stage: Stage, name: str, kind: str) -> None:
    task, value = stage.app.by_template, VALUES[kind]
    result = task.delay(name, value, gate=name)
    [start] = stage.journal.wait_for_starts(1, key=name)
    assert start.data["held"] == task.lock_key(name, value, gate=name)
    stage.open(name)
    assert result.get(timeout=20) == name


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"b": 2, "a": {"d": 1, "c": 2}}, {"a": {"c": 2, "d": 1}, "b": 2}),
        ((1, (2, [3])), (1, (2, [3]))),
        ({8, 0}, {0, 8}),
        ({2: "b", 1: "a"}, {1: "a", 2: "b"}),
    ],
    ids=["dict", "tuple", "set", "dict with int keys"],
)
def test_equal_values_in_a_template_are_one_key_and_the_publisher_knows_it(
    stage: Stage, name: str, one: Any, other: Any
) -> None:
    task = stage.app.by_literals
    first = task.delay(name, one, gate=name)
    [start] = stage.journal.wait_for_starts(1, key=name)
    assert start.data["held"] == task.lock_key(name, one) == task.lock_key(name, other)
    assert is_skipped(task.delay(name, other).get(timeout=20))
    stage.open(name)
    assert first.get(timeout=20) == name


@pytest.mark.parametrize("task_name", ["by_arguments", "by_template"])
def test_an_argument_of_one_mebibyte_leaves_no_key_behind(
    stage: Stage, name: str, task_name: str
) -> None:
    task = getattr(stage.app, task_name)
    large = "\N{SNOWMAN}" + "x" * (2**20 - 3)
    assert len(large.encode()) == 2**20
    result = task.delay(name, large, gate=name)
    [start] = stage.journal.wait_for_starts(1, key=name)
    assert start.data["held"] == task.lock_key(name, large, gate=name)
    assert len(start.data["held"]) < 200
    assert is_skipped(task.delay(name, large, gate=name).get(timeout=20))
    stage.open(name)
    assert result.get(timeout=20) == name

    def left() -> list[str]:
        return [key for key in stage.redis.scan_iter(EVERY_NAME) if not Keyspace.stays(key)]

    wait_until(lambda: not left(), "no key of a lock is left")
    assert sorted(stage.redis.keys(EVERY_NAME)) == [name_in_store("shard"), name_in_store("shards")]


def test_per_task_is_one_key_for_all_arguments(stage: Stage, name: str) -> None:
    first = stage.app.by_nothing.delay(name, gate=name)
    stage.journal.wait_for_starts(1, key=name)
    assert is_skipped(stage.app.by_nothing.delay(f"{name}-other").get(timeout=20))
    stage.open(name)
    assert first.get(timeout=20) == name
    assert stage.starts(f"{name}-other") == []


def test_a_callable_key_of_none_runs_without_a_lock(stage: Stage, name: str) -> None:
    free = f"free-{name}"
    assert stage.app.by_callable.lock_key(free, gate=name) is None
    results = [stage.app.by_callable.delay(free, gate=name) for _ in range(2)]
    starts = stage.journal.wait_for_starts(2, key=free)
    assert [start.data["held"] for start in starts] == [None, None]
    stage.open(name)
    assert [result.get(timeout=20) for result in results] == [free] * 2


def test_a_callable_key_locks_where_it_is_a_string(stage: Stage, name: str) -> None:
    result = stage.app.by_callable.delay(name, gate=name)
    [start] = stage.journal.wait_for_starts(1, key=name)
    assert start.data["held"] == stage.app.by_callable.lock_key(name, gate=name)
    assert is_skipped(stage.app.by_callable.delay(name, gate="none").get(timeout=20))
    stage.open(name)
    assert result.get(timeout=20) == name
