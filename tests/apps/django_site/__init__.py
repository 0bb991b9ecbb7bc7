"""A minimal Django project whose tasks are singletons: `celery -A tests.apps.django_site`.

Its environment: BROKER_URL, RESULT_URL, JOURNAL; DATABASE, an SQLite file; SETTINGS, a JSON object
of further Django settings.
"""

from __future__ import annotations

import os

from celery import Celery

os.environ["DJANGO_SETTINGS_MODULE"] = "tests.apps.django_site.settings"

app = Celery("django_site")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["tests.apps.django_site"])
