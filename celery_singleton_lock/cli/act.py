"""An act of an operator: confirmed before, and reported afterwards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import click


class Target(NamedTuple):
    """A key or call, and whether the act was carried out on it.

    Attributes:
        row: The key or call as JSON data.
        name: Its name.
        is_done: Whether the act was carried out.
        refusal: The message that it was not.
    """

    row: Mapping[str, Any]
    name: str
    is_done: bool
    refusal: str


@dataclass(frozen=True, slots=True)
class Act:
    """An act on keys or calls, such as their release.

    Attributes:
        done, does: What the act is called.
        dry_run, yes, as_json: The options of the command.
    """

    done: str
    does: str
    dry_run: bool
    yes: bool
    as_json: bool

    def confirm(self, what: str, question: str, *, answers: str = "--yes") -> None:
        """Show ``what``, and ask; ``answers`` are the options that answer."""
        if self.yes or self.dry_run:
            return
        if self.as_json:
            raise click.UsageError(f"with --json give {answers}")
        click.echo(what)
        try:
            confirmed = click.confirm(question)
        except click.Abort:
            # Standard input has ended, because there is no terminal.
            message = f"no answer, so nothing is {self.done}; --yes {self.does} without asking"
            raise click.ClickException(message) from None
        if not confirmed:
            raise click.Abort

    def report(self, targets: Sequence[Target], what: str) -> bool:
        """Print what became of all, or ``what`` they are; return whether nothing was refused."""
        if self.as_json:
            rows = [{**one.row, self.done: one.is_done} for one in targets]
            click.echo(json.dumps(rows, indent=2))
        elif self.dry_run and targets:
            click.echo(f"{what}\nnothing is {self.done}: --dry-run")
        else:
            for one in targets:
                text = f"{self.done} {one.name}" if one.is_done else one.refusal
                click.echo(text, err=not one.is_done)
        return self.dry_run or all(one.is_done for one in targets)
