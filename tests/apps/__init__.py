"""Celery apps that the tests' worker processes load; each reads its URLs from the environment."""
