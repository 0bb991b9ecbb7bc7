"""Passwords are in no log, error, traceback or repr, of any form of URL, quoted rightly or not."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import pytest
from celery import Celery
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_singleton_lock import singleton_task
from celery_singleton_lock.errors import SettingsError
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.settings import read_settings
from celery_singleton_lock.stores import open_store
from celery_singleton_lock.stores.store_url import masked

#: What nothing may show; it has no letter that is quoted.
WORD = "hunter2"

#: ``{p}`` is the password.
FORMS = [
    "redis://:{p}@h:6379/0",
    "redis://u:{p}@h/0",
    "redis://h/0?password={p}",
    "redis://h/0?username=u&password={p}",
    "rediss://u:{p}@h/0?ssl_cert_reqs=none",
    "rediss://h/0?ssl_password={p}",
    "valkey://:{p}@h",
    "valkeys://u:{p}@[::1]:6379/0",
    "unix://:{p}@/tmp/x.sock?virtual_host=1",
    "unix:///tmp/x.sock?password={p}",
    "redis+socket://:{p}@/tmp/x.sock",
    "sentinel://:{p}@h:26379/0?master_name=m",
    "sentinel://:{p}@h1:26379/0;sentinel://:{p}@h2:26379/0",
    "sentinel://h1,h2/0?master_name=m&sentinel_password={p}",
    "sentinels://:{p}@h1:1,h2:2/0?master_name=m&sentinel_username=u&sentinel_password={p}",
    "redis+cluster://:{p}@h1:7000,h2:7001",
    "rediss+cluster://u:{p}@h1:7000,h2:7001?ssl_cert_reqs=none",
    "redis+cluster://h1:7000?password={p}",
    "redlock://:{p}@a:1,b:2,c:3/0",
    "redlock://u:{p}@a:1,v:{p}@b:2,:{p}@[::1]:3/0",
    "redlocks://:{p}@a:1,b:2,c:3/0?ssl_password={p}",
    "redlocks://a:1,b:2,c:3/0?ssl_password={p}&quarantine=1",
    "etcd://u:{p}@h1:1,h2:2/x",
    "etcds://u:{p}@h?ca=/x",
    "zk://u:{p}@h1,h2/x",
    "zks://u:{p}@h",
]

#: Before and behind the word: every character that means something in a URL, and digits, which pass
#: for a port.
AROUND = st.text(alphabet="/?#@:,;%&=[]+ .\\'\"é12ab", max_size=4)


def app_of(url: str, setting: str = "singleton_lock_url", sentinel: str = "") -> Celery:
    app = Celery("t", set_as_current=False, broker="memory://")
    app.conf[setting] = url
    app.conf.broker_transport_options = {
        "master_name": "m",
        "sentinel_kwargs": {"password": sentinel} if sentinel else {},
    }
    return app


def printed_of(url: str, setting: str = "singleton_lock_url") -> Iterator[str]:
    """Everything that the library says of a URL, without a server at it."""
    yield masked(url)
    try:
        read = read_settings(app_of(url, setting, sentinel=WORD))
        yield f"{read!r} {read.safe_url}"
        store = open_store(read.url, options=read.connection_options)
        yield repr(store)
    except SettingsError as error:
        # With the errors that it came from: a traceback has them all.
        yield "".join(traceback.format_exception(error))


@settings(max_examples=80, deadline=None)
@given(form=st.sampled_from(FORMS), before=AROUND, behind=AROUND)
def test_a_password_that_is_quoted_is_read_and_not_shown(
    form: str, before: str, behind: str
) -> None:
    for printed in printed_of(form.format(p=quote(before + WORD + behind, safe=""))):
        assert WORD not in printed


@pytest.mark.parametrize(
    "form",
    # A TLS context takes the time of a hundred other URLs.
    [pytest.param(f, marks=[pytest.mark.slow] if "redlocks" in f else []) for f in FORMS],
)
def test_a_password_with_an_unquoted_character_is_not_shown(form: str) -> None:
    """The library may refuse such a URL, or misread it; what it says is not the password."""
    pieces = [("ab", WORD), (WORD, "ab"), ("12", WORD), ("", WORD), (WORD, "")]
    for special in "/?#@:,;%&=+ []":
        for first, second in pieces:
            password = first + special + second
            for printed in printed_of(form.format(p=password)):
                assert WORD not in printed, password


@pytest.mark.parametrize("setting", ["result_backend", "broker_url"])
@pytest.mark.parametrize("special", [*"/?#"], ids=repr)
def test_an_inherited_url_is_treated_alike(setting: str, special: str) -> None:
    for printed in printed_of(f"redis://:12{special}{WORD}@h:6379/0", setting):
        assert WORD not in printed


@pytest.mark.parametrize("url", ["redis://:12/x@h/0", "zk://u:1?x@h", "etcd://u:#x@h1,h2"])
def test_a_password_that_passes_for_a_port_is_refused_with_what_to_do(url: str) -> None:
    with pytest.raises(SettingsError, match=r"percent-encode.*%2F"):
        read_settings(app_of(url))


def test_reporters_that_show_local_variables_get_no_password() -> None:
    """As of Sentry, `pytest -l` and rich: they print the repr of whatever a frame has."""
    read = read_settings(app_of(f"sentinel://:{WORD}@h1,h2/0", sentinel=WORD))
    assert read.connection_options["sentinel_kwargs"] == {"password": WORD}
    assert WORD in read.url
    seen: list[Any] = [read, Runtime(app_of(f"redis://:{WORD}@h"))]
    for form in ("redis://:{p}@h", "redlock://:{p}@a,b,c", "etcd://u:{p}@h", "zk://u:{p}@h"):
        store = open_store(form.format(p=WORD))
        seen += [store, vars(store)]
    for value in seen:
        assert WORD not in repr(value)


def _nothing() -> None:
    """A task's body."""


def test_a_celery_report_hides_the_url_of_the_store() -> None:
    """`celery report` is pasted into issues; `inspect conf` answers any client of the broker."""
    app = app_of(f"redis://:{WORD}@h/0")
    # Not shared: that one would join every other app of the test process.
    singleton_task(app=app, name="t", shared=False)(_nothing)
    table: Mapping[str, Any] = app.conf.table(with_defaults=True, censored=True)
    assert table["singleton_lock_url"] == "********"
    assert WORD not in str(table["singleton_lock_url"]) + app.bugreport()


def test_the_zookeeper_client_logs_no_login_even_at_debug(
    caplog: pytest.LogCaptureFixture,
) -> None:
    serialization = pytest.importorskip("kazoo.protocol.serialization")
    sessions = pytest.importorskip("celery_singleton_lock.stores.zookeeper.sessions")
    from celery_singleton_lock.core import observers
    from celery_singleton_lock.core.clock import SystemClock
    from celery_singleton_lock.stores.store_url import StoreUrl

    url = StoreUrl.parse(f"zk://u:{WORD}@127.0.0.1:1", port=2181)
    session = sessions.Session(url, 10.0, SystemClock())
    with caplog.at_level(logging.DEBUG, logger="kazoo.client"):
        # As kazoo's connection does: it logs each request that it sends.
        logger = session.client._connection.logger
        login = serialization.Auth(0, "digest", f"u:{WORD}")
        logger.log(logging.DEBUG, "Sending request(xid=%s): %s", -4, login)
        logger.debug("Sending request(xid=%s): %s", 1, serialization.Ping())
        observers.flush()  # kazoo's threads wait for no handler
    assert WORD not in caplog.text
    assert "Ping" in caplog.text
