"""What a server has used of a processor, by its own count."""

from __future__ import annotations

from typing import Any

__all__ = ["processor_time"]


def processor_time(client: Any) -> float:
    """Seconds since it was started, for itself and in the kernel."""
    used = client.info("cpu")
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])
