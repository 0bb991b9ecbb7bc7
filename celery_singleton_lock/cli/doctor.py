"""The command ``celery -A app singleton doctor``: findings as text or JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click
from celery.bin.base import CeleryCommand

from celery_singleton_lock.doctor import Finding, Severity, diagnose


@click.command(cls=CeleryCommand)
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Look for what keeps locks from working, or will. Exit status 1 if something does."""
    app: Any = ctx.obj.app
    app.finalize()
    app.loader.import_default_modules()
    findings = list(diagnose(app))
    if as_json:
        click.echo(json.dumps([_row(finding) for finding in findings], indent=2))
    else:
        click.echo("\n".join(map(_line, findings)))
    ctx.exit(1 if any(f.severity is Severity.ERROR for f in findings) else 0)


def _row(finding: Finding) -> dict[str, str]:
    row = asdict(finding)
    # Programs read this field by its original name.
    row["cure"] = row.pop("remedy")
    return row


def _line(finding: Finding) -> str:
    is_loud = finding.severity in (Severity.WARNING, Severity.ERROR)
    mark = finding.severity.upper() if is_loud else finding.severity
    line = f"{mark:8} {finding.subject}: {finding.text}"
    return f"{line}\n{'':8} -> {finding.remedy}" if finding.remedy else line
