"""Celery's own integration suite, its tasks plain and as singletons: `make celery-suite`."""
