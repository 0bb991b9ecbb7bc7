"""``celery -A app singleton``, of which nothing is imported before somebody calls it.

Every ``celery`` command in an environment that has this package, every worker's too, imports this
module to know that the command exists.
"""

from __future__ import annotations

import click

__all__ = ["singleton"]


class _Later(click.Group):
    """A group whose commands are those of another module."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _commands().get(cmd_name)


def _commands() -> dict[str, click.Command]:
    from celery_singleton_lock.cli.commands import COMMANDS

    return COMMANDS


@click.group(name="singleton", cls=_Later)
def singleton() -> None:
    """See and free the leases of singleton tasks, and the claims of unique ones."""
