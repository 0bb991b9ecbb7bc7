"""What `celery singleton ls --json` prints."""

from __future__ import annotations

import json

import pytest

from celery_singleton_lock.cli.commands import json_array, row_of
from celery_singleton_lock.core.lease import Holder, Kind, Phase, Record
from celery_singleton_lock.inspection import HeldKey
from tests.harness.keys import name_in_store


def records(number: int) -> list[HeldKey]:
    found = [
        Record(
            key=name_in_store(f"ü:{one}"),
            kind=Kind.CLAIM if one % 2 else Kind.LEASE,
            token="a|0.0|b",
            fence=None if one % 2 else one,
            holder=Holder(task='say "hi"\n', task_id="é", worker="w@h", pid=7, since=1.7e9),
            ttl=one / 3,
            phase=Phase.RUNNING if one % 2 else None,
        )
        for one in range(number)
    ]
    return [*map(HeldKey.of, found)]


@pytest.mark.parametrize("number", [0, 1, 2, 200, 201, 400, 401])
def test_an_array_in_pieces_is_the_text_that_it_would_be_in_one(number: int) -> None:
    rows = [row_of(record) for record in records(number)]
    assert "".join(json_array(records(number))) == json.dumps(rows, indent=2)


def test_an_array_begins_before_all_of_it_has_been_read() -> None:
    unread = iter(records(1000))
    next(json_array(unread))
    assert len(list(unread)) > 500
