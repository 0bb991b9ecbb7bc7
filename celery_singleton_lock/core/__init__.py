"""The lease engine: no Celery, no client library of any store."""
