"""A shop: the project and its only Django app. The Celery app is loaded with Django."""

from .celery import app as celery_app

__all__ = ["celery_app"]
