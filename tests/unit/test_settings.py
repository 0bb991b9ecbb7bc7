"""From an app's configuration to validated settings."""

from __future__ import annotations

import re
import ssl
from datetime import timedelta
from enum import IntEnum
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from redis.connection import parse_url

from celery_singleton_lock import SettingsError
from celery_singleton_lock import settings as settings_module
from celery_singleton_lock.on_conflict import OnConflict
from celery_singleton_lock.settings import Settings, read_settings
from celery_singleton_lock.stores import is_store_url, open_store
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.stores.redis.connection_options import connection_url
from celery_singleton_lock.stores.redis.sentinel import SentinelConnections
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.stores.store_url import StoreUrl

REDIS, OTHER = "redis://:secret@one:6379/1", "redis://two:6379/2"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CELERY_BROKER_URL", "CELERY_RESULT_BACKEND"):
        monkeypatch.delenv(name, raising=False)


def settings(**conf: Any) -> Settings:
    app = Celery("app", set_as_current=False)
    app.conf.update(conf)
    return read_settings(app)


# --- the prefix of the keys ----------------------------------------------------------------------


def with_prefixes(backend: Any = None, broker: Any = None, **conf: Any) -> Settings:
    """Settings with Celery's prefix beside the result backend and beside the broker."""
    options = {"result_backend": backend, "broker": broker}
    given = {
        f"{name}_transport_options": {"global_keyprefix": value}
        for name, value in options.items()
        if value is not None
    }
    return settings(**{"result_backend": REDIS, "broker_url": OTHER, **given, **conf})


def test_the_prefix_is_that_of_the_setting_in_which_the_store_is() -> None:
    assert with_prefixes("prod:", "broker:").global_keyprefix == "prod:"
    rpc = {"result_backend": "rpc://"}
    assert with_prefixes("prod:", "broker:", **rpc).global_keyprefix == "broker:"
    assert with_prefixes("prod:", None, **rpc).global_keyprefix == ""
    assert with_prefixes().global_keyprefix == with_prefixes("").global_keyprefix == ""
    ours = {"singleton_lock_url": "redis://three"}
    assert with_prefixes("prod:", "broker:", **ours).global_keyprefix == ""


@pytest.mark.parametrize(
    ("variable", "setting", "by"),
    [
        ("0", True, "SINGLETON_LOCK_ENABLED in the environment"),
        (" OFF ", None, "SINGLETON_LOCK_ENABLED in the environment"),
        ("1", False, ""),
        ("", False, "singleton_lock_enabled=False"),
        ("", True, ""),
    ],
)
def test_the_variable_of_the_switch_takes_precedence_over_its_setting(
    monkeypatch: pytest.MonkeyPatch, variable: str, setting: bool | None, by: str
) -> None:
    monkeypatch.setenv("SINGLETON_LOCK_ENABLED", variable)
    given = {} if setting is None else {"singleton_lock_enabled": setting}
    found = settings(**given)
    assert (found.off_by, found.policy.enabled) == (by, not by)


def test_another_value_of_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an operator would believe that the locks are off."""
    monkeypatch.setenv("SINGLETON_LOCK_ENABLED", "disabled")
    with pytest.raises(SettingsError, match="SINGLETON_LOCK_ENABLED='disabled': give 1 or 0"):
        settings()


def test_the_prefix_is_taken_literally_though_the_result_backend_adds_a_separator() -> None:
    assert with_prefixes("prod").global_keyprefix == "prod"


@pytest.mark.parametrize(
    ("url", "without"),
    [
        ("redis://three/1?global_keyprefix=a%3A", "redis://three/1"),
        (
            "redis://three?db=1&global_keyprefix=a:&client_name=x",
            "redis://three?db=1&client_name=x",
        ),
        (
            "sentinel://h1?global_keyprefix=a:;sentinel://h2?db=1",
            "sentinel://h1;sentinel://h2?db=1",
        ),
        ("redlock://h1,h2,h3?global_keyprefix=a:&quarantine=9", "redlock://h1,h2,h3?quarantine=9"),
        ("etcd://h1/locks?global_keyprefix=a:", "etcd://h1/locks"),
    ],
)
def test_our_own_url_may_have_a_prefix(url: str, without: str) -> None:
    chosen = with_prefixes("prod:", singleton_lock_url=url)
    assert (chosen.global_keyprefix, chosen.url) == ("a:", without)


def test_our_own_setting_comes_first_and_may_be_empty() -> None:
    for own in ("", "locks:"):
        chosen = with_prefixes("prod:", singleton_lock_global_keyprefix=own)
        assert chosen.global_keyprefix == own
        assert chosen.other_keyprefixes == (("", "prod:") if own else ("prod:",))
    assert with_prefixes("prod:", singleton_lock_global_keyprefix=None).global_keyprefix == "prod:"


def test_no_prefix_is_another_one_for_an_app_that_has_none() -> None:
    assert with_prefixes().other_keyprefixes == ()
    assert with_prefixes("prod:").other_keyprefixes == ("",)


def test_two_prefixes_of_one_store_are_refused() -> None:
    own = {"singleton_lock_url": "redis://three?global_keyprefix=a:"}
    assert settings(**own, singleton_lock_global_keyprefix="a:").global_keyprefix == "a:"
    with pytest.raises(SettingsError, match=r"'b:', but global_keyprefix in .*url is 'a:'"):
        settings(**own, singleton_lock_global_keyprefix="b:")


@pytest.mark.parametrize(
    "value", [1, b"a:", "{prod}:", "a}", "a b", "a\n", "a#1:", "50%", "x" * 101]
)
def test_a_prefix_that_would_make_keys_ambiguous_is_refused_where_it_is_written(value: Any) -> None:
    with pytest.raises(SettingsError, match=r"result_backend_transport_options\['global_keypref"):
        with_prefixes(value)
    with pytest.raises(SettingsError, match=r"^singleton_lock_global_keyprefix="):
        settings(result_backend=REDIS, singleton_lock_global_keyprefix=value)
    assert with_prefixes(value, singleton_lock_global_keyprefix="").global_keyprefix == ""


def test_a_prefix_in_our_url_that_would_make_keys_ambiguous_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"^global_keyprefix in singleton_lock_url='\{a\}:'"):
        settings(singleton_lock_url="redis://three?global_keyprefix=%7Ba%7D:")


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


def test_a_broker_in_memory_has_its_locks_there_unless_a_store_is_named() -> None:
    in_memory = {"broker_url": "memory://", "result_backend": "cache+memory://"}
    assert settings(**in_memory).url == "memory://"
    assert settings(**in_memory, singleton_lock_url=REDIS).url == REDIS
    assert settings(broker_url="memory://", result_backend=REDIS).url == REDIS


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


@pytest.mark.parametrize("namespace", ["", "CELERY_"])
def test_celery_singletons_expiry_is_a_warning_and_stops_nothing(
    namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"{namespace}SINGLETON_LOCK_EXPIRY" if namespace else "singleton_lock_expiry"
    conf = SimpleNamespace(**{name: 300, f"{namespace}SINGLETON_KEY_PREFIX": "p"})
    settings_module._warn_once.cache_clear()
    for _ in range(2):
        app = Celery("app", set_as_current=False)
        app.config_from_object(conf, namespace=namespace.rstrip("_") or None)
        assert read_settings(app).policy.ttl == 60
    [line] = [one for one in caplog.messages if name in one]
    assert "celery-singleton package" in line
    assert "singleton_lock_ttl" in line
    assert "singleton_lock_unique_for" in line


def test_a_name_that_only_ends_like_ours_is_another_packages() -> None:
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
    assert chosen.policy.on_conflict == OnConflict.retry()


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
    ("name", "value", "remedy"),
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
        ("completion_ttl", 59, "at least 60.0 seconds, because a second delivery"),
        ("completion_ttl", None, "give seconds as a number"),
    ],
)
def test_a_wrong_value_is_refused_with_its_remedy(name: str, value: Any, remedy: str) -> None:
    with pytest.raises(SettingsError, match=remedy):
        settings(**{f"singleton_lock_{name}": value})


def test_a_wrong_visibility_timeout_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"visibility_timeout.*seconds"):
        settings(broker_transport_options={"visibility_timeout": "long"})


@pytest.mark.parametrize(
    ("scheme", "module", "name"),
    [
        ("redis", "redis", "visibility_timeout"),
        ("sqs", "SQS", "default_visibility_timeout"),
        ("slmq", "SLMQ", "default_visibility_timeout"),
        ("azureservicebus", "azureservicebus", "default_peek_lock_seconds"),
    ],
)
def test_a_brokers_default_visibility_timeout_is_kombus(
    scheme: str, module: str, name: str
) -> None:
    # Its source, because these modules import clients that are not installed here.
    spec = find_spec(f"kombu.transport.{module}")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    [kombus] = re.findall(rf"^    {name}(?:: int)? = (\d+)", source, re.MULTILINE)
    assert settings(broker_url=f"{scheme}://").visibility_timeout == int(kombus)


@pytest.mark.parametrize(
    ("conf", "timeout"),
    [
        ({"broker_url": REDIS}, 3600),
        ({"broker_url": "sqs://"}, 1800),
        ({"broker_url": "SQS://"}, 1800),
        ({"broker_url": "slmq://"}, 1800),
        ({"broker_url": "pgmq://"}, 1800),
        ({"broker_url": "azureservicebus://"}, 60),
        (
            {
                "broker_url": "azureservicebus://",
                "broker_transport_options": {"peek_lock_seconds": 90},
            },
            90,
        ),
        ({"broker_url": "redis+socket:///run/redis.sock"}, 3600),
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
    assert chosen.completion_ttl == max(timeout or 0, 3600)
    assert (
        settings(**conf, singleton_lock_completion_ttl=timedelta(minutes=5)).completion_ttl == 300
    )


# --- Valkey, Sentinel, Cluster -------------------------------------------------------------------

SENTINELS = "sentinel://:secret@a:26379/0;sentinel://:secret@b:26380/0"


@pytest.mark.parametrize(
    "url", ["valkey://:secret@one:6379/1", "valkeys://one", "redis+cluster://a,b"]
)
def test_a_url_of_every_store_is_taken_over(url: str) -> None:
    assert settings(result_backend="rpc://", broker_url=url).url == url
    assert is_store_url(url)


def test_sentinels_are_taken_together_with_the_options_beside_them() -> None:
    options = {"master_name": "m", "sentinel_kwargs": {"password": "pw"}, "visibility_timeout": 5}
    chosen = settings(broker_url=SENTINELS, broker_transport_options=options)
    assert (chosen.url, chosen.url_source) == (SENTINELS, "broker_url")
    assert dict(chosen.connection_options) == {
        "master_name": "m",
        "sentinel_kwargs": {"password": "pw"},
    }
    listed = settings(
        broker_url=[*SENTINELS.split(";"), "amqp://c"], broker_transport_options=options
    )
    assert listed.url == SENTINELS
    backend = settings(
        result_backend=SENTINELS,
        result_backend_transport_options={"master_name": "n"},
        broker_transport_options=options,
    )
    assert dict(backend.connection_options) == {"master_name": "n"}


def test_our_own_sentinel_url_may_leave_the_name_to_the_brokers_options() -> None:
    chosen = settings(
        singleton_lock_url=SENTINELS, broker_transport_options={"master_name": "brokers"}
    )
    assert dict(chosen.connection_options) == {"master_name": "brokers"}
    assert not settings(singleton_lock_url="redis://a").connection_options


@pytest.mark.parametrize(
    "url",
    [
        SENTINELS,
        "sentinel://:secret@a:26379,b:26380/0?master_name=m&sentinel_password=secret",
        "redis+cluster://user:secret@a:7000,b:7001",
        "valkey://:secret@a",
    ],
)
def test_every_password_of_several_is_masked(url: str) -> None:
    safe = settings(singleton_lock_url=url).safe_url
    assert "secret" not in safe
    assert "a" in safe
    assert ("b" in safe) == ("b:" in url)


def test_a_slash_in_a_password_of_several_is_named_as_the_cause() -> None:
    with pytest.raises(SettingsError, match="percent-encode"):
        settings(singleton_lock_url="sentinel://a:26379;sentinel://:x/y@b:26380/0")


def test_both_forms_of_several_hosts_are_one() -> None:
    ours = StoreUrl.parse("sentinel://u:p%3B@a:1,b,[::1]:3/4?master_name=m", port=9)
    kombus = StoreUrl.parse("sentinel://u:p%3B@a:1/4;sentinel://b;sentinel://[::1]:3", port=9)
    assert ours.hosts == kombus.hosts == (("a", 1), ("b", 9), ("::1", 3))
    assert (ours.username, ours.password, ours.path) == ("u", "p;", "4")
    assert (kombus.username, kombus.password, kombus.path) == ("u", "p;", "4")
    assert ours.options == {"master_name": "m"}


def options_of(connections: Any) -> dict[str, Any]:
    return {**connections._options, "class": connections._make.__name__}


def test_tls_and_logins_reach_the_master_and_the_sentinels() -> None:
    url = "sentinels://:pw@a,b/2?master_name=m&ssl_ca_certs=/ca&sentinel_password=spw"
    connections = SentinelConnections(url)
    master, sentinel = options_of(connections), options_of(connections.sentinels[0])
    assert (master["password"], master["db"], master["ssl_ca_certs"]) == ("pw", 2, "/ca")
    assert (sentinel["password"], sentinel["host"]) == ("spw", "a")
    assert sentinel["ssl_ca_certs"] == "/ca"
    assert master["class"] == sentinel["class"] == "SSLConnection"


def test_tls_options_of_a_url_are_read_alike_for_the_master_and_the_sentinels() -> None:
    url = "sentinels://a/2?master_name=m&ssl_cert_reqs=CERT_NONE&ssl_check_hostname=false"
    connections = SentinelConnections(url)
    for options in (options_of(connections), options_of(connections.sentinels[0])):
        assert (options["ssl_cert_reqs"], options["ssl_check_hostname"]) == ("none", False)


def test_kombus_tls_options_are_the_masters_alone_unless_sentinel_kwargs_say_ssl() -> None:
    options: dict[str, Any] = {"master_name": "m", "ssl_ca_certs": "/ca"}
    connections = SentinelConnections(SENTINELS, options)
    assert options_of(connections)["class"] == "SSLConnection"
    assert options_of(connections.sentinels[0])["class"] == "Connection"
    connections = SentinelConnections(SENTINELS, {**options, "sentinel_kwargs": {"ssl": True}})
    assert options_of(connections.sentinels[0])["class"] == "SSLConnection"


def test_tls_options_make_a_valkey_url_one_with_tls() -> None:
    chosen = settings(result_backend="valkey://one", redis_backend_use_ssl={"ssl_ca_certs": "/ca"})
    assert chosen.url == "valkeys://one"


@pytest.mark.parametrize("value", [-1, 1.5, True, "1", 101])
def test_a_wrong_number_of_replicas_is_refused(value: Any) -> None:
    with pytest.raises(SettingsError, match=r"singleton_lock_wait_replicas.*whole number"):
        settings(singleton_lock_wait_replicas=value)


def test_a_right_number_of_replicas_is_read() -> None:
    assert settings().wait_replicas == 0
    assert settings(singleton_lock_wait_replicas=2).wait_replicas == 2


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
        ("valkey://:pw@h:1/2", "redis://:pw@h:1/2"),
        ("valkeys://h", "rediss://h"),
        ("redis://h?max_connections=20&timeout=3&retry_on_timeout=1", None),
        ("redis://h/0?client_name=locks&socket_keepalive=0&protocol=3&heartbeat=3", None),
        ("redis://h?virtual_host=2", "redis://h?db=2"),
        ("redis://h/?virtual_host=/2", "redis://h/?db=2"),
        ("redis://h/1?virtual_host=2", "redis://h/1"),
        ("redis://h/1?credential_provider=tests.apps.logins.Locks", None),
        ("redis://:pw@?host=h&port=7", "redis://:pw@h:7"),
        ("rediss:///2?host=::1", "rediss://[::1]/2"),
        ("redis://h?host=other&port=7", "redis://h:7"),
        ("redis://h:1?port=7", "redis://h:1"),
        ("unix://?path=/run/r.sock", "unix:///run/r.sock"),
    ],
)
def test_celerys_and_kombus_urls_are_read(url: str, read: str | None) -> None:
    port = {} if ".sock" in url else {"port": 6379}
    found = parse_url(connection_url(StoreUrl.parse(url, port=6379)))
    assert found == {**port, **parse_url(read or url)}
    assert isinstance(open_store(url), RedisStore)
    assert is_store_url(url)


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("timout=1", r"'timout' is no option of a connection \(known: client_name, "),
        ("socket_keepalives=1", r"\(did you mean 'socket_keepalive'\?\)"),
        ("ssl_ca_cert=/ca", r"redis-py \S+ got an unexpected keyword argument 'ssl_ca_cert'"),
        ("db=first", "Invalid value for .db."),
        ("credential_provider=nowhere:Here", "credential_provider='nowhere:Here': No module"),
        ("credential_provider=celery:Celery", "is no redis.CredentialProvider"),
        ("credential_provider=collections:Nothing", "has no attribute 'Nothing'"),
    ],
)
def test_an_option_that_is_none_is_refused_in_the_users_words(query: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason) as caught:
        open_store(f"rediss://h/0?{query}")
    assert "__init__" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["redis://a:1/0;redis://b:2/0", "redis://:pw@a,b/0", "rediss://a;rediss://b"]
)
def test_several_servers_are_refused_where_there_can_be_one(url: str) -> None:
    with pytest.raises(SettingsError, match=r"names several servers.*Name one; .*sentinel://"):
        open_store(settings(singleton_lock_url=url).url)
    assert isinstance(open_store("redis://:p%2Cw@a/0"), RedisStore)
    assert isinstance(open_store("unix:///run/a,b.sock"), RedisStore)


def test_a_broker_that_fails_over_is_a_warning_for_locks_do_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings_module._warn_once.cache_clear()
    assert settings(broker_url="redis://a;redis://b").url == "redis://a"
    [line] = caplog.messages
    assert "broker_url names several Redis servers" in line
    assert "Set singleton_lock_url" in line


@pytest.mark.parametrize("port", ["6379x", "99999", "ninety"])
@pytest.mark.parametrize("login", ["", ":pw@", "user:p%2Fw@"])
def test_a_wrong_port_is_reported_as_one(port: str, login: str) -> None:
    with pytest.raises(SettingsError, match="no number from 0 to 65535") as caught:
        settings(singleton_lock_url=f"redis://{login}localhost:{port}/0")
    assert port not in str(caught.value), "it may be a password"


@pytest.mark.parametrize("url", ["redis://:p/w@h:1/0", "redis://:p#w@h/0", "redis://:p?w@h:6379/0"])
def test_a_password_that_is_not_encoded_is_reported_as_one(url: str) -> None:
    with pytest.raises(SettingsError, match="percent-encode"):
        settings(singleton_lock_url=url)


def test_a_path_that_is_no_database_is_refused_and_not_taken_for_0() -> None:
    with pytest.raises(SettingsError, match="no number of a database") as caught:
        open_store("redis://h/zer0")
    assert "zer0" not in str(caught.value), "it may be a part of a password"


def test_options_without_effect_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for _ in range(2):
        open_store("redis://h?max_connections=21&socket_timeout=3&protocol=3&encoding=latin1")
    [line] = [text for text in caplog.messages if "max_connections" in text]
    assert "without effect on locks" in line


def test_the_login_that_stands_beside_the_result_backends_url_is_taken() -> None:
    login = {"redis_username": "locks", "redis_password": "pw"}
    chosen = settings(result_backend="redis://h", **login)
    assert dict(chosen.connection_options) == {"username": "locks", "password": "pw"}
    assert not settings(result_backend="redis://:other@h", **login).connection_options
    assert not settings(broker_url="redis://h", **login).connection_options
    provider = {"redis_backend_credential_provider": "tests.apps.logins:Locks"}
    chosen = settings(result_backend="redis://h", **login, **provider)
    assert dict(chosen.connection_options) == {"credential_provider": "tests.apps.logins:Locks"}


def test_a_unix_url_keeps_its_path_its_password_and_its_database() -> None:
    store = open_store("redis+socket://:pw@/run/r.sock?virtual_host=4")
    assert isinstance(store, RedisStore)
    options = store.runner.connections._options
    assert (options["path"], options["db"], options["password"]) == ("/run/r.sock", 4, "pw")


def test_an_unknown_scheme_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"'memcached'.*memory, redis"):
        open_store("memcached://h")
    with pytest.raises(SettingsError, match=r"did you mean 'rediss'|did you mean 'redis'"):
        open_store("redi://h")
    assert not is_store_url("amqp://h")
    assert isinstance(open_store("memory://"), MemoryStore)


# --- beats ---------------------------------------------------------------------------------------


def test_beats_of_an_app_elect_one_leader_under_its_name() -> None:
    chosen = settings()
    assert (chosen.beat_name, chosen.beat_ttl, chosen.beat_poll) == ("app", 15.0, 1.0)
    assert read_settings(Celery(set_as_current=False)).beat_name == "celery"
    chosen = settings(
        singleton_lock_beat_name="nightly",
        singleton_lock_beat_ttl=timedelta(minutes=1),
        singleton_lock_beat_poll=5,
    )
    assert (chosen.beat_name, chosen.beat_ttl, chosen.beat_poll) == ("nightly", 60.0, 5.0)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("beat_ttl", 0.2, "at least 0.3 seconds"),
        ("beat_ttl", "60", "give seconds as a number"),
        ("beat_ttl", -1, "give seconds, not negative"),
        ("beat_ttl", True, "give seconds as a number"),
        ("beat_poll", 0, "at least 0.05 seconds"),
        ("beat_poll", None, "give seconds as a number"),
        ("beat_name", "", "give a name of 1 to 100 characters"),
        ("beat_name", "n" * 101, "give a name of 1 to 100 characters"),
        ("beat_name", 1, "give a name of 1 to 100 characters"),
    ],
)
def test_a_wrong_setting_of_beats_is_named_with_its_value_and_a_cure(
    name: str, value: Any, said: str
) -> None:
    with pytest.raises(SettingsError) as raised:
        settings(**{f"singleton_lock_{name}": value})
    assert str(raised.value).startswith(f"singleton_lock_{name}={value!r}: {said}")


def test_a_whole_number_may_be_of_a_subclass_of_int() -> None:
    class Base(IntEnum):
        LEFT = 7

    found = settings(singleton_lock_url=REDIS, singleton_lock_fence_base=Base.LEFT)
    assert found.fence_base == 7
