"""From ``app.conf`` to a frozen, validated Settings.

Every name is read with ``conf.get(name, default)``: that finds a Django namespace's spelling too
(``CELERY_SINGLETON_LOCK_TTL``), and unlike ``app.add_defaults`` never overrides the user's values.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from celery import Celery

from celery_singleton_lock.celery_compat import namespace_of
from celery_singleton_lock.errors import SettingsError
from celery_singleton_lock.policy import APP_OPTIONS, MIN_TTL, Policy, merge, seconds, suggestion
from celery_singleton_lock.stores import is_sentinel_url, is_store_url, names_nodes, with_tls
from celery_singleton_lock.stores.urls import check_url, masked, split_url

__all__ = ["Settings", "has_broker_in_memory", "read_settings"]

logger = logging.getLogger("celery_singleton_lock")

_PREFIX: Final = "singleton_lock_"
_NAMES: Final = APP_OPTIONS | {
    "url",
    "prefix",
    "fence_base",
    "allow_eviction",
    "beat_name",
    "beat_ttl",
    "beat_poll",
    "wait_replicas",
}
# A setting of the celery-singleton package, the only one with our prefix. Projects that migrate
# from that package, or use both for a while, still have it.
_CELERY_SINGLETONS: Final = "singleton_lock_expiry"
# kombu's defaults for transports that deliver a message again if it is not acknowledged in time:
# seconds, by the first part of the broker URL's scheme. Redis: Channel.visibility_timeout; the
# others: Channel.default_visibility_timeout and default_peek_lock_seconds.
_VISIBILITY_TIMEOUTS: Final = {
    **dict.fromkeys(("redis", "rediss", "valkey", "valkeys", "sentinel", "sentinels"), 3600.0),
    **dict.fromkeys(("sqs", "slmq", "pgmq"), 1800.0),
    "azureservicebus": 60.0,
}
# A twin can come an hour late on any broker: an unacknowledged message waits for a connection that
# the broker believes alive.
_MIN_MARKER_TTL: Final = 3600.0
_MISSING: Final = object()
# Long enough for a leader whose host stalls for seconds, short enough for what is due meanwhile.
_BEAT_TTL: Final = 15.0
_BEAT_POLL: Final = 1.0
# A standby's try is one script that changes nothing; more than 20 a second help nobody.
_MIN_BEAT_POLL: Final = 0.05
_MAX_BEAT_NAME_CHARS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One app's options.

    Attributes:
        url: Of the store; empty if the app names none, which is well for an eager one.
        url_source: The setting it was taken from.
        connection_options: For the store's client (TLS, Sentinel).
        prefix: First part of every key; apps with the same prefix share locks.
        policy: Defaults of this app's tasks.
        fence_base: Fences are above it.
        allow_eviction: Whether a server that may evict leases is accepted.
        wait_replicas: How many replicas must have a grant before it counts.
        beat_name: Which beats elect one leader: those of the same name.
        beat_ttl: Seconds that a dead leader blocks the others.
        beat_poll: Seconds between two tries of a standby.
        visibility_timeout: Seconds after which the broker delivers an unacknowledged message
            again; None for brokers that wait for the connection to end.
    """

    # Not in the repr: reporters of errors show local variables, and here are passwords.
    url: str = field(repr=False)
    url_source: str
    connection_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    prefix: str = "celery"
    policy: Policy = field(default_factory=Policy)
    fence_base: int = 0
    allow_eviction: bool = False
    wait_replicas: int = 0
    beat_name: str = "celery"
    beat_ttl: float = _BEAT_TTL
    beat_poll: float = _BEAT_POLL
    visibility_timeout: float | None = None

    @property
    def safe_url(self) -> str:
        """The URL with its password masked, for logs and errors."""
        return masked(self.url)

    @property
    def marker_ttl(self) -> float:
        """Seconds that a late twin is recognised."""
        return max(self.visibility_timeout or 0.0, _MIN_MARKER_TTL)

    @property
    def longest_countdown(self) -> float | None:
        """Seconds a put-back message may wait at a time.

        Longer, and the broker would deliver it again while a worker still waits for its time: then
        every copy multiplies (1 message became 1060 deliveries in 40 s).
        """
        return None if self.visibility_timeout is None else self.visibility_timeout / 3


def read_settings(app: Celery) -> Settings:
    """The validated settings of ``app``.

    Raises:
        SettingsError: A name is unknown or a value is wrong.
    """
    conf = app.conf
    _refuse_unknown(conf)
    given = {
        name: value
        for name in _NAMES
        if (value := conf.get(_PREFIX + name, _MISSING)) is not _MISSING
    }
    try:
        policy = merge(
            Policy(),
            {name: given[name] for name in APP_OPTIONS & set(given)},
            where="singleton_lock_* settings",
        )
    except (TypeError, ValueError) as exc:
        raise SettingsError(str(exc)) from None
    url, source = _choose_url(conf, given.get("url"))
    tls_options = _tls_options(conf, source)
    if tls_options:
        # As Celery and kombu do: with such options they speak TLS, whatever the scheme says.
        url = with_tls(url)
    return Settings(
        url=url,
        url_source=source,
        connection_options={
            **tls_options,
            **_login_options(conf, url, source),
            **_sentinel_options(conf, url, source),
        },
        prefix=_check_prefix(given.get("prefix", "celery")),
        policy=policy,
        fence_base=_check_fence_base(given.get("fence_base", 0)),
        allow_eviction=_check_flag("allow_eviction", given.get("allow_eviction", False)),
        wait_replicas=_check_replicas(given.get("wait_replicas", 0)),
        beat_name=_check_beat_name(given.get("beat_name", app.main or "celery")),
        beat_ttl=_check_beat_ttl(given.get("beat_ttl", _BEAT_TTL)),
        beat_poll=_check_beat_poll(given.get("beat_poll", _BEAT_POLL)),
        visibility_timeout=_visibility_timeout(conf),
    )


def _refuse_unknown(conf: Any) -> None:
    """Refuse a name that is ours but unknown, or that Celery wouldn't find under our spelling."""
    names = list(conf)  # Celery loads its configuration now, and knows the namespace then
    namespace = namespace_of(conf)
    ours = re.compile(rf"(?:{re.escape(namespace)})?{_PREFIX}(\w+)", re.IGNORECASE)
    for key in names:
        match = ours.fullmatch(key)
        if not match:
            continue
        name = _PREFIX + match[1].lower()
        if name == _CELERY_SINGLETONS:
            _warn_once(
                f"{key!r} is a setting of the celery-singleton package and has no effect on "
                "celery-singleton-lock: leases are renewed while their task runs. "
                "singleton_lock_ttl is how long a dead holder's lease blocks its key, and "
                "singleton_lock_unique_for how long a queued message keeps equal calls from being "
                "published"
            )
            continue
        known = [_PREFIX + known for known in _NAMES]
        if name not in known:
            raise SettingsError(f"unknown setting {key!r}{suggestion(name, known)}")
        if conf.get(name, _MISSING) is _MISSING:
            spelling = namespace + name
            spelling = spelling.upper() if namespace.isupper() else spelling
            raise SettingsError(f"{key!r} is a setting that Celery doesn't read: write {spelling}")


@cache
def _warn_once(text: str) -> None:
    """Log ``text``; not again in this process, nor in those that it forks."""
    logger.warning("singleton: %s", text)


def _choose_url(conf: Any, given: Any) -> tuple[str, str]:
    if given is not None:
        if not isinstance(given, str) or "://" not in given:
            # Not shown: a password may be in it.
            raise SettingsError(
                "singleton_lock_url is no URL: give one such as redis://localhost:6379/0"
            )
        # One of several nodes is read by its store, which says what is wrong with which of them.
        url = given if names_nodes(given) else _readable(given, "singleton_lock_url")
        return url, "singleton_lock_url"
    for setting in ("result_backend", "broker_url"):
        value = getattr(conf, setting)
        candidates = value.split(";") if isinstance(value, str) else value or ()
        urls = [url for url in candidates if isinstance(url, str) and is_store_url(url)]
        if urls and is_sentinel_url(urls[0]):
            # Not several stores to choose from, but several who know where the one is.
            urls = [";".join(url for url in urls if is_sentinel_url(url))]
        if len(urls) > 1:
            _warn_once(
                f"{setting} names several Redis servers; locks are kept in the first one only, and "
                "can't fail over with the broker's connection. Set singleton_lock_url; use "
                "Sentinel or a Cluster if locks have to survive the loss of a server"
            )
        if urls:
            return _readable(urls[0], setting), setting
    # As in tests: no other process gets a message, so no other process needs the locks.
    return ("memory://", "broker_url") if has_broker_in_memory(conf) else ("", "nowhere")


def has_broker_in_memory(conf: Any) -> bool:
    """Whether the broker is kombu's ``memory://``, whose messages stay in their process."""
    broker = conf.broker_url
    return isinstance(broker, str) and broker.startswith("memory:")


def _readable(url: str, setting: str) -> str:
    try:
        check_url(url)
    except ValueError as exc:
        raise SettingsError(f"{setting} can't be read as a URL: {exc}") from None
    return url


def _tls_options(conf: Any, source: str) -> dict[str, Any]:
    """The TLS options of the setting that the URL was inherited from."""
    name = {"result_backend": "redis_backend_use_ssl", "broker_url": "broker_use_ssl"}.get(source)
    options = conf.get(name) if name else None
    if not isinstance(options, Mapping):
        return {}
    return {
        key if key.startswith("ssl_") else f"ssl_{key}": value for key, value in options.items()
    }


def _login_options(conf: Any, url: str, source: str) -> dict[str, Any]:
    """The login that Celery's settings name beside the result backend's URL."""
    if source != "result_backend":
        return {}
    if provider := conf.get("redis_backend_credential_provider"):
        return {"credential_provider": provider}
    if "@" in split_url(url).netloc:
        return {}
    login = {name: conf.get(f"redis_{name}") for name in ("username", "password")}
    return {name: value for name, value in login.items() if value}


def _sentinel_options(conf: Any, url: str, source: str) -> dict[str, Any]:
    """Which master, and the login of the sentinels: kombu's options of the setting of the URL."""
    if not is_sentinel_url(url):
        return {}
    of_source = {
        "result_backend": "result_backend_transport_options",
        "broker_url": "broker_transport_options",
    }
    # Our own URL may name the same sentinels, and leave the rest to these.
    for name in [of_source[source]] if source in of_source else of_source.values():
        options = conf.get(name) or {}
        found = {key: options[key] for key in ("master_name", "sentinel_kwargs") if key in options}
        if found:
            return found
    return {}


def _check_prefix(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[\w.@/-]{1,64}", value):
        raise SettingsError(
            f"singleton_lock_prefix={value!r}: give 1 to 64 letters, digits or _ . @ / -"
        )
    return value


def _check_fence_base(value: Any) -> int:
    # Lua's numbers are exact up to 2**53.
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**52:
        raise SettingsError(
            f"singleton_lock_fence_base={value!r}: give a whole number from 0 to 2**52, at least "
            "the highest fence of the store you leave"
        )
    return value


def _check_replicas(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 100:
        raise SettingsError(
            f"singleton_lock_wait_replicas={value!r}: give a whole number from 0 (don't wait), and "
            "not above the number of replicas that each master has"
        )
    return value


def _check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SettingsError(f"{_PREFIX}{name}={value!r}: give True or False")
    return value


def _check_beat_name(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_BEAT_NAME_CHARS:
        raise SettingsError(
            f"singleton_lock_beat_name={value!r}: give a name of 1 to {_MAX_BEAT_NAME_CHARS} "
            "characters; beats of one name elect one leader"
        )
    return value


def _check_beat_ttl(value: Any) -> float:
    name = f"{_PREFIX}beat_ttl"
    ttl = _seconds(name, value)
    if ttl < MIN_TTL:
        raise SettingsError(
            f"{name}={value!r}: at least {MIN_TTL} seconds, for the leader renews every third of it"
        )
    return ttl


def _check_beat_poll(value: Any) -> float:
    name = f"{_PREFIX}beat_poll"
    poll = _seconds(name, value)
    if poll < _MIN_BEAT_POLL:
        raise SettingsError(
            f"{name}={value!r}: at least {_MIN_BEAT_POLL} seconds between two tries of a standby"
        )
    return poll


def _seconds(name: str, value: Any) -> float:
    try:
        return seconds(name, value)
    except (TypeError, ValueError) as exc:
        raise SettingsError(str(exc)) from None


def _visibility_timeout(conf: Any) -> float | None:
    options = conf.get("broker_transport_options") or {}
    broker = conf.broker_url
    first = broker if isinstance(broker, str) else next(iter(broker or ()), "")
    transport = re.split(r"[+:]", first, maxsplit=1)[0].lower()
    option = "peek_lock_seconds" if transport == "azureservicebus" else "visibility_timeout"
    if option in options:
        return _seconds(f"broker_transport_options[{option!r}]", options[option])
    return _VISIBILITY_TIMEOUTS.get(transport)
