"""A Django project whose schedule is in its database: `celery -A tests.apps.beat_site beat`.

Its environment: as of `tests.apps.ticks`, and DATABASE, an SQLite file.
"""

from __future__ import annotations

import os

# Before the app is made: that is when Celery looks for Django.
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.apps.beat_site.settings"

from tests.apps.ticks import app

__all__ = ["app"]
