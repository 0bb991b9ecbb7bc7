"""``on_conflict="cancel_running"``: the call waits, and the running one is asked to end."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Final

from ..option_values import at_least, seconds
from .wait import Wait

if TYPE_CHECKING:
    from ..policy import Policy

# Seconds. Each holder checks for a newer call that often, with one command.
_MIN_WITHIN: Final = 0.1


@dataclass(frozen=True, slots=True, init=False)
class CancelRunning(Wait):
    """Cancel the running call in favour of the newest, which waits until the other has ended.

    Args:
        within: How soon the running call notices the newer one, in seconds; at least 0.1.
        timeout: How long the newer call waits, in seconds. Then it fails with LockConflict. The
            default is longer than the default ``ttl``, so it outlasts a dead worker's lock.
    """

    action: ClassVar = "cancel_running"
    reason: ClassVar = "the holder is asked to end"
    revokes: ClassVar = True
    has_feature: ClassVar = True

    within: float

    def __init__(self, within: float | timedelta = 1, timeout: float | timedelta = 90) -> None:
        where = "OnConflict.cancel_running"
        often = at_least(f"{where}(within)", within, _MIN_WITHIN, "; each check is a command")
        longest = seconds(f"{where}(timeout)", timeout)
        if longest <= often:
            raise ValueError(
                f"{where}(within={often:g}, timeout={longest:g}): the newer call gives up before"
                " the holder checks; give a timeout that is longer than within"
            )
        self._set(within=often, timeout=longest)

    def check(self, policy: Policy) -> None:
        where = 'on_conflict="cancel_running"'
        if policy.limit > 1:
            raise ValueError(
                f"{where} with limit={policy.limit}: it is not defined which of the holders to "
                "cancel; use limit=1"
            )
        if policy.unique == "until_done":
            raise ValueError(
                f'{where} with unique="until_done": no equal call is published while one runs, so '
                "none would ever be cancelled; drop unique"
            )
