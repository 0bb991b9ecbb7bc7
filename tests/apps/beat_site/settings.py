"""Settings of the Django project; Celery's are in the app."""

from __future__ import annotations

import os

SECRET_KEY = "of a test"
USE_TZ = True
INSTALLED_APPS = ["django_celery_beat"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ["DATABASE"],
        # Seconds: several beats write their schedules when they start.
        "OPTIONS": {"timeout": 20},
        # None: never closed. Celery's handler of SIGTERM writes the rows in the middle of whatever
        # the beat does. A connection that is closed in the middle of a read leaves a lock on the
        # file, and the handler's own write would wait for it.
        "CONN_MAX_AGE": None,
    },
}
