"""Sinks of events: log lines, Celery signals and worker events."""
