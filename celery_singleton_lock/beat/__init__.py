"""Leader election for Celery Beat, and the schedulers that use it."""

from __future__ import annotations

from celery_singleton_lock.beat.scheduler import TICK_HEADER, LeaderMixin, LeaderScheduler

__all__ = ["TICK_HEADER", "LeaderMixin", "LeaderScheduler"]
