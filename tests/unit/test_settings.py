"""From an app's configuration to validated settings."""

from __future__ import annotations

import ssl
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from celery_singleton_lock import SettingsError
from celery_singleton_lock.core.policy import ConflictAction
from celery_singleton_lock.settings import Settings, read_settings
from celery_singleton_lock.stores import is_store_url, open_store
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.stores.redis import RedisStore, connection_url

REDIS, OTHER = "redis://:secret@one:6379/1", "redis://two:6379/2"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CELERY_BROKER_URL", "CELERY_RESULT_BACKEND"):
        monkeypatch.delenv(name, raising=False)


def settings(**conf: Any) -> Settings:
    app = Celery("app", set_as_current=False)
    app.conf.update(conf)
    return read_settings(app)


# --- which store ---------------------------------------------------------------------------------


def test_its_own_url_comes_before_the_result_backend_before_the_broker() -> None:
    both = {"result_backend": REDIS, "broker_url": OTHER}
    chosen = settings(singleton_lock_url="redis://three", **both)
    assert (chosen.url, chosen.url_source) == ("redis://three", "singleton_lock_url")
    chosen = settings(**both)
    assert (chosen.url, chosen.url_source) == (REDIS, "result_backend")
    chosen = settings(result_backend="rpc://", broker_url=OTHER)
    assert (chosen.url, chosen.url_source) == (OTHER, "broker_url")


def test_the_first_redis_of_several_brokers_is_taken() -> None:
    assert settings(broker_url=f"amqp://a;{OTHER};{REDIS}").url == OTHER
    assert settings(broker_url=["amqp://a", REDIS]).url == REDIS


def test_no_redis_anywhere_is_no_url_and_no_error() -> None:
    chosen = settings(broker_url="amqp://a", result_backend="db+sqlite://")
    assert (chosen.url, chosen.url_source) == ("", "nowhere")


def test_the_password_is_masked() -> None:
    assert "secret" not in settings(result_backend=REDIS).safe_url


@pytest.mark.parametrize("url", [1, "localhost", ""])
def test_a_url_that_is_none_is_refused(url: Any) -> None:
    with pytest.raises(SettingsError, match=r"singleton_lock_url.*redis://localhost"):
        settings(singleton_lock_url=url)


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("singleton_lock_tll", "singleton_lock_ttl"),
        ("singleton_lock_onconflict", "singleton_lock_on_conflict"),
        ("singleton_lock_fencebase", "singleton_lock_fence_base"),
        ("singleton_lock_key", "known: |did you mean"),
        ("singleton_lock_min_hold", "known: |did you mean"),
    ],
)
def test_an_unknown_name_stops_the_worker_with_a_suggestion(name: str, known: str) -> None:
    with pytest.raises(SettingsError, match=f"unknown setting '{name}'.*({known})"):
        settings(**{name: 1})


def test_a_name_that_only_ends_like_ours_is_somebody_elses() -> None:
    settings(other_singleton_lock_timeout=1, other_singleton_lock_ttl=1)


@pytest.mark.parametrize("name", ["SINGLETON_LOCK_TTL", "Singleton_Lock_Ttl"])
def test_a_name_that_celery_does_not_read_is_refused_and_not_ignored(name: str) -> None:
    with pytest.raises(SettingsError, match="write singleton_lock_ttl"):
        settings(**{name: 30})


# --- a Django namespace --------------------------------------------------------------------------


def namespaced(**names: Any) -> Settings:
    app = Celery("app", set_as_current=False)
    app.config_from_object(SimpleNamespace(**names), namespace="CELERY")
    return read_settings(app)


def test_djangos_spelling_is_read() -> None:
    chosen = namespaced(
        CELERY_SINGLETON_LOCK_TTL=30,
        CELERY_SINGLETON_LOCK_URL=OTHER,
        CELERY_SINGLETON_LOCK_ON_CONFLICT="retry",
        CELERY_BROKER_URL=REDIS,
    )
    assert (chosen.policy.ttl, chosen.url) == (30, OTHER)
    assert chosen.policy.on_conflict.action is ConflictAction.RETRY


def test_djangos_broker_is_found() -> None:
    assert namespaced(CELERY_BROKER_URL=REDIS).url == REDIS


def test_a_typo_in_djangos_spelling_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"'CELERY_SINGLETON_LOCK_TLL'.*singleton_lock_ttl"):
        namespaced(CELERY_SINGLETON_LOCK_TLL=30)


def test_a_forgotten_namespace_is_refused_and_another_apps_names_are_not() -> None:
    with pytest.raises(SettingsError, match="write CELERY_SINGLETON_LOCK_TTL"):
        namespaced(SINGLETON_LOCK_TTL=30)
    assert namespaced(SHOP_SINGLETON_LOCK_SECONDS=30).policy.ttl == 60


def test_django_itself_is_read() -> None:
    from django.conf import UserSettingsHolder, global_settings

    django = UserSettingsHolder(global_settings)
    django.CELERY_SINGLETON_LOCK_TTL = 45
    app = Celery("app", set_as_current=False)
    app.config_from_object(django, namespace="CELERY")
    assert read_settings(app).policy.ttl == 45


# --- values --------------------------------------------------------------------------------------


def test_app_settings_are_the_defaults_of_its_tasks() -> None:
    policy = settings(singleton_lock_ttl=10, singleton_lock_hold_on_retry=False).policy
    assert (policy.ttl, policy.hold_on_retry, policy.limit) == (10, False, 1)


@pytest.mark.parametrize(
    ("name", "value", "cure"),
    [
        ("ttl", 0, "at least 0.3 seconds"),
        ("ttl", "60", "as a number, or a timedelta"),
        ("on_conflict", "skipp", "did you mean 'skip'"),
        ("on_lost", "ignore", "known: continue"),
        ("prefix", "", "1 to 64 letters"),
        ("prefix", "a{b}", "1 to 64 letters"),
        ("prefix", "a:b", "1 to 64 letters"),
        ("prefix", "p" * 65, "1 to 64 letters"),
        ("prefix", None, "1 to 64 letters"),
        ("fence_base", -1, "from 0 to 2"),
        ("fence_base", 2**52, "from 0 to 2"),
        ("fence_base", 1.5, "whole number"),
        ("fence_base", True, "whole number"),
        ("allow_eviction", 1, "give True or False"),
    ],
)
def test_a_wrong_value_is_refused_with_its_cure(name: str, value: Any, cure: str) -> None:
    with pytest.raises(SettingsError, match=cure):
        settings(**{f"singleton_lock_{name}": value})


def test_a_wrong_visibility_timeout_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"visibility_timeout.*seconds"):
        settings(broker_transport_options={"visibility_timeout": "long"})


@pytest.mark.parametrize(
    ("conf", "timeout"),
    [
        ({"broker_url": REDIS}, 3600),
        ({"broker_url": "sqs://"}, 3600),
        ({"broker_url": "sentinel://a;sentinel://b"}, 3600),
        ({"broker_url": ["redis://a", "redis://b"]}, 3600),
        ({"broker_url": "amqp://"}, None),
        ({}, None),
        ({"broker_url": REDIS, "broker_transport_options": {"visibility_timeout": 90}}, 90),
    ],
    ids=str,
)
def test_the_brokers_visibility_timeout_is_known(conf: Any, timeout: float | None) -> None:
    chosen = settings(**conf)
    assert chosen.visibility_timeout == timeout
    assert chosen.longest_countdown == (None if timeout is None else timeout / 3)
    assert chosen.marker_ttl == max(timeout or 0, 3600)


# --- TLS -----------------------------------------------------------------------------------------


def test_tls_options_come_with_the_url_they_belong_to() -> None:
    options = {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": "/ca.pem"}
    chosen = settings(result_backend="rediss://one", redis_backend_use_ssl=options)
    assert dict(chosen.connection_options) == options
    chosen = settings(
        broker_url="rediss://two", broker_use_ssl={"ca_certs": "/ca.pem", "cert_reqs": 2}
    )
    assert dict(chosen.connection_options) == {"ssl_ca_certs": "/ca.pem", "ssl_cert_reqs": 2}
    own = settings(singleton_lock_url="redis://three", redis_backend_use_ssl=options)
    assert not own.connection_options


@pytest.mark.parametrize("setting", ["result_backend", "broker_url"])
def test_tls_options_make_a_connection_tls_as_celery_does(setting: str) -> None:
    # Celery and kombu speak TLS to a redis:// URL that such options stand beside.
    option = {"result_backend": "redis_backend_use_ssl", "broker_url": "broker_use_ssl"}[setting]
    chosen = settings(**{setting: "redis://one:6380/0", option: {"ssl_ca_certs": "/ca.pem"}})
    assert chosen.url == "rediss://one:6380/0"
    store = open_store(chosen.url, options=chosen.connection_options)
    assert isinstance(store, RedisStore)


# --- URLs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "read"),
    [
        ("redis://h:1/2", "redis://h:1/2"),
        ("redis://u:p%40@h/0?health_check_interval=3", None),
        ("unix:///run/r.sock?db=3", "unix:///run/r.sock?db=3"),
        ("redis+socket:///run/r.sock", "unix:///run/r.sock?db=0"),
        ("redis+socket:///run/r.sock?virtual_host=4", "unix:///run/r.sock?db=4"),
        ("redis+socket:///run/r.sock?virtual_host=/4", "unix:///run/r.sock?db=4"),
        ("redis+socket://:pw@/run/r.sock", "unix://:pw@/run/r.sock?db=0"),
        ("rediss://h?ssl_cert_reqs=CERT_NONE", "rediss://h?ssl_cert_reqs=none"),
        ("rediss://h?ssl_cert_reqs=required", "rediss://h?ssl_cert_reqs=required"),
    ],
)
def test_celerys_and_kombus_urls_are_read(url: str, read: str | None) -> None:
    assert connection_url(url) == (read or url)
    assert isinstance(open_store(url), RedisStore)
    assert is_store_url(url)


def test_a_unix_url_keeps_its_path_its_password_and_its_database() -> None:
    store = open_store("redis+socket://:pw@/run/r.sock?virtual_host=4")
    assert isinstance(store, RedisStore)
    options = store._options
    assert (options["path"], options["db"], options["password"]) == ("/run/r.sock", 4, "pw")


def test_an_unknown_scheme_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"'memcached'.*memory, redis"):
        open_store("memcached://h")
    with pytest.raises(SettingsError, match=r"did you mean 'rediss'|did you mean 'redis'"):
        open_store("redi://h")
    assert not is_store_url("amqp://h")
    assert isinstance(open_store("memory://"), MemoryStore)
