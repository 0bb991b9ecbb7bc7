"""`tests.apps.unique_ticks` with its schedule in Django's database."""

from __future__ import annotations

import os

# Before the app is made: that is when Celery looks for Django.
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.apps.beat_site.settings"

from tests.apps.unique_ticks import app

__all__ = ["app"]
