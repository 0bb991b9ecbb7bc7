"""A small bank that imports, reports and pays with Celery, and the demo that tries to break it."""
