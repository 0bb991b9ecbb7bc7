"""Settings of the Django project, those of Celery in a namespace."""

from __future__ import annotations

import json
import os

SECRET_KEY = "of a test"
USE_TZ = True
INSTALLED_APPS = ["tests.apps.django_site"]
DATABASES = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["DATABASE"]},
}

CELERY_BROKER_URL = os.environ["BROKER_URL"]
CELERY_RESULT_BACKEND = os.environ["RESULT_URL"]
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_SINGLETON_LOCK_TTL = 7
CELERY_SINGLETON_LOCK_ON_CONFLICT = "raise"
CELERY_SINGLETON_LOCK_PREFIX = "site"

globals().update(json.loads(os.environ.get("SETTINGS", "{}")))
