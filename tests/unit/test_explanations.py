"""What `explain`, `show` and `ls` say of a key whose holder's process is dead, or may be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import Any

import pytest
from celery import Celery, states

from celery_singleton_lock import inspection
from celery_singleton_lock.core.lease import Holder, Token
from celery_singleton_lock.core.process import identity_of_this_process
from celery_singleton_lock.core.store_requests import Acquire
from celery_singleton_lock.inspection import CallInQueue, Explanation, Fate, HeldKey
from celery_singleton_lock.inspection.broker import InBroker
from celery_singleton_lock.inspection.facts import Facts, InWorker, Result, _pids_in, _Workers
from celery_singleton_lock.message.skipped import skipped_value
from celery_singleton_lock.runtime import Runtime
from tests.harness.cli import run_here
from tests.harness.explanations import text

NOW = datetime(2026, 11, 28, 12, tzinfo=UTC)
KEY, WORKER = "csl:{celery:0}:t:a", "celery@web-1"
RELEASE = f"`celery -A ... singleton release '{KEY}' --token 'id|0.0|n'`"
HELD = HeldKey(
    key=KEY,
    state="running",
    phase=None,
    task="t",
    task_id="id",
    worker=WORKER,
    pid=811,
    since=NOW - timedelta(seconds=60),
    ttl=3540.0,
    fence=1,
    token="id|0.0|n",
)
DEAD = replace(HELD, is_dead=True)
SILENT: dict[str, Any] = {"processes": {WORKER: None}}
RESTARTED: dict[str, Any] = {"processes": {WORKER: frozenset({900, 901})}}
ALIVE: dict[str, Any] = {"processes": {WORKER: frozenset({800, 811})}}
CHECK = (
    f"To do: check `celery -A ... inspect ping -d {WORKER}`, and `ps -p 811` on that worker's "
    f"host. If that process is dead, free its key: {RELEASE}"
)


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("explained", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.singleton_lock_url = "memory://"
    with app:
        yield app


class Explain:
    """What `explain` says of some facts."""

    def __init__(self, app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
        self._app, self._monkeypatch = app, monkeypatch

    def __call__(self, task_id: str = "id", **facts: Any) -> Explanation:
        pending = {"result": Result(), "lease": None, "claim": None, "ttls": {"t": 3600.0}}
        found = Facts(**{"task_id": task_id, "now": NOW, **pending, **facts})
        # The package has a function of the module's name.
        module = import_module("celery_singleton_lock.inspection.explain")
        self._monkeypatch.setattr(module, "gather", lambda *args, **options: found)
        return inspection.explain(self._app, task_id)

    def skipped(self, held: HeldKey, **facts: Any) -> Explanation:
        """Of a call that was skipped because of ``held``."""
        by = Holder(task="t", task_id="id", worker=WORKER)
        result = Result(state=states.SUCCESS, value=skipped_value("t", KEY, by))
        return self("other", result=result, others={KEY: held}, **facts)


@pytest.fixture
def explain(app: Celery, monkeypatch: pytest.MonkeyPatch) -> Explain:
    return Explain(app, monkeypatch)


def test_a_lease_of_a_dead_process_is_left_and_its_end_and_release_are_said(
    explain: Explain,
) -> None:
    found = explain(lease=DEAD)
    assert (found.fate, found.key) == (Fate.LEFT, KEY)
    assert found.sentences == (
        f"It began at 2026-11-28T11:59:00+00:00, on {WORKER} (pid 811). Its process no longer "
        f"exists on this host, but its lease still holds {KEY}.",
        "The key is free when the lease expires, in 3540 s, or as soon as another call tries to "
        'take it on this host. (A call in the queue of the key, on_conflict="queue", doesn\'t '
        "try.)",
        "With acks_late, its message comes back when the broker delivers it again.",
        "To do: nothing, if you can wait; without acks_late, send it again if it must run. To free "
        f"the key at once: {RELEASE}.",
    )


MESSAGE = InWorker(
    worker="w2", state="reserved", task="t", task_id="id", key=KEY, since=None, pid=None
)
TWICE = "To do: nothing, if you can wait; don't send it again, or it runs twice. To free the key "


@pytest.mark.parametrize(
    ("facts", "sentence", "remedy"),
    [
        (
            {"broker": InBroker(is_complete=True)},
            "Its message was acknowledged before it began, so it does not come back.",
            "To do: send it again if it must run. To free the key at once: ",
        ),
        ({"broker": InBroker(taken_at=NOW)}, "A worker took its message at 2026", TWICE),
        ({"broker": InBroker(queue="q", length=1)}, "It is the only message in the ", TWICE),
        ({"message": MESSAGE}, "w2 has its message.", TWICE),
    ],
    ids=["acknowledged", "taken", "in its queue", "in a worker"],
)
def test_it_says_whether_the_message_of_a_dead_process_comes_back(
    explain: Explain, facts: dict[str, Any], sentence: str, remedy: str
) -> None:
    found = explain(lease=DEAD, workers=("w2",), **facts)
    assert found.fate is Fate.LEFT
    assert sentence in found.sentences[2]
    assert found.sentences[-1].startswith(remedy)
    assert found.sentences[-1].endswith(f"{RELEASE}.")


CLAIM = replace(
    HELD,
    key="csl:{celery:0}:claim|t|t:a",
    state="claim, running",
    phase="running",
    ttl=30.0,
    token="id",
)
END_CLAIM = (
    "Its claim keeps equal calls from being sent for another 30 s. To end it at once: `celery -A "
    f"... singleton release '{CLAIM.key}' --token id`"
)


def test_the_claim_of_a_dead_process_is_named_where_the_call_has_to_be_sent_again(
    explain: Explain,
) -> None:
    found = explain(lease=DEAD, claim=CLAIM, broker=InBroker(is_complete=True))
    assert found.sentences[-1].endswith(f"the key at once: {RELEASE}. {END_CLAIM}.")
    assert found.sentences[-1].startswith("To do: send it again if it must run. To free")


def test_a_call_that_has_only_its_claim_left_is_not_said_to_be_queued(explain: Explain) -> None:
    found = explain(claim=CLAIM, broker=InBroker(is_complete=True))
    assert found.fate is Fate.STARTED
    assert "Its message was acknowledged before it began, so it does not" in text(found)
    assert "its message may be in one" not in text(found)
    assert found.sentences[-1] == f"To do: send it again if it must run. {END_CLAIM}."
    unknown = explain(claim=CLAIM)
    assert "With acks_late, its message comes back" in text(unknown)
    assert "its message may be in one" in text(unknown)
    assert unknown.sentences[-1].startswith("To do: without acks_late, send it again")


def test_a_worker_that_has_not_noticed_the_death_of_its_process_is_asked_again(
    explain: Explain,
) -> None:
    """Celery looks every 5 s. What becomes of the job depends on its task's options."""
    has = replace(MESSAGE, worker=WORKER, state="active", pid=811, since=NOW)
    found = explain(lease=DEAD, message=has, workers=(WORKER,))
    assert found.fate is Fate.LEFT
    assert found.sentences[-1].startswith("To do: ask again in 5 s.")
    assert "twice" not in text(found)


def call(position: int, starts_in: float = 0.0, *, has_begun: bool = False) -> CallInQueue:
    return CallInQueue(
        key=KEY,
        position=position,
        task="t",
        task_id=f"call-{position}",
        state="waiting",
        since=NOW,
        copies=0,
        routing_key="celery",
        has_begun=has_begun,
        broker="",
        call_id=f"call-{position}",
        starts_in=starts_in,
    )


def test_a_call_that_its_queue_runs_again_is_not_to_be_sent_again(explain: Explain) -> None:
    place = call(1, has_begun=True)
    found = explain(place=place, claim=CLAIM, broker=InBroker(is_complete=True))
    assert found.fate is Fate.STARTED
    assert "publishes it again, or stores its failure" in text(found)
    assert "send it again" not in text(found)
    found = explain(lease=DEAD, place=place, broker=InBroker(is_complete=True))
    assert found.fate is Fate.LEFT
    assert found.sentences[-1].startswith(TWICE)


def test_a_call_behind_others_is_told_when_the_rate_lets_the_first_of_them_start(
    explain: Explain,
) -> None:
    first, second = call(1, 4.5), call(2)
    found = explain(place=call(3), before=second, first=first)
    assert found.fate is Fate.WAITING
    assert "lets the first of them, t[call-1], start in 4.5 s." in text(found)
    assert found.sentences[-1] == "To do: nothing, it runs in its turn."
    found = explain(place=second, before=first, first=first)
    assert "The rate of the key lets that start in 4.5 s." in text(found)


def test_a_holder_whose_worker_does_not_answer_may_be_dead(explain: Explain) -> None:
    found = explain(lease=HELD, **SILENT)
    assert found.fate is Fate.RUNNING
    assert found.sentences[0] == (
        f"It has run since 2026-11-28T11:59:00+00:00 (60.0 s), on {WORKER} (pid 811), and holds "
        f"{KEY}. {WORKER} didn't answer a ping; its process may be dead (a busy worker with the "
        "solo pool doesn't answer either)."
    )
    assert found.sentences[-1] == f"{CHECK}."


def test_a_worker_without_the_process_of_the_lease_may_have_been_restarted(
    explain: Explain,
) -> None:
    found = explain(lease=HELD, **RESTARTED)
    assert found.fate is Fate.RUNNING
    assert found.sentences[0].endswith(
        f"{WORKER} answers, but names no process 811: that worker may have been restarted, and the "
        "process that holds the lease may be dead."
    )
    assert found.sentences[-1] == f"{CHECK}."


@pytest.mark.parametrize(
    "facts",
    [{}, ALIVE, {"processes": {WORKER: frozenset()}}, {"processes": {"another": None}}],
    ids=["not asked", "alive", "unknown pool", "another"],
)
def test_nothing_is_suspected_without_a_reason(explain: Explain, facts: dict[str, Any]) -> None:
    found = explain(lease=HELD, **facts)
    assert found.sentences[0].startswith("It runs now since 2026")
    assert found.sentences[-1] == "To do: nothing, it is at work."
    skipped = explain.skipped(HELD, **facts)
    assert skipped.sentences[1].endswith("since 2026-11-28T11:59:00+00:00.")
    assert skipped.sentences[-1].startswith("To do: nothing, if that call did its work")


def test_a_skipped_call_is_told_that_its_holder_is_dead_or_may_be(explain: Explain) -> None:
    dead = explain.skipped(DEAD)
    assert dead.sentences[1:] == (
        f"Now t[id] on {WORKER} holds {KEY} since 2026-11-28T11:59:00+00:00. Its process no longer "
        "exists on this host.",
        f"To do: free the key of the dead process: {RELEASE}. Then send it again if it must run.",
    )
    silent = explain.skipped(HELD, **SILENT)
    assert f"{WORKER} didn't answer a ping; its process may be dead" in silent.sentences[1]
    assert silent.sentences[-1] == f"{CHECK}. Then send it again if it must run."
    assert "names no process 811" in text(explain.skipped(HELD, **RESTARTED))


def test_a_call_that_waits_is_told_that_the_holder_is_dead(explain: Explain) -> None:
    found = explain("other", message=replace(MESSAGE, task_id="other"), others={KEY: DEAD})
    assert found.fate is Fate.RECEIVED
    assert "Its process no longer exists on this host." in text(found)
    assert found.sentences[-1] == f"To do: free the key of the dead process: {RELEASE}."


def test_the_call_that_had_the_key_is_named(explain: Explain) -> None:
    by = Holder(task="t", task_id="id", worker=WORKER)
    result = Result(state=states.SUCCESS, value=skipped_value("t", KEY, by))
    ended = Result(state=states.SUCCESS, done_at=NOW)
    found = explain("other", result=result, holders_result=ended)
    assert found.sentences[1] == (
        "t[id] ended at 2026-11-28T12:00:00+00:00 (SUCCESS). When it took the key isn't recorded."
    )
    found = explain("other", result=result, holders_result=Result())
    assert found.sentences[1].startswith("t[id] doesn't hold the key now. ")


# --- the workers' replies -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stats", "pids"),
    [
        ({"pid": 1, "pool": {"processes": [2, 3]}}, {1, 2, 3}),
        ({"pid": 1, "pool": {"implementation": "celery.concurrency.thread:TaskPool"}}, {1}),
        ({"pid": 1, "pool": {"implementation": "another.pool:TaskPool"}}, set()),
        ({"error": "no such command"}, set()),
    ],
    ids=["prefork", "threads", "another pool", "an error"],
)
def test_the_processes_of_a_worker_are_those_that_its_pool_names(
    stats: dict[str, Any], pids: set[int]
) -> None:
    assert _pids_in(stats) == pids


def test_nobody_is_asked_where_workers_take_no_commands(app: Celery) -> None:
    workers = _Workers(app, 0.1)
    assert workers.processes({WORKER}) == {WORKER: None}
    app.conf.worker_enable_remote_control = False
    assert workers.processes({WORKER}) == {}


# --- show and ls ----------------------------------------------------------------------------------


@pytest.mark.skipif(not identity_of_this_process(), reason="needs Linux's /proc")
def test_ls_and_show_say_that_the_process_is_dead(app: Celery) -> None:
    runtime = Runtime.of(app)
    own = runtime.process
    # Of a process that had the id of this one, and started at another time.
    former = f"{own[:-1]}{'0' if own[-1] != '0' else '1'}"
    elsewhere = f"{'x' if own[0] != 'x' else 'y'}{former[1:]}"

    def key_of(name: str) -> str:
        return runtime.keyspace.lock("t", name)

    for name, process in (("former", former), ("own", own), ("elsewhere", elsewhere)):
        holder = Holder(task="t", task_id=name, worker=WORKER, pid=os.getpid(), process=process)
        token = Token(name, 0, 0, "n")
        request = Acquire(slots=(key_of(name),), token=token, holder=holder, ttl=60)
        runtime.store.leases.acquire(request, timeout=5)
    rows = {row["task_id"]: row for row in run_here(app, "ls", "--json").json()}
    assert {name: row["is_dead"] for name, row in rows.items()} == {
        "former": True,
        "own": False,
        "elsewhere": False,
    }
    lines = run_here(app, "ls").out.splitlines()
    assert [line for line in lines if "process is dead" in line] == [
        line for line in lines if "t:former" in line
    ]
    shown = run_here(app, "show", "t:former").out
    assert "state: process is dead (its process no longer exists on this host)\n" in shown
    assert "state: running\n" in run_here(app, "show", "t:own").out
    for found in (inspection.find_task(app, "former"), inspection.find_key(app, key_of("former"))):
        assert found is not None
        assert found.is_dead
