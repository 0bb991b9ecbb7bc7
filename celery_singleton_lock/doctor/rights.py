"""What the store's login may not use, and what to grant to it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final

from ..core.call_queue import CallQueue
from ..core.store import NO_KEYS, WaitQueue
from ..errors import DOCS
from .context import SCOPE, Context, Finding, Findings, error, note, ok

_RIGHTS_PAGE: Final = f"{DOCS}reference/settings.html#rights"


def missing_basics(context: Context) -> Finding | None:
    """What to grant to a login to which the store refuses a lease; None: it is not known."""
    keyspace = context.runtime.keyspace
    key = keyspace.lock(SCOPE, secrets.token_hex(8))
    missing = context.store.leases.missing_rights(key)
    if not missing:
        return None
    pattern = f"~{keyspace.match_all().partition('{')[0]}*"
    grants = [pattern if name == NO_KEYS else f"+{name.lower()}" for name in missing]
    commands = [name for name in missing if name != NO_KEYS]
    lacks = [f"the commands {', '.join(commands)}"] if commands else []
    lacks += [f"the keys {pattern.removeprefix('~')}"] if NO_KEYS in missing else []
    text = f"the login may not use {' and '.join(lacks)}: no locks"
    # A right to a part of the keys is missing for a command alone.
    return error("rights", text, f"grant {' '.join(grants)}, see {_RIGHTS_PAGE}")


def check_waiting(context: Context, queue: WaitQueue) -> Finding:
    """Whether the login has the rights to wake waiting calls."""
    missing = queue.missing_rights(context.runtime.keyspace.lock(SCOPE, secrets.token_hex(8)))
    if not missing:
        return ok("waiting", "a call that waits for a key is woken when the key is released")
    text = (
        f"the login may not use {', '.join(missing)}: a call that waits for a key isn't woken "
        "when the key is released, but asks every half second"
    )
    return note("waiting", text, _granting(missing))


def check_queue_rights(context: Context, queue: CallQueue) -> Findings:
    """Whether the login has the rights for the queues of keys, in which paused calls wait too."""
    missing = queue.missing_rights(context.runtime.keyspace.lock(SCOPE, secrets.token_hex(8)))
    if not missing:
        return
    lacks = f"the login may not use {', '.join(missing)}"
    if context.queue_tasks:
        text = f'{lacks}: calls with on_conflict="queue" are refused, or never start'
        yield error("rights", f"{text}: {context.queue_tasks}", _granting(missing))
    else:
        text = f"{lacks}: paused calls, and retries above a rate, are requeued or start late"
        yield note("rights", text, _granting(missing))


def _granting(commands: Sequence[str]) -> str:
    """The remedy for a login that lacks ``commands``."""
    return f"grant {' '.join(f'+{name.lower()}' for name in commands)}, see {_RIGHTS_PAGE}"
