"""``celery singleton serve``: metrics, health, and a page of who holds what.

Guarantees
    The server only reads, except for the doctor's own keys and a release with a token. Counters
    come from worker events, gauges from the store at the time of the scrape, so workers need no
    additional library and no port.
    Task arguments are not shown. A key is, and a template puts arguments into its keys.

Non-guarantees
    Events that workers sent while this server was down, or while its broker was away, are not
    counted: counters begin at 0, as after any restart of a process that Prometheus scrapes.
    The page has no login. Reading it needs access to the address that it listens on.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn
from celery import Celery
from prometheus_client import CollectorRegistry, disable_created_metrics

from ..errors import SettingsError
from ..instrumentation.prometheus import PrometheusMetrics
from ..runtime import Runtime, singleton_tasks
from .access import Access
from .gauges import Gauges
from .http import Application
from .listener import Listener
from .options import Options, read_token
from .protocol import bounded
from .readings import Readings
from .routes import HEALTH, METRICS, Site

__all__ = ["Options", "open_site", "read_token", "serve"]


def serve(app: Celery, options: Options, report: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        app: The app.
        options: The options.
        report: Called with the lines for the operator, such as the address.

    Raises:
        SettingsError: The address can't be used, or the app's settings are wrong.
    """
    disable_created_metrics()  # Prometheus' text format has no use for them
    listening = _listen(options)
    site = open_site(app, options)
    host, port = listening.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    report(f"{url} ({'releases need the token' if options.token else 'read-only'})")
    if options.is_public:
        report(
            "other hosts can reach it, and reading needs no login: put a proxy with one before it"
        )
    config = uvicorn.Config(
        Application(site.answer, quick={HEALTH}, exempt={HEALTH, METRICS}),
        access_log=False,
        http=bounded(options.max_connections),
        lifespan="off",
        log_config=None,
        log_level="warning",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=3,
        ws="none",
    )
    uvicorn.Server(config).run(sockets=[listening])


def open_site(app: Celery, options: Options) -> Site:
    """The site of ``app``, with the threads that read for it.

    Raises:
        SettingsError: The app's settings are wrong.
    """
    runtime = Runtime.of(app)
    registry = CollectorRegistry()
    readings = Readings(app)
    metrics = PrometheusMetrics(registry)
    for task in singleton_tasks(app):
        metrics.begin(task.name)
    listener = Listener(app, runtime.clock, metrics)
    registry.register(Gauges(readings, listener, runtime.settings.beat_name))
    site = Site(readings, listener, registry, Access(options))
    readings.start()
    listener.start()
    return site


def _listen(options: Options) -> socket.socket:
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        return socket.create_server(address[:2], family=family)
    except OSError as exc:
        raise SettingsError(
            f"can't listen on {options.host!r}, port {options.port}: {exc}; "
            "give another --host or --port"
        ) from exc
