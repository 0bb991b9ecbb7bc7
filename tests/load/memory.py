"""How much memory processes and a server use, at moments of a run."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import psutil
import redis

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Memory at one moment, in MiB.

    Attributes:
        share: The share of the run, from 0 to 1.
        parents: Resident, the largest of the long-lived processes.
        children: Resident, the largest of their children.
        server: What the server says that it uses.
        keys: In the server's database.
    """

    share: float
    parents: float
    children: float
    server: float
    keys: int

    def __str__(self) -> str:
        return (
            f"{self.share:4.0%}: process {self.parents:.1f} MiB, child {self.children:.1f} MiB, "
            f"store {self.server:.1f} MiB with {self.keys} keys"
        )


def sample(share: float, pids: Iterable[int], client: redis.Redis) -> Sample:
    """Look now."""
    parents, children = [0.0], [0.0]
    for pid in pids:
        process = psutil.Process(pid)
        parents.append(process.memory_info().rss / MIB)
        for child in process.children():
            with suppress(psutil.NoSuchProcess):  # killed between the two looks
                children.append(child.memory_info().rss / MIB)
    return Sample(
        share=share,
        parents=max(parents),
        children=max(children),
        server=client.info("memory")["used_memory"] / MIB,
        keys=client.dbsize(),
    )
