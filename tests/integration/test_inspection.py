"""The API `celery_singleton_lock.inspection`, and the options of `ls` and `release` over it."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import FrozenInstanceError
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import redis
from celery import Celery

from celery_singleton_lock import (
    Lease,
    SingletonLockError,
    StoreError,
    hold,
    inspection,
    singleton_task,
)
from celery_singleton_lock.core.keyspace import Keyspace
from celery_singleton_lock.core.lease import Holder, Token
from celery_singleton_lock.core.store_requests import ClaimRequest
from celery_singleton_lock.inspection import AmbiguousKey, Filter, HeldKey, SortBy
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.typed_keys import forms_of
from example_project.private_server import PrivateServer
from tests.harness.calls import Calls
from tests.harness.cli import Answer, run_here
from tests.harness.deliveries import wait_until

POOLS = "tests.apps.pools"
BRIEF = f"{POOLS}.brief"
#: Seconds. An explanation waits for three, and the rest is for a loaded machine; Celery waits for
#: half a minute and more.
BOUNDED = 15.0


class Stage:
    """Three leases, the oldest first, and a claim, held by this process."""

    def __init__(self, app: Any, stack: ExitStack) -> None:
        self.app = app
        self.leases: dict[str, Lease] = {}
        for name, scope, ttl in (("b", "billing", 60), ("a", "a b:c", 90), ("c", "billing", 30)):
            lease = stack.enter_context(hold(name, scope=scope, ttl=ttl, app=app))
            self.leases[name] = lease
        self.claim = Keyspace.claim(BRIEF, Runtime.of(app).keyspace.lock(BRIEF, "x"))
        # Published an hour ago.
        since = Runtime.of(app).clock.wall() - 3600
        holder = Holder(task=BRIEF, task_id="id-x", worker="web-1", pid=7, since=since)
        take_claim = ClaimRequest(
            key=self.claim, token=Token("id-x", 0, 0, "n", "c1"), holder=holder, ttl=600
        )
        assert Runtime.of(app).store.claims.take(take_claim, timeout=5) is None

    def key(self, name: str) -> str:
        return self.leases[name].key

    def listed(self, *, sort: SortBy = SortBy.KEY, **conditions: Any) -> list[str]:
        found = inspection.held_keys(self.app, Filter(**conditions), sort=sort)
        names = {lease.key: name for name, lease in self.leases.items()} | {self.claim: "claim"}
        return [names[held.key] for held in found]


@pytest.fixture
def stage(load_app: Callable[..., ModuleType]) -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(load_app(POOLS).app, stack)


@pytest.fixture
def cli(load_app: Callable[..., ModuleType]) -> Cli:
    return partial(run_here, load_app(POOLS).app)


Cli = Callable[..., Answer]


def test_each_filter_keeps_the_keys_that_match_all_conditions(stage: Stage) -> None:
    assert sorted(stage.listed()) == ["a", "b", "c", "claim"]
    assert sorted(stage.listed(scope="billing")) == ["b", "c"]
    assert stage.listed(scope="a b:c") == stage.listed(scope="a%20b%3Ac") == ["a"]
    assert stage.listed(scope=BRIEF) == stage.listed(task=BRIEF) == ["claim"]
    assert stage.listed(scope="bill") == stage.listed(task="bri") == []
    assert stage.listed(older_than=3500) == ["claim"]
    assert stage.listed(older_than=3700) == []
    assert stage.listed(task_id="id-x") == ["claim"]
    assert stage.listed(pattern="*:b", scope="billing") == ["b"]


def test_a_list_is_sorted_by_key_age_ttl_or_task(stage: Stage) -> None:
    by_key = [held.key for held in inspection.held_keys(stage.app)]
    assert by_key == sorted(by_key)
    assert stage.listed(sort=SortBy.AGE) == ["claim", "b", "a", "c"]
    assert stage.listed(sort=SortBy.TTL) == ["c", "b", "a", "claim"]
    assert stage.listed(sort=SortBy.TASK)[-1] == "claim"


def test_a_held_key_is_a_frozen_value_with_times_and_the_scope_as_text(stage: Stage) -> None:
    lease = stage.leases["a"]
    held = inspection.find_key(stage.app, lease.key)
    assert isinstance(held, HeldKey)
    assert (held.scope, held.state, held.is_claim) == ("a b:c", "running", False)
    assert (held.token, held.fence, held.pid) == (str(lease.token), lease.fence, os.getpid())
    assert held.since is not None
    assert abs(held.since.timestamp() - Runtime.of(stage.app).clock.wall()) < 60
    with pytest.raises(FrozenInstanceError):
        held.ttl = 3.0  # type: ignore[misc]
    claim = inspection.find_key(stage.app, stage.claim)
    assert claim is not None
    assert (claim.is_claim, claim.phase, claim.scope) == (True, "queued", BRIEF)


def test_a_key_is_found_by_the_id_of_its_task(stage: Stage) -> None:
    held = inspection.find_task(stage.app, stage.leases["b"].token.task_id)
    assert held is not None
    assert held.key == stage.key("b")
    claim = inspection.find_task(stage.app, "id-x")
    assert claim is not None
    assert claim.key == stage.claim
    assert inspection.find_task(stage.app, "id-y") is None


def test_a_short_name_of_two_keys_raises_with_both(stage: Stage) -> None:
    with (
        hold("b", scope="other", ttl=60, app=stage.app) as other,
        pytest.raises(AmbiguousKey, match="names several keys") as raised,
    ):
        inspection.find_key(stage.app, "b")
    assert sorted(raised.value.keys) == sorted((stage.key("b"), other.key))


def test_a_free_key_is_distinguished_from_one_that_no_task_can_have(stage: Stage) -> None:
    assert inspection.can_be_a_key(stage.app, f"{BRIEF}:a")
    assert not inspection.can_be_a_key(stage.app, "breif:a")
    assert f"{BRIEF}:{{key}}" in forms_of(stage.app)


def test_the_clients_that_wait_are_counted(stage: Stage) -> None:
    app, over = stage.app, threading.Event()

    def wait() -> None:
        with hold("b", scope="billing", ttl=60, wait=60, app=app):
            over.wait(60)

    waiters = [threading.Thread(target=wait, daemon=True) for _ in range(2)]
    for waiter in waiters:
        waiter.start()

    def counts() -> dict[str, int | None]:
        found = inspection.held_keys(app, counts_waiting=True)
        return {held.key: held.waiting for held in found}

    wait_until(lambda: counts()[stage.key("b")] == 2, "two clients wait")
    assert stage.listed(waiting=True) == ["b"]
    assert stage.listed(sort=SortBy.WAITING)[0] == "b"
    assert counts() == {stage.key("b"): 2, stage.key("a"): 0, stage.key("c"): 0, stage.claim: 0}
    over.set()
    # The test's own thread holds it: an operator frees it for the waiting clients.
    assert inspection.release(app, stage.key("b"), str(stage.leases["b"].token))
    for waiter in waiters:
        waiter.join(30)
    assert stage.listed(waiting=True) == []


def test_a_store_without_wait_queues_says_that_it_does_not_know(
    load_app: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = load_app(POOLS).app
    Runtime.install(app, Runtime(app, store=Runtime.of(app, eager=True).store))
    with pytest.raises(SingletonLockError, match="keeps no wait queues"):
        list(inspection.held_keys(app, Filter(waiting=True)))


def test_a_release_gives_its_author_and_reason_to_the_holder(stage: Stage) -> None:
    lease = stage.leases["a"]
    assert not inspection.release(stage.app, lease.key, f"{lease.token}x", reason="wrong")
    assert inspection.release(stage.app, lease.key, str(lease.token), reason="stuck since noon")
    Runtime.of(stage.app).locker.heartbeat.ask(lease)
    assert lease.loss is not None
    who = f"{getpass.getuser()} on {socket.gethostname()}"
    assert lease.loss.detail == f"released by {who}: stuck since noon"


# The same by the command line.


@pytest.mark.slow
def test_ls_filters_and_sorts(stage: Stage, cli: Cli) -> None:
    rows = json.loads(cli("ls", "--scope", "billing", "--sort", "ttl", "--json").out)
    assert [row["key"] for row in rows] == [stage.key("c"), stage.key("b")]
    aged = cli("ls", "--older-than", "59m").out
    assert stage.claim in aged
    assert stage.key("a") not in aged
    assert cli("ls", "--task", "none").out == "nothing matches\n"
    wrong = cli("ls", "--older-than", "soon")
    assert wrong.status == 2
    assert "write 90, 90s, 15m, 2h or 1d" in wrong.err


def test_a_pattern_is_a_part_of_a_key_or_a_glob_for_all_of_it(stage: Stage, cli: Cli) -> None:
    for key in ("ids:[1, 2]", "what?", "a:b"):
        with hold(key, scope="patterns", app=stage.app) as lease:
            for pattern in (key, f"patterns:{key}", "patterns:*", lease.key):
                found = json.loads(cli("ls", pattern, "--json").out)
                assert [row["key"] for row in found] == [lease.key], pattern
            nothing = cli("ls", f"{key[:3]}*").out
            assert nothing == (
                "nothing matches: a glob is for the whole key; for a part of it write "
                f"'*{key[:3]}*'\n"
            )
            assert lease.key in cli("ls", f"*{key[:3]}*").out
    assert cli("ls", "*none*").out == "nothing matches\n"


def test_a_key_that_is_no_text_names_no_other_key(stage: Stage, cli: Cli) -> None:
    """The shell passes any bytes, and Python decodes those that are no text as surrogates."""
    with hold("what?", scope="bytes", app=stage.app) as lease:
        assert cli("release", "bytes:what\udcff", "--yes").status == 1
        lease.check()
        assert inspection.find_key(stage.app, "bytes:what?") is not None


def test_show_takes_the_id_of_a_task(stage: Stage, cli: Cli) -> None:
    shown = cli("show", "--json", stage.leases["b"].token.task_id)
    assert json.loads(shown.out)["key"] == stage.key("b")


@pytest.mark.slow
def test_release_frees_a_scope_key_by_key_after_a_dry_run(stage: Stage, cli: Cli) -> None:
    keys = {stage.key("b"), stage.key("c")}
    dry = cli("release", "--scope", "billing", "--dry-run")
    assert dry.status == 0
    assert all(key in dry.out for key in keys)
    assert stage.key("a") not in dry.out
    assert dry.out.endswith("nothing is released: --dry-run\n")
    assert len(stage.listed()) == 4
    refused = cli("release", "--scope", "billing", answers="n\n")
    assert refused.status == 1
    assert "Release these 2 keys? [y/N]" in refused.out
    assert len(stage.listed()) == 4
    done = cli("release", "--scope", "billing", "--yes", "--json", "--reason", "cleanup")
    assert done.status == 0
    assert json.loads(done.out) == [{"key": key, "released": True} for key in sorted(keys)]
    assert sorted(stage.listed()) == ["a", "claim"]
    Runtime.of(stage.app).locker.heartbeat.ask(stage.leases["c"])
    assert stage.leases["c"].loss is not None
    assert stage.leases["c"].loss.detail.endswith(": cleanup")
    nothing = cli("release", "--pattern", "*:none", "--yes")
    assert nothing.status == 1
    assert nothing.err.startswith("nothing matches: a glob is for the whole key")


@pytest.mark.slow
def test_release_refuses_options_that_contradict_each_other(stage: Stage, cli: Cli) -> None:
    for arguments, problem in (
        ((), "give KEY, or options"),
        (("--yes", "--scope", "billing", "a"), "give KEY, or options"),
        (("--token", "x", "--scope", "billing"), "--token is for one KEY"),
        (("--json", "--scope", "billing"), "with --json give --yes"),
    ):
        answer = cli("release", *arguments)
        assert answer.status == 2
        assert problem in answer.err
    assert len(stage.listed()) == 4
    dry = cli("release", "--dry-run", stage.key("a"))
    assert (dry.status, len(stage.listed())) == (0, 4)


def test_without_the_right_to_scan_a_full_key_is_found_and_a_short_one_is_refused() -> None:
    with PrivateServer() as server, redis.Redis.from_url(server.url()) as client:
        rights = ["+@all", "-scan"]
        client.acl_setuser(
            "locks", enabled=True, nopass=True, keys=["*"], channels=["*"], commands=rights
        )
        app = Celery("rights", broker="memory://", set_as_current=False)
        app.conf.singleton_lock_url = server.url().replace("//", "//locks:x@")
        with hold("account:42", scope="billing", app=app) as lease:
            assert inspection.find_key(app, lease.key) is not None
            for find, name in (
                (inspection.find_key, "account:42"),
                (inspection.find_task, lease.token.task_id),
            ):
                with pytest.raises(StoreError, match=r"give the full key .*, or grant \+scan"):
                    find(app, name)
            for refused in (
                ("ls",),
                ("show", "account:42"),
                ("release", "account:42", "--yes"),
                ("release", "--scope", "billing", "--yes"),
                ("explain", lease.token.task_id, "--timeout", "0.1"),
            ):
                answer = run_here(app, *refused)
                assert answer.status == 1, refused
                assert re.search(r"give the full key .*, or grant \+scan", answer.err), refused
            assert run_here(app, "show", lease.key).status == 0
        assert inspection.find_key(app, lease.key) is None
        calls = Calls(Runtime.of(app).store)
        calls.key = lease.key
        [token] = calls.joined(1)
        assert inspection.find_queue(app, "account:42") == lease.key, "queues are no search"
        [call] = inspection.find_calls(app, [token.task_id])
        assert call.key == lease.key
        Runtime.of(app).close()


def no_request_waits() -> bool:
    return all(thread.name != "singleton-request" for thread in threading.enumerate())


@pytest.mark.parametrize("fault", ["stopped", "killed"])
def test_explain_without_a_broker_says_that_no_worker_was_asked(fault: str) -> None:
    """A stopped broker takes the request, and does not answer: nothing else would end the wait."""
    with PrivateServer() as broker, PrivateServer() as locks:
        app = Celery("cut-off", broker=broker.url(), set_as_current=False)
        app.conf.singleton_lock_url = locks.url()
        broker.pause() if fault == "stopped" else broker.kill()
        began = time.monotonic()
        found = inspection.explain(app, "some-id", timeout=0.1)
        assert time.monotonic() - began < BOUNDED
        assert found.fate is inspection.Fate.UNKNOWN
        assert "The broker does not answer, so the workers were not asked." in found.sentences
        # The thread that asks the broker ends when it answers.
        broker.resume() if fault == "stopped" else broker.start()
        wait_until(no_request_waits, "the thread has ended")
        Runtime.of(app).close()


@pytest.mark.parametrize("fault", ["stopped", "killed"])
def test_explain_without_a_result_backend_says_that_the_result_is_unknown(fault: str) -> None:
    with PrivateServer() as results, PrivateServer() as locks:
        app = Celery("cut-off", broker="memory://", backend=results.url(), set_as_current=False)
        app.conf.singleton_lock_url = locks.url()
        results.pause() if fault == "stopped" else results.kill()
        began = time.monotonic()
        found = inspection.explain(app, "some-id", timeout=0.1)
        assert time.monotonic() - began < BOUNDED
        assert found.fate is inspection.Fate.UNKNOWN
        assert "the result backend failed" in " ".join(found.sentences)
        results.resume() if fault == "stopped" else results.start()
        wait_until(no_request_waits, "the thread has ended")
        Runtime.of(app).close()


def test_a_task_that_a_worker_would_refuse_keeps_no_other_from_being_explained() -> None:
    app = Celery("refused", broker="memory://", set_as_current=False)
    app.conf.singleton_lock_url = "memory://"
    app.conf.task_always_eager = True

    @singleton_task(app=app, name="refused", shared=False, unique_for=60)
    def refused() -> None: ...

    found = inspection.explain(app, "some-id", timeout=0.1)
    assert found.fate is inspection.Fate.UNKNOWN
    Runtime.of(app).close()
