"""Leader election for Celery Beat, and the schedulers that use it."""

from __future__ import annotations

from ..message.header import SCHEDULED_AT_HEADER
from .scheduler import LeaderMixin, LeaderScheduler

__all__ = ["SCHEDULED_AT_HEADER", "LeaderMixin", "LeaderScheduler"]
