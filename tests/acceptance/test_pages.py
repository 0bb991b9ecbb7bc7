"""The examples of the documentation's pages, run as they are printed."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any, ClassVar

import pytest
import redis
from celery import Celery

from celery_singleton_lock import SingletonTask
from tests.harness.deliveries import wait_until
from tests.harness.pages import Page, block_with, blocks, run
from tests.harness.processes import ROOT
from tests.harness.worker import CeleryWorker

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}


def test_a_lock_in_ten_lines_fails_as_the_page_shows(tmp_path: Path, redis_url: str) -> None:
    Page("explanation/guarantees.md", tmp_path, redis_url).check()


def test_the_database_refuses_the_older_fence(tmp_path: Path, redis_url: str) -> None:
    Page("tutorials/first-lock.md", tmp_path, redis_url).write()
    Page("explanation/how-it-works.md", tmp_path, redis_url).write().check()


def test_the_nightly_job_is_scheduled_and_has_one_key_for_all_its_runs() -> None:
    names: dict[str, Any] = {"__name__": "nightly"}
    exec(block_with((ROOT / "docs/how-to/beat.md").read_text(), "# nightly.py"), names)
    app, task = names["app"], names["import_orders"]
    assert [entry["task"] for entry in app.conf.beat_schedule.values()] == [task.name]
    assert task.lock_key().endswith(":nightly.import_orders:*")
    app.close()


class Refused(Exception):
    """botocore's ClientError, as far as the page reads it."""

    def __init__(self, code: str) -> None:
        self.response = {"Error": {"Code": code}}


class Bucket:
    """One object with the conditional writes of S3.

    Args:
        between: Called once, between a read and the write that depends on it.
    """

    def __init__(self, between: Callable[[], None] = lambda: None) -> None:
        self.stored: dict[str, Any] | None = None
        self._between = between

    def head_object(self, Bucket: str, Key: str) -> dict[str, Any]:
        found, between = self.stored, self._between
        self._between = lambda: None
        between()
        if found is None:
            raise Refused("404")
        return found

    def put_object(self, Body: bytes, Metadata: dict[str, str], **given: str) -> None:
        found = self.stored
        if "IfNoneMatch" in given and found is not None:
            raise Refused("PreconditionFailed")
        if "IfMatch" in given and (found is None or found["ETag"] != given["IfMatch"]):
            raise Refused("PreconditionFailed")
        etag = f"{Body!r}{Metadata}"
        self.stored = {"Metadata": Metadata, "ETag": etag, "Body": Body}


@pytest.fixture
def objects(tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page's objects.py."""
    Page("explanation/how-it-works.md", tmp_path, redis_url).write()
    errors: Any = ModuleType("botocore.exceptions")
    errors.ClientError = Refused
    monkeypatch.setitem(sys.modules, "botocore", ModuleType("botocore"))
    monkeypatch.setitem(sys.modules, "botocore.exceptions", errors)
    module: Any = ModuleType("objects")
    exec((tmp_path / "objects.py").read_text(), vars(module))
    return module


@pytest.mark.parametrize("stored", [False, True])
def test_an_object_keeps_the_newest_fence_whenever_the_older_one_writes(
    objects: Any, stored: bool
) -> None:
    def newer() -> None:
        objects.put_fenced(bucket, "b", "k", b"newer", fence=9)

    bucket = Bucket(between=newer)
    if stored:
        bucket.put_object(b"first", {"fence": "1"})
    with pytest.raises(objects.StaleWrite, match="fence 5 is not the newest"):
        objects.put_fenced(bucket, "b", "k", b"older", fence=5)
    assert bucket.stored is not None
    assert bucket.stored["Body"] == b"newer"
    objects.put_fenced(bucket, "b", "k", b"again", fence=9)
    assert bucket.stored["Body"] == b"again"


@pytest.mark.parametrize("page", ["choosing", "killed", "unique-calls"])
def test_the_first_example_of_a_page_is_complete(page: str, redis_url: str) -> None:
    code = blocks((ROOT / f"docs/how-to/{page}.md").read_text())[0]
    names: dict[str, Any] = {"__name__": "tasks"}
    exec(re.sub(r"redis://localhost:6379/\d", redis_url, code), names)
    names["app"].close()


@pytest.mark.slow
def test_flask_keeps_its_context_and_shares_the_lock(
    tmp_path: Path, redis_url: str, worker: Callable[..., CeleryWorker]
) -> None:
    page = Page("how-to/flask.md", tmp_path, redis_url).write()
    worker("shop:celery_app")
    page.check()


#: Calls of the Flask example whose order is no number, or a very long one; their statuses.
OUT_OF_BOUNDS = """
from shop import flask_app
client = flask_app.test_client()
for order in ("-1", "1.5", "nan", "9" * 300, "9" * 4000, "9" * 5000):
    for do in ("charge", "refund"):
        print(client.post(f"/orders/{order}/{do}").status_code)
"""


def test_flask_answers_no_order_with_a_failure_of_the_server(
    tmp_path: Path, redis_url: str
) -> None:
    Page("how-to/flask.md", tmp_path, redis_url).write()
    done = run("-c", OUT_OF_BOUNDS, folder=tmp_path)
    found = done.stdout.split()
    assert found == [*["404"] * 6, *["202", "200"] * 2, *["404"] * 2], done.stderr


@pytest.mark.slow
def test_a_worker_killed_after_its_result_causes_no_second_run(
    tmp_path: Path, redis_url: str, worker: Callable[..., CeleryWorker]
) -> None:
    page = (ROOT / "docs/how-to/killed.md").read_text()
    settings = block_with(page, "worker_deduplicate_successful_tasks").replace("600", "2")
    (tmp_path / "late.py").write_text(
        "import os, pathlib, signal\nfrom celery import Celery\n"
        "from celery.signals import task_success\n"
        "from celery_singleton_lock import singleton_task\n"
        f"app = Celery('late', broker={redis_url!r}, backend={redis_url!r})\n{settings}"
        "killed = pathlib.Path(__file__).with_name('killed')\n\n"
        "@singleton_task(app=app, ttl=1, acks_late=True, reject_on_worker_lost=True)\n"
        "def work() -> None:\n    print('body runs')\n\n"
        "@task_success.connect\n"
        "def die(**_):\n"
        "    if not killed.exists():\n"
        "        killed.touch()\n"
        "        os.killpg(os.getpgid(0), signal.SIGKILL)\n"
    )
    first = worker("late", concurrency=1, wait=False)
    called = run("-c", "import late; late.work.delay()", folder=tmp_path)
    assert called.returncode == 0, called.stderr
    first.wait()
    with redis.Redis.from_url(redis_url) as broker:  # a worker's start looks for what is due

        def is_due() -> bool:
            return bool(broker.zcount("unacked_index", 0, time.time() - 2))

        wait_until(is_due, "the message of the killed worker is due")
    second = worker("late", concurrency=1, wait=False)
    second.wait_for_log("already completed")
    assert "body runs" not in second.log


#: The user's own part of the Django example.
PAYMENTS = """
def charge(total, idempotency_key): ...
def refund(total, idempotency_key): ...
"""
#: What the page's other functions do.
VIEW_TESTS = """
from unittest import mock
from django.test import TestCase, override_settings
from celery_singleton_lock.testing import hold_lock
from shop.models import Order
from shop.orders import place
from shop.tasks import charge
from shop.views import pay, refund

@override_settings(CELERY_TASK_ALWAYS_EAGER=True, CELERY_TASK_EAGER_PROPAGATES=True)
class ViewTest(TestCase):
    def is_refunded(self):
        order = Order.objects.get()
        self.assertTrue(order.paid)
        return order.refunded

    def test_a_placed_order_is_charged_once_and_refunded_while_nobody_charges_it(self):
        order = Order(total=30)
        with mock.patch("shop.payments.charge") as pay, self.captureOnCommitCallbacks(execute=True):
            place(order)
        pay.assert_called_once()
        with hold_lock(charge, order.pk):
            self.assertEqual(refund(None, order.pk).status_code, 409)
        self.assertFalse(self.is_refunded())
        self.assertEqual(refund(None, order.pk).status_code, 204)
        self.assertTrue(self.is_refunded())

    def test_an_order_that_is_paid_twice_is_charged_once(self):
        order = Order.objects.create(total=30)
        with mock.patch("shop.payments.charge") as charges:
            with self.captureOnCommitCallbacks(execute=True):
                statuses = [pay(None, order.pk).status_code for _ in range(2)]
        self.assertEqual(statuses, [202, 202])
        charges.assert_called_once()

    def test_a_call_with_options_is_sent_after_the_commit(self):
        order = Order.objects.create(total=30)
        with mock.patch("shop.payments.charge") as pay:
            with self.captureOnCommitCallbacks(execute=True) as calls:
                exec(OPTIONS, {"charge": charge, "order": order})
            pay.assert_called_once()
        self.assertEqual(len(calls), 2)
"""


@pytest.mark.slow
def test_a_testcase_of_django_needs_no_server(tmp_path: Path) -> None:
    nowhere = "redis://127.0.0.1:1/0"
    for name in ("how-to/django.md", "how-to/testing.md"):
        Page(name, tmp_path, nowhere).write()
    for package in ("proj", "shop"):
        (tmp_path / package / "__init__.py").touch()
    found = blocks((ROOT / "docs/how-to/django.md").read_text())
    options = "".join(one for one in found if "charge.apply_async_on_commit" in one)
    view_tests = f"OPTIONS = {options!r}\n{VIEW_TESTS}"
    ours = {"payments": PAYMENTS, "test_views": view_tests}
    for name, code in ours.items():
        (tmp_path / f"shop/{name}.py").write_text(code)
    (tmp_path / "proj/__init__.py").write_text("from .celery import app as celery_app\n")
    with (tmp_path / "proj/settings.py").open("a") as settings:
        settings.write(
            "SECRET_KEY = 'x'\nINSTALLED_APPS = ['shop']\n"
            "DATABASES = {'default': {'ENGINE': 'django.db.backends.sqlite3'}}\n"
            "DATABASES['default']['NAME'] = ':memory:'\n"
        )
    command = ["-m", "django", "test", "shop", "--settings", "proj.settings"]
    path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = run(*command, folder=tmp_path, env=path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ran 6 tests" in done.stderr


@pytest.mark.slow
def test_an_outbox_is_drained_in_order_and_no_row_is_left_behind(
    tmp_path: Path, redis_url: str, worker: Callable[..., CeleryWorker]
) -> None:
    page = Page("how-to/outbox.md", tmp_path, redis_url).write()
    drains = worker("outbox", concurrency=4, cwd=tmp_path)
    page.check(*page.sessions)
    left = """
        >>> from outbox import connect, drain_all
        >>> connect().execute("INSERT INTO outbox (account, amount) VALUES ('ann', 20)").rowcount
        1
        >>> _ = drain_all.delay()
    """
    page.check(left)
    drains.wait_for_log("ann: tell the bank about 20")
    drained = re.findall(r"(ann|bob): tell the bank about (\d+)", drains.log)
    for account, most in (("ann", 21), ("bob", 20)):
        assert [int(n) for name, n in drained if name == account] == list(range(most))


def test_every_python_block_of_the_pages_compiles() -> None:
    """A block is a module, or the inside of a function."""
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.M):
            if ">>>" not in block:
                compile(block, str(page), "exec")


def test_a_task_without_the_package_keeps_celerys_options() -> None:
    app = Celery("removed", broker="memory://", set_as_current=False)
    page = (ROOT / "docs/how-to/switch.md").read_text()
    before = block_with(page, "@singleton_task(\n").replace("_task(", "_task(app=app, ")
    after = block_with(page, "@shared_task(").replace("shared_task(", "app.task(")
    tasks = []
    for name, code in (("before", before), ("after", after)):
        names: dict[str, Any] = {"app": app, "__name__": name}
        exec(code, names)
        tasks.append(names["sync"])
    assert [task.acks_late for task in tasks] == [True, True]
    assert [isinstance(task, SingletonTask) for task in tasks] == [True, False]
    app.close()


class Partner(BaseHTTPRequestHandler):
    """Answers the first request with 429, and the others with 200."""

    asked: ClassVar[list[float]] = []

    def do_GET(self) -> None:
        self.asked.append(time.monotonic())
        is_first = len(self.asked) == 1
        self.send_response(429 if is_first else 200)
        self.send_header("Retry-After", "2")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_partner_that_answers_with_429_is_left_alone_until_its_retry_after(
    tmp_path: Path, redis_url: str, environment: dict[str, str]
) -> None:
    Page("how-to/pause.md", tmp_path, redis_url).write()
    with (
        HTTPServer(("127.0.0.1", 0), Partner) as server,
        ExitStack() as stack,
        Celery("client", broker=redis_url, backend=redis_url, set_as_current=False) as app,
    ):
        Thread(target=server.serve_forever, daemon=True).start()
        worker = CeleryWorker("partners", env=environment, cwd=tmp_path)
        stack.callback(worker.kill_group)
        worker.start()
        worker.wait_until_ready()
        url = f"http://127.0.0.1:{server.server_port}/"
        calls = [app.send_task("partners.sync", ("acme", url)) for _ in range(3)]
        assert [call.get(timeout=30) for call in calls] == [200, 200, 200]
        server.shutdown()
    first, second, *_ = Partner.asked
    assert len(Partner.asked) == 4, "429 for one call, 200 for each"
    assert second - first >= 1.9
    assert "429 from acme" in worker.log
