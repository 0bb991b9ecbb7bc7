"""A time means what Celery's worker reads: compared with the messages of plain tasks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any, Final
from unittest.mock import patch
from uuid import uuid4
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.app.trace import build_tracer
from celery.utils.time import timezone as celery_timezone
from celery.worker.request import Request
from kombu.asynchronous.timer import to_timestamp

from celery_singleton_lock import claim_and_send, singleton_task
from celery_singleton_lock.core.lease import Kind
from celery_singleton_lock.message.request_data import ATTRIBUTE, Arrival
from celery_singleton_lock.message.times import seconds_until, utc
from celery_singleton_lock.policy import Policy
from celery_singleton_lock.publish.debounce import check_debounce
from celery_singleton_lock.testing import SingletonStore
from tests.harness.keys import EVERY_NAME

# Half an hour before a change of summer time, if the zone has any.
MOMENTS: Final = [
    ("Europe/Berlin", datetime(2030, 3, 31, 0, 30, tzinfo=UTC)),
    ("Europe/Berlin", datetime(2030, 10, 27, 0, 30, tzinfo=UTC)),
    ("America/Los_Angeles", datetime(2030, 3, 10, 9, 30, tzinfo=UTC)),
    ("America/Los_Angeles", datetime(2030, 11, 3, 8, 30, tzinfo=UTC)),
    ("Asia/Tokyo", datetime(2030, 3, 31, 0, 30, tzinfo=UTC)),
    (None, datetime(2030, 3, 31, 0, 30, tzinfo=UTC)),
]
ZONES: Final = ["Europe/Berlin", "America/Los_Angeles", "Asia/Tokyo"]
UNIQUE_FOR, TTL = 1e6, 60.0


def forms(now: datetime) -> list[Any]:
    """The forms of times that lie an hour ahead, or, without a time zone, an hour ahead as UTC."""
    due = now + timedelta(hours=1)
    naive = due.replace(tzinfo=None)
    zones = [
        UTC,
        timezone(timedelta(hours=9)),
        *map(ZoneInfo, ZONES),
    ]
    aware = [due.astimezone(zone) for zone in zones]
    past = naive - timedelta(hours=3)
    texts = [moment.isoformat() for moment in (naive, past, *aware)]
    return [naive, past, *aware, *texts, f"{naive.isoformat()}Z"]


class Site:
    """An app at a time that stands still, with a plain and a singleton task that retry."""

    def __init__(self, now: datetime, **settings: Any) -> None:
        self.app = Celery("times", broker="memory://", set_as_current=False)
        self.app.conf.update(task_default_queue=f"q-{uuid4().hex}", **settings)
        self.app.now = lambda: now.astimezone(self.app.timezone)  # type: ignore[method-assign]
        self.now, self.of_retry = now, dict[str, Any]()
        self.store = SingletonStore()
        self.store.install(self.app)

        def work(task: Any, number: int = 0) -> None:
            raise task.retry(**self.of_retry)

        options: dict[str, Any] = {"bind": True, "shared": False, "max_retries": None}
        self.plain = self.app.task(name="plain", **options)(work)
        terms: Any = {"unique": "until_done", "unique_for": UNIQUE_FOR, "ttl": TTL}
        self.task = singleton_task(app=self.app, name="work", **options, **terms)(work)

    def close(self) -> None:
        self.store.uninstall()
        self.app.close()

    def message(self) -> Any:
        """The message that was published last."""
        with self.app.connection_for_read() as connection:
            queue, found = connection.SimpleQueue(self.app.conf.task_default_queue), None
            while True:
                try:
                    found = queue.get_nowait()
                except queue.Empty:
                    return found
                found.ack()

    def run(self, task: Any, message: Any) -> None:
        where = {"exchange": "", "routing_key": "", "redelivered": False}
        request = {**message.headers, "delivery_info": where, ATTRIBUTE: Arrival(nonce="n")}
        build_tracer(task.name, task, app=self.app)(request["id"], (), {}, request)

    def celerys(self, message: Any) -> tuple[float | None, float | None]:
        """Seconds until eta and expires of a message, as its worker computes them.

        kombu compares two clocks for it, read some milliseconds apart on a busy machine. Here both
        are the same, and stand still.
        """
        app, eta, expires = self.app, None, None
        request = Request(message, app=app, task=self.plain, utc=app.uses_utc_timezone())
        if request.eta:  # celery.worker.strategy
            with patch("kombu.asynchronous.timer._time", self.now.timestamp):
                if request.utc:
                    local = celery_timezone.to_system(request.eta)
                    eta = to_timestamp(local, time=self.now.timestamp)
                else:
                    eta = to_timestamp(request.eta, app.timezone, time=self.now.timestamp)
            eta -= self.now.timestamp()
        if request.expires:
            expires = request.expires.timestamp() - self.now.timestamp()
        return eta, expires

    def ttl(self, kind: Kind) -> float:
        """The ttl of the store's only record of that kind; 0: there is none."""
        return sum(
            record.ttl
            for record in self.store.store.operators.scan(EVERY_NAME)
            if record.kind is kind
        )


@contextmanager
def site(now: datetime, **settings: Any) -> Iterator[Site]:
    site = Site(now, **settings)
    try:
        yield site
    finally:
        site.close()


@pytest.mark.parametrize("enable_utc", [True, False], ids=["utc", "local"])
@pytest.mark.parametrize(("zone", "now"), MOMENTS, ids=str)
class TestAsAPlainWorker:
    """What this library computes from a time is what Celery's worker reads in the message."""

    def test_a_claim_lasts_from_the_countdown_or_eta(
        self, zone: str | None, now: datetime, enable_utc: bool
    ) -> None:
        day: Any = (now + timedelta(days=2)).date()
        calls = [{"eta": when} for when in [*forms(now), day]]
        calls += [{"countdown": 3600}, {"countdown": 0.5}, {"countdown": 5400, "eta": day}]
        with site(now, timezone=zone, enable_utc=enable_utc) as here:
            for options in calls:
                here.plain.apply_async(**options)
                due, _ = here.celerys(here.message())
                assert due is not None
                here.task.apply_async((len(options),), **options)
                assert here.ttl(Kind.CLAIM) == pytest.approx(UNIQUE_FOR + max(0.0, due)), options
                here.store.clock.advance(2 * UNIQUE_FOR)

    def test_a_claim_ends_when_its_message_expires(
        self, zone: str | None, now: datetime, enable_utc: bool
    ) -> None:
        with site(now, timezone=zone, enable_utc=enable_utc) as here:
            for expires in [*forms(now), 3600, 5400.5, 0]:
                here.plain.apply_async(expires=expires)
                _, ends = here.celerys(here.message())
                assert ends is not None
                here.task.apply_async(expires=expires)
                assert here.ttl(Kind.CLAIM) == pytest.approx(max(0.0, ends), abs=0.01), expires
                here.store.clock.advance(2 * UNIQUE_FOR)

    def test_a_key_is_reserved_until_the_retry_is_due(
        self, zone: str | None, now: datetime, enable_utc: bool
    ) -> None:
        calls: list[dict[str, Any]] = [{"eta": when} for when in forms(now)]
        calls += [{"countdown": 3600}, {"countdown": 7, "eta": now + timedelta(hours=2)}]
        with site(now, timezone=zone, enable_utc=enable_utc) as here:
            for here.of_retry in calls:
                here.plain.delay()
                here.run(here.plain, here.message())
                due, _ = here.celerys(here.message())
                assert due is not None
                here.task.delay()
                here.run(here.task, here.message())
                due = max(0.0, due)
                assert here.ttl(Kind.RESERVED) == pytest.approx(due + TTL), here.of_retry
                assert here.ttl(Kind.CLAIM) == pytest.approx(UNIQUE_FOR + due), here.of_retry
                here.store.clock.advance(2 * UNIQUE_FOR)


@pytest.mark.parametrize("when", [None, 0, "", -5], ids=repr)
def test_no_option_and_what_has_passed_are_now(when: Any) -> None:
    with site(datetime.now(UTC)) as here:
        assert seconds_until(when, here.app) == 0.0


@pytest.mark.parametrize("when", ["soon", [9], timedelta(seconds=9)], ids=repr)
def test_what_celery_refuses_or_no_worker_reads_is_no_time(when: Any) -> None:
    with site(datetime.now(UTC)) as here:
        assert seconds_until(when, here.app) is None


def test_a_time_zone_without_an_offset_is_utc() -> None:
    class Nowhere(tzinfo):
        def utcoffset(self, when: datetime | None) -> None:
            return None

    assert utc(datetime(2030, 1, 2, tzinfo=Nowhere())) == datetime(2030, 1, 2, tzinfo=UTC)


def test_debounce_compares_with_the_time_at_which_the_call_expires() -> None:
    policy = Policy(debounce=60, debounce_max=600)
    for zone, now in MOMENTS:
        with site(now, timezone=zone) as here:
            soon, late = (now.replace(tzinfo=None) + timedelta(minutes=m) for m in (9, 11))
            check_debounce("work", policy, {}, late, here.app)
            with pytest.raises(ValueError, match="may expire before it runs"):
                check_debounce("work", policy, {}, soon, here.app)


KEY = "0" * 32  # the form of a digest


def test_a_call_by_name_expires_as_a_call_of_the_registered_task() -> None:
    """Celery 5.7 does so in ``send_task``; a claim without it would outlast its message."""
    with site(datetime.now(UTC)) as here:
        here.task.expires = 30
        claim_and_send(here.app, "work", key=KEY, singleton={"unique": "until_done"})
        assert here.ttl(Kind.CLAIM) == pytest.approx(30)
        assert here.celerys(here.message())[1] == pytest.approx(30)
        here.store.clock.advance(60)
        once: Any = {"unique": "until_done", "unique_for": 70}
        claim_and_send(here.app, "work", key=KEY, singleton=once, expires=None)
        assert here.ttl(Kind.CLAIM) == pytest.approx(70)
        assert here.celerys(here.message())[1] is None


# django-celery-results stores what Django calls now. Django sets the time zone of the process only
# if its settings are a module.
PROGRAM = """
    import sys
    from datetime import UTC, datetime
    from types import ModuleType

    import django
    from celery import Celery
    from django.core.management import call_command

    site = sys.modules["site_settings"] = ModuleType("site_settings")
    site.USE_TZ, site.TIME_ZONE, site.SECRET_KEY = False, {zone!r}, "x"
    site.INSTALLED_APPS = ["django_celery_results"]
    site.DATABASES = {{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}}}
    django.setup()
    call_command("migrate", verbosity=0)

    from celery_singleton_lock.message.times import done_at

    app = Celery("site", backend="django-db")
    app.conf.timezone = {zone!r}
    app.backend.store_result("t", None, "SUCCESS")
    found = done_at(app.AsyncResult("t").date_done, app)
    print(abs((found - datetime.now(UTC)).total_seconds()) < 60)
"""


@pytest.mark.parametrize(
    "zone", ["America/Los_Angeles", pytest.param("Asia/Tokyo", marks=pytest.mark.slow)]
)
def test_a_local_time_in_djangos_database_is_no_utc(zone: str) -> None:
    """Read as UTC, a local time made a result older or newer than the call that it belongs to."""
    pytest.importorskip("django_celery_results")
    program = textwrap.dedent(PROGRAM.format(zone=zone))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "site_settings"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "True\n", done.stderr
