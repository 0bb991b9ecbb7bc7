"""``celery -A app singleton doctor``: findings for people, or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, Final

import click
from celery.bin.base import CeleryCommand, CLIContext

from celery_singleton_lock.doctor import Finding, Severity, diagnose

__all__ = ["doctor"]

_MARKS: Final = {
    Severity.OK: "ok",
    Severity.NOTE: "note",
    Severity.WARNING: "WARNING",
    Severity.ERROR: "ERROR",
}


@click.command(cls=CeleryCommand)
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Look for what keeps locks from working, or will. Exit status 1 if something does."""
    context: CLIContext = ctx.obj
    app: Any = context.app
    app.finalize()
    app.loader.import_default_modules()
    findings = list(diagnose(app))
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            click.echo(_line(finding))
    ctx.exit(1 if any(f.severity is Severity.ERROR for f in findings) else 0)


def _line(finding: Finding) -> str:
    line = f"{_MARKS[finding.severity]:8} {finding.subject}: {finding.text}"
    return f"{line}\n{'':8} -> {finding.cure}" if finding.cure else line
