"""`celery singleton serve`: what it answers, allows, counts and refuses."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from celery import Celery
from prometheus_client import CollectorRegistry

from celery_singleton_lock import SettingsError, hold
from celery_singleton_lock.core.events import Event, EventName
from celery_singleton_lock.core.lease import Holder, Kind, Record, Token
from celery_singleton_lock.core.pauses import Pause
from celery_singleton_lock.core.store_requests import Acquire
from celery_singleton_lock.doctor.context import warning
from celery_singleton_lock.errors import StoreUnavailable
from celery_singleton_lock.inspection import HeldKey, Paused, pause
from celery_singleton_lock.instrumentation.metrics import COUNTERS
from celery_singleton_lock.instrumentation.prometheus import PrometheusMetrics
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.serve import Options, protocol, read_token, readings
from celery_singleton_lock.serve import serve as serve_on
from celery_singleton_lock.serve.access import Access
from celery_singleton_lock.serve.gauges import Gauges
from celery_singleton_lock.serve.http import Application, Request, Response
from celery_singleton_lock.serve.listener import Listener, event_of
from celery_singleton_lock.serve.readings import Cached, Reading, Readings
from celery_singleton_lock.serve.routes import HEALTH, METRICS, Site
from celery_singleton_lock.testing import ManualClock
from tests.harness.calls import Calls
from tests.harness.deliveries import wait_until
from tests.harness.listener import type_of
from tests.harness.processes import ROOT

TOKEN = "0123456789abcdef-secret"
HOSTILE = "</script><img src=x onerror=alert(1)>\ud800"


class Server:
    """A site on a store in memory, without threads and sockets."""

    def __init__(self, token: str = "") -> None:
        self.app = Celery("shop", broker="memory://", set_as_current=False)
        self.registry = CollectorRegistry()
        self.readings = Readings(self.app)
        self.listener = Listener(self.app, self.readings.clock, PrometheusMetrics(self.registry))
        self.registry.register(Gauges(self.readings, self.listener, "shop"))
        access = Access(Options(token=token))
        self.site = Site(self.readings, self.listener, self.registry, access)

    def ask(self, path: str, *, headers: dict[str, str] | None = None, **request: Any) -> Response:
        headers = {"host": "localhost:9876", **(headers or {})}
        return self.site.answer(Request(path=path, headers=headers, **request))

    def state(self, **query: str) -> dict[str, Any]:
        self.readings.keys.forget()
        found: dict[str, Any] = json.loads(self.ask("/api/state", query=query).body)
        return found

    def release(self, headers: dict[str, str] | None = None, **body: Any) -> Response:
        sent = {"content-type": "application/json", "authorization": f"Bearer {TOKEN}"}
        sent["origin"] = "http://localhost:9876"
        return self.ask(
            "/api/release",
            method="POST",
            headers={**sent, **(headers or {})},
            body=json.dumps({"user": "ann", "reason": "stuck", **body}).encode(),
        )


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(TOKEN)
    yield server
    Runtime.of(server.app).close()


# Reading.


def test_the_page_lists_what_is_held_and_finds_it_by_key_task_id_and_worker(server: Server) -> None:
    with (
        hold("invoice:7", scope="billing", ttl=60, app=server.app) as lease,
        hold("account:42", scope="shop.sync", ttl=60, app=server.app),
    ):
        state = server.state()
        assert (state["counts"], state["matching"]) == (
            {"all": 2, "held": 2, "claimed": 0, "waiting": None},
            2,
        )
        for query in ("invoice", lease.token.task_id, "BILLING", lease.key):
            [row] = server.state(q=query)["keys"]
            assert (row["key"], row["token"]) == (lease.key, str(lease.token))
        assert len(server.state(q=Runtime.of(server.app).worker)["keys"]) == 2
        assert server.state(q="nothing")["keys"] == []
        assert server.state(show="claimed")["matching"] == 0
        assert server.state(show="held", sort="key")["keys"][0]["key"] == lease.key
        assert server.state(show="?", sort="?")["matching"] == 2
    assert server.state()["keys"] == []


def test_calls_that_wait_for_a_free_key_are_shown_with_the_next_one(server: Server) -> None:
    runtime = Runtime.of(server.app)
    calls = Calls(runtime.store)
    calls.key = runtime.keyspace.lock("shop.sync", "account:42")
    first, _ = calls.joined(2)
    state = server.state()
    [row] = state["keys"]
    assert (row["key"], row["state"], row["task_id"]) == (calls.key, "free", first.task_id)
    assert (row["calls"], row["is_free"]) == (2, True)
    assert state["counts"] == {"all": 1, "held": 0, "claimed": 0, "waiting": 2}
    assert server.state(show="held")["matching"] == 0
    assert server.state(show="waiting")["matching"] == 1
    calls.begin(first)
    [row] = server.state()["keys"]
    assert (row["state"], row["calls"]) == ("running", 1)


def test_a_page_has_a_limit_but_the_search_has_none(server: Server) -> None:
    runtime = Runtime.of(server.app)
    for number in range(300):
        token = Token(f"id-{number}", 0, 0, "n")
        holder = Holder(task="shop.sync", task_id=token.task_id, since=runtime.clock.wall())
        key = runtime.keyspace.lock("shop.sync", f"k{number:03}")
        runtime.store.leases.acquire(
            Acquire(slots=(key,), token=token, holder=holder, ttl=60), timeout=5
        )
    state = server.state(sort="key")
    assert (state["counts"]["held"], state["matching"], len(state["keys"])) == (300, 300, 200)
    [row] = server.state(q="id-299")["keys"]
    assert row["key"].endswith(":k299")


def test_hostile_names_are_data_in_every_answer(server: Server) -> None:
    runtime = Runtime.of(server.app)
    key = runtime.keyspace.lock("hostile", HOSTILE)
    holder = Holder(task=HOSTILE, task_id=HOSTILE, worker=HOSTILE, since=runtime.clock.wall())
    token = Token(HOSTILE, 0, 0, "n")
    runtime.store.leases.acquire(
        Acquire(slots=(key,), token=token, holder=holder, ttl=60), timeout=5
    )
    server.listener.receive(
        {"type": type_of(EventName.ACQUIRED), "name": HOSTILE, "waited": "soon"}
    )
    server.listener.receive(
        {"type": type_of(EventName.CONFLICT), "name": 7, "outcome": {"a": HOSTILE}}
    )
    answer = server.ask("/api/state")
    assert answer.content_type == "application/json"
    assert json.loads(answer.body)["keys"][0]["task"] == HOSTILE
    metrics = server.ask("/metrics")
    assert metrics.status == 200
    assert b'task="</script><img src=x onerror=alert(1)>?"' in metrics.body


def test_the_page_gets_what_is_paused_and_why(server: Server) -> None:
    assert server.state()["pauses"] == []
    pause(scope="shop.sync", reason="maintenance", user="anna", app=server.app)
    [text] = server.state()["pauses"]
    assert text.startswith("scope shop.sync is paused since ")
    assert text.endswith(": maintenance")
    gauge = b'celery_singleton_paused{scope="shop.sync"} 1.0'
    assert gauge in server.ask("/metrics").body.splitlines()


def test_the_page_s_files_need_no_other_server_and_no_inline_script(server: Server) -> None:
    for path in ("/", "/page.js", "/style.css", "/icon.svg"):
        answer = server.ask(path)
        text = answer.body.decode().replace("http://www.w3.org/2000/svg", "")
        assert answer.status == 200
        assert "://" not in text, path
        for unsafe in (
            "innerHTML",
            "insertAdjacent",
            "eval(",
            "onclick",
            "style=",
            "document.write",
        ):
            assert unsafe not in text, (path, unsafe)
    assert not re.search(r"<script(?! src)|<style", server.ask("/").body.decode())


def test_an_unknown_path_is_404_and_a_write_to_a_page_405(server: Server) -> None:
    assert server.ask("/../pyproject.toml").status == 404
    assert server.ask("/", method="POST").status == 405


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:9876", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:9876", 200),
        ("10.0.0.7:9876", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example:9876", 421),
        ("localhost@evil.example", 421),
        ("[::1", 421),
        ("", 421),
    ],
)
def test_a_name_that_may_be_rebound_is_refused(server: Server, host: str, status: int) -> None:
    for path in ("/api/state", "/metrics", "/healthz", "/"):
        assert server.ask(path, headers={"host": host}).status in (status, 503)
    no_task = server.ask("/api/explain", headers={"host": host})
    assert no_task.status == (421 if status == 421 else 400)
    if status == 421:
        answer = server.release({"host": host, "origin": f"http://{host}"}, key="k", token="t")
        assert answer.status in (403, 421)


def test_a_name_is_allowed_on_request() -> None:
    access = Access(Options(allowed_hosts=("Locks.example",)))
    assert access.refuse_host(Request(headers={"host": "locks.example:80"})) is None
    assert access.refuse_host(Request(headers={"host": "x.locks.example"})) is not None


# Explaining.


def test_it_explains_a_task_as_the_command_does(server: Server) -> None:
    answer = server.ask("/api/explain", query={"task": " no-such-task "})
    found = json.loads(answer.body)
    assert (found["task_id"], found["fate"]) == ("no-such-task", "unknown")
    assert found["sentences"][:2] == [
        "Nothing is known of no-such-task.",
        "Its result is unknown, because the app has no result backend.",
    ]


def test_a_question_without_a_task_is_refused(server: Server) -> None:
    assert server.ask("/api/explain").status == 400
    assert server.ask("/api/explain", query={"task": " "}).status == 400


# Releasing.


def test_a_release_frees_the_key_of_the_holder_that_was_seen(server: Server) -> None:
    with hold("k", scope="s", ttl=60, app=server.app) as lease:
        stale = server.release(key=lease.key, token=f"{lease.token}x")
        assert json.loads(stale.body) == {"released": False}
        assert len(server.state()["keys"]) == 1
        assert json.loads(server.release(key=lease.key, token=str(lease.token)).body) == {
            "released": True
        }
        assert server.state()["keys"] == []
        Runtime.of(server.app).locker.heartbeat.ask(lease)
        assert lease.loss is not None
        assert lease.loss.detail.startswith("released by ann on ")
        assert lease.loss.detail.endswith(": stuck")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": ""}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": f"Basic {TOKEN}"}, 401),
        ({"authorization": "", "cookie": f"token={TOKEN}"}, 401),
        ({"authorization": "Bearer \xfc"}, 401),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost:9877"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
    ],
)
def test_a_release_without_token_or_of_another_site_is_refused(
    server: Server, headers: dict[str, str], status: int
) -> None:
    with hold("k", scope="s", ttl=60, app=server.app) as lease:
        answer = server.release(headers, key=lease.key, token=str(lease.token))
        assert answer.status == status
        assert len(server.state()["keys"]) == 1


def test_a_wrong_token_is_logged_without_it(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.release({"authorization": "Bearer guess-of-a-token"}, key="k", token="t")
    assert "a release with a wrong token" in caplog.text
    assert "guess-of-a-token" not in caplog.text


def test_a_get_releases_nothing(server: Server) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    assert server.ask("/api/release", headers=headers).status == 405


@pytest.mark.parametrize("body", [{}, {"key": "k"}, {"key": 7, "token": "t"}, {"user": " "}])
def test_an_incomplete_release_is_refused(server: Server, body: dict[str, Any]) -> None:
    assert server.release(**body).status == 400


def test_without_a_token_the_page_is_read_only() -> None:
    server = Server()
    with hold("k", scope="s", ttl=60, app=server.app):
        state = server.state()
    assert (state["can_release"], "token" in state["keys"][0]) == (False, False)
    for headers in ({}, {"authorization": "Bearer "}):
        answer = server.release(headers, key="k", token="t")
        assert (answer.status, b"read-only" in answer.body) == (403, True)


# Options.


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"port": 70000}, "--port 70000 is no port"),
        ({"port": -1}, "--port -1 is no port"),
        ({"token": "short"}, "at least 16 characters"),
        ({"token": "with a blank inside it"}, "visible ASCII"),
        ({"allowed_hosts": ("https://a.b",)}, "without scheme and port"),
        ({"allowed_hosts": ("*",)}, "is no host name"),
        ({"max_connections": 0}, "--max-connections 0 allows no connection"),
    ],
)
def test_a_bad_option_is_an_error_that_says_what_to_do(
    options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(SettingsError, match=re.escape(problem)) as raised:
        Options(**options)
    assert "short" not in str(raised.value)


def test_a_token_file_that_is_missing_or_empty_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(SettingsError, match="can't be read"):
        read_token(file)
    file.write_text("\n")
    with pytest.raises(SettingsError, match="is empty"):
        read_token(file)
    file.write_text(f"{TOKEN}\n")
    assert read_token(file) == TOKEN
    assert TOKEN not in repr(Options(token=TOKEN))


def test_an_address_that_is_taken_is_an_error(server: Server) -> None:
    with pytest.raises(SettingsError, match=r"can't listen on '203\.0\.113\.1', port 1: "):
        serve_on(server.app, Options(host="203.0.113.1", port=1), print)


def test_only_a_loopback_address_is_not_public() -> None:
    assert not any(Options(host=host).is_public for host in ("127.0.0.1", "::1", "localhost"))
    assert all(Options(host=host).is_public for host in ("0.0.0.0", "::", "web-1"))


# The parts.


def test_a_worker_event_is_read_as_the_event_that_it_was() -> None:
    fields = {
        "type": type_of(EventName.LEASE_LOST),
        "uuid": "id",
        "name": "t",
        "key": "k",
        "reason": "gone",
    }
    event = event_of(fields)
    assert event is not None
    assert (event.name, event.task, event.task_id, event.key) == (
        EventName.LEASE_LOST,
        "t",
        "id",
        "k",
    )
    assert event.data["reason"] == "gone"
    for other in ("task-skipped", "singleton-of-a-newer-version", "", None, 7):
        assert event_of({"type": other}) is None


def test_an_event_that_a_worker_sends_again_is_counted_once(server: Server) -> None:
    def acquired(timestamp: float, hostname: str = "w1") -> None:
        fields = {"uuid": "id", "key": "k", "name": "t", "hostname": hostname}
        server.listener.receive(
            {"type": type_of(EventName.ACQUIRED), "timestamp": timestamp, **fields}
        )

    for timestamp in (1.0, 1.0, 2.0):
        acquired(timestamp)
    acquired(2.0, "w2")
    assert server.listener.received == 3


def test_a_list_that_a_worker_sends_again_is_counted_once(server: Server) -> None:
    def listed(number: int) -> list[dict[str, Any]]:
        counts = [[EventName.ACQUIRED, "t", 0.001, 5]]
        loss = {"type": type_of(EventName.LEASE_LOST), "name": "t", "key": "k", "reason": "gone"}
        about = {"hostname": "w1", "uuid": str(number), "timestamp": 1.0}
        return [{"type": "singleton-counts", "counts": counts, **about}, loss]

    for number in (1, 1, 2):
        server.listener.receive(listed(number))
    assert server.listener.received == 12
    metrics = server.ask("/metrics").body
    assert b'celery_singleton_acquisitions_total{task="t"} 10.0' in metrics
    assert b'celery_singleton_wait_seconds_count{task="t"} 10.0' in metrics
    assert b'celery_singleton_losses_total{reason="gone",task="t"} 2.0' in metrics


def test_a_hostile_list_is_logged_and_ends_nothing(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    for body in (
        *([], [7], 7, "x", [None], [[]]),
        [{"type": "singleton-counts"}],
        [{"type": "singleton-counts", "counts": [[EventName.ACQUIRED, "t", 0.1]]}],
        [{"type": "singleton-counts", "counts": 7, "hostname": []}],
        [{"type": "singleton-counts", "counts": []}, 7],
    ):
        server.listener.receive(body)
    assert "can't read" in caplog.text
    newer = [["of-a-newer-version", "t", 0.1, 3], [EventName.ACQUIRED, "t", 0.1, 2]]
    server.listener.receive([{"type": "singleton-counts", "counts": newer, "uuid": "1"}])
    assert server.listener.received == 2


def test_the_memory_of_a_listener_does_not_grow_with_the_names_of_workers(server: Server) -> None:
    for number in range(5000):
        fields = {
            "type": type_of(EventName.ACQUIRED),
            "hostname": f"w@pod-{number}",
            "timestamp": 1.0,
        }
        server.listener.receive(fields)
        server.listener.receive({**fields, "hostname": "w@stays", "timestamp": float(number)})
    assert len(server.listener._last) <= 1000
    assert "w@stays" in server.listener._last
    assert server.listener.received == 10_000


def test_events_that_a_worker_dropped_are_counted(server: Server) -> None:
    for count in (2, 3, "hostile"):
        server.listener.receive({"type": "singleton-events-dropped", "uuid": "", "count": count})
    assert (server.listener.dropped, server.listener.received) == (5, 0)
    assert b"celery_singleton_dropped_events_total 5.0" in server.ask("/metrics").body


def test_each_event_is_counted_once() -> None:
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    for name in EventName:
        metrics(
            Event(name=name, key="k", task="t", data={"outcome": "o", "reason": "r", "held": 3})
        )
    samples = [s for family in registry.collect() for s in family.samples]
    counted = [s for s in samples if s.name.endswith("_total") and s.value]
    assert len(counted) == len(COUNTERS)
    assert {(s.value, s.labels["task"]) for s in counted} == {(1.0, "t")}
    [held] = [s for s in samples if s.name == "celery_singleton_hold_seconds_sum"]
    assert held.value == 3


def test_the_log_names_once_a_broker_that_was_never_reached(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.socket() as closed:  # bound, and not listening
        closed.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{closed.getsockname()[1]}"
        with Celery("shop", broker=url, set_as_current=False) as app:
            listener = Listener(app, _Twice(), PrometheusMetrics(CollectorRegistry()))
            with pytest.raises(InterruptedError):
                listener._listen()
    [text] = [text for text in caplog.messages if "broker is unreachable" in text]
    assert "refused" in text


class _Twice(ManualClock):
    """Ends the second pause with an exception."""

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.now() > 1001.5:
            raise InterruptedError


def test_a_probe_reads_no_keys(server: Server) -> None:
    def read() -> Reading:
        raise AssertionError("there may be millions")

    server.readings.keys = Cached(read, server.readings.clock, 60.0)
    server.listener.error = ""
    assert server.ask("/healthz").status == 200


def test_a_probe_says_that_the_store_does_not_answer(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trace(*_: Any, timeout: float) -> None:
        assert timeout <= 1
        raise StoreUnavailable("no reply")

    server.listener.error = ""
    monkeypatch.setattr(Runtime.of(server.app).store.leases, "trace", trace)
    answer = server.ask("/healthz")
    assert (answer.status, json.loads(answer.body)["store"]) == (503, "no reply")


def test_the_counters_of_a_task_begin_with_0_so_its_first_loss_is_an_increase() -> None:
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    metrics.begin("t")
    samples = [s for family in registry.collect() for s in family.samples]
    assert {s.value for s in samples if s.name.endswith("_total")} == {0}
    for reason in ("expired", "gone", "replaced", "unreachable", "operator"):
        labels = {"task": "t", "reason": reason}
        assert registry.get_sample_value("celery_singleton_losses_total", labels) == 0
    outcome = {"task": "t", "outcome": "skip"}
    assert registry.get_sample_value("celery_singleton_conflicts_total", outcome) == 0
    assert registry.get_sample_value("celery_singleton_freed_total", {"task": "t"}) == 0
    assert registry.get_sample_value("celery_singleton_stalls_total", {"task": "t"}) == 0
    lost = {"task": "t", "reason": "lost"}
    assert registry.get_sample_value("celery_singleton_removals_total", lost) == 0


def test_a_call_that_is_requeued_again_is_one_conflict() -> None:
    registry = CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    for again in (None, True, True):
        data = {"outcome": "requeued", "reason": "conflict", "again": again}
        metrics(Event(name=EventName.CONFLICT, key="k", task="t", data=data))
        metrics(Event(name=EventName.REQUEUED, key="k", task="t", data=data))
    last = {"outcome": "raise", "again": True}
    metrics(Event(name=EventName.CONFLICT, key="k", task="t", data=last))
    found = {
        (s.name, *s.labels.values()): s.value
        for family in registry.collect()
        for s in family.samples
        if s.value and s.name.endswith("_total")
    }
    assert found == {
        ("celery_singleton_conflicts_total", "t", "requeued"): 1,
        ("celery_singleton_conflicts_total", "t", "raise"): 1,
        ("celery_singleton_requeues_total", "t", "conflict"): 3,
    }


def test_the_table_of_metrics_is_complete(server: Server) -> None:
    page = (ROOT / "docs/how-to/monitoring.md").read_text()
    rows = re.findall(r"^\| `(celery_singleton_\w+)` \| (\w+) \| ([^|]*)\|", page, re.MULTILINE)
    documented = {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert len(documented) == len(rows)
    data = {"outcome": "o", "reason": "r", "held": 3, "waited": 2}
    for name in EventName:
        server.listener.receive({"type": type_of(name), "name": "t", "key": "k", **data})
    server.readings.findings = (warning("eviction", "volatile-lru"),)
    holder = Holder(task="t", since=1.0)
    record = Record(key="k", kind=Kind.LEASE, token="t", fence=1, holder=holder, ttl=1.0)
    awaited = HeldKey.of(record)
    keys = (replace(awaited, waiting=1, calls=1),)
    paused = Paused.of(Pause(name="csl:{celery:0}:t", user="anna", host="web1"))
    server.readings.keys = Cached(
        lambda: Reading(datetime.now(UTC), keys, pauses=(paused,)), server.readings.clock, 60.0
    )
    found = {
        f"{family.name}_total" if family.type == "counter" else family.name: (
            family.type,
            {name for sample in family.samples for name in sample.labels} - {"le"},
        )
        for family in server.registry.collect()
    }
    assert found == documented


def test_a_slow_reading_is_used_longer() -> None:
    clock = ManualClock()
    calls: list[float] = []

    def read() -> int:
        clock.advance(2)
        calls.append(clock.now())
        return len(calls)

    cached = Cached(read, clock, 1.0)
    assert [cached.get(), cached.get()] == [1, 1]
    clock.advance(7.9)
    assert cached.get() == 1, "4 times the 2 s that it took"
    clock.advance(0.2)
    assert cached.get() == 2
    cached.forget()
    assert cached.get() == 3


def test_a_long_reading_holds_up_no_scrape_that_has_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search through millions of keys takes longer than a scrape may."""
    monkeypatch.setattr(readings, "_PATIENCE", 0.05)
    clock, gate, calls = ManualClock(), threading.Event(), list[int]()

    def read() -> int:
        calls.append(1)
        if len(calls) > 1:
            gate.wait(30)
        return len(calls)

    cached = Cached(read, clock, 1.0)
    assert cached.get() == 1
    clock.advance(2)
    assert [cached.get(), cached.get()] == [1, 1]
    gate.set()
    wait_until(lambda: cached.get() == 2, "the next reading")
    assert len(calls) == 2


def test_a_reading_that_fails_is_made_again() -> None:
    replies: list[Any] = [RuntimeError("a defect"), 5]

    def read() -> int:
        reply = replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return int(reply)

    cached = Cached(read, ManualClock(), 1.0)
    with pytest.raises(RuntimeError, match="a defect"):
        cached.get()
    assert cached.get() == 5


def asgi(application: Application, **scope: Any) -> list[dict[str, Any]]:
    """The messages that the application sends for one request."""
    sent: list[dict[str, Any]] = []
    chunks = iter(scope.pop("chunks", [b""]))
    scope = {"method": "GET", "path": "/", "query_string": b"", "headers": [], **scope}

    async def receive() -> dict[str, Any]:
        chunk = next(chunks)
        return {"type": "http.request", "body": chunk, "more_body": bool(chunk)}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(application({"type": "http", **scope}, receive, send))
    return sent


def test_every_response_has_the_headers_that_keep_other_scripts_out() -> None:
    start, _ = asgi(Application(lambda request: Response.text("ok")))
    headers = dict(start["headers"])
    policy = headers[b"content-security-policy"].decode()
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
    assert "require-trusted-types-for 'script'" in policy
    assert headers[b"x-content-type-options"] == b"nosniff"
    assert headers[b"cache-control"] == b"no-store"


def test_a_failure_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    def fail(request: Request) -> Response:
        raise RuntimeError("s3cret")

    start, body = asgi(Application(fail))
    assert start["status"] == 500
    assert b"s3cret" not in body["body"]
    assert "s3cret" in caplog.text


def test_a_long_body_is_refused_before_it_is_read() -> None:
    application = Application(lambda request: Response.text("ok"))
    start, _ = asgi(application, method="POST", chunks=[b"x" * 9000] * 5)
    assert start["status"] == 413


def test_a_head_request_has_no_body() -> None:
    start, body = asgi(Application(lambda request: Response.text("ok")), method="HEAD")
    assert (start["status"], body["body"]) == (200, b"")
    assert dict(start["headers"])[b"content-length"] == b"3"


#: Bytes of a response that fills the buffers of a connection, as the metrics of many tasks would.
LONG = 20_000_000


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[uvicorn.Server, tuple[str, int]]]:
    """A server that answers each path, and waits for a request for some tenths of a second."""
    monkeypatch.setattr(protocol, "REQUEST_TIMEOUT", 0.2)
    protocol._warn.cache_clear()
    application = Application(
        lambda request: Response.text("x" * LONG if request.path == "/long" else "here"),
        quick={HEALTH},
        exempt={HEALTH, METRICS},
    )
    config = uvicorn.Config(application, http=protocol.bounded(2), lifespan="off", log_config=None)
    site = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as accepting:
        thread = threading.Thread(target=site.run, kwargs={"sockets": [accepting]})
        thread.start()
        yield site, accepting.getsockname()
        site.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "part",
    [
        b"",
        b"GET / HTT",
        b"GET / HTTP/1.1\r\nHost: a\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{",
    ],
)
def test_a_request_that_does_not_arrive_does_not_keep_its_connection(
    part: bytes, listening: tuple[uvicorn.Server, tuple[str, int]]
) -> None:
    """Four hundred of them would occupy the server for as long as they like."""
    with socket.create_connection(listening[1], timeout=30) as client:
        client.sendall(part)
        while client.recv(4096):  # until the server closes it
            pass


@pytest.mark.parametrize("version", ["1.0", "1.1"])  # the server closes the first by itself
def test_a_response_that_is_not_read_does_not_keep_its_connection(
    version: str, listening: tuple[uvicorn.Server, tuple[str, int]]
) -> None:
    opened: set[Any] = listening[0].server_state.connections
    with socket.socket() as client:
        client.settimeout(30)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listening[1])
        client.sendall(f"GET /long HTTP/{version}\r\nHost: a\r\n\r\n".encode())
        assert client.recv(1), "it is being answered"
        wait_until(lambda: not opened, "the server has closed it")


def test_a_body_that_does_not_arrive_does_not_delay_the_end_of_the_server(
    listening: tuple[uvicorn.Server, tuple[str, int]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "REQUEST_TIMEOUT", 60.0)
    server, address = listening
    with socket.create_connection(address, timeout=30) as client:
        client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
        wait_until(lambda: bool(server.server_state.tasks), "the request is being read")
        server.should_exit = True
        while client.recv(4096):
            pass
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.fixture
def connect(
    listening: tuple[uvicorn.Server, tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], socket.socket]]:
    """A function that opens a connection to the server, which waits for its request."""
    monkeypatch.setattr(protocol, "REQUEST_TIMEOUT", 30.0)
    opened: set[Any] = listening[0].server_state.connections
    with ExitStack() as stack:

        def connect() -> socket.socket:
            count = len(opened)
            client = stack.enter_context(socket.create_connection(listening[1], timeout=30))
            wait_until(lambda: len(opened) > min(count, 3), "the server has accepted it")
            return client

        yield connect


def ask(client: socket.socket, path: str) -> str:
    """The response, with its headers; a surplus connection is closed after it."""
    client.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    response = b""
    while b"\r\n\r\n" not in response:
        response += client.recv(4096)
    return response.decode().lower()


def test_further_connections_of_an_address_get_503_and_one_warning(
    connect: Callable[[], socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    first, _second = connect(), connect()
    assert "503" not in caplog.text
    for _ in range(3):
        response = ask(client := connect(), "/")
        assert response.startswith("http/1.1 503 ")
        assert "connection: close" in response
        while client.recv(4096):  # until the server closes it
            pass
    assert ask(first, "/").startswith("http/1.1 200 ")
    [warning] = [record for record in caplog.records if "connections" in record.getMessage()]
    assert warning.levelno == logging.WARNING
    assert "127.0.0.1 has more than 2 connections" in warning.getMessage()
    assert "--max-connections" in warning.getMessage()


@pytest.mark.parametrize("path", [HEALTH, METRICS])
def test_an_address_with_too_many_connections_is_scraped_and_probed(
    connect: Callable[[], socket.socket], path: str
) -> None:
    for _ in range(2):
        connect()
    response = ask(connect(), path)
    assert response.startswith("http/1.1 200 ")
    assert "connection: close" in response


def test_one_address_has_a_bounded_number_of_connections_and_the_newest_is_answered(
    listening: tuple[uvicorn.Server, tuple[str, int]], connect: Callable[[], socket.socket]
) -> None:
    clients = [connect() for _ in range(6)]
    wait_until(lambda: len(listening[0].server_state.connections) == 4, "four are left")
    for client in clients[2:4]:  # the surplus ones that have waited longest
        with suppress(ConnectionError):
            assert client.recv(1) == b""
    assert ask(clients[-1], METRICS).startswith("http/1.1 200 ")
    assert ask(clients[0], "/").startswith("http/1.1 200 ")
