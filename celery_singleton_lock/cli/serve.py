"""The command ``celery -A proj singleton serve``, which needs the extra ``serve``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import click

from .commands import Command

_F = TypeVar("_F", bound=Callable[..., Any])


def _prints(option: str, name: str, help_text: str) -> Callable[[_F], _F]:
    """An option that prints a file of ``serve/monitoring``, for which the extra is not needed."""

    def show(ctx: click.Context, param: click.Parameter, is_given: bool) -> None:
        if is_given:
            path = files("celery_singleton_lock") / "serve" / "monitoring" / name
            click.echo(path.read_text(encoding="utf-8"), nl=False)
            ctx.exit()

    return click.option(
        option, is_flag=True, is_eager=True, expose_value=False, callback=show, help=help_text
    )


@click.command(cls=Command)
@_prints("--print-alerts", "prometheus-alerts.yml", "Print alert rules for Prometheus, and exit.")
@_prints("--print-dashboard", "grafana-dashboard.json", "Print a Grafana dashboard, and exit.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", default=9876, show_default=True, help="0: any free port.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A file with the token that releases need. Without it the page is read-only.",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="A name by which this server is addressed, besides localhost and IP addresses.",
)
@click.option(
    "--max-connections",
    default=64,
    show_default=True,
    help="Of one address. Further ones are for /metrics and /healthz.",
)
@click.pass_context
def serve(ctx: click.Context, /, token_file: Path | None, **options: Any) -> None:
    """Serve /metrics for Prometheus, /healthz, and a live page of what is held."""
    try:
        from .. import serve as server
    except ModuleNotFoundError as exc:
        if exc.name not in ("prometheus_client", "uvicorn"):
            raise
        needed = "pip install 'celery-singleton-lock[serve]'"
        raise click.ClickException(f"serve needs {exc.name}: {needed}") from exc
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    app: Any = ctx.obj.app
    app.loader.import_default_modules()
    token = server.read_token(token_file) if token_file else ""
    server.serve(app, server.Options(token=token, **options), click.echo)
