"""From ``app.conf`` to a frozen, validated Settings.

Every name is read with ``conf.get(name, default)``: that finds a Django namespace's spelling too
(``CELERY_SINGLETON_LOCK_TTL``), and unlike ``app.add_defaults`` never overrides the user's values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from celery import Celery
from kombu.utils.url import maybe_sanitize_url

from celery_singleton_lock.core.policy import APP_OPTIONS, Policy, merge, seconds, suggestion
from celery_singleton_lock.errors import SettingsError
from celery_singleton_lock.stores import is_store_url

__all__ = ["Settings", "read_settings"]

_PREFIX: Final = "singleton_lock_"
_NAMES: Final = APP_OPTIONS | {"url", "prefix", "fence_base", "allow_eviction"}
# Celery's own default for the Redis transport (kombu.transport.redis.Channel.visibility_timeout).
_DEFAULT_VISIBILITY_TIMEOUT: Final = 3600.0
# A twin can come an hour late on any broker: an unacknowledged message waits for a connection that
# the broker believes alive.
_MIN_MARKER_TTL: Final = 3600.0
_MISSING: Final = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One app's options.

    Attributes:
        url: Of the store; empty if the app names none, which is well for an eager one.
        url_source: The setting it was taken from.
        connection_options: For the store's client (TLS).
        prefix: First part of every key; apps with the same prefix share locks.
        policy: Defaults of this app's tasks.
        fence_base: Fences are above it.
        allow_eviction: Whether a server that may evict leases is accepted.
        visibility_timeout: Seconds after which the broker delivers an unacknowledged message
            again; None for brokers that wait for the connection to end.
    """

    url: str
    url_source: str
    connection_options: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = "celery"
    policy: Policy = field(default_factory=Policy)
    fence_base: int = 0
    allow_eviction: bool = False
    visibility_timeout: float | None = None

    @property
    def safe_url(self) -> str:
        """The URL with its password masked, for logs and errors."""
        return str(maybe_sanitize_url(self.url))

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
    if tls_options and url.startswith("redis://"):
        # As Celery and kombu do: with such options they speak TLS, whatever the scheme says.
        url = url.replace("redis://", "rediss://", 1)
    return Settings(
        url=url,
        url_source=source,
        connection_options=tls_options,
        prefix=_check_prefix(given.get("prefix", "celery")),
        policy=policy,
        fence_base=_check_fence_base(given.get("fence_base", 0)),
        allow_eviction=_check_flag("allow_eviction", given.get("allow_eviction", False)),
        visibility_timeout=_visibility_timeout(conf),
    )


def _refuse_unknown(conf: Any) -> None:
    """Refuse a name that is ours but unknown, or that Celery wouldn't find under our spelling."""
    names = list(conf)  # Celery loads its configuration now, and knows the namespace then
    namespace = getattr(conf, "prefix", None) or ""
    ours = re.compile(rf"(?:{re.escape(namespace)})?{_PREFIX}(\w+)", re.IGNORECASE)
    for key in names:
        match = ours.fullmatch(key)
        if not match:
            continue
        name = _PREFIX + match[1].lower()
        known = [_PREFIX + known for known in _NAMES]
        if name not in known:
            raise SettingsError(f"unknown setting {key!r}{suggestion(name, known)}")
        if conf.get(name, _MISSING) is _MISSING:
            spelling = namespace + name
            spelling = spelling.upper() if namespace.isupper() else spelling
            raise SettingsError(f"{key!r} is a setting that Celery doesn't read: write {spelling}")


def _choose_url(conf: Any, given: Any) -> tuple[str, str]:
    if given is not None:
        if not isinstance(given, str) or "://" not in given:
            # Not shown: a password may be in it.
            raise SettingsError(
                "singleton_lock_url is no URL: give one such as redis://localhost:6379/0"
            )
        return _readable(given, "singleton_lock_url"), "singleton_lock_url"
    for setting in ("result_backend", "broker_url"):
        value = getattr(conf, setting)
        candidates = value.split(";") if isinstance(value, str) else value or ()
        for url in candidates:
            if isinstance(url, str) and is_store_url(url):
                return _readable(url, setting), setting
    return "", "nowhere"


def _readable(url: str, setting: str) -> str:
    try:
        _ = urlsplit(url).port
    except ValueError:
        # Neither the URL nor this error is shown: the usual cause is a "/" in the password, and
        # then what the reader takes for a port, and quotes, is the password.
        raise SettingsError(
            f"{setting} can't be read as a URL: percent-encode what is special in its password "
            "('/' is %2F, '?' is %3F, '#' is %23)"
        ) from None
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


def _check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SettingsError(f"{_PREFIX}{name}={value!r}: give True or False")
    return value


def _visibility_timeout(conf: Any) -> float | None:
    options = conf.get("broker_transport_options") or {}
    if "visibility_timeout" in options:
        name = "broker_transport_options['visibility_timeout']"
        try:
            return seconds(name, options["visibility_timeout"])
        except (TypeError, ValueError) as exc:
            raise SettingsError(str(exc)) from None
    broker = conf.broker_url
    first = broker if isinstance(broker, str) else next(iter(broker or ()), "")
    acknowledged_by_timeout = first.startswith(("redis", "rediss", "valkey", "sentinel", "sqs"))
    return _DEFAULT_VISIBILITY_TIMEOUT if acknowledged_by_timeout else None
