"""The group ``celery -A proj singleton``, whose commands are imported when one is called.

Every ``celery`` command in an environment with this package, also ``celery worker``, imports this
module to find the group.
"""

from __future__ import annotations

import click


class _LazyGroup(click.Group):
    """A group whose commands are defined in another module."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _commands().get(cmd_name)


def _commands() -> dict[str, click.Command]:
    from .commands import COMMANDS
    from .pause import pause, paused, resume
    from .serve import serve
    from .watch import watch

    return {
        **COMMANDS,
        "pause": pause,
        "paused": paused,
        "resume": resume,
        "serve": serve,
        "watch": watch,
    }


@click.group(name="singleton", cls=_LazyGroup)
def singleton() -> None:
    """See, free and pause the locks of singleton tasks, and the claims of unique ones."""
