"""The settings of one app, read from ``app.conf`` and validated.

Every name is read with ``conf.get(name, default)``, which also finds the spelling of a Django
namespace (``CELERY_SINGLETON_LOCK_TTL``) and, unlike ``app.add_defaults``, never overrides the
user's values.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Final

from celery import Celery

from .celery_compat import namespace_of
from .errors import SettingsError
from .option_names import suggestion
from .option_values import at_least, flag, require
from .policy import APP_OPTIONS, MIN_TTL, Policy, check_option, merge, option
from .stores import is_sentinel_url, is_store_url, with_tls
from .stores.store_url import check_url, masked, split_url, take_option
from .visibility_timeout import visibility_timeout_of

logger = logging.getLogger("celery_singleton_lock")

_PREFIX: Final = "singleton_lock_"
#: The environment variable that takes precedence over the setting ``singleton_lock_enabled``: an
#: operator can set it without a change of the code.
SWITCH: Final = "SINGLETON_LOCK_ENABLED"
_SWITCH_VALUES: Final = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
# The only setting of the celery-singleton package that begins with this library's prefix. Projects
# that migrate from that package, or use both for a while, still have it.
_CELERY_SINGLETONS: Final = "singleton_lock_expiry"
# Seconds. With any broker a duplicate may arrive an hour late: the broker keeps an unacknowledged
# message assigned to a connection that it believes to be alive.
_DEFAULT_COMPLETION_TTL: Final = 3600.0
# Seconds. A duplicate delivery of a running task is requeued for up to 30 s, and then waits in its
# queue.
_MIN_COMPLETION_TTL: Final = 60.0
# The settings next to a URL that Celery reads: its TLS options and its transport options.
_BESIDE: Final = {
    "result_backend": ("redis_backend_use_ssl", "result_backend_transport_options"),
    "broker_url": ("broker_use_ssl", "broker_transport_options"),
}
# Celery's name, in the transport options, for what begins the keys of a deployment.
_KEYPREFIX: Final = "global_keyprefix"
_MISSING: Final = object()


def _text(name: str, value: Any, pattern: str, advice: str) -> Any:
    is_valid = isinstance(value, str) and re.fullmatch(pattern, value, re.DOTALL)
    require(is_valid, name, value, advice)
    return value


def _keyprefix(name: str, value: Any) -> Any:
    """A prefix that leaves the hash tag, the quoting and the slot number of a key unambiguous."""
    advice = (
        "give at most 100 characters, without blanks, braces, '#' and '%'. If Celery's keys are to "
        f'keep it, set {_PREFIX}{_KEYPREFIX} to "", or to a prefix for the locks'
    )
    return _text(name, value, r"[^\s{}#%\x00-\x20\x7f-\xa0\ud800-\udfff]{0,100}", advice)


def _number(name: str, value: Any, end: int, advice: str) -> Any:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    require(is_whole and 0 <= value < end, name, value, f"give a whole number from 0 {advice}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one app.

    Attributes:
        url: The URL of the store; empty if the app has none, which is valid for an eager app.
        url_source: The setting that contains the URL.
        connection_options: Options of the store's client (TLS, Sentinel).
        prefix: A part of every key; apps with the same prefix share locks.
        global_keyprefix: The beginning of every key, in front of ``csl:``.
        other_keyprefixes: What may be there in workers of this app whose configuration differs:
            nothing, or the broker's prefix where ``singleton_lock_global_keyprefix`` is set.
        policy: The defaults of this app's tasks.
        off_by: What has switched the locks of all tasks off; empty: nothing has.
        fence_base: Fences are above this number.
        allow_eviction: Whether leases are taken on a server that may evict renewed ones.
        wait_replicas: The number of replicas that must acknowledge a grant before it counts.
        beat_name: The name of the election; Beats with the same name elect one leader.
        beat_ttl: Seconds for which a dead leader blocks the others: long enough for a leader whose
            host stalls for seconds, short enough for entries that are due meanwhile.
        beat_poll: Seconds between two tries of a standby candidate.
        old_locks: Whether to take the lock of the old package (celery-once, celery-singleton,
            celery-heimdall, RedBeat) as well. None means yes for the classes of ``migration``, and
            no for RedBeat.
        completion_ttl: How many seconds to remember that a message has been processed, so that a
            late duplicate delivery is recognized, and that a newer call exists
            (``cancel_running``). An hour by default, or ``visibility_timeout`` if that is longer.
        visibility_timeout: Seconds after which the broker delivers an unacknowledged message
            again; None for brokers that wait for the connection to end.
    """

    # Excluded from the repr: error reporters show local variables, and these contain passwords.
    url: str = field(repr=False)
    url_source: str
    connection_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    policy: Policy = field(default_factory=Policy)
    off_by: str = ""
    visibility_timeout: float | None = None
    prefix: str = option(
        "celery", _text, r"[\w.@/-]{1,64}", "give 1 to 64 letters, digits or _ . @ / -"
    )
    global_keyprefix: str | None = option(None, _keyprefix)
    other_keyprefixes: tuple[str, ...] = ()
    # Lua's numbers are exact up to 2**53.
    fence_base: int = option(
        0, _number, 2**52, "to 2**52, at least the highest fence of the store you leave"
    )
    allow_eviction: bool = option(False, flag)
    wait_replicas: int = option(
        0,
        _number,
        101,
        "(don't wait), and not above the number of replicas that each master has",
    )
    beat_name: str = option(
        "celery",
        _text,
        ".{1,100}",
        "give a name of 1 to 100 characters; beats of one name elect one leader",
    )
    beat_ttl: float = option(
        15.0, at_least, MIN_TTL, ", because the leader renews every third of it"
    )
    # A try of a standby candidate is one script that changes nothing. More than 20 per second have
    # no use.
    beat_poll: float = option(1.0, at_least, 0.05, " between two tries of a standby")
    old_locks: bool | None = option(None, flag)
    completion_ttl: float = option(
        _DEFAULT_COMPLETION_TTL,
        at_least,
        _MIN_COMPLETION_TTL,
        ", because a second delivery of a running task waits for up to 30 s before it asks again",
    )

    @property
    def safe_url(self) -> str:
        """The URL with its password masked, for logs and errors."""
        return masked(self.url)

    @property
    def longest_countdown(self) -> float | None:
        """The longest countdown of a requeued message, in seconds; None: there is no limit.

        With a longer countdown the broker would deliver the message again while a worker still
        waits for its eta, and every copy would multiply (1 message became 1060 deliveries in 40 s).
        """
        return None if self.visibility_timeout is None else self.visibility_timeout / 3


def read_settings(app: Celery) -> Settings:
    """The validated settings of ``app``.

    Raises:
        SettingsError: A name is unknown or a value is wrong.
    """
    conf = app.conf
    _refuse_unknown(conf)
    try:
        given_policy, switch = _given(conf, APP_OPTIONS), _switch()
        if switch is not None:
            given_policy["enabled"] = switch
        policy = merge(Policy(), given_policy, where="singleton_lock_* settings")
        given = _given(conf, _OWN).items()
        own = {name: check_option(Settings, name, value, _PREFIX) for name, value in given}
        visibility_timeout = visibility_timeout_of(conf)
    except (TypeError, ValueError) as exc:
        raise SettingsError(str(exc)) from None
    url, source = _choose_url(conf)
    try:
        check_url(url)
    except ValueError as exc:
        raise SettingsError(f"{source} can't be read as a URL: {exc}") from None
    url, prefix, others = _choose_keyprefix(conf, url, source, own.pop(_KEYPREFIX, None))
    options = _tls_options(conf, source)
    if options:
        # With such options, Celery and kombu use TLS with any scheme.
        url = with_tls(url)
    options |= _login_options(conf, url, source) | _sentinel_options(conf, url, source)
    return Settings(
        url=url,
        url_source=source,
        connection_options=options,
        global_keyprefix=prefix,
        other_keyprefixes=others,
        policy=policy,
        off_by=_off_by(policy, switch),
        visibility_timeout=visibility_timeout,
        **{
            "beat_name": app.main or "celery",
            "completion_ttl": max(visibility_timeout or 0.0, _DEFAULT_COMPLETION_TTL),
            **own,
        },
    )


def _switch() -> bool | None:
    """The value of the environment variable; None: it is not set, or empty."""
    value = os.environ.get(SWITCH, "").strip().lower()
    require(not value or value in _SWITCH_VALUES, SWITCH, value, "give 1 or 0")
    return _SWITCH_VALUES.get(value)


def _off_by(policy: Policy, switch: bool | None) -> str:
    if policy.enabled:
        return ""
    return f"{_PREFIX}enabled=False" if switch is None else f"{SWITCH} in the environment"


def _given(conf: Any, names: Iterable[str]) -> dict[str, Any]:
    """The settings of these names that ``conf`` has."""
    values = {name: conf.get(_PREFIX + name, _MISSING) for name in sorted(names)}
    return {name: value for name, value in values.items() if value is not _MISSING}


def _refuse_unknown(conf: Any) -> None:
    """Refuse names with this library's prefix that are unknown, or that Celery does not read."""
    names = list(conf)  # loads the configuration and thereby sets the namespace
    namespace = namespace_of(conf)
    ours = re.compile(rf"(?:{re.escape(namespace)})?({_PREFIX}\w+)", re.IGNORECASE)
    known = [_PREFIX + name for name in _NAMES]
    for match in filter(None, map(ours.fullmatch, names)):
        key, name = match[0], match[1].lower()
        if name == _CELERY_SINGLETONS:
            _warn_once(
                f"{key!r} is a setting of the celery-singleton package. Only tasks with "
                "base=celery_singleton_lock.migration.Singleton read it. It has no effect on other "
                "tasks of celery-singleton-lock: leases are renewed while their task runs. "
                "singleton_lock_ttl is how long a dead holder's lease blocks its key, and "
                "singleton_lock_unique_for how long a queued message keeps equal calls from being "
                "published"
            )
        elif name not in known:
            raise SettingsError(f"unknown setting {key!r}{suggestion(name, known)}")
        elif conf.get(name, _MISSING) is _MISSING:
            spelling = (namespace + name).upper() if namespace.isupper() else namespace + name
            raise SettingsError(f"{key!r} is a setting that Celery doesn't read: write {spelling}")


@cache
def _warn_once(text: str) -> None:
    """Log ``text`` once in this process and its forks."""
    logger.warning("singleton: %s", text)


def _choose_url(conf: Any) -> tuple[str, str]:
    given = conf.get(f"{_PREFIX}url")
    if given is not None:
        if not isinstance(given, str) or "://" not in given:
            # The value is not shown, because it may contain a password.
            raise SettingsError(
                "singleton_lock_url is no URL: give one such as redis://localhost:6379/0"
            )
        return given, "singleton_lock_url"
    for setting in ("result_backend", "broker_url"):
        urls = _stores_in(getattr(conf, setting))
        if len(urls) > 1:
            _warn_once(
                f"{setting} names several Redis servers; locks are kept in the first one only, and "
                "can't fail over with the broker's connection. Set singleton_lock_url; use "
                "Sentinel or a Cluster if locks have to survive the loss of a server"
            )
        if urls:
            return urls[0], setting
    # With a broker in memory (in tests), no other process receives a message or needs the locks.
    return ("memory://", "broker_url") if has_broker_in_memory(conf) else ("", "nowhere")


def _stores_in(value: Any) -> list[str]:
    """The URLs of lock stores in Celery's setting of a broker or a result backend."""
    candidates = value.split(";") if isinstance(value, str) else value or ()
    urls = [url for url in candidates if isinstance(url, str) and is_store_url(url)]
    if urls and is_sentinel_url(urls[0]):
        # The URLs name several sentinels of one store, not several stores.
        return [";".join(url for url in urls if is_sentinel_url(url))]
    return urls


def has_broker_in_memory(conf: Any) -> bool:
    """Whether the broker is kombu's ``memory://``, whose messages stay in their process."""
    broker = conf.broker_url
    return isinstance(broker, str) and broker.startswith("memory:")


def _choose_keyprefix(
    conf: Any, url: str, source: str, own: str | None
) -> tuple[str, str, tuple[str, ...]]:
    """``url`` without its ``global_keyprefix``, the prefix of the keys, and other prefixes.

    Celery's result backend separates its names from a prefix that ends in a letter with ``_``;
    kombu does not. Here nothing is added, so that apps of one deployment have the same keys whether
    they find the store in the result backend or in the broker.
    """
    if source in _BESIDE:
        setting = _BESIDE[source][1]
        where, found = f"{setting}[{_KEYPREFIX!r}]", (conf.get(setting) or {}).get(_KEYPREFIX)
    else:
        where = f"{_KEYPREFIX} in {source}"
        url, found = take_option(url, _KEYPREFIX)
        if None not in (own, found) and own != found:
            raise SettingsError(f"{_PREFIX}{_KEYPREFIX}={own!r}, but {where} is {found!r}")
    try:
        prefix = _keyprefix(where, found or "") if own is None else own
    except ValueError as exc:
        raise SettingsError(str(exc)) from None
    candidates = ("", found if isinstance(found, str) else "")
    return url, prefix, tuple(dict.fromkeys(one for one in candidates if one != prefix))


def _tls_options(conf: Any, source: str) -> dict[str, Any]:
    """The TLS options of the setting that the URL was inherited from."""
    options = conf.get(_BESIDE[source][0]) if source in _BESIDE else None
    if not isinstance(options, Mapping):
        return {}
    return {f"ssl_{key.removeprefix('ssl_')}": value for key, value in options.items()}


def _login_options(conf: Any, url: str, source: str) -> dict[str, Any]:
    """The login in Celery's settings for the result backend, if its URL has none."""
    if source != "result_backend":
        return {}
    if provider := conf.get("redis_backend_credential_provider"):
        return {"credential_provider": provider}
    if "@" in split_url(url).netloc:
        return {}
    login = {name: conf.get(f"redis_{name}") for name in ("username", "password")}
    return {name: value for name, value in login.items() if value}


def _sentinel_options(conf: Any, url: str, source: str) -> dict[str, Any]:
    """The master's name and the sentinels' login, from the transport options next to the URL."""
    if not is_sentinel_url(url):
        return {}
    # singleton_lock_url may name the same sentinels without these options.
    for _, setting in [_BESIDE[source]] if source in _BESIDE else _BESIDE.values():
        options = conf.get(setting) or {}
        found = {key: options[key] for key in ("master_name", "sentinel_kwargs") if key in options}
        if found:
            return found
    return {}


_OWN: Final = frozenset(f.name for f in fields(Settings) if f.metadata)
_NAMES: Final = APP_OPTIONS | _OWN | {"url"}
