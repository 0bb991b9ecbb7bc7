"""Leader election for Celery Beat, and the schedulers that use it."""

from __future__ import annotations

from ..message.header import TICK_HEADER
from .scheduler import LeaderMixin, LeaderScheduler

__all__ = ["TICK_HEADER", "LeaderMixin", "LeaderScheduler"]
