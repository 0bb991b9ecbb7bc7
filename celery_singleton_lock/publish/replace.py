"""``on_duplicate="replace"``: a queued message runs with the newest arguments.

Overview
    The arguments of a later call are kept in the store, at a key next to the claim of the queued
    message, and the grant of that message's lease returns them (`task.replace`). With ``debounce``,
    each call also postpones the start of the message.

Guarantees
    The message runs with the arguments of the last call that it represents. If it starts before it
    gets a call's arguments, the call claims the key itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..core.keyspace import Keyspace
from ..core.lease import Record
from ..core.store import Store
from ..core.store_requests import ARGUMENTS_FOR, ReplaceArguments, Replaced
from ..errors import SettingsError
from ..message.claim import Claim
from ..policy import Policy

# Seconds to wait for the reply of the store.
_TIMEOUT: Final = 0.4


@dataclass(frozen=True, slots=True)
class Replacement:
    """The arguments of a call, for the queued message that has its claim.

    Attributes:
        policy: The task's policy, with this call's options.
        packed: The arguments, as `pack_arguments` returns them.
    """

    policy: Policy
    packed: bytes

    @property
    def due_in(self) -> float:
        """Seconds from now until the message may start."""
        return self.policy.debounce or 0.0

    def replace(self, store: Store, existing: Record, claim: Claim) -> Replaced:
        """Replace the arguments of the message whose record is ``existing``.

        Raises:
            StoreError: The store refuses the request, or does not answer.
        """
        request = ReplaceArguments(
            claim=claim.key,
            call_id=existing.token,
            key=Keyspace.arguments(claim.key, existing.token),
            arguments=self.packed,
            ttl=claim.unique_for + self.due_in + ARGUMENTS_FOR,
            due_in=self.due_in,
            due_max=self.policy.debounce_max,
        )
        if store.arguments is None:
            return Replaced.FIXED
        return store.arguments.replace(request, timeout=_TIMEOUT)


def check_replaceable(task: str, store: Store, *, through_others: bool = False) -> None:
    """Refuse ``on_duplicate="replace"`` where it can't work.

    Args:
        task: The name of the task.
        store: The store of its claims.
        through_others: Whether a base class overrides the task's ``apply_async``.

    Raises:
        SettingsError: The store can't replace arguments, or a base class may change them.
    """
    if store.arguments is None:
        raise SettingsError(
            f'{task} has on_duplicate="replace", but the store ({store.capabilities.name}) can\'t '
            "replace the arguments of a queued message: use Redis or Valkey (alone, Sentinel, "
            "Cluster), or another on_duplicate"
        )
    if through_others:
        raise SettingsError(
            f'{task} has on_duplicate="replace", but a base class overrides apply_async, which may '
            "change the arguments of a message: those in the store would not be changed. Use "
            "another on_duplicate"
        )
