"""Leader election for Celery Beat, and the schedulers that use it."""

from __future__ import annotations

from celery_singleton_lock.beat.scheduler import LeaderMixin, LeaderScheduler
from celery_singleton_lock.publish.header import TICK_HEADER

__all__ = ["TICK_HEADER", "LeaderMixin", "LeaderScheduler"]
