"""What a ``redlock://`` URL says, and what is refused with which reason."""

from __future__ import annotations

import re

import pytest
from celery import Celery

from celery_singleton_lock.errors import SettingsError
from celery_singleton_lock.settings import read_settings
from celery_singleton_lock.stores import is_store_url, open_store
from celery_singleton_lock.stores.redis.url_options import connection_options
from celery_singleton_lock.stores.redlock.store import RedlockStore
from celery_singleton_lock.stores.redlock.url import read_nodes
from celery_singleton_lock.stores.urls import masked

THREE = "redlock://a:1,b:2,c:3/0"


def test_hosts_ports_and_database_are_read() -> None:
    nodes = read_nodes("redlock://a,b:7001,[::1]:7002/5").members
    assert [str(node) for node in nodes] == ["a:6379", "b:7001", "[::1]:7002"]
    assert [node.url for node in nodes] == [
        "redis://a/5",
        "redis://b:7001/5",
        "redis://[::1]:7002/5",
    ]


def test_the_first_login_is_for_all_that_have_none_of_their_own() -> None:
    nodes = read_nodes("redlock://u:p%2C%40@a:1,b:2,:other@c:3/0").members
    assert [node.url for node in nodes] == [
        "redis://u:p%2C%40@a:1/0",
        "redis://u:p%2C%40@b:2/0",
        "redis://:other@c:3/0",
    ]
    nodes = read_nodes("redlock://a:1,u:p@b:2,c:3").members
    assert [node.url for node in nodes] == ["redis://a:1/0", "redis://u:p@b:2/0", "redis://c:3/0"]
    assert "u:p" not in repr(nodes)


def test_tls_is_for_all_nodes() -> None:
    url = "redlocks://a:1,b:2,c:3/0"
    assert [node.url for node in read_nodes(url).members] == [
        "rediss://a:1/0?ssl_check_hostname=true",
        "rediss://b:2/0?ssl_check_hostname=true",
        "rediss://c:3/0?ssl_check_hostname=true",
    ]


@pytest.mark.parametrize(
    ("query", "checks"),
    [
        ("", True),
        ("?ssl_check_hostname=false", False),
        ("?ssl_cert_reqs=optional", True),
        ("?ssl_cert_reqs=none", False),
        ("?ssl_cert_reqs=CERT_NONE&ssl_check_hostname=true", False),
    ],
)
def test_the_hosts_name_is_checked_with_every_redis_py(query: str, checks: bool) -> None:
    url = read_nodes(f"redlocks://a:1,b:2,c:3/0{query}").members[0].url
    assert connection_options(url)["ssl_check_hostname"] is checks


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redlock://a:1/0", "names 1 node.*takes 3.*redis://"),
        ("redlock://a:1,b:2/0", "names 2 node"),
        ("redlock://a:1,b:2,c:3,d:4/0", "names 4 nodes.*odd number"),
        ("redlock://a:1,b:2,a:1/0", "a:1 more than once"),
        ("redlock://a:1,,c:3/0", "can't be read"),
        ("redlock://", "can't be read"),
        ("redlock://a:1,b:x,c:3/0", "can't be read"),
        ("redlock://a:1,b:2,c:3/first", "number of a database"),
        ("redlock://a:1,b:2,c:3/0?quarantin=1", "did you mean 'quarantine'"),
        ("redlock://a:1,b:2,c:3/0?quarantine=soon", "no number of seconds"),
        ("redlock://a:1,b:2,c:3/0?quarantine=-1", "no number of seconds"),
        ("redlock://a:1,b:2,c:3/0?ssl_ca_certs=x", "redlocks://"),
        ("redlocks://a:1,b:2,c:3/0?ssl_ca_certs=/nowhere", "TLS options"),
        ("redlocks://a:1,b:2,c:3/0?ssl_cert_reqs=some", "required, optional, none"),
    ],
)
def test_what_makes_no_quorum_is_refused_with_the_reason(url: str, reason: str) -> None:
    with pytest.raises(SettingsError) as caught:
        open_store(url)
    assert re.search(reason, str(caught.value))


@pytest.mark.parametrize(
    "url",
    [
        "redlock://u:s3/cret@a:1,b:2,c:3/0",
        "redlock://u:s3cret@a:1,b:2",
        "redlock://u:s3cret@a:x,b,c",
    ],
)
def test_no_password_is_in_an_error(url: str) -> None:
    with pytest.raises(SettingsError) as caught:
        open_store(url)
    assert "cret" not in str(caught.value)
    assert "cret" not in masked(url)


def test_passwords_are_masked_for_logs() -> None:
    url = "redlocks://u:one@a:1,b:2,:two@c:3/0?ssl_password=three&ssl_cert_reqs=none"
    assert masked(url) == "redlocks://u:**@a:1,b:2,:**@c:3/0?ssl_password=**&ssl_cert_reqs=none"


def test_the_setting_names_it_and_nothing_else_does() -> None:
    app = Celery(set_as_current=False)
    app.conf.singleton_lock_url = "redlock://u:s3cret@a:1,b:2,c:3/0"
    settings = read_settings(app)
    assert settings.url_source == "singleton_lock_url"
    assert settings.safe_url == "redlock://u:**@a:1,b:2,c:3/0"
    assert isinstance(open_store(settings.url), RedlockStore)
    assert not is_store_url(THREE)


def test_quarantine_is_the_ttls_unless_it_is_given() -> None:
    assert read_nodes(THREE).quarantine is None
    assert read_nodes(f"{THREE}?quarantine=0").quarantine == 0
    assert read_nodes(f"{THREE}?quarantine=90.5").quarantine == 90.5
