"""What a ``redlock://`` URL says, and what is refused with which reason."""

from __future__ import annotations

import re

import pytest
from celery import Celery

from celery_singleton_lock.errors import SettingsError
from celery_singleton_lock.settings import read_settings
from celery_singleton_lock.stores import is_store_url, open_store
from celery_singleton_lock.stores.redis.connection_options import connection_options
from celery_singleton_lock.stores.redlock.store import RedlockStore, read_nodes
from celery_singleton_lock.stores.store_url import StoreUrl, masked

THREE = "redlock://a:1,b:2,c:3/0"


def nodes_of(url: str) -> list[StoreUrl]:
    return read_nodes(url)[0]


def are_alike(nodes: list[StoreUrl], *urls: str) -> bool:
    """Whether the connections to ``nodes`` are those to ``urls``."""
    wanted = [connection_options(StoreUrl.parse(url, port=0)) for url in urls]
    return [connection_options(node) for node in nodes] == wanted


def test_hosts_ports_and_database_are_read() -> None:
    nodes = nodes_of("redlock://a,b:7001,[::1]:7002/5")
    assert [str(node) for node in nodes] == ["a:6379", "b:7001", "[::1]:7002"]
    assert are_alike(nodes, "redis://a:6379/5", "redis://b:7001/5", "redis://[::1]:7002/5")


def test_a_list_of_urls_names_nodes_too() -> None:
    nodes = nodes_of("redlock://:one@a:1/5;redlock://b:2;redlock://:p%3Bw@c:3")
    assert are_alike(nodes, "redis://:one@a:1/5", "redis://:one@b:2/5", "redis://:p%3Bw@c:3/5")


def test_the_first_login_is_for_all_that_have_none_of_their_own() -> None:
    nodes = nodes_of("redlock://u:p%2C%40@a:1,b:2,:other@c:3/0")
    first, second = "redis://u:p%2C%40@a:1/0", "redis://u:p%2C%40@b:2/0"
    assert are_alike(nodes, first, second, "redis://:other@c:3/0")
    nodes = nodes_of("redlock://a:1,u:p@b:2,c:3")
    assert are_alike(nodes, "redis://a:1", "redis://u:p@b:2", "redis://c:3")
    nodes = nodes_of("redlock://u:p@a:1,@b:2,c:3")
    assert are_alike(nodes, "redis://u:p@a:1", "redis://b:2", "redis://u:p@c:3"), "'@': no login"
    assert "u:p" not in repr(nodes)


def test_tls_is_for_all_nodes() -> None:
    nodes = nodes_of("redlocks://a:1,b:2,c:3/0")
    assert are_alike(nodes, *(f"rediss://{host}/0?ssl_check_hostname=1" for host in nodes))


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
    first = nodes_of(f"redlocks://a:1,b:2,c:3/0{query}")[0]
    assert connection_options(first)["ssl_check_hostname"] is checks


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
        ("redlocks://a:1,b:2,c:3/0?ssl_password=s3&cret", "options of .* can't be read"),
        ("redlock://a:1,b:2,c:3/0?quarantine=soon", "no number of seconds"),
        ("redlock://a:1,b:2,c:3/0?quarantine=-1", "no number of seconds"),
        ("redlock://a:1,b:2,c:3/0?quarantine=", "no number of seconds"),
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
    assert read_nodes(THREE)[1] is None
    assert read_nodes(f"{THREE}?quarantine=0")[1] == 0
    assert read_nodes(f"{THREE}?quarantine=90.5")[1] == 90.5
