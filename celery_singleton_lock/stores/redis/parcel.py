"""A command on its way to a node of a Redis Cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from celery_singleton_lock.errors import StoreError
from celery_singleton_lock.stores.redis.topology import Address, slot_of
from celery_singleton_lock.stores.redis.transport import Command

__all__ = ["Parcel", "parcels_of"]


@dataclass(frozen=True, slots=True)
class Parcel:
    """A command, and WAIT behind it if it has one: they go to the same node, on one connection.

    Attributes:
        index: Of its first reply.
        commands: Both.
        slot: Of the command's key.
        asking: The node that a migration led to; None: the slot's.
    """

    index: int
    commands: tuple[Command, ...]
    slot: int
    asking: Address | None = None

    def fill(self, replies: list[Any], error: StoreError) -> None:
        """Put ``error`` where the replies would stand."""
        replies[self.index : self.index + len(self.commands)] = [error] * len(self.commands)


def parcels_of(commands: Sequence[Command]) -> list[Parcel]:
    """One for each command but WAIT, which goes with the command before it."""
    parcels: list[Parcel] = []
    for index, command in enumerate(commands):
        if command[0] == "WAIT":
            last = parcels[-1]
            parcels[-1] = replace(last, commands=(*last.commands, command))
        else:
            key = command[3] if command[0] in ("EVALSHA", "EVAL") else command[1]
            parcels.append(Parcel(index, (command,), slot_of(key)))
    return parcels
